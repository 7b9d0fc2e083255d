"""The store port: log, inbox, outbox, leases and timers, independent of the database.

The conformance suite in `tests/store` defines the contract of each method; it runs against every store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from ..bus import InboundMessage, Kind, OutboundMessage
from ..log import CallsAsked, Compacted, Entry, Logged, Written, in_words
from .peers import ANY, EventRelay, Notice, Peer

if TYPE_CHECKING:
    from .overview import Overview, Replication

T = TypeVar("T")
SILENCE_SECONDS = 1800.0  # after a silence this long, the model is told the time again


class Incoming(msgspec.Struct, frozen=True):
    """A row of the inbox."""

    id: int
    session: int
    message: InboundMessage
    kind: Kind = "message"
    done: bool = False
    turn: str | None = None  # the turn that took it
    first_seq: int | None = None  # position of that turn's first entry


class Outgoing(msgspec.Struct, frozen=True):
    """A row of the outbox; `message.repeat` is set if it may have been sent before."""

    id: int
    message: OutboundMessage
    turn: str | None
    term: int | None = None  # the term of the worker's lease when it took the row, for stores whose leases expire


class SentPart(msgspec.Struct, frozen=True):
    """A part of a message that its network has accepted."""

    id: str  # assigned by the network
    end: int  # offset of the part's end in the message's text


class Delivery(msgspec.Struct, frozen=True):
    """The delivery progress of an outbox row."""

    at: float  # when the message was written
    session: str  # the key of the session that it was said in
    parts: tuple[SentPart, ...]


ChannelRow = tuple[str, str, str | None]  # channel, key and value; None for no value


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that its channel could not deliver."""

    id: int
    at: float
    channel: str
    chat_id: str
    reason: str
    content: str


class Spent(msgspec.Struct, frozen=True):
    """Tokens and money used in one scope: a turn, a day."""

    scope: str
    tokens: int
    cost: float


@dataclass(slots=True)
class Claim:
    """A session held under a lease, with the turn to run in it.

    Every write carries the fencing token; the database refuses it once another worker has a higher one.
    """

    owner: str
    session: int
    key: str
    fence: int
    turn: str
    history_from: int  # the conversation starts after this position
    next_seq: int  # position of the next entry
    first_seq: int  # position of the turn's first entry
    inbox: list[int] = field(default_factory=list)  # rows that this turn answers
    message: InboundMessage = field(init=False)  # the message that opened the turn
    command: bool = False  # the message is a command for the session, not a turn
    entries: list[Entry] = field(default_factory=list)  # the turn's existing log entries
    resumed: bool = False
    accepted: int | None = None  # the inbox row of the message passed to `begin`
    compacted: int = 0  # position of the latest compaction
    began: float = 0.0  # start of the conversation
    idle_since: float = 0.0  # the session's last activity
    spent: list[Spent] = field(default_factory=list)  # written with the next entries
    unflushed: list[Any] = field(default_factory=list)  # steps that a store may have to rewrite, in its own format

    def time_to_tell(self, now: float) -> str:
        """Return the time in words if the conversation has been silent for a while; "" otherwise.

        A new conversation also gets "", because its prompt includes the time at which it began.
        """
        fresh = self.first_seq == self.history_from + 1
        return "" if fresh or now - self.idle_since < SILENCE_SECONDS else in_words(now)


class SessionInfo(msgspec.Struct, frozen=True):
    id: int
    owner: str
    key: str
    entries: int
    history_from: int
    created_at: float
    updated_at: float
    open_turn: str | None
    worker: str | None
    compacted: int = 0  # position of the latest compaction
    parked: bool = False  # the open turn waits for a person's answer
    title: str = ""  # set by a person or a model; "" if the session is shown by its first words
    named_by: str = ""  # the model that was asked for the title
    naming_usage: dict[str, int] = {}  # tokens of all model calls for titles
    archived_at: int = 0  # number of entries when a person archived it; 0 if it was not

    @property
    def archived(self) -> bool:
        """Return whether a person archived it, and nothing has happened in it since."""
        return 0 < self.archived_at == self.entries


class Naming(msgspec.Struct, frozen=True):
    """A model call that named a session."""

    model: str
    usage: dict[str, int]


class Removed(msgspec.Struct, frozen=True):
    """What was deleted with a session."""

    keys: tuple[str, ...]  # of the session and its sub-agents
    entries: int = 0  # in their logs
    turns: int = 0
    messages: int = 0  # in their inboxes and outboxes


class Pruned(msgspec.Struct, frozen=True):
    """The result of one pruning step: the removed sessions, and the position of the next step."""

    removed: tuple[tuple[str, str], ...]  # (owner, key)
    position: int | None  # None at the end


class TurnInfo(msgspec.Struct, frozen=True):
    id: str
    session: int
    key: str
    owner: str
    first_seq: int
    started_at: float
    ended_at: float | None
    reason: str | None
    flushed: float = 0.0  # seconds spent on flushes in the writes that closed or parked it


class RequestText(msgspec.Struct, frozen=True):
    """A text from requests to a model, as JSON. With a key, it belongs to that session only."""

    data: str
    key: str = ""


class Found(msgspec.Struct, frozen=True):
    """A past message found by a search."""

    session: str  # its key
    turn: str | None
    at: float
    role: Literal["user", "assistant"]
    text: str
    untrusted: bool  # the model had read untrusted text before it said this
    seq: int


class FileMark(msgspec.Struct, frozen=True):
    """A file content that the agent wrote, and whether its session was tainted at the time."""

    digest: str  # SHA-256, in hexadecimal
    tainted: bool
    path: str  # where it was last written


class Timer(msgspec.Struct, frozen=True):
    owner: str
    id: str
    due_at: float
    data: dict[str, Any]


class Token(msgspec.Struct, frozen=True):
    """The stored record of a bearer token, which does not include the token itself."""

    id: str
    name: str
    owner: str
    created_at: float
    last_used_at: float | None = None  # to the hour
    revoked_at: float | None = None
    rights: frozenset[str] = frozenset({"use"})  # "use", "admin" or both
    agent: str = ""  # "client": never the agent's own tools; "own": they are the default; "": the server decides


class Finished(msgspec.Struct, frozen=True):
    """The result of ending a turn: its outbox rows, and whether the session has more to do."""

    outbox: list[int]
    more: bool
    announced: bool = False  # the sending processes were notified of the rows


class Busy(Exception):
    """The session is held by another live worker, or locked by a write (`worker` is "" then).

    The message is in the inbox.
    """

    def __init__(self, worker: str, accepted: int | None) -> None:
        super().__init__(f"the session is held by {worker or 'another write'}")
        self.worker = worker
        self.accepted = accepted


class Waiting(Exception):
    """The session's turn waits for a person's answer. The message is in the inbox, behind that turn."""

    def __init__(self, accepted: int | None) -> None:
        super().__init__("the session waits for a person's answer")
        self.accepted = accepted


class Store(Protocol):
    """The database. A write returns once it is on disk."""

    # inbox
    async def accept(self, message: InboundMessage, kind: Kind = "message") -> Incoming:
        """Put a message into the inbox of its session. A message with a known id is not accepted again.

        A message of kind "reply" is stored as "urgent" if the session has an open question, and as "message" otherwise.
        """
        ...

    async def ready(self, worker: str, owner: str | None = None) -> list[tuple[str, str]]:
        """Return (owner, session key) of all sessions with work that no other live worker holds.

        Work is a pending message or an interrupted turn. With `owner`, only that owner's sessions are returned.
        """
        ...

    async def waiting(self, owner: str, key: str) -> list[Incoming]:
        """Return the session's rows that no turn has taken yet, oldest first, without urgent ones."""
        ...

    async def urgent(self, worker: str, owner: str | None = None) -> list[Incoming]:
        """Return urgent rows of sessions, of one owner if given, that this worker or no other worker holds."""
        ...

    async def look(
        self, worker: str, sessions: Sequence[int] | None = None
    ) -> tuple[list[tuple[str, str]], list[Incoming]]:
        """Return `ready` and `urgent` together, for these sessions or for all."""
        ...

    async def unfinished(self, owner: str, channel: str) -> list[Incoming]:
        """Return the owner's messages from this channel that are pending or whose turn has not ended, oldest first."""
        ...

    async def incoming(self, id: int) -> Incoming: ...

    async def over(self, ids: Sequence[int]) -> list[int]:
        """Return those of these rows that are done, or that a parked turn has taken."""
        ...

    async def find(self, owner: str, message_id: str) -> Incoming | None:
        """Return the owner's message with this id, unless it is hidden."""
        ...

    async def turn_of(self, owner: str, message_id: str) -> tuple[int, int] | None:
        """Return the session of the message with this id, and the first entry of the turn that it opened.

        The message itself, which may be very long, is not read.
        """
        ...

    async def hide(self, owner: str, message_id: str) -> bool:
        """Hide the owner's message from `find`; its log is kept. Return whether it existed."""
        ...

    # turns
    async def begin(
        self, owner: str, key: str, worker: str, message: InboundMessage | None = None, kind: Kind = "message"
    ) -> Claim | None:
        """Take the session's lease and its next work: an interrupted turn first, then the oldest pending message.

        `message` is put into the inbox in the same transaction. Return None if there is nothing to do; raise `Busy` if
        another live worker holds the session, and `Waiting` if its turn is parked.
        """
        ...

    def append(
        self, claim: Claim, entries: Sequence[Entry], took: Sequence[int] = (), flush: bool = True
    ) -> Written[None]:
        """Append to the turn's log under the claim's fencing token; `took` are the inbox rows that the entries contain.

        Without `flush`, the entries survive the death of the process, but a power loss only after the next flush.
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
        """End the turn and release the lease, in one transaction.

        It writes the log's tail, marks the inbox rows as done and adds the outbox rows. `sender` is the worker that
        will send the outgoing messages right away; `incoming` are messages that the turn's end puts into the inboxes of
        other sessions.
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
        """In one transaction, write the log's tail and the question, park the turn and release the lease."""
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

        Return the inbox row that opened the turn, and the question; None if no turn is parked. `allowed=None` answers
        nothing and only wakes the turn so that it can be stopped. A message (`word`) answers one question, however
        often it is delivered, and none that was asked after it; unless it answers one, it is not put into the inbox.
        With `always`, the grants that the question offers are given to the session in the same transaction.
        """
        ...

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> Written[int | None]:
        """Put a message of a running turn into the outbox, once per idempotency key; None if the key is known."""
        ...

    async def release(self, claim: Claim) -> None:
        """Release the lease and leave the turn open."""
        ...

    async def release_all(self, worker: str, owner: str | None = None) -> None:
        """Release all leases of a worker that is stopping, of one owner if given; its turns stay open."""
        ...

    async def answer(
        self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None = None
    ) -> list[int]:
        """Mark an urgent row (or a message that is not in the inbox yet) as done, together with its answer."""
        ...

    # outbox
    async def take_outgoing(
        self,
        worker: str,
        limit: int = 100,
        chat: tuple[str, str] | None = None,
        channels: Sequence[str] | None = None,
    ) -> list[Outgoing]:
        """Take messages that no live worker is sending, oldest first: of one chat or of some channels, if given.

        A row that cannot be decoded is set aside and does not block the others.
        """
        ...

    async def keep_outgoing(self, row: Outgoing, worker: str) -> bool:
        """Renew the claim on a message that the worker has taken and is about to send.

        Return False if another worker has taken it over because the lease expired. The database is only queried if that
        may have happened.
        """
        ...

    async def sent(self, ids: Sequence[int]) -> None: ...

    # channels
    async def hold(self, name: str, worker: str) -> bool:
        """Take or renew a named lease; False while another live worker holds it."""
        ...

    async def unhold(self, name: str, worker: str) -> None:
        """Release a named lease, if the worker holds it."""
        ...

    async def holders(self) -> dict[str, str]:
        """Return the live workers that hold named leases, by lease name."""
        ...

    async def deliveries(self, ids: Sequence[int]) -> dict[int, Delivery]: ...

    async def hold_back(self, ids: Sequence[int], worker: str) -> None:
        """Mark rows that the worker has taken but not started to send.

        If the worker dies, they do not count as possible repeats.
        """
        ...

    async def release_outgoing(self, worker: str, channel: str) -> None:
        """Release the rows of a channel that the worker has taken."""
        ...

    async def mark_parts(self, id: int, worker: str, parts: Sequence[SentPart], sent: bool = False) -> bool:
        """Record the parts of a row that the network has accepted.

        Unless the row is `sent`, the next part counts as started. Return False if another worker has the row.
        """
        ...

    async def bury(self, id: int, worker: str, reason: str) -> bool:
        """Make a row a dead letter, which is not sent. Return False if another worker has the row."""
        ...

    async def dead_letters(self, channel: str | None = None, limit: int = 100) -> list[DeadLetter]: ...

    async def revive(self, ids: Sequence[int]) -> list[int]:
        """Resend dead letters, from their first unsent part. Return the ids that existed."""
        ...

    async def channel_state(self, channel: str) -> dict[str, str]:
        """Return a channel's stored state (cursor, pairings and status) by key."""
        ...

    async def set_channel_state(self, channel: str, key: str, value: str | None) -> None:
        """Store a value under its key; None removes it."""
        ...

    async def write_channel_state(self, rows: Sequence[ChannelRow], expected: ChannelRow) -> bool:
        """Write all of these values, or none if the value of `expected` has changed.

        Return whether they were written.
        """
        ...

    # reading
    async def read_log(self, session: int, after: int = 0, until: int | None = None) -> list[Logged]: ...

    async def read_turn(self, session: int, first_seq: int) -> list[Logged]:
        """Return the entries of the turn that starts at this position."""
        ...

    async def session(self, owner: str, key: str) -> SessionInfo | None: ...

    async def sessions(self, owner: str, limit: int = 100) -> list[SessionInfo]: ...

    async def turns(
        self, owner: str, *, session: int | None = None, prefix: str = "", limit: int = 100
    ) -> list[TurnInfo]:
        """Return the latest turns, newest first."""
        ...

    # requests
    async def keep_request_texts(self, owner: str, key: str, texts: Mapping[str, str]) -> None:
        """Store texts of an owner's requests by hash, unless they are already stored.

        With a session's key, they are deleted with the session. Like a step of a turn, they are flushed with the next
        flushed write.
        """
        ...

    async def request_texts(self, owner: str, hashes: Sequence[str]) -> dict[str, RequestText]:
        """Return those of the owner's texts with these hashes that are stored."""
        ...

    async def note_flushes(self, seconds: Mapping[int, float]) -> None:
        """Add to the time that turns, given by the inbox rows that opened them, spent on their last flush.

        That is the flush when they were closed or parked. The addition itself is not flushed: a power loss may undo it.
        """
        ...

    async def search(self, owner: str, query: str, limit: int = 10) -> list[Found]:
        """Search the messages of all sessions of an owner, best match first. A query is plain words, without syntax."""
        ...

    # outside of turns
    async def note(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        """Append entries outside of a turn; raise `Busy` while a live worker runs one."""
        ...

    async def compact(self, owner: str, key: str, entry: Compacted) -> bool:
        """Append a compaction outside of a turn.

        Return False if the session is busy or has changed since it was made.
        """
        ...

    async def fork(self, owner: str, key: str, until: int | None, new_key: str) -> SessionInfo:
        """Create a session whose log is the first `until` entries of another one."""
        ...

    async def set_title(self, owner: str, key: str, title: str, naming: Naming | None = None) -> bool:
        """Set a session's title; "" removes it. Return whether it was set.

        With `naming`, a model wrote it: its usage is recorded in any case, but the title is only set if neither a
        person nor a model has titled this conversation.
        """
        ...

    async def set_archived(self, owner: str, key: str, archived: bool) -> bool:
        """Archive a session until something happens in it, or unarchive it. Return whether it exists."""
        ...

    async def delete_session(self, owner: str, key: str) -> Removed | None:
        """Delete a session and its sub-agents' sessions with everything stored for them.

        That is logs, messages, search index, grants and titles. Return None if there is no such session; raise `Busy`
        while a live worker runs a turn of one of them, or sends a message.
        """
        ...

    async def prune_requests(self, before: float, position: int = 0) -> Pruned:
        """Examine some sessions from a position on, and delete old ones of sessionless API requests.

        Those of their sub-agents are deleted as well. A session is old if nothing has happened in it since `before` and
        nothing is left to do.
        """
        ...

    # budgets
    async def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        """Add to the owner's usage."""
        ...

    async def spent(self, owner: str, scopes: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Return (tokens, cost) that the owner has used, by scope."""
        ...

    # rates
    async def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        """Count one event of a fixed-window rate limit, shared by all processes.

        Return 0.0 if it was counted; if `most` events were already counted in the current window, return the seconds
        until the window ends. A window of `seconds` starts with the first event counted in it.
        """
        ...

    # timers
    async def set_timer(self, timer: Timer) -> None: ...

    async def cancel_timer(self, owner: str, id: str) -> bool: ...

    async def timers(self, owner: str | None = None, limit: int | None = None) -> list[Timer]:
        """Return all timers, of one owner if given, or the first `limit`, in the order in which they are due."""
        ...

    async def fire_timer(self, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
        """Put the timer's message into the inbox and advance the timer; False if another worker has done so."""
        ...

    # tokens
    async def add_token(
        self, name: str, owner: str, hash: str, rights: Iterable[str] = ("use",), agent: str = ""
    ) -> Token:
        """Store a token by its hash; raise an `EverloopError` if a valid token has the name."""
        ...

    async def tokens_exist(self) -> bool:
        """Return whether any token exists or existed: revoked tokens count."""
        ...

    async def token(self, hash: str) -> Token | None:
        """Return the token with this hash; None if it is unknown or revoked."""
        ...

    async def tokens(self, owner: str | None = None) -> list[Token]:
        """Return all tokens, including revoked ones, oldest first; of one owner, if given."""
        ...

    async def token_used(self, id: str, at: float) -> None:
        """Record the use of a token, at most once an hour."""
        ...

    async def revoke_token(self, id: str) -> bool:
        """Revoke a token; False if there is no valid one with this id."""
        ...

    # trust
    async def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        """Record file contents that the agent writes. Content once written in a clean session stays clean."""
        ...

    async def file_marks(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        """Return whether each of these contents is tainted; contents that the agent never wrote are omitted."""
        ...

    async def tainted_paths(self, owner: str, limit: int = 1000) -> list[str]:
        """Return the paths where tainted contents were written, latest first."""
        ...

    async def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        """Record a person's grants for the rest of a session."""
        ...

    async def grants(self, owner: str, key: str) -> frozenset[str]: ...

    async def revoke_grants(self, owner: str, key: str) -> None: ...

    # workers
    async def join(self, worker: str, address: str) -> None:
        """Register a worker and the address to wake it at."""
        ...

    async def workers(self) -> list[tuple[str, str]]:
        """Return (worker, address) of all live workers that have joined."""
        ...

    async def session_holders(self) -> list[str]:
        """Return all live workers that may hold sessions, whether they have joined or not."""
        ...

    async def leave(self, worker: str) -> None: ...

    async def is_alive(self, worker: str) -> bool:
        """Return whether a worker still holds its leases."""
        ...

    def peer(self, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False) -> Peer:
        """Return a worker's membership among the others.

        With `takes_work`, it gets notices of work in any session, but may miss those of messages to send.
        """
        ...

    async def wake(self, what: str = ANY, ids: Iterable[int] = ()) -> None:
        """Notify the workers of a change: those that it concerns, or all."""
        ...

    @property
    def relay(self) -> EventRelay: ...

    @property
    def standby_wait(self) -> float:
        """Seconds without a synchronous standby of the database, or of a write that waits for one; 0 if all is well."""
        ...

    async def standbys(self) -> Replication | None:
        """Return the replication state reported by the database server; None for a store without a server."""
        ...

    async def overview(self) -> Overview:
        """Return an overview of all owners' work: what each worker does, what is pending, and what no worker does.

        Its cost depends on the amount of open work.
        """
        ...

    def aside(self, work: Callable[[], T]) -> Written[T]:
        """Run short file I/O off the event loop, sharing one wake-up with the writes around it."""
        ...

    async def check_writable(self) -> None:
        """Commit a small write without effect; raise a `StoreError` if writing does not work."""
        ...

    def files(self) -> Sequence[Path]:
        """Return the store's files on this machine, which no tool may touch."""
        ...

    def hurry(self) -> None:
        """Stop waiting for an unreachable server, because the process is shutting down."""
        ...

    async def close(self) -> None: ...

    # for callers without an event loop
    def note_now(self, owner: str, key: str, entries: Sequence[Entry]) -> int: ...

    def read_now(self, owner: str, key: str) -> list[Logged]:
        """Return the current conversation of a session."""
        ...


def new_turn_id() -> str:
    """Return a unique id that sorts by time: microseconds, increasing within a process, and random bits."""
    global _last_turn
    _last_turn = max(time.time_ns() // 1000, _last_turn + 1)
    return f"{_last_turn:013x}{os.urandom(3).hex()}"


_last_turn = 0
