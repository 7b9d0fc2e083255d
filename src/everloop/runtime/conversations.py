"""Conversations: lets clients that read the log follow sessions, post to them, stop turns and answer questions."""

from __future__ import annotations

from ..bus import WEB, InboundMessage
from ..commands import answer_of, kind_of
from ..store.base import Store
from ..store.peers import WORK
from ..text_cursor import Position
from .chat_commands import NOTHING_ASKED, NOTHING_RUNS, ChatCommands
from .dispatcher import Dispatcher
from .streaming import SessionSubscriber, TurnStreams


class Conversations:
    """The sessions of an agent, for clients that receive no direct answers: they see everything in the log."""

    def __init__(self, store: Store, dispatcher: Dispatcher, commands: ChatCommands, streams: TurnStreams) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._commands = commands
        self._streams = streams

    def follow(self, owner: str, key: str, seen: Position, mark: int | None = None) -> SessionSubscriber:
        """Follow a session from a log position.

        The `mark` of the entry there tells whether it is still the same entry.
        """
        return SessionSubscriber(self._store, self._streams, owner, key, seen, mark)

    async def post(self, message: InboundMessage) -> str | None:
        """Put a message into its session's inbox; it is on disk when this returns.

        A command that is answered at once is not put there; its reply is returned.
        """
        message = message.addressed()
        kind = kind_of(message)
        if answer_of(message.content) is not None and kind in ("urgent", "reply"):
            decided = await self._commands.decide(message, message)
            if decided is not None:
                return decided[1]
            if kind == "urgent":
                return NOTHING_ASKED
            kind = "message"
        elif kind == "urgent":
            return await self._commands.answer(message)
        row = await self._store.accept(message, kind)
        await self._store.wake(WORK, [row.session])
        return None

    async def stop(self, owner: str, key: str, by: str) -> bool:
        """Stop the session's turn. Return whether there was one to stop."""
        message = InboundMessage(WEB, by, key, "/stop", owner=owner, session=key, reply=False)
        return await self._commands.answer(message) != NOTHING_RUNS

    async def answer(
        self, owner: str, key: str, question: int, *, allowed: bool, by: str, note: str = "", always: bool = False
    ) -> bool:
        """Answer the question at this log position. Return False if it is not, or no longer, open."""
        info = await self._store.session(owner, key)
        if info is None or not info.parked or info.entries != question:
            return False
        if await self._store.decide(owner, key, allowed, by, note, always=always) is None:
            return False
        self._dispatcher.kick(owner, key)
        return True
