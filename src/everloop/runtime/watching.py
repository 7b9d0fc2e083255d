"""Follows the turn of a message, wherever it runs: first what the log has of it, then what happens, each thing once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from .. import events
from ..engine import HANDED
from ..errors import StoreError
from ..log import Call, CallEnded, Logged, ModelAnswered, TurnEnded
from ..store.base import Store
from .streaming import Batch, decode

log = logging.getLogger(__name__)
GOES_ON = "the turn goes on in another process"
WAITING = 2_000  # batches that have come and are not shown yet; of more the oldest are dropped, and the log has them
ASK_SECONDS = 0.5  # between two questions for what was missed

Show = Callable[[int, events.Event], None]  # with the log's last entry before the round that it happens in


class Follower:
    """Shows the turn that an inbox row opened. The log is the truth: what was lost on the way is taken from there, and
    what came twice is shown once."""

    def __init__(self, store: Store, show: Show, row: int = 0) -> None:
        self.row = row
        self.ask: Callable[[], None] | None = None  # for all that a newcomer must know
        self._store = store
        self._show = show
        self._batches: deque[Batch] = deque(maxlen=WAITING)
        self._more = asyncio.Event()
        self._asked_at = 0.0
        self._session = 0
        self._turn: str | None = None
        self._at = 0  # the log's last entry that was shown; the round that runs began there
        self._calls: dict[str, Call] = {}  # those that were made
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._round = Round()
        self._over = False

    def pass_on(self, seq: int, event: events.Event) -> None:
        """Show what the turn itself tells, for as long as it is begun and run here: it may move elsewhere later."""
        if seq != self._at:
            self._at, self._round = seq, Round()
        if isinstance(event, events.Text):
            self._round.passed(event.text)
        elif isinstance(event, events.Restarted):
            self._round = Round()
        if isinstance(event, events.Text | events.Restarted):
            self._show(seq, event)
        else:
            self._tell_event(event)

    def take(self, batch: Batch) -> None:
        """Something has happened in the session."""
        self._batches.append(batch)
        self._more.set()

    def hear(self, data: bytes) -> None:
        """Something has happened in another process."""
        try:
            self.take(decode(data))
        except msgspec.MsgspecError as error:  # of another version: the log is understood
            log.warning("something was said of a turn that is not understood: %s", error)

    async def run(self) -> None:
        """Show what happens, until cancelled."""
        while True:
            try:
                await self._look()
                while True:
                    while self._batches:
                        await self._take(self._batches.popleft())
                    self._more.clear()
                    await self._more.wait()
            except StoreError as error:  # the end is looked up in the log as well
                log.warning("%s", error)
                await asyncio.sleep(1)

    def end(self, logged: Sequence[Logged]) -> None:
        """The turn is over, and this is all of it: show what was not shown."""
        if logged and self._turn is None:
            self._begin(logged[0].turn, logged[0].seq)
        self._replay(logged)

    # ------------------------------------------------------------------------------------------ the log

    async def _look(self) -> None:
        """Find the turn, if it has begun, and show what the log has of it."""
        if self._turn is None:
            row = await self._store.incoming(self.row)
            if row.turn is None or row.first_seq is None:
                return
            self._session = row.session
            self._begin(row.turn, row.first_seq)
        self._replay(await self._store.read_log(self._session, self._at))

    def _begin(self, turn: str | None, first: int) -> None:
        self._turn, self._at = turn, max(self._at, first - 1)

    def _replay(self, logged: Iterable[Logged]) -> None:
        for one in logged:
            if one.turn == self._turn and one.seq > self._at:
                self._enter(one)
                self._at = one.seq

    def _enter(self, one: Logged) -> None:
        match one.entry:
            case ModelAnswered() as answer:
                if answer.reasoning and not self._round.thought:
                    self._show(self._at, events.Reasoning(answer.reasoning))
                self._tell(self._round.logged(answer.content or ""))
                self._round = Round()
                self._calls.update((call.id, call) for call in answer.calls)
            case CallEnded() as ended if ended.content != HANDED:
                self._tell_event(events.ToolEnded(ended.id, ended.name, ended.content, ended.status, ended.seconds))
            case TurnEnded(reason=reason, text=text) if not self._over:
                self._tell_event(events.TurnEnded(one.turn or "", reason, text))

    # ------------------------------------------------------------------------------------------ what happens now

    async def _take(self, batch: Batch) -> None:
        if self._turn is None:
            await self._look()
        if batch.turn != self._turn:
            return  # of another turn of the session
        if batch.seq > self._at:
            self._replay(await self._store.read_log(self._session, self._at))
        if batch.seq != self._at:
            return
        chars = batch.chars
        for event in batch.events:
            if isinstance(event, events.Text):
                if (shown := self._round.heard(batch.attempt, chars, event.text)) is None:
                    self._ask()
                else:
                    self._tell(shown)
                chars += len(event.text)
            elif not isinstance(event, events.Restarted | events.TurnEnded):  # seen by the text, and in the log
                self._tell_event(event)

    def _ask(self) -> None:
        """Something was missed: ask for it, or wait for the log to have it."""
        now = asyncio.get_running_loop().time()
        if self.ask is not None and now - self._asked_at > ASK_SECONDS:
            self._asked_at = now
            self.ask()

    def _tell(self, shown: Iterable[events.Event]) -> None:
        for event in shown:
            self._show(self._at, event)

    def _tell_event(self, event: events.Event) -> None:
        match event:
            case events.ToolStarted(call=call):
                if call in self._started:
                    return
                self._started.add(call)
            case events.ToolEnded(call=call, name=name):
                if call in self._ended:
                    return
                if call not in self._started:  # that it started got lost
                    made = self._calls.get(call)
                    self._tell_event(events.ToolStarted(call, name, made.arguments if made is not None else {}))
                self._ended.add(call)
            case events.Reasoning():
                self._round.thought = True
            case events.TurnEnded():
                self._over = True
        self._show(self._at, event)


class Round:
    """The text of one answer: what was shown of it, and what is known of the try that runs now.

    A round that is begun again may say the same: then nothing of it is shown twice.
    """

    def __init__(self) -> None:
        self.thought = False
        self._attempt = ""
        self._shown: list[str] = []
        self._known: list[str] | None = None  # None: what was shown is what is known
        self._length = 0  # of what is known

    def heard(self, attempt: str, chars: int, text: str) -> list[events.Event] | None:
        """What is to be shown of a piece with so many characters before it; None when some of these are missing."""
        if attempt != self._attempt:
            self._attempt, self._length = attempt, 0
            self._known = [] if self._shown else None
        if chars > self._length:
            return None
        new = text[self._length - chars :]
        if not new:
            return []
        self._length += len(new)
        if self._known is None:
            self._shown.append(new)
            return [events.Text(new)]
        self._known.append(new)
        return self._catch_up()

    def passed(self, text: str) -> None:
        """This was shown, as the next piece."""
        self._shown.append(text)

    def logged(self, text: str) -> list[events.Event]:
        """What is to be shown when this is the whole answer. Spaces around it may have been shown that it has not."""
        shown = "".join(self._shown)
        for said in (shown, shown.lstrip(), shown.strip()):
            if text.startswith(said):
                return [events.Text(text[len(said) :])] if len(text) > len(said) else []
        return [events.Restarted(GOES_ON), *([events.Text(text)] if text else [])]

    def _catch_up(self) -> list[events.Event]:
        """A new try: go on where it goes beyond what was shown, or begin again where it says something else."""
        known, shown = "".join(self._known or ()), "".join(self._shown)
        if shown.startswith(known):
            return []
        self._known, self._shown = None, [known]
        if known.startswith(shown):
            return [events.Text(known[len(shown) :])]
        return [events.Restarted(GOES_ON), events.Text(known)]
