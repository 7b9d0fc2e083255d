"""The commands that are answered at once, whatever a session is doing: /stop, /status, /help, /approve, /deny."""

from __future__ import annotations

from .. import events
from ..bus import InboundMessage
from ..commands import HELP, command_of, meant_by, words_after
from ..dispatch.local import Dispatcher
from ..store.base import Incoming, Store
from .elsewhere import runs_elsewhere, stop_elsewhere
from .subagents import SubagentManager
from .turns import TurnRunner

STOPPED = "Stopped. What was done so far is kept."
NOTHING_RUNS = "Nothing is running."
NOTHING_ASKED = "Nothing waits for your word."


class Urgent:
    """Answers urgent commands of any session."""

    def __init__(
        self, store: Store, dispatcher: Dispatcher, turns: TurnRunner, subagents: SubagentManager, workspace: str
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._turns = turns
        self._subagents = subagents
        self._workspace = workspace

    async def answer(
        self, message: InboundMessage, emit: events.Emit | None = None, word: Incoming | InboundMessage | None = None
    ) -> str:
        """Do what a message says that is a command, and say so. `word` is the message as it came in."""
        match command_of(message.content):
            case "approve":
                return await self._decide(message, True, emit, word)
            case "deny":
                return await self._decide(message, False, emit, word)
            case "stop":
                stopped = await self._stop_turn(message)
                children = await self._subagents.stop(message.owner, message.session_key)
                return STOPPED if stopped or children else NOTHING_RUNS
            case "status":
                return await self._status(message)
            case "help":
                return HELP
            case _:
                given = message.content.strip()
                return f"There is no command {given}: did you mean /{meant_by(given)}? /help lists them."

    async def _decide(
        self,
        message: InboundMessage,
        allowed: bool,
        emit: events.Emit | None,
        word: Incoming | InboundMessage | None,
    ) -> str:
        """Take a person's word on what the session's turn asked for. The turn goes on; who called directly waits."""
        note = words_after(message.content)
        where = (message.owner, message.session_key)
        decided = await self._store.decide(*where, allowed, message.sender_id, note, word)
        if decided is None:
            return NOTHING_ASKED
        if not message.reply:
            return await self._dispatcher.follow(decided[0], message, emit)
        self._dispatcher.kick(message.owner, message.session_key)
        return "Approved." if allowed else "Denied."

    async def _stop_turn(self, message: InboundMessage) -> bool:
        """Stop the session's turn, whether it runs or waits for a person's word."""
        where = (message.owner, message.session_key)
        if self._dispatcher.stop_turn(*where, "cancelled", STOPPED):
            return True
        if await runs_elsewhere(self._store, self._dispatcher, await self._store.session(*where)):
            await stop_elsewhere(self._store, self._dispatcher, *where)
            return True
        if await self._store.decide(*where, None) is None:
            return False
        self._dispatcher.kick(*where)
        return self._dispatcher.stop_turn(*where, "cancelled", STOPPED)

    async def _status(self, message: InboundMessage) -> str:
        info = await self._store.session(message.owner, message.session_key)
        live = self._dispatcher.live(message.owner, message.session_key)
        turn = live.turn if live is not None else None
        running = f"turn {turn.id}, {len(turn.entries)} entries" if turn else "nothing"
        if turn is None and info is not None and info.open_turn is not None:
            running = f"turn {info.open_turn}, in another process"
        if info is not None and info.parked:
            running = f"turn {info.open_turn} waits for your word: /approve or /deny"
        children = await self._subagents.running(message.owner, message.session_key)
        return "\n".join(
            (
                f"model: {self._turns.compactor.model or '(the provider’s default)'}",
                f"session: {message.session_key}, {info.entries - info.history_from if info else 0} entries",
                f"context: {await self._turns.fullness(info)}",
                f"running: {running}",
                *(f"sub-agent {one.id}: {one.label}{'' if one.started else ' (waiting)'}" for one in children),
                f"workspace: {self._workspace}",
            )
        )
