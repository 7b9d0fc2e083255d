"""Requests of API clients: their turns are run, and what came of them is read from the log."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from .. import events
from ..bus import InboundMessage
from ..commands import kind_of
from ..errors import StoreError
from ..log import Call, Entry, Logged, ModelAnswered, TurnEnded
from ..store.base import Gathering, Store
from .chat_commands import Urgent
from .dispatcher import Dispatcher
from .turn_runner import TurnRunner
from .watching import Follower, Show

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

    def __init__(self, store: Store, dispatcher: Dispatcher, urgent: Urgent, turns: TurnRunner) -> None:
        self._store = store
        self._relay = store.relay if isinstance(store, Gathering) else None
        self._dispatcher = dispatcher
        self._urgent = urgent
        self._turns = turns
        self._waiting: Counter[tuple[str, str]] = Counter()  # who waits here, by the message's owner and id
        self._dropping: set[asyncio.Task[None]] = set()  # messages that nobody waits for any more
        turns.on_withdrawn = partial(dispatcher.withdraw, text=CLIENT_LEFT)

    async def run(self, message: InboundMessage, show: Show | None = None) -> Outcome:
        """The outcome of a request's turn, wherever it runs. One whose id is known is not run again: it gives what came
        of it. `show` is told all that happens in the turn, from its beginning on, with the places in the log.

        Cancelled, it only stops waiting: `withdraw` stops the turn.
        """
        id, kept = message.id, message.request is not None and message.request.kept
        assert id is not None
        kind = kind_of(message) if kept else "message"
        message = message.addressed()
        shown = partial(show, 0) if show is not None else None
        if kind == "urgent":
            return Outcome(await self._urgent.answer(message, shown))
        if kind == "reply":
            if (replied := await self._urgent.reply(message, shown)) is not None:
                return Outcome(replied)
            kind = "message"
        self._waiting[message.owner, id] += 1
        following = Following(self, message, show) if show is not None else None
        try:
            told = following.elsewhere if following is not None else None
            emit = following.here if following is not None else None
            text = await (await self._dispatcher.submit(message, kind, emit, told))
        finally:
            self._waiting[message.owner, id] -= 1
            self._waiting += Counter()  # without those that nobody waits for
            if following is not None:
                following.stop()
        row = await self._store.find(message.owner, id)
        if row is None or row.first_seq is None:
            return Outcome(text)
        logged = await self._store.read_turn(row.session, row.first_seq)
        if following is not None:
            following.end(logged)
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
        live, showing = self._dispatcher.live(*where), self._turns.shown(*where)
        here = live is not None and live.message == message.id
        if here and showing is not None and showing.followed_elsewhere:
            return
        self._dispatcher.withdraw(*where, message.id, CLIENT_LEFT)
        if self._relay is not None and not here and not self._waiting[message.owner, message.id]:
            self._relay.tell(*where, msgspec.json.encode(message.id))
        if not known and live is None:
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


class Following:
    """Shows a request's turn to its client: as it is told of one that is begun for it here, else by following it."""

    def __init__(self, requests: Requests, message: InboundMessage, show: Show) -> None:
        self._requests = requests
        self._where = (message.owner, message.session_key)
        self._follower = Follower(requests._store, show)
        self._followed = False
        self._task: asyncio.Task[None] | None = None
        self._ends: list[Callable[[], None]] = []

    def here(self, event: events.Event) -> None:
        showing = self._requests._turns.shown(*self._where)
        self._follower.pass_on(showing.seq if showing is not None else 0, event)

    def elsewhere(self, row: int) -> None:
        """Its turn is none that begins here now, or goes on elsewhere: follow it, wherever it is."""
        follower = self._follower
        follower.row, self._followed = row, True
        if self._requests._relay is not None:  # before the log is looked at, so that nothing falls in between
            following = self._requests._relay.follow(*self._where, follower.hear)
            follower.ask = following.ask
            self._ends.append(following.close)
        self._ends.append(self._requests._turns.follow(*self._where, follower.take))
        self._task = asyncio.get_running_loop().create_task(follower.run())

    def stop(self) -> None:
        """Nobody waits any more, or the turn is over."""
        for end in self._ends:
            end()
        self._ends.clear()
        if self._task is not None:
            self._task.cancel()

    def end(self, logged: Sequence[Logged]) -> None:
        """The turn is over, and this is all of it."""
        if self._followed:
            self._follower.end(logged)
