"""The heartbeat: at a fixed interval the agent works on the tasks in the workspace's HEARTBEAT.md."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from typing import Self

from ..bus import HEARTBEAT, NOTHING_TO_SAY, CronOrigin, InboundMessage
from ..config import Config
from ..errors import StoreError
from ..store.base import Timer
from ..threads import in_thread
from .schedules import Every, latest_until, next_after
from .service import CronService

log = logging.getLogger(__name__)

MAX_TASKS = 8_000  # characters
RETRY_SECONDS = 15.0  # delay before setting the timer is retried after a store error

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.S)
_NO_TASK = re.compile(r"\s*(?:#{1,6}(?:\s|$)|(?:[-*_]\s*){3,}$|(?:[-*+]|\d+[.)])\s*(?:\[ ?\])?\s*$)")
_CHECKED = re.compile(r"(\s*)(?:[-*+]|\d+[.)])\s+\[[xX]\]")


def heartbeat_message(workspace_text: str) -> str | None:
    """Return the agent's message for the text of HEARTBEAT.md; None if the text has no task."""
    tasks = "\n".join(_tasks(workspace_text))
    if not tasks:
        return None
    if len(tasks) > MAX_TASKS:
        tasks = f"{tasks[:MAX_TASKS]}\n(There is more in the file HEARTBEAT.md.)"
    return (
        "This is the heartbeat, not a message from a person. These are the tasks in HEARTBEAT.md:\n\n"
        f"{tasks}\n\n"
        "Do what is due now. Check off in the file what is done for good: - [x]. If there is nothing to report, answer "
        f"only {NOTHING_TO_SAY}."
    )


def _tasks(text: str) -> list[str]:
    """Return the lines that are not headings, rules, comments, or checked boxes with the lines nested under them."""
    found: list[str] = []
    done: int | None = None  # the indentation of the checked box above
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
    """Fires like a job, but builds its message when it is due, and sends none if there are no tasks.

    `read` returns the text of HEARTBEAT.md, "" if there is none; it is called in a thread.
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
            raise ValueError(f"a heartbeat's interval must be at least 1 second, not {every} s")
        self._service = service
        self._read = read
        self._every = math.ceil(every)
        self._channel, self._chat_id, self._session = channel, chat_id, session

    @classmethod
    def of(cls, settings: Config, service: CronService, read: Callable[[], str]) -> Self | None:
        """Return the heartbeat configured in the settings, if any."""
        if not settings.heartbeat_minutes:
            return None
        channel, _, chat_id = settings.heartbeat_to.partition(":")
        return cls(service, read, max(60 * settings.heartbeat_minutes, 1.0), channel, chat_id)

    async def start(self) -> None:
        """Make the service fire the heartbeat. An existing timer with the same interval is kept."""
        store, owner = self._service.store, self._service.owner
        there = [timer for timer in await store.timers(owner) if timer.id == HEARTBEAT]
        if not there or _schedule(there[0]) is None or there[0].data["every"] != self._every:
            anchor = math.ceil(self._service.clock())
            data = {"every": self._every, "anchor": anchor}
            await store.set_timer(Timer(owner, HEARTBEAT, anchor + self._every, data))
        self._service.set_heartbeat(self._fire)

    async def start_with_retries(self) -> None:
        """Call `start`, and retry after a store error: a full or locked disk must not end scheduled work."""
        while True:
            try:
                return await self.start()
            except StoreError as error:
                log.error("%s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        """Stop the heartbeat for this service and later ones."""
        self._service.set_heartbeat(None)
        await self._service.store.cancel_timer(self._service.owner, HEARTBEAT)

    async def _fire(self, timer: Timer, now: float) -> tuple[InboundMessage | None, float | None]:
        schedule = _schedule(timer)
        if schedule is None:  # damaged: the next start sets it again
            return None, None
        next_due = next_after(schedule, now)
        text = await self._message()
        if text is None:
            # There is no message to fire. If another service fires this slot meanwhile, its message has the slot's id,
            # and a second message with that id is not accepted.
            await self._service.store.set_timer(Timer(timer.owner, timer.id, next_due or now, timer.data))
            return None, next_due
        message = InboundMessage(
            self._channel,
            "cron",
            self._chat_id,
            text,
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
            log.error("skipping this heartbeat: HEARTBEAT.md cannot be read (%s)", error)
            return None


def _schedule(timer: Timer) -> Every | None:
    match timer.data:
        case {"every": int(every), "anchor": int(anchor)} if every > 0:
            return Every(every, anchor)
        case _:
            return None
