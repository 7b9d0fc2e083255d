"""Commands that are answered at once, whatever the session is doing: /stop, /status, /help, /approve, /deny."""

from __future__ import annotations

from collections.abc import Collection

from .. import events
from ..bus import PULLED, InboundMessage, StopRequest
from ..commands import answer_of, command_of, help_text, meant_by
from ..store.base import Incoming, Store
from .dispatcher import Dispatcher
from .subagents import SubagentManager
from .turn_runner import TurnRunner

STOPPED = "Stopped. The work so far is kept."
NOTHING_RUNS = "Nothing is running."
NOTHING_ASKED = "There is no open question."
ALLOWED, ALLOWED_ALWAYS, DENIED = "Approved.", "Approved for this session.", "Denied."


class ChatCommands:
    """Answers the chat commands of all sessions, and the replies to questions."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        turns: TurnRunner,
        subagents: SubagentManager,
        workspace: str,
        networks: Collection[str],
    ) -> None:
        """`networks` are the names of the channels that run."""
        self._store = store
        self._dispatcher = dispatcher
        self._turns = turns
        self._subagents = subagents
        self._workspace = workspace
        self._networks = networks

    async def answer(
        self, message: InboundMessage, show: events.Show | None = None, word: Incoming | InboundMessage | None = None
    ) -> str:
        """Run the command in a message and return the reply. `word` is the message as received."""
        if answer_of(message.content) is not None:
            told = await self.reply(message, show, word)
            return NOTHING_ASKED if told is None else told
        match command_of(message.content):
            case "stop":
                stopped = await self._stop_turn(message, word)
                children = await self._subagents.stop(message.owner, message.session_key)
                return STOPPED if stopped or children else NOTHING_RUNS
            case "status":
                return await self._status(message)
            case "help":
                return help_text(in_network=message.channel in self._networks)
            case _:
                given = message.content.strip()
                return f"There is no command {given}: did you mean /{meant_by(given)}? /help lists them."

    async def reply(
        self, message: InboundMessage, show: events.Show | None = None, word: Incoming | InboundMessage | None = None
    ) -> str | None:
        """Answer the open question of the message's session with this message; None if there is no question to answer.

        The turn resumes. A caller that gets no reply in its chat waits for the turn's own answer.
        """
        decided = await self.decide(message, word)
        if decided is None:
            return None
        row, taken = decided
        if row is not None and not message.reply:
            return await self._dispatcher.follow(row, message, show)
        return taken

    async def decide(
        self, message: InboundMessage, word: Incoming | InboundMessage | None
    ) -> tuple[int | None, str] | None:
        """Record a person's answer to the question of the session's turn, and resume the turn.

        Return the inbox row that opened the turn, if this call answered the question, and a confirmation for the
        person; None if the message answers nothing.
        """
        answer = answer_of(message.content)
        assert answer is not None
        where = (message.owner, message.session_key)
        decided = await self._store.decide(
            *where, answer.allowed, message.sender_id, answer.note, word, always=answer.always
        )
        taken = DENIED if not answer.allowed else ALLOWED_ALWAYS if answer.always else ALLOWED
        if decided is None:  # another process may have recorded this very answer and been killed before it confirmed it
            known = isinstance(word, Incoming) and (await self._store.incoming(word.id)).first_seq is not None
            return (None, taken) if known else None
        self._dispatcher.kick(*where)
        return decided[0], taken

    async def _stop_turn(self, message: InboundMessage, word: Incoming | InboundMessage | None) -> bool:
        """Stop the session's turn: running, interrupted, parked, or about to start with an earlier message."""
        where = (message.owner, message.session_key)
        request = message.cause if isinstance(message.cause, StopRequest) else StopRequest()
        given, told = request.target, request.chat_told or (message.reply and message.channel not in PULLED)
        if given is None and self._dispatcher.stop_turn(*where, "cancelled", STOPPED, chat_told=told):
            return True
        info = await self._store.session(*where)
        meant = info.open_turn if info is not None and info.open_turn else await self._about_to_begin(where, word)
        if meant is None or not (given in (None, meant) or await self._opened(given, meant)):
            return False
        if not self._dispatcher.runs or await self._dispatcher.runs_elsewhere(info):
            # The task that takes commands from the inbox also receives the notices of answers: it must not wait for
            # one.
            wait = not isinstance(word, Incoming)
            await self._dispatcher.stop_elsewhere(*where, meant, wait=wait, chat_told=told)
            return True
        await self._store.decide(*where, None)
        self._dispatcher.kick(*where)
        return self._dispatcher.stop_turn(*where, "cancelled", STOPPED, meant, chat_told=told)

    async def _about_to_begin(self, where: tuple[str, str], word: Incoming | InboundMessage | None) -> int | None:
        """Return the inbox row that opens the next turn, if it arrived before this command."""
        first = next(iter(await self._store.waiting(*where)), None)
        return first.id if first is not None and not (isinstance(word, Incoming) and word.id < first.id) else None

    async def _opened(self, row: object, turn: object) -> bool:
        """Return whether this inbox row opened this turn."""
        return isinstance(row, int) and (await self._store.incoming(row)).turn == turn

    async def _status(self, message: InboundMessage) -> str:
        info = await self._store.session(message.owner, message.session_key)
        session = self._dispatcher.session(message.owner, message.session_key)
        turn = session.state.turn if session is not None else None
        running = f"turn {turn.id}, {len(turn.entries)} entries" if turn else "nothing"
        if turn is None and info is not None and info.open_turn is not None:
            running = f"turn {info.open_turn}, in another process"
        if info is not None and info.parked:
            running = f"turn {info.open_turn} waits for your answer: y, n or a (always)"
        children = await self._subagents.running(message.owner, message.session_key)
        return "\n".join(
            (
                f"model: {self._turns.models.compactor.model or '(the provider’s default)'}",
                f"session: {message.session_key}, {info.entries - info.history_from if info else 0} entries",
                f"context: {await self._turns.fullness(info)}",
                f"running: {running}",
                *(f"sub-agent {one.id}: {one.label}{'' if one.started else ' (waiting)'}" for one in children),
                f"workspace: {self._workspace}",
            )
        )
