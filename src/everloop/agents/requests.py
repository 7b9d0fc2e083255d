"""Requests of API clients: their turns are run, and what came of them is read from the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import events
from ..bus import InboundMessage
from ..commands import kind_of
from ..dispatch.local import Dispatcher
from ..log import Call, Entry, ModelAnswered, TurnEnded
from ..store.base import Store
from .urgent import Urgent

UNANSWERED = frozenset({"cancelled", "aborted", "replaced", "abandoned", "timeout", "error"})
CLIENT_LEFT = "Stopped: the client went away."


@dataclass(slots=True, frozen=True)
class Earlier:
    """A request that came before."""

    said: str
    unanswered: bool  # it has ended without an answer, so that it may be run once more


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of a request: the turn's entries, and its end. A command has no turn, only words."""

    text: str
    entries: Sequence[Entry] = ()

    @property
    def reason(self) -> str:
        last = self.entries[-1] if self.entries else None
        return last.reason if isinstance(last, TurnEnded) else "answer"

    @property
    def left(self) -> bool:
        """Whether the turn was stopped because its client had gone."""
        last = self.entries[-1] if self.entries else None
        return isinstance(last, TurnEnded) and last.reason == "cancelled" and last.text == CLIENT_LEFT

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls that the client is to run."""
        answer = self._last_answer()
        return answer.calls if answer is not None and self.reason == "handed" else ()

    @property
    def finish_reason(self) -> str:
        """As the model's API said it."""
        answer = self._last_answer()
        return answer.finish_reason if answer is not None else "stop"

    @property
    def reasoning(self) -> str:
        return "\n\n".join(one.reasoning for one in self._answers() if one.reasoning)

    @property
    def model(self) -> str:
        answer = self._last_answer()
        return answer.model if answer is not None else ""

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of all model calls of the turn."""
        total: dict[str, int] = {}
        for answer in self._answers():
            for name, count in answer.usage.items():
                total[name] = total.get(name, 0) + count
        return total

    def _answers(self) -> list[ModelAnswered]:
        return [entry for entry in self.entries if isinstance(entry, ModelAnswered)]

    def _last_answer(self) -> ModelAnswered | None:
        return next(reversed(self._answers()), None)


class Requests:
    """Runs the turns of an agent's API clients."""

    def __init__(self, store: Store, dispatcher: Dispatcher, urgent: Urgent) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._urgent = urgent

    async def run(self, message: InboundMessage, emit: events.Emit | None = None) -> Outcome:
        """The outcome of a request's turn. One whose id is known is not run again: it gives what came of it.

        Cancelled, it only stops waiting: `withdraw` stops the turn.
        """
        id, kept = message.id, message.request is not None and message.request.kept
        assert id is not None
        kind = kind_of(message) if kept else "message"
        message = message.addressed()
        if kind == "urgent":
            return Outcome(await self._urgent.answer(message, emit))
        text = await (await self._dispatcher.submit(message, kind, emit))
        row = await self._store.find(message.owner, id)
        if row is None or row.first_seq is None:
            return Outcome(text)
        logged = await self._store.read_turn(row.session, row.first_seq)
        return Outcome(text, [one.entry for one in logged])

    async def earlier(self, owner: str, id: str) -> Earlier | None:
        """The request of this id, if there was one."""
        row = await self._store.find(owner, id)
        if row is None:
            return None
        if not row.done or row.first_seq is None:
            return Earlier(row.message.content, False)
        logged = await self._store.read_turn(row.session, row.first_seq)
        last = logged[-1].entry if logged else None
        return Earlier(row.message.content, isinstance(last, TurnEnded) and last.reason in UNANSWERED)

    def withdraw(self, message: InboundMessage) -> None:
        """The client has gone: its turn ends now, or as soon as it begins, unless another waits for the same one."""
        assert message.id is not None
        self._dispatcher.withdraw(message.owner, message.session_key, message.id, CLIENT_LEFT)
