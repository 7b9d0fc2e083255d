"""Streaming: publishes the events of running turns, and delivers each event to every subscriber exactly once.

A turn that runs in this process has a `TurnPublisher`. Its events go to three kinds of subscribers: watchers, which are
callables in this process (a terminal, the client that started the turn); followers, which receive batches with their
position in the turn; and followers in other processes, which the store's relay carries batches to. A `TurnSubscriber`
shows a client the turn of its message, wherever that runs, from the log, from batches and from this process, without
gaps or repeats. A `SessionSubscriber` shows a client everything in a session from a log position. Events are for
display only; the log is the source of truth.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from .. import events
from ..bus import WEB
from ..engine import HANDED
from ..errors import StoreError
from ..events import Show
from ..log import Call, CallEnded, Logged, ModelAnswered, TurnEnded
from ..store.base import Claim, Store
from ..store.peers import EventPublisher, EventRelay
from ..text import clean
from ..text_cursor import Position, TextCursor, checksum
from .session import Session

log = logging.getLogger(__name__)
MOVED = "the turn continues in another process"
MAX_FIELD = 500  # characters of a tool's arguments and output in batches for other processes
WAITING = 2_000  # batches waiting to be shown; beyond that the oldest are dropped and read from the log instead
ASK_SECONDS = 0.5  # minimum time between two requests for missed events
PAGE = 200  # log entries read at a time
SETTLE_SECONDS = 0.05  # from an event to the entry that it announces
LOOK_SECONDS = 1.0  # polling interval for a turn in a process that sends no batches
REST_SECONDS = 5.0  # polling interval for an idle session

# ---------------------------------------------------------------------------------------------- batches

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        events.TurnStarted,
        events.Text,
        events.Reasoning,
        events.Restarted,
        events.ToolStarted,
        events.ToolProgress,
        events.ToolEnded,
        events.Asked,
        events.Usage,
        events.Steered,
        events.Compacting,
        events.Compacted,
        events.Error,
        events.TurnEnded,
    )
}


@dataclass(slots=True, frozen=True)
class Batch:
    """Events of a turn and their position in it.

    The position is the log's last entry before them, the attempt of the round that they belong to, and how many
    characters of its text precede them.
    """

    turn: str
    seq: int
    attempt: str
    chars: int
    events: list[events.Event]


Follow = Callable[[Batch], None]
_decoder = msgspec.json.Decoder(tuple[str, int, str, int, list[tuple[str, msgspec.Raw]]])


def encode(batch: Batch) -> bytes:
    """Encode a batch as one line of JSON."""
    try:
        return msgspec.json.encode(_wire(batch))
    except UnicodeEncodeError:  # a lone surrogate, as some models emit
        return clean(msgspec.json.encode(_wire(_cleaned(batch))).decode()).encode()


def decode(data: bytes) -> Batch:
    """Decode the output of `encode`. Unknown kinds of events are skipped."""
    turn, seq, attempt, chars, told = _decoder.decode(data)
    known = [msgspec.json.decode(raw, type=_KINDS[name]) for name, raw in told if name in _KINDS]
    return Batch(turn, seq, attempt, chars, known)


def _wire(batch: Batch) -> Any:
    told = [(type(event).__name__, event) for event in batch.events]
    return batch.turn, batch.seq, batch.attempt, batch.chars, told


def _cleaned(batch: Batch) -> Batch:
    """Return the batch without lone surrogates. Only texts can have any: everything else has been in the log."""
    texts = (events.Text, events.Reasoning, events.ToolProgress)
    return replace(
        batch,
        events=[
            replace(event, text=clean(event.text)) if isinstance(event, texts) else event for event in batch.events
        ],
    )


def _short(event: events.Event) -> events.Event:
    """Return the event shortened for other processes: the log has the rest."""
    match event:
        case events.ToolStarted(arguments=arguments):
            return replace(event, arguments={name: _cut(value) for name, value in arguments.items()})
        case events.ToolEnded(content=content):
            return replace(event, content=content[:MAX_FIELD])
        case events.ToolProgress(text=text) | events.TurnEnded(text=text):
            return replace(event, text=text[:MAX_FIELD])
        case _:
            return event


def _cut(value: object) -> object:
    if isinstance(value, str):
        return value[:MAX_FIELD]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:MAX_FIELD]


# ---------------------------------------------------------------------------------------------- publishing


class TurnPublisher:
    """Publishes the events of one running turn."""

    def __init__(self, claim: Claim, session: Session, watchers: list[Show], followers: list[Follow]) -> None:
        self._claim = claim
        self._session = session
        self._watchers = watchers
        self._followers = followers
        self._audience: EventPublisher | None = None
        self._attempts = 0
        self._at = 0  # the log's last entry before the running round
        self._chars = 0  # of the current attempt's text
        self._gathered: list[Batch] = []  # for other processes

    @property
    def seq(self) -> int:
        """The log's last entry."""
        return self._claim.next_seq - 1

    @property
    def is_followed(self) -> bool:
        return bool(self._followers) or self.is_followed_elsewhere

    @property
    def is_followed_elsewhere(self) -> bool:
        return self._audience is not None and self._audience.has_subscribers

    def serve(self, relay: EventRelay, withdrawn: Callable[[bytes], None]) -> None:
        """Publish to other processes as well; `withdrawn` is called when one of their clients has disconnected."""
        self._audience = relay.publish(self._claim.owner, self._claim.key, self._send_state, withdrawn)

    def publish(self, event: events.Event) -> None:
        """Deliver an event to every subscriber."""
        if (seq := self.seq) != self._at:
            self._at, self._chars = seq, 0
        if isinstance(event, events.Restarted):
            self._attempts, self._chars = self._attempts + 1, 0
        for show in (*self._session.state.watchers, *self._watchers):  # iterate over a copy: a watcher may unsubscribe
            try:
                show(seq, event)
            except Exception:  # a subscriber's failure must not fail the turn
                log.exception("a subscriber of session %s failed", self._claim.key)
        if self.is_followed:
            batch = self._batch(self._chars, [event])
            for follow in self._followers:
                follow(batch)
            if self.is_followed_elsewhere:
                self._gather(batch)
        if isinstance(event, events.Text):
            self._chars += len(event.text)

    def start(self) -> None:
        """Start publishing if the turn started without a subscriber."""
        if (turn := self._session.state.turn) is not None:
            turn.subscribe(self.publish)

    def send_state(self, follow: Follow) -> None:
        """Send a new follower the state of the turn. Later events are published to it."""
        if (turn := self._session.state.turn) is None:
            return  # it is about to start
        self.start()
        calls = {call.id: call for entry in turn.entries if isinstance(entry, ModelAnswered) for call in entry.calls}
        running = [calls[id] for id in turn.running if id in calls]
        so_far: list[events.Event] = [events.Text("".join(turn.partial))] if turn.partial else []
        so_far += [events.ToolStarted(call.id, call.name, call.arguments) for call in running]
        follow(self._batch(0, so_far))

    def close(self) -> None:
        """Stop publishing, because the turn has ended here."""
        self._flush()
        if self._audience is not None:
            self._audience.close()
            self._audience = None

    def _batch(self, chars: int, told: list[events.Event]) -> Batch:
        return Batch(self._claim.turn, self.seq, f"{self._claim.fence}.{self._attempts}", chars, told)

    def _send_state(self, address: str) -> None:
        """Send the state to a process that starts to follow, or has missed something."""
        if (audience := self._audience) is not None:
            self.send_state(lambda batch: audience.send(encode(batch), address))

    def _gather(self, batch: Batch) -> None:
        """Buffer the event until the relay sends the next batch."""
        (event,) = batch.events
        last = self._gathered[-1] if self._gathered else None
        if last is None or (last.seq, last.attempt) != (batch.seq, batch.attempt):
            if last is None and self._audience is not None:
                self._audience.before_batch(self._flush)
            self._gathered.append(replace(batch, events=[_short(event)]))
        elif isinstance(event, events.Text) and isinstance(before := last.events[-1], events.Text):
            last.events[-1] = events.Text(before.text + event.text)
        else:
            last.events.append(_short(event))

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self._audience is not None:
            for batch in gathered:
                self._audience.send(encode(batch))


@dataclass(slots=True)
class _Topic:
    """The stream of one session: its running turn and its subscribers."""

    publisher: TurnPublisher | None = None
    watchers: list[Show] = field(default_factory=list)
    followers: list[Follow] = field(default_factory=list)


class Link(Protocol):
    """A subscription to a session's batches."""

    def ask(self) -> None:
        """Ask for the state that a new follower gets, because something was missed."""
        ...

    def close(self) -> None: ...


class TurnStreams:
    """The streams of an agent's sessions.

    `withdraw` is called with owner, session and message when a client in another process has disconnected and left no
    other subscriber there.
    """

    def __init__(
        self,
        relay: EventRelay,
        withdraw: Callable[[str, str, str], None],
        on_event: Callable[[str, events.Event], None] | None = None,
    ) -> None:
        self._relay = relay
        self._withdraw = withdraw
        self._on_event = on_event  # called with every event of every session
        self._topics: dict[tuple[str, str], _Topic] = {}

    def open(self, claim: Claim, session: Session) -> None:
        """Start publishing the session's turn; without a subscriber, publish nothing until there is one."""
        owner, key = claim.owner, claim.key
        topic = self._topics.setdefault((owner, key), _Topic())
        publisher = topic.publisher = TurnPublisher(claim, session, topic.watchers, topic.followers)
        publisher.serve(self._relay, lambda data: self._withdrawn(owner, key, data))
        if (on_event := self._on_event) is not None:
            session.state.watchers.append(lambda _, event: on_event(key, event))
        # After a crash, the client of an API request will reconnect, and so will a web page.
        expected = claim.resumed and (claim.message.request is not None or claim.message.channel == WEB)
        if session.state.watchers or topic.watchers or expected or publisher.is_followed:
            publisher.start()

    def close(self, claim: Claim) -> None:
        """Stop publishing, because the turn has ended here."""
        topic = self._topics.get((claim.owner, claim.key))
        if topic is not None and topic.publisher is not None:
            topic.publisher.close()
            topic.publisher = None
            self._clean(claim.owner, claim.key)

    def publisher(self, owner: str, key: str) -> TurnPublisher | None:
        """Return the publisher of the session's turn, if one runs here."""
        topic = self._topics.get((owner, key))
        return topic.publisher if topic is not None else None

    def watch(self, owner: str, key: str, show: Show) -> Callable[[], None]:
        """Call `show` with every event of a session, until the returned function is called."""
        topic = self._topics.setdefault((owner, key), _Topic())
        topic.watchers.append(show)
        if topic.publisher is not None:
            topic.publisher.start()

        def stop() -> None:
            if show in topic.watchers:
                topic.watchers.remove(show)
            self._clean(owner, key)

        return stop

    def follow(self, owner: str, key: str, follow: Follow) -> Callable[[], None]:
        """Call `follow` with batches of a session's events, until the returned function is called.

        The first batch is the state of the running turn; then follow its events and those of later turns.
        """
        topic = self._topics.setdefault((owner, key), _Topic())
        topic.followers.append(follow)
        if topic.publisher is not None:
            topic.publisher.send_state(follow)

        def stop() -> None:
            topic.followers.remove(follow)
            self._clean(owner, key)

        return stop

    def connect(self, owner: str, key: str, follow: Follow) -> Link:
        """Follow a session in this process and in the others."""
        return _Link(self, self._relay, owner, key, follow)

    def tell_withdrawn(self, owner: str, key: str, message: str) -> None:
        """Tell the process that runs the message's turn that its client here has disconnected."""
        self._relay.send(owner, key, msgspec.json.encode(message))

    def _withdrawn(self, owner: str, key: str, data: bytes) -> None:
        publisher = self.publisher(owner, key)
        if publisher is not None and not publisher.is_followed_elsewhere:
            self._withdraw(owner, key, msgspec.json.decode(data, type=str))

    def _clean(self, owner: str, key: str) -> None:
        topic = self._topics.get((owner, key))
        if topic is not None and topic.publisher is None and not topic.watchers and not topic.followers:
            del self._topics[owner, key]


class _Link:
    """Follows a session here and, through the relay, elsewhere."""

    def __init__(self, streams: TurnStreams, relay: EventRelay, owner: str, key: str, follow: Follow) -> None:
        self._follow = follow
        # Subscribe to the relay first: what happens before the log is read must not be missed.
        self._remote = relay.subscribe(owner, key, self._receive)
        self._stop = streams.follow(owner, key, follow)

    def ask(self) -> None:
        self._remote.request_state()

    def close(self) -> None:
        self._remote.close()
        self._stop()

    def _receive(self, data: bytes) -> None:
        try:
            batch = decode(data)
        except msgspec.MsgspecError as error:  # from another version; the log can still be read
            log.warning("ignored a batch of turn events that cannot be decoded: %s", error)
            return
        self._follow(batch)


# ---------------------------------------------------------------------------------------------- subscribing


class Subscriber(ABC):
    """Follows the batches of a session, and shows what is new in them.

    It tracks its client's position: the log's last entry that was shown, and a cursor in the text of the round after
    it. Repeated text is shown once. Missed events are requested again, and in any case read from the log.
    """

    def __init__(self, store: Store, streams: TurnStreams, owner: str, key: str, seen: Position) -> None:
        self._store = store
        self._streams = streams
        self._where = (owner, key)
        self._session = 0
        self._at = seen.seq  # the log's last entry that was shown; the running round began there
        self._cursor = TextCursor(seen if seen.chars else None)  # in the text of the running round
        self._link: Link | None = None
        self._batches: deque[Batch] = deque(maxlen=WAITING)
        self._more = asyncio.Event()  # there are batches, or something else to look at
        self._asked_at = 0.0

    @abstractmethod
    def _show_event(self, event: events.Event) -> None:
        """Show an event of the running round."""

    def receive(self, batch: Batch) -> None:
        """Take a batch of the session's events."""
        self._batches.append(batch)
        self._more.set()

    def close(self) -> None:
        """Stop following."""
        if self._link is not None:
            self._link.close()

    def _connect(self) -> None:
        self._link = self._streams.connect(*self._where, self.receive)

    def _show_batch(self, batch: Batch) -> None:
        """Show what is new in a batch of the running round."""
        offset = batch.chars
        for event in batch.events:
            if isinstance(event, events.Text):
                self._take_text(batch.attempt, offset, event.text)
                offset += len(event.text)
            elif not isinstance(event, events.Restarted | events.TurnEnded):  # the cursor and the log cover these
                self._show_event(event)

    def _take_text(self, attempt: str, offset: int, text: str) -> None:
        """Show the new part of a text that starts at this offset of its attempt."""
        cursor = self._cursor
        if attempt != cursor.attempt:
            cursor.begin(attempt)
        if offset > cursor.length:
            now = asyncio.get_running_loop().time()
            if self._link is not None and now - self._asked_at > ASK_SECONDS:
                self._asked_at = now
                self._link.ask()
        elif text := text[cursor.length - offset :]:
            new = cursor.feed(text)
            self._show_text(new, "" if new is not None else cursor.restart())

    def _show_text(self, new: str | None, whole: str) -> None:
        """Show a continuation, or the `whole` text from its start if it differs from what was shown."""
        if new is None:
            self._show_event(events.Restarted(MOVED))
            new = whole
        if new:
            self._show_event(events.Text(new))


class TurnSubscriber(Subscriber):
    """Shows a client the turn that its message opened, wherever it runs.

    While the turn runs here for this message, `on_event` forwards its events. `follow` is for a turn that runs or ran
    elsewhere: it shows what the log has, and then batches as they arrive.
    """

    def __init__(self, store: Store, streams: TurnStreams, owner: str, key: str, show: Show) -> None:
        super().__init__(store, streams, owner, key, Position(0, 0))
        self._show = show
        self._row = 0  # the inbox row that opened the turn
        self._task: asyncio.Task[None] | None = None
        self._turn: str | None = None
        # texts of the running round that were shown while the turn ran here; fed to the cursor later
        self._texts: list[str] = []
        self._has_reasoning = False  # some reasoning of the running round was shown
        self._calls: dict[str, Call] = {}
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._over = False

    def on_event(self, seq: int, event: events.Event) -> None:
        """Show an event of the turn, which runs in this process."""
        if seq != self._at:
            self._begin_round(seq)
        if isinstance(event, events.Text):
            self._texts.append(event.text)
            self._show(seq, event)
        elif isinstance(event, events.Restarted):
            self._begin_round(seq)
            self._show(seq, event)
        else:
            self._show_event(event)

    def follow(self, row: int) -> None:
        """Follow the turn of this inbox row, which runs or ran elsewhere, until `close`."""
        self._row = row
        for text in self._texts:
            self._cursor.feed(text)
        self._texts = []
        self._connect()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        super().close()
        if self._task is not None:
            self._task.cancel()

    @property
    def is_following(self) -> bool:
        """Return whether the turn runs, or ran, in another process."""
        return self._link is not None

    def finish(self, logged: Sequence[Logged]) -> None:
        """Show what a follower has missed, given the log of the ended turn."""
        if self._link is None:
            return
        if logged and self._turn is None:
            self._begin(logged[0].turn, logged[0].seq)
        self._replay(logged)

    async def _run(self) -> None:
        while True:
            try:
                await self._read_log()
                while True:
                    while self._batches:
                        await self._take(self._batches.popleft())
                    self._more.clear()
                    await self._more.wait()
            except StoreError as error:  # `finish` reads the log as well
                log.warning("%s", error)
                await asyncio.sleep(1)

    async def _read_log(self) -> None:
        """Find the turn, if it has started, and show what the log has of it."""
        if self._turn is None:
            row = await self._store.incoming(self._row)
            if row.turn is None or row.first_seq is None:
                return
            self._session = row.session
            self._begin(row.turn, row.first_seq)
        self._replay(await self._store.read_log(self._session, self._at))

    def _begin(self, turn: str | None, first: int) -> None:
        self._turn, self._at = turn, max(self._at, first - 1)

    def _begin_round(self, seq: int) -> None:
        self._at, self._cursor, self._texts, self._has_reasoning = seq, TextCursor(), [], False

    def _replay(self, logged: Iterable[Logged]) -> None:
        for one in logged:
            if one.turn == self._turn and one.seq > self._at:
                self._show_entry(one)
                self._at = one.seq

    def _show_entry(self, one: Logged) -> None:
        match one.entry:
            case ModelAnswered() as answer:
                if answer.reasoning and not self._has_reasoning:
                    self._show(self._at, events.Reasoning(answer.reasoning))
                self._show_text(self._cursor.finish(answer.content or ""), answer.content or "")
                self._begin_round(self._at)
                self._calls.update((call.id, call) for call in answer.calls)
            case CallEnded() as ended if ended.content != HANDED:
                self._show_event(events.ToolEnded(ended.id, ended.name, ended.content, ended.status, ended.seconds))
            case TurnEnded(reason=reason, text=text) if not self._over:
                self._show_event(events.TurnEnded(one.turn or "", reason, text))

    async def _take(self, batch: Batch) -> None:
        if self._turn is None:
            await self._read_log()
        if batch.turn != self._turn:
            return  # another turn of the session
        if batch.seq > self._at:
            self._replay(await self._store.read_log(self._session, self._at))
        if batch.seq == self._at:
            self._show_batch(batch)

    def _show_event(self, event: events.Event) -> None:
        match event:
            case events.ToolStarted(call=call):
                if call in self._started:
                    return
                self._started.add(call)
            case events.ToolEnded(call=call, name=name):
                if call in self._ended:
                    return
                if call not in self._started:  # its start was missed
                    made = self._calls.get(call)
                    self._show_event(events.ToolStarted(call, name, made.arguments if made is not None else {}))
                self._ended.add(call)
            case events.Reasoning():
                self._has_reasoning = True
            case events.TurnEnded():
                self._over = True
        self._show(self._at, event)


@dataclass(slots=True, frozen=True)
class Streamed:
    """An event of the running round, which began after log entry `seq`."""

    seq: int
    event: events.Event


@dataclass(slots=True, frozen=True)
class SessionState:
    """Session state that is not in the log: the open turn, whether it is parked, and the messages queued for a turn."""

    turn: str | None = None
    parked: bool = False
    waiting: tuple[tuple[str, str], ...] = ()  # id and text


Update = Logged | Streamed | SessionState


class SessionSubscriber(Subscriber):
    """Follows a session from a log position: every entry once, and the streamed events of the round after them.

    `next` returns what is new. Batches of events tell when to read the log. If there are none, because the turn runs in
    a process that does not relay them, the subscriber polls the session.
    """

    def __init__(
        self, store: Store, streams: TurnStreams, owner: str, key: str, seen: Position, mark: int | None = None
    ) -> None:
        super().__init__(store, streams, owner, key, seen)
        self._mark = mark  # the mark of the last entry that was shown; None while unknown
        self._state: SessionState | None = None
        self._found: list[Update] = []
        self._look_at = 0.0
        self._pause = LOOK_SECONDS
        self._last_turn: str | None = None  # the turn of the last batch
        self._over = False
        self._connect()

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will be shown: `end` was called, or the log has lost entries that were shown."""
        return self._over

    def end(self) -> None:
        """Show nothing more, and wake a waiting caller."""
        self._over = True
        self._more.set()

    def look(self) -> None:
        """Look into the store, which may have something new."""
        self._look_at = 0.0
        self._more.set()

    async def next(self, seconds: float) -> list[Update]:
        """Return what is new as soon as there is something, or an empty list after `seconds`."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while not self._found and not self._over:
            if clock() >= self._look_at:
                await self._look()
            elif self._batches:
                await self._take(self._batches.popleft())
            elif (now := clock()) >= until:
                break
            else:
                self._more.clear()
                try:
                    async with asyncio.timeout(min(until, self._look_at) - now):
                        await self._more.wait()
                except TimeoutError:
                    continue
        while self._batches and len(self._found) < PAGE and not self._over:
            await self._take(self._batches.popleft())
        found, self._found = self._found, []
        return found

    def _show_event(self, event: events.Event) -> None:
        self._found.append(Streamed(self._at, event))

    async def _look(self) -> None:
        """Read the session's state and new entries from the store."""
        info = await self._store.session(*self._where)
        before, state = self._at, SessionState()
        if info is not None:
            self._session = info.id
            if info.entries < self._at:
                self._over = True
                return
            more = await self._read_log()
            waiting = [(row.message.id or "", row.message.content) for row in await self._store.waiting(*self._where)]
            state = SessionState(info.open_turn, info.parked, tuple(waiting))
            if state.turn not in (None, self._last_turn) and not state.parked and self._link is not None:
                self._link.ask()  # its process may have started after this subscription, and not know about it
            if more:  # a long log is shown in pages; the state comes with the last page
                self._look_at = 0.0
                return
        if state != self._state:
            self._state = state
            self._found.append(state)
        is_quiet = state.turn is None and before == self._at
        self._pause = min(self._pause * 1.5, REST_SECONDS) if is_quiet else LOOK_SECONDS
        self._look_at = asyncio.get_running_loop().time() + self._pause

    async def _read_log(self) -> bool:
        """Show the entries after the last one that was shown, and return whether there may be more.

        That last entry is read again: after a power loss its position may have been given to another entry.
        """
        if not self._session:
            return False
        logged = await self._store.read_log(self._session, max(self._at - 1, 0), self._at + PAGE)
        if self._at and logged and logged[0].seq == self._at:
            if self._mark is not None and self._mark != mark_of(logged[0]):
                self._over = True
                return False
            self._mark = mark_of(logged.pop(0))
        for one in logged:
            self._found.append(one)
            self._at, self._mark, self._cursor = one.seq, mark_of(one), TextCursor()
        return len(logged) >= PAGE

    async def _take(self, batch: Batch) -> None:
        self._last_turn = batch.turn
        if batch.seq > self._at:
            if not self._session and (info := await self._store.session(*self._where)) is not None:
                self._session = info.id
            while await self._read_log():
                pass
        if any(not isinstance(event, events.Text | events.Reasoning) for event in batch.events):
            # The entry that an event announces is written right after it.
            self._look_at = min(self._look_at, asyncio.get_running_loop().time() + SETTLE_SECONDS)
        if batch.seq == self._at:
            self._show_batch(batch)


def mark_of(one: Logged) -> int:
    """Return a checksum that distinguishes an entry from one that took its position after a power loss."""
    return checksum(f"{one.turn}:{one.at!r}:{one.seq}")
