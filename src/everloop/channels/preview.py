"""Shows in a chat that an answer is on its way: the typing notice, and a draft with the text so far.

A draft is removed once the answer has been sent from the outbox. The ids of all drafts are in the store, so that those
of a process that died are removed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .. import events
from ..bus import InboundMessage
from ..config import ChannelConfig
from ..errors import EverloopError, StoreError
from ..log import Logged, ModelAnswered, Reason, TurnEnded
from ..runtime.streaming import SessionState, SessionSubscriber, Streamed
from ..store.base import Store
from .base import Channel, Later
from .text import render, split

log = logging.getLogger(__name__)
TYPING_SECONDS = 4.5  # networks hide the typing notice after about this long
MIN_TEXT = 20  # characters; a shorter text gets no draft
MAX_SECONDS = 3600.0
QUIET_SECONDS = 3.0  # a session without a turn for this long is considered done
ANSWER_SECONDS = 10.0  # after the end of a turn, for its answer to replace the draft
DRAFT = "draft:"
MORE = " …"
Follow = Callable[[str, str], Awaitable[SessionSubscriber]]
MaySee = Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class Shown:
    """The preview of the turns that the messages of a chat open, until all of these are answered."""

    chat: str
    messages: set[str | None]  # ids of the messages that are not answered yet
    streams: bool  # drafts are shown
    may_see: MaySee  # whether the chat still belongs to the session
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_over: bool = False
    answers: int = 0  # answers that were sent
    ends: int = 0  # turns that ended, as far as the session was followed
    reason: Reason | None = None  # why the latest of them ended
    text: str = ""
    drafted: str = ""  # the text of the draft
    next_draft: float = 0.0
    next_typing: float = 0.0


class Previews:
    """The previews of a channel, at most one per chat."""

    def __init__(self, store: Store, config: ChannelConfig, channel: Channel, follow: Follow | None) -> None:
        self._store = store
        self._config = config
        self._channel = channel
        self._can = channel.can
        self._follow = follow
        self._shown: dict[str, Shown] = {}
        self._drafts: dict[str, str] = {}  # chat id → the network's id of the draft
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def preparing(
        self, message: InboundMessage, chat: str, is_thread: bool, may_see: MaySee
    ) -> AsyncIterator[None]:
        """Show what happens in the message's session, until its turn has ended or its answer is sent.

        The body of the context puts the message into the inbox. The session is followed from before that, so that
        nothing of the turn is missed.
        """
        session, chat_id = message.session_key, message.chat_id
        streams = self._config.stream and self._can.edit and not is_thread
        if not (streams or self._can.typing):
            yield
            return
        if chat_id in self._shown:
            self._shown[chat_id].messages.add(message.id)
            yield
            return
        shown = self._shown[chat_id] = Shown(chat, {message.id}, streams, may_see)
        subscriber: SessionSubscriber | None = None
        try:
            if self._follow is not None:
                subscriber = await self._try_to_follow(self._follow, session)
            yield
            task = asyncio.create_task(self._run(chat_id, shown, subscriber))
        except BaseException:
            self._end(chat_id, shown, subscriber)
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try_to_follow(self, follow: Follow, session: str) -> SessionSubscriber | None:
        try:
            return await follow(self._config.owner, session)
        except (LookupError, EverloopError) as error:
            log.debug("channel %s cannot follow a session: %s", self._config.name, error)
            return None

    async def answered(self, chat_id: str, message_id: str | None) -> None:
        """Remove the draft of an answer, because it was sent; with the last one, end the preview of the chat."""
        if (shown := self._shown.get(chat_id)) is not None:
            if message_id not in shown.messages:
                return  # something else was sent, such as a notice, while the turn runs
            shown.messages.discard(message_id)
            shown.answers += 1
            shown.is_over = not shown.messages
            async with shown.lock:  # a draft may be on its way
                shown.drafted = ""
                if shown.answers > shown.ends:  # the text is that of the answer; else it is already the next one's
                    shown.text = ""
        if (id := self._drafts.pop(chat_id, None)) is not None:
            await self._remove(chat_id, id)

    async def sweep(self) -> None:
        """Remove the drafts of a process that died."""
        with contextlib.suppress(StoreError):
            for key, value in (await self._store.channel_state(self._config.name)).items():
                if key.startswith(DRAFT) and (chat_id := key.removeprefix(DRAFT)) not in self._drafts:
                    await self._remove(chat_id, value)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shown.clear()

    async def _remove(self, chat_id: str, id: str) -> None:
        chat, _, draft = id.partition(" ")
        try:
            await self._channel.show(chat, draft, "")
        except Exception as error:
            log.debug("a draft was not removed (%s)", type(error).__name__)
        with contextlib.suppress(StoreError):
            await self._store.set_channel_state(self._config.name, DRAFT + chat_id, None)

    async def _run(self, chat_id: str, shown: Shown, subscriber: SessionSubscriber | None) -> None:
        try:
            await self._type(shown)
            if subscriber is not None:
                async with asyncio.timeout(MAX_SECONDS):
                    await self._watch(subscriber, chat_id, shown)
        except Exception as error:  # previews are best-effort
            log.debug("channel %s: the preview of a turn has failed (%s)", self._config.name, type(error).__name__)
        finally:
            self._end(chat_id, shown, subscriber)
        await self._remove_unanswered(chat_id, shown.reason)

    async def _remove_unanswered(self, chat_id: str, reason: Reason | None) -> None:
        """Remove the draft of a turn that was stopped, or answered in another chat of its session."""
        id = self._drafts.get(chat_id)
        if id is not None:
            if reason not in ("cancelled", "replaced"):
                await asyncio.sleep(ANSWER_SECONDS)
            if self._drafts.get(chat_id) == id and chat_id not in self._shown:
                del self._drafts[chat_id]
                await self._remove(chat_id, id)

    def _end(self, chat_id: str, shown: Shown, subscriber: SessionSubscriber | None) -> None:
        if subscriber is not None:
            subscriber.close()
        if self._shown.get(chat_id) is shown:
            del self._shown[chat_id]

    async def _watch(self, subscriber: SessionSubscriber, chat_id: str, shown: Shown) -> None:
        clock = asyncio.get_running_loop().time
        shown.next_draft = clock() + self._can.pace
        waiting, quiet_since = False, None
        while not shown.is_over and not subscriber.is_over:
            until = shown.next_draft if shown.streams and shown.text != shown.drafted else shown.next_typing
            for update in await subscriber.next(min(max(until - clock(), 0.05), TYPING_SECONDS)):
                match update:
                    case Streamed(event=events.Text(text=text)):
                        shown.text += text
                    case Streamed(event=events.Restarted()) | Logged(entry=ModelAnswered()):
                        shown.text = ""
                    case SessionState(turn=turn, parked=parked, waiting=rows):
                        waiting, is_quiet = bool(rows), turn is None and not rows
                        if parked:
                            return
                        # While a message is being claimed, it is briefly in neither place.
                        quiet_since = (quiet_since or clock()) if is_quiet else None
                    case Logged(entry=TurnEnded(reason=reason)):
                        shown.reason, shown.ends, shown.text = reason, shown.ends + 1, ""
                        further = len(shown.messages) - (shown.ends > shown.answers)
                        if not waiting and not further:
                            return
            if quiet_since is not None and clock() - quiet_since > QUIET_SECONDS:
                return
            if shown.streams and clock() >= shown.next_draft:
                await self._draft(chat_id, shown)
            if clock() >= shown.next_typing and not shown.is_over:
                await self._type(shown)

    async def _type(self, shown: Shown) -> None:
        shown.next_typing = asyncio.get_running_loop().time() + TYPING_SECONDS
        if self._can.typing:
            await self._channel.show(shown.chat, "", "")

    async def _draft(self, chat_id: str, shown: Shown) -> None:
        """Show the text so far, if it has grown."""
        clock = asyncio.get_running_loop().time
        async with shown.lock:
            if shown.is_over or shown.text == shown.drafted or len(shown.text) < MIN_TEXT:
                return
            if shown.answers > shown.ends:  # this is still of the turn whose answer was sent
                return
            first = next(split(shown.text, self._can), None)
            if first is None:
                return
            if not await shown.may_see():
                shown.is_over = True
                return
            id = self._drafts.get(chat_id, "")
            pause = self._can.pace
            try:
                text = render(first.text, self._can.form) + MORE
                made = await self._channel.show(shown.chat, id.partition(" ")[2], text)
                if not id and made:
                    self._drafts[chat_id] = f"{shown.chat} {made}"
                    await self._store.set_channel_state(self._config.name, DRAFT + chat_id, f"{shown.chat} {made}")
            except Later as error:
                pause = max(pause, error.seconds)
            shown.drafted = shown.text
            shown.next_draft = clock() + pause
