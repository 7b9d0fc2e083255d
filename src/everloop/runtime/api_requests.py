"""Requests of API clients: their turns are run, and what came of them is read from the log."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..bus import InboundMessage
from ..commands import kind_of
from ..errors import StoreError
from ..events import Show
from ..log import Call, Entry, ModelAnswered, TurnEnded
from ..store.base import Store
from .chat_commands import Urgent
from .dispatcher import Dispatcher
from .streaming import TurnStreams, TurnSubscriber

log = logging.getLogger(__name__)
UNANSWERED = frozenset({"cancelled", "aborted", "replaced", "abandoned", "timeout", "error"})
CLIENT_LEFT = "Stopped: the client went away."
SPACES = 100  # characters around a text that may have been shown and are not in the log


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

    def __init__(self, store: Store, dispatcher: Dispatcher, urgent: Urgent, streams: TurnStreams) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._urgent = urgent
        self._streams = streams
        self._waiting: Counter[tuple[str, str]] = Counter()  # who waits here, by the message's owner and id
        self._dropping: set[asyncio.Task[None]] = set()  # messages that nobody waits for any more

    async def run(self, message: InboundMessage, show: Show | None = None) -> Outcome:
        """The outcome of a request's turn, wherever it runs. One whose id is known is not run again: it gives what came
        of it. `show` is told all that happens in the turn, from its beginning on, with the places in the log.

        Cancelled, it only stops waiting: `withdraw` stops the turn.
        """
        id, kept = message.id, message.request is not None and message.request.kept
        assert id is not None
        kind = kind_of(message) if kept else "message"
        message = message.addressed()
        if kind == "urgent":
            return Outcome(await self._urgent.answer(message, _without_place(show) if show is not None else None))
        self._waiting[message.owner, id] += 1
        where = (message.owner, message.session_key)
        subscriber = TurnSubscriber(self._store, self._streams, *where, show) if show is not None else None
        try:
            if subscriber is None:
                answer = await self._dispatcher.submit(message, kind)
            else:
                answer = await self._dispatcher.submit(message, kind, subscriber.on_event, subscriber.follow)
            text = await answer
        finally:
            self._waiting[message.owner, id] -= 1
            self._waiting += Counter()  # without those that nobody waits for
            if subscriber is not None:
                subscriber.close()
        row = await self._store.find(message.owner, id)
        if row is None or row.first_seq is None:
            return Outcome(text)
        logged = await self._store.read_turn(row.session, row.first_seq)
        if subscriber is not None:
            subscriber.finish(logged)
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

    async def holds(self, owner: str, id: str, seq: int, chars: int) -> bool:
        """Whether there is such a place in the turn of this request: an entry, and a text after it that is so long."""
        row = await self._store.find(owner, id)
        if row is None or row.first_seq is None:
            return False
        logged = await self._store.read_turn(row.session, row.first_seq)
        if not logged or not row.first_seq <= seq <= logged[-1].seq or (logged[-1].seq == seq and row.done):
            return False
        after = next((one.entry for one in logged if one.seq == seq + 1), None)
        if after is None:
            return True  # the answer is not there yet
        said = after.content or "" if isinstance(after, ModelAnswered) else ""
        return chars <= len(said) + (SPACES if isinstance(after, ModelAnswered) else 0)

    def withdraw(self, message: InboundMessage, known: bool = True) -> None:
        """The client has gone: its turn ends now, or as soon as it begins, unless another waits for the same one, here
        or elsewhere. Of one that is not `known` to anybody else, no turn is begun any more, wherever that would be."""
        assert message.id is not None
        where = (message.owner, message.session_key)
        session, publisher = self._dispatcher.session(*where), self._streams.publisher(*where)
        here = session is not None and session.message == message.id
        if here and publisher is not None and publisher.is_followed_elsewhere:
            return
        self._dispatcher.withdraw(*where, message.id, CLIENT_LEFT)
        if not here and not self._waiting[message.owner, message.id]:
            self._streams.tell_withdrawn(*where, message.id)
        if not known and session is None:
            task = asyncio.get_running_loop().create_task(self._drop(message))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, message: InboundMessage) -> None:
        try:
            row = await self._store.find(message.owner, message.id or "")
            if row is not None and row.turn is None:
                await self._store.answer(row, [])
                await self._dispatcher.settle([row.id])
        except StoreError as error:  # then it is run for nobody
            log.warning("%s", error)


def _without_place(show: Show) -> Show:
    """Show the events of a command without their places: a client cannot resume it."""
    return lambda _, event: show(0, event)
