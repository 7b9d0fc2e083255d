"""The store port: log, inbox, outbox, leases and timers, whatever database is behind it.

The conformance suite in `tests/store` defines what each call promises; it runs against every store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ..bus import InboundMessage, Kind, OutboundMessage
from ..log import CallsAsked, Compacted, Entry, Logged, Written, in_words
from .overview import Overview as Overview
from .overview import Replication as Replication
from .peers import ANY, EventRelay, Notice, Peer

T = TypeVar("T")
SILENCE_SECONDS = 1800.0  # after which the model is told the time again


@dataclass(slots=True, frozen=True)
class Incoming:
    """A row of the inbox."""

    id: int
    session: int
    message: InboundMessage
    kind: Kind = "message"
    done: bool = False
    turn: str | None = None  # the turn that took it
    first_seq: int | None = None  # where that turn's entries begin


@dataclass(slots=True, frozen=True)
class Outgoing:
    """A row of the outbox; `message.repeat` is set when it may have been sent before."""

    id: int
    message: OutboundMessage
    turn: str | None
    term: int | None = None  # of the worker's lease when it was taken, where leases can end


@dataclass(slots=True, frozen=True)
class SentPart:
    """A part of a message that its network has taken."""

    id: str  # that the network gave it
    end: int  # where the part ends in the message's text


@dataclass(slots=True, frozen=True)
class Delivery:
    """How far the delivery of an outbox row is."""

    at: float  # when the message was written
    parts: tuple[SentPart, ...]


ChannelRow = tuple[str, str, str | None]  # channel, key and value; None for no value


@dataclass(slots=True, frozen=True)
class DeadLetter:
    """A message that its channel could not deliver."""

    id: int
    at: float
    channel: str
    chat_id: str
    reason: str
    content: str


@dataclass(slots=True, frozen=True)
class Spent:
    """Tokens and money that were used, and what they count for: a turn, a day."""

    scope: str
    tokens: int
    cost: float


@dataclass(slots=True)
class Claim:
    """A session held under a lease, with the turn to run in it.

    Every write carries the fence; the database refuses it once another worker has a higher one.
    """

    owner: str
    session: int
    key: str
    fence: int
    turn: str
    history_from: int  # the conversation starts after this position
    next_seq: int  # where the next entry goes
    first_seq: int  # where the turn's entries begin
    inbox: list[int] = field(default_factory=list)  # rows that this turn answers
    message: InboundMessage = field(init=False)  # what opened the turn
    command: bool = False  # the message is a command for the session, not a turn
    entries: list[Entry] = field(default_factory=list)  # what the turn's log holds already
    resumed: bool = False
    accepted: int | None = None  # the inbox row of the message handed to `begin`
    compacted: int = 0  # the position of the entry that says what of the conversation is left out
    began: float = 0.0  # when the conversation began
    idle_since: float = 0.0  # when the session last did something
    spent: list[Spent] = field(default_factory=list)  # written with the next entries
    unflushed: list[Any] = field(default_factory=list)  # steps that a store may have to write again, in its own form

    def time_to_tell(self, now: float) -> str:
        """The time in words if the conversation has been silent for a while; "" otherwise, and for a new one, which is
        told when it began."""
        fresh = self.first_seq == self.history_from + 1
        return "" if fresh or now - self.idle_since < SILENCE_SECONDS else in_words(now)


@dataclass(slots=True, frozen=True)
class SessionInfo:
    id: int
    owner: str
    key: str
    entries: int
    history_from: int
    created_at: float
    updated_at: float
    open_turn: str | None
    worker: str | None
    compacted: int = 0  # the position of the entry that says what of the conversation is left out
    parked: bool = False  # the open turn waits for a person's answer
    title: str = ""  # given by a person or a model; "" for a session that is known by its first words
    named_by: str = ""  # the model that was asked for that title
    naming_usage: dict[str, int] = field(default_factory=dict)  # the tokens of all model calls for titles
    archived_at: int = 0  # the number of its entries when a person archived it; 0 for one that was not

    @property
    def archived(self) -> bool:
        """Whether a person has archived it, and nothing has happened in it since."""
        return 0 < self.archived_at == self.entries


@dataclass(slots=True, frozen=True)
class Naming:
    """A model call that named a session."""

    model: str
    usage: dict[str, int]


@dataclass(slots=True, frozen=True)
class Removed:
    """What was deleted with a session."""

    keys: tuple[str, ...]  # of the session, and of its sub-agents
    entries: int = 0  # of their logs
    turns: int = 0
    messages: int = 0  # in their inboxes and outboxes

    def __add__(self, other: Removed) -> Removed:
        return Removed(
            self.keys + other.keys,
            self.entries + other.entries,
            self.turns + other.turns,
            self.messages + other.messages,
        )


@dataclass(slots=True, frozen=True)
class Pruned:
    """One step of removing old requests: the sessions that were removed, and where the next step begins."""

    removed: tuple[tuple[str, str], ...]  # (owner, key)
    position: int | None  # None at the end


@dataclass(slots=True, frozen=True)
class TurnInfo:
    id: str
    session: int
    key: str
    owner: str
    first_seq: int
    started_at: float
    ended_at: float | None
    reason: str | None
    flushed: float = 0.0  # seconds that it waited for the disk in the writes that closed or parked it


@dataclass(slots=True, frozen=True)
class RequestText:
    """A text of requests to a model, as JSON; with a key it belongs to the session of that key only."""

    data: str
    key: str = ""


@dataclass(slots=True, frozen=True)
class Found:
    """A message of the past, as found by a search."""

    session: str  # its key
    turn: str | None
    at: float
    role: Literal["user", "assistant"]
    text: str
    untrusted: bool  # the model had read untrusted text when it said this
    seq: int


@dataclass(slots=True, frozen=True)
class FileMark:
    """A file content that the agent wrote, and whether its session was tainted then."""

    digest: str  # SHA-256, in hexadecimal
    tainted: bool
    path: str  # where it was written last


@dataclass(slots=True, frozen=True)
class Timer:
    owner: str
    id: str
    due_at: float
    data: dict[str, Any]


@dataclass(slots=True, frozen=True)
class Token:
    """What is kept of a bearer token, which is not the token itself."""

    id: str
    name: str
    owner: str
    created_at: float
    last_used_at: float | None = None  # to the hour
    revoked_at: float | None = None
    rights: frozenset[str] = frozenset({"use"})  # "use", "admin" or both
    agent: str = ""  # "client": never the agent's own tools; "own": they are the default; "": the server decides


@dataclass(slots=True, frozen=True)
class Finished:
    """The result of ending a turn: its rows in the outbox, and whether the session has more to do."""

    outbox: list[int]
    more: bool
    announced: bool = False  # the processes that send were notified of the rows


class Busy(Exception):
    """The session is held by another living worker, or locked by a write (then `worker` is ""). The message is in the
    inbox."""

    def __init__(self, worker: str, accepted: int | None) -> None:
        super().__init__(f"the session is held by {worker or 'another write'}")
        self.worker = worker
        self.accepted = accepted


class Waiting(Exception):
    """The session's turn waits for a person's answer. The message is in the inbox, behind it."""

    def __init__(self, accepted: int | None) -> None:
        super().__init__("the session waits for a person's answer")
        self.accepted = accepted


class Store(Protocol):
    """Everything that Everloop keeps. A write returns when it is on disk."""

    # inbox
    async def accept(self, message: InboundMessage, kind: Kind = "message") -> Incoming:
        """Put a message into the inbox of its session. A message whose id is known is not accepted again.

        A message of the kind "reply" is stored as "urgent" if a question is open in the session, else as "message".
        """
        ...

    async def ready(self, worker: str, owner: str | None = None) -> list[tuple[str, str]]:
        """(owner, session key) of all sessions, of one owner if given, with waiting messages or an interrupted turn
        that no other living worker holds."""
        ...

    async def waiting(self, owner: str, key: str) -> list[Incoming]:
        """The rows of a session that no turn has taken yet, oldest first, without urgent ones."""
        ...

    async def urgent(self, worker: str, owner: str | None = None) -> list[Incoming]:
        """Urgent rows of sessions, of one owner if given, that this worker holds or no other does."""
        ...

    async def look(
        self, worker: str, sessions: Sequence[int] | None = None
    ) -> tuple[list[tuple[str, str]], list[Incoming]]:
        """`ready` and `urgent` at once, for these sessions or for all."""
        ...

    async def unfinished(self, owner: str, channel: str) -> list[Incoming]:
        """The owner's messages from this channel that wait or whose turn has not ended, oldest first."""
        ...

    async def incoming(self, id: int) -> Incoming: ...

    async def over(self, ids: Sequence[int]) -> list[int]:
        """Which of these rows are done, or were taken by a turn that waits for a person's answer."""
        ...

    async def find(self, owner: str, message_id: str) -> Incoming | None:
        """The owner's message with this id, unless it is hidden."""
        ...

    async def turn_of(self, owner: str, message_id: str) -> tuple[int, int] | None:
        """The session of the message with this id, and the first entry of the turn that it opened. What was said is
        not read: it may be very long."""
        ...

    async def hide(self, owner: str, message_id: str) -> bool:
        """Let the owner's message be found no more; its log stays. Return whether it was there."""
        ...

    # turns
    async def begin(
        self, owner: str, key: str, worker: str, message: InboundMessage | None = None, kind: Kind = "message"
    ) -> Claim | None:
        """Take the session's lease and its next work: an interrupted turn first, then the oldest waiting message.

        `message` is put into the inbox in the same transaction. None when there is nothing to do; `Busy` when
        another living worker has the session, `Waiting` when its turn is parked.
        """
        ...

    def append(
        self, claim: Claim, entries: Sequence[Entry], took: Sequence[int] = (), flush: bool = True
    ) -> Written[None]:
        """Append to the turn's log under the claim's fence; `took` are inbox rows that the entries hold.

        Without `flush` the entries survive the death of the process, and a power loss only from the next flush on.
        """
        ...

    def finish(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
        incoming: Sequence[InboundMessage] = (),
    ) -> Written[Finished]:
        """In one transaction: the log's tail, the turn's end, inbox rows done, outbox rows, the lease given back.

        `sender` is the worker that sends the outgoing messages right away; `incoming` are messages that the turn's end
        puts into the inboxes of the sessions that they name.
        """
        ...

    def park(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
    ) -> Written[Finished]:
        """In one transaction: the log's tail, the question in the outbox, the turn parked, the lease given back."""
        ...

    async def decide(
        self,
        owner: str,
        key: str,
        allowed: bool | None,
        by: str = "",
        note: str = "",
        word: Incoming | InboundMessage | None = None,
        always: bool = False,
    ) -> tuple[int, CallsAsked | None] | None:
        """Answer the question of a session's parked turn, which can then be resumed like an interrupted one.

        Return the inbox row that opened the turn, and the question; None when none is parked. `allowed=None` answers
        nothing and only wakes the turn, to be stopped. A message (`word`) answers one question, however often it comes,
        and none that was asked after it; unless it answers one it is not put into the inbox. With `always`, what the
        question offers to grant is granted to the session in the same transaction.
        """
        ...

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> Written[int | None]:
        """Put a message of a running turn into the outbox, once for each key; None when the key is known."""
        ...

    async def release(self, claim: Claim) -> None:
        """Release the lease and leave the turn open."""
        ...

    async def release_all(self, worker: str, owner: str | None = None) -> None:
        """Release all leases of a worker that stops, of one owner if given; its turns stay open."""
        ...

    async def answer(
        self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None = None
    ) -> list[int]:
        """Mark an urgent row (or a message that is not in the inbox yet) as done, with its answer."""
        ...

    # outbox
    async def take_outgoing(
        self,
        worker: str,
        limit: int = 100,
        chat: tuple[str, str] | None = None,
        channels: Sequence[str] | None = None,
    ) -> list[Outgoing]:
        """Take messages to send that no living worker is sending, oldest first: of one chat or of some channels, if
        given. A row that cannot be decoded is set aside, and the others are taken all the same."""
        ...

    async def keep_outgoing(self, row: Outgoing, worker: str) -> bool:
        """Keep a message that the worker has taken and is about to send; False when another worker has taken it over,
        because the lease had ended meanwhile. The database is asked only if that can have happened."""
        ...

    async def sent(self, ids: Sequence[int]) -> None: ...

    # channels
    async def hold(self, name: str, worker: str) -> bool:
        """Take a lease by its name, or keep it; False while another living worker has it."""
        ...

    async def unhold(self, name: str, worker: str) -> None:
        """Give the lease back, if the worker has it."""
        ...

    async def holders(self) -> dict[str, str]:
        """The living workers that hold leases, by the names of the leases."""
        ...

    async def deliveries(self, ids: Sequence[int]) -> dict[int, Delivery]: ...

    async def hold_back(self, ids: Sequence[int], worker: str) -> None:
        """Rows that the worker has taken and is not sending yet: if it dies, they do not count as possible repeats."""
        ...

    async def release_outgoing(self, worker: str, channel: str) -> None:
        """Leave the rows of a channel that the worker has taken to the next one."""
        ...

    async def mark_parts(self, id: int, worker: str, parts: Sequence[SentPart], sent: bool = False) -> bool:
        """Record the parts of a row that the network has taken. Unless the row is `sent`, the next part counts as
        begun. False when another worker has the row."""
        ...

    async def bury(self, id: int, worker: str, reason: str) -> bool:
        """Make a row a dead letter, which is not sent. False when another worker has the row."""
        ...

    async def dead_letters(self, channel: str | None = None, limit: int = 100) -> list[DeadLetter]: ...

    async def revive(self, ids: Sequence[int]) -> list[int]:
        """Let dead letters be sent, from their first part that was not. Return those that there were."""
        ...

    async def channel_state(self, channel: str) -> dict[str, str]:
        """What a channel keeps: its cursor, pairings and status, by key."""
        ...

    async def set_channel_state(self, channel: str, key: str, value: str | None) -> None:
        """Keep a value under its key; None removes it."""
        ...

    async def write_channel_state(self, rows: Sequence[ChannelRow], expected: ChannelRow) -> bool:
        """Write all of these values or none of them. False when the value of `expected` is another one now."""
        ...

    # reading
    async def read_log(self, session: int, after: int = 0, until: int | None = None) -> list[Logged]: ...

    async def read_turn(self, session: int, first_seq: int) -> list[Logged]:
        """The entries of the turn that begins there."""
        ...

    async def session(self, owner: str, key: str) -> SessionInfo | None: ...

    async def sessions(self, owner: str, limit: int = 100) -> list[SessionInfo]: ...

    async def turns(
        self, owner: str, *, session: int | None = None, prefix: str = "", limit: int = 100
    ) -> list[TurnInfo]:
        """The newest turns, newest first."""
        ...

    # requests
    async def keep_request_texts(self, owner: str, key: str, texts: Mapping[str, str]) -> None:
        """Keep texts of an owner's requests by their hashes, unless they are kept already. With the key of a session,
        they are deleted with it. Like a step of a turn, they are flushed with the next write that is."""
        ...

    async def request_texts(self, owner: str, hashes: Sequence[str]) -> dict[str, RequestText]:
        """Those of the owner's texts with these hashes that are kept."""
        ...

    async def note_flushes(self, seconds: Mapping[int, float]) -> None:
        """Add to how long turns waited for the disk when they were closed or parked, by the inbox rows that opened
        them. It is not flushed: a power loss may undo it."""
        ...

    async def search(self, owner: str, query: str, limit: int = 10) -> list[Found]:
        """Search the messages of all sessions of an owner, best first. A query is words without syntax."""
        ...

    # outside of turns
    async def note(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        """Append entries outside of a turn; `Busy` while a living worker runs one."""
        ...

    async def compact(self, owner: str, key: str, entry: Compacted) -> bool:
        """Append a compaction outside of a turn. False when the session is busy or has changed since it was made."""
        ...

    async def fork(self, owner: str, key: str, until: int | None, new_key: str) -> SessionInfo:
        """A new session whose log is the first `until` entries of another."""
        ...

    async def set_title(self, owner: str, key: str, title: str, naming: Naming | None = None) -> bool:
        """Give a session a title; "" takes it away. With `naming` a model made it: its usage is kept in any case, and
        its title only if no person or model gave one to this conversation. Return whether the title was set."""
        ...

    async def set_archived(self, owner: str, key: str, archived: bool) -> bool:
        """Archive a session, until something happens in it, or bring it back. Return whether it is there."""
        ...

    async def delete_session(self, owner: str, key: str) -> Removed | None:
        """Delete a session and its sub-agents' sessions, with all that is kept of them: logs, messages, search index,
        grants, titles. None if there is no such session; `Busy` while a living worker runs a turn of one of them, or
        sends a message."""
        ...

    async def prune_requests(self, before: float, position: int = 0) -> Pruned:
        """Look at some of the sessions from a position on, and delete those of API requests without a session, and of
        their sub-agents, in which nothing has happened since this time and nothing is left to do."""
        ...

    # budgets
    async def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        """Add to the owner's usage."""
        ...

    async def spent(self, owner: str, scopes: Sequence[str]) -> dict[str, tuple[int, float]]:
        """(tokens, cost) that the owner has used, by scope."""
        ...

    # rates
    async def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        """Count one event and return 0.0, unless `most` were counted in the current window by all processes together;
        then return the seconds until it ends. A window of `seconds` begins with the first event counted in it."""
        ...

    # timers
    async def set_timer(self, timer: Timer) -> None: ...

    async def cancel_timer(self, owner: str, id: str) -> bool: ...

    async def timers(self, owner: str | None = None, limit: int | None = None) -> list[Timer]:
        """All timers, of one owner if given, or the first so many: the next one due first."""
        ...

    async def fire_timer(self, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
        """Put the timer's message into the inbox and move the timer on; False when another worker has done so."""
        ...

    # tokens
    async def add_token(
        self, name: str, owner: str, hash: str, rights: Iterable[str] = ("use",), agent: str = ""
    ) -> Token:
        """Keep a token by its hash; an `EverloopError` when a valid one has the name."""
        ...

    async def tokens_exist(self) -> bool:
        """Whether there is a token, or was one: revoked tokens count."""
        ...

    async def token(self, hash: str) -> Token | None:
        """The token with this hash; None once it is revoked."""
        ...

    async def tokens(self, owner: str | None = None) -> list[Token]:
        """All tokens, revoked ones too, the oldest first; of one owner, if given."""
        ...

    async def token_used(self, id: str, at: float) -> None:
        """Record the use of a token, at most once an hour."""
        ...

    async def revoke_token(self, id: str) -> bool:
        """Revoke a token; False when there is no valid one with this id."""
        ...

    # trust
    async def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        """Record file contents that the agent writes. A content once written in a clean session stays clean."""
        ...

    async def file_marks(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        """Whether each of these contents is tainted; contents that the agent never wrote are left out."""
        ...

    async def tainted_paths(self, owner: str, limit: int = 1000) -> list[str]:
        """Where tainted contents were written, the latest first."""
        ...

    async def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        """Record what a person allowed for the rest of a session."""
        ...

    async def grants(self, owner: str, key: str) -> frozenset[str]: ...

    async def revoke_grants(self, owner: str, key: str) -> None: ...

    # workers
    async def join(self, worker: str, address: str) -> None:
        """Register a worker and the address to wake it at."""
        ...

    async def workers(self) -> list[tuple[str, str]]:
        """(worker, address) of all living ones that have joined."""
        ...

    async def session_holders(self) -> list[str]:
        """All living workers that may hold sessions, whether they have joined or not."""
        ...

    async def leave(self, worker: str) -> None: ...

    async def is_alive(self, worker: str) -> bool:
        """Whether a worker still holds its leases."""
        ...

    def peer(self, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False) -> Peer:
        """A worker's membership among the others. With `takes_work`, it gets notices of any session's work, but need
        not get those of messages to send."""
        ...

    async def wake(self, what: str = ANY, ids: Iterable[int] = ()) -> None:
        """Notify the workers of a change: those that it concerns, or all."""
        ...

    @property
    def relay(self) -> EventRelay: ...

    @property
    def standby_wait(self) -> float:
        """Seconds that a write has been waiting for a synchronous standby of the database; 0 when none does."""
        ...

    async def standbys(self) -> Replication | None:
        """What the database's server says of its standbys; None for a store without a server."""
        ...

    async def overview(self) -> Overview:
        """The work of all owners: what is done by which worker, what waits, and what no worker does. Its cost depends
        on the amount of open work."""
        ...

    def aside(self, work: Callable[[], T]) -> Written[T]:
        """Run short file work off the event loop, in the same wake-up as the writes around it."""
        ...

    async def check_writable(self) -> None:
        """Commit a small write without effect; a `StoreError` when writing does not work."""
        ...

    def files(self) -> Sequence[Path]:
        """The files of the store on this machine, which no tool may touch."""
        ...

    def hurry(self) -> None:
        """Stop waiting for a server that is away: the process is ending."""
        ...

    async def close(self) -> None: ...

    # for callers without an event loop
    def note_now(self, owner: str, key: str, entries: Sequence[Entry]) -> int: ...

    def read_now(self, owner: str, key: str) -> list[Logged]:
        """The current conversation of a session."""
        ...


def new_turn_id() -> str:
    """A unique id that sorts by time: microseconds, increasing within a process, and random bits."""
    global _last_turn
    _last_turn = max(time.time_ns() // 1000, _last_turn + 1)
    return f"{_last_turn:013x}{os.urandom(3).hex()}"


_last_turn = 0
