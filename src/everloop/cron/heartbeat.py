"""The heartbeat: from time to time the agent looks at the tasks in the workspace's HEARTBEAT.md."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from typing import Self

from ..bus import CronOrigin, InboundMessage
from ..config import Config
from ..errors import StoreError
from ..store.base import Timer
from ..threads import in_thread
from .jobs import HEARTBEAT
from .schedules import Every, latest_until, next_after
from .service import CronService

log = logging.getLogger(__name__)

NOTHING_TO_SAY = "HEARTBEAT_OK"  # an answer that is only this is not delivered
MAX_TASKS = 8_000  # characters
RETRY_SECONDS = 15.0  # until a store is tried again that could not keep the timer

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.S)
_NO_TASK = re.compile(r"\s*(?:#{1,6}(?:\s|$)|(?:[-*_]\s*){3,}$|(?:[-*+]|\d+[.)])\s*(?:\[ ?\])?\s*$)")
_CHECKED = re.compile(r"(\s*)(?:[-*+]|\d+[.)])\s+\[[xX]\]")
_MARKS = "`*_.!\"' \n\t"


def heartbeat_message(workspace_text: str) -> str | None:
    """What the agent is told, from the text of HEARTBEAT.md; None when it holds no task."""
    tasks = "\n".join(_tasks(workspace_text))
    if not tasks:
        return None
    if len(tasks) > MAX_TASKS:
        tasks = f"{tasks[:MAX_TASKS]}\n(There is more in the file HEARTBEAT.md.)"
    return (
        "This is the heartbeat; nobody has written. These tasks stand in HEARTBEAT.md:\n\n"
        f"{tasks}\n\n"
        "Do what is due now. What is done once and for all, check off in the file: - [x]. If nobody needs to hear of "
        f"anything, answer only {NOTHING_TO_SAY}."
    )


def says_nothing(answer: str) -> bool:
    """Whether an answer is only the word for having nothing to say."""
    return answer.strip(_MARKS) == NOTHING_TO_SAY


def _tasks(text: str) -> list[str]:
    """The lines that are no headings, rules, comments, or checked boxes with what belongs to them."""
    found: list[str] = []
    done: int | None = None  # how far the checked box above is indented
    for line in _COMMENT.sub("", text).expandtabs(4).splitlines():
        indented = len(line) - len(line.lstrip())
        if not line.strip() or (done is not None and indented > done):
            continue
        done = None
        if checked := _CHECKED.match(line):
            done = len(checked[1])
        elif not _NO_TASK.match(line):
            found.append(line.rstrip())
    return found


class Heartbeat:
    """Fires like a job, but makes its message when it is due, and keeps silent when there are no tasks.

    `read` gives the text of HEARTBEAT.md, "" when there is none; it is called in a thread.
    """

    def __init__(
        self,
        service: CronService,
        read: Callable[[], str],
        every: float,
        channel: str,
        chat_id: str,
        session: str | None = None,
    ) -> None:
        if not 1 <= every < math.inf:
            raise ValueError(f"a heartbeat comes every second at most, not every {every} s")
        self._service = service
        self._read = read
        self._every = math.ceil(every)
        self._channel, self._chat_id, self._session = channel, chat_id, session

    @classmethod
    def of(cls, settings: Config, service: CronService, read: Callable[[], str]) -> Self | None:
        """The heartbeat of the settings, if there is one."""
        if not settings.heartbeat_minutes:
            return None
        channel, _, chat_id = settings.heartbeat_to.partition(":")
        return cls(service, read, max(60 * settings.heartbeat_minutes, 1.0), channel, chat_id or "direct")

    async def start(self) -> None:
        """Be fired by the service. A timer that is there already, for the same interval, goes on."""
        store, owner = self._service.store, self._service.owner
        there = [timer for timer in await store.timers(owner) if timer.id == HEARTBEAT]
        if not there or _schedule(there[0]) is None or there[0].data["every"] != self._every:
            anchor = math.ceil(self._service.clock())
            data = {"every": self._every, "anchor": anchor}
            await store.set_timer(Timer(owner, HEARTBEAT, anchor + self._every, data))
        self._service.beat = self._fire
        self._service.changed()

    async def insist(self) -> None:
        """Start as soon as the store lets it: a full or locked disk ends no scheduled work."""
        while True:
            try:
                return await self.start()
            except StoreError as error:
                log.error("%s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        """Be fired no more, by this service or a later one."""
        self._service.beat = None
        await self._service.store.cancel_timer(self._service.owner, HEARTBEAT)

    async def _fire(self, timer: Timer, now: float) -> tuple[InboundMessage | None, float | None]:
        schedule = _schedule(timer)
        if schedule is None:  # damaged: the next start makes it anew
            return None, None
        next_due = next_after(schedule, now)
        text = await self._message()
        if text is None:
            # Without a message there is no firing to be won. Should another service fire this slot meanwhile, its
            # message has the slot's id, and none with that id is taken again.
            await self._service.store.set_timer(Timer(timer.owner, timer.id, next_due or now, timer.data))
            return None, next_due
        message = InboundMessage(
            self._channel,
            "cron",
            self._chat_id,
            text,
            metadata={"cron": HEARTBEAT},
            cause=CronOrigin(HEARTBEAT),
            id=f"cron:{HEARTBEAT}:{int(latest_until(schedule, timer.due_at, now))}",
            owner=timer.owner,
            session=self._session or f"{self._channel}:{self._chat_id}",
            attended=False,
        )
        fired = await self._service.store.fire_timer(timer, message, next_due)
        return (message if fired else None), next_due

    async def _message(self) -> str | None:
        try:
            return heartbeat_message(await in_thread(self._read))
        except (OSError, UnicodeError) as error:
            log.error("HEARTBEAT.md cannot be read (%s): the heartbeat is left out this time", error)
            return None


def _schedule(timer: Timer) -> Every | None:
    match timer.data:
        case {"every": int(every), "anchor": int(anchor)} if every > 0:
            return Every(every, anchor)
        case _:
            return None
