"""The commands that are answered at once, whatever a session is doing: /stop, /status, /help, /approve, /deny."""

from __future__ import annotations

import logging

from .. import events
from ..bus import InboundMessage
from ..commands import HELP, command_of, meant_by, words_after
from ..errors import StoreError
from ..store.base import Incoming, Store
from .dispatcher import Dispatcher
from .peers import MEANT, runs_elsewhere, stop_elsewhere
from .subagents import SubagentManager
from .turn_runner import TurnRunner

log = logging.getLogger(__name__)

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
        self, message: InboundMessage, emit: events.Show | None = None, word: Incoming | InboundMessage | None = None
    ) -> str:
        """Do what a message says that is a command, and say so. `word` is the message as it came in."""
        match command_of(message.content):
            case "approve":
                return await self._decide(message, True, emit, word)
            case "deny":
                return await self._decide(message, False, emit, word)
            case "stop":
                stopped = await self._stop_turn(message, word)
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
        emit: events.Show | None,
        word: Incoming | InboundMessage | None,
    ) -> str:
        """Take a person's word on what the session's turn asked for. The turn goes on; who called directly waits."""
        note = words_after(message.content)
        where = (message.owner, message.session_key)
        decided = await self._store.decide(*where, allowed, message.sender_id, note, word)
        taken = "Approved." if allowed else "Denied."
        if decided is None:  # another process may have taken this very word, and perhaps was killed before it said so
            known = isinstance(word, Incoming) and (await self._store.incoming(word.id)).first_seq is not None
            return taken if known else NOTHING_ASKED
        if not message.reply:
            return await self._dispatcher.follow(decided[0], message, emit)
        self._dispatcher.kick(message.owner, message.session_key)
        return taken

    async def _stop_turn(self, message: InboundMessage, word: Incoming | InboundMessage | None) -> bool:
        """Stop the session's turn, whether it runs, was cut off, or waits for a person's word; or the one that is about
        to begin, with a message that came before this word."""
        where = (message.owner, message.session_key)
        given = message.metadata.get(MEANT)
        if given is None and self._dispatcher.stop_turn(*where, "cancelled", STOPPED):
            return True
        info = await self._store.session(*where)
        meant = info.open_turn if info is not None and info.open_turn else await self._about_to_begin(where, word)
        if meant is None or not (given in (None, meant) or await self._opened(given, meant)):
            return False
        if not self._dispatcher.runs or await runs_elsewhere(self._store, self._dispatcher, info):
            # What came by the inbox was taken out by whoever also hears of answers: it must not wait for one.
            await stop_elsewhere(self._store, self._dispatcher, *where, meant, wait=not isinstance(word, Incoming))
            return True
        await self._store.decide(*where, None)
        self._dispatcher.kick(*where)
        return self._dispatcher.stop_turn(*where, "cancelled", STOPPED, meant)

    async def _about_to_begin(self, where: tuple[str, str], word: Incoming | InboundMessage | None) -> int | None:
        """The inbox row that opens the next turn, if it came before this word."""
        first = next(iter(await self._store.waiting(*where)), None)
        return first.id if first is not None and not (isinstance(word, Incoming) and word.id < first.id) else None

    async def _opened(self, row: object, turn: object) -> bool:
        """Whether this inbox row has opened this turn."""
        return isinstance(row, int) and (await self._store.incoming(row)).turn == turn

    async def stop_elsewhere(self, owner: str, key: str, meant: str | int | None) -> None:
        """Another process was quicker to take up what was to be stopped here."""
        try:
            await stop_elsewhere(self._store, self._dispatcher, owner, key, meant, wait=False)
        except StoreError as error:  # then it goes on there
            log.warning("%s", error)

    async def _status(self, message: InboundMessage) -> str:
        info = await self._store.session(message.owner, message.session_key)
        session = self._dispatcher.session(message.owner, message.session_key)
        turn = session.turn if session is not None else None
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
