"""Decisions about sessions, log, inbox and outbox: pure functions that both stores call in their transactions.

A transaction reads rows, asks these functions what follows from them, and writes the result. So SQLite and PostgreSQL
differ in their SQL and in nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..bus import InboundMessage, Kind, OutboundMessage
from ..errors import StaleLease, StoreError
from ..log import (
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Compacted,
    Entry,
    Logged,
    ModelAnswered,
    TurnEnded,
    decode_entry,
    encode_entry,
    entry_bytes,
    kind_of,
    open_turn,
)
from .base import Busy, Claim, DeadLetter, Delivery, Incoming, Outgoing, SentPart, Spent, Waiting, new_turn_id

T = TypeVar("T")
log = logging.getLogger(__name__)
INBOX_COLUMNS = "id, session, data, kind, state, turn, first_seq"
encode = msgspec.json.Encoder().encode
_ALWAYS = ("channel", "sender_id", "chat_id", "content")
_USUAL = tuple(
    (field.name, field.default if field.default_factory is MISSING else field.default_factory())
    for field in fields(InboundMessage)
    if field.name not in _ALWAYS
)
_decode_inbound = msgspec.json.Decoder(InboundMessage).decode
_decode_outbound = msgspec.json.Decoder(OutboundMessage).decode
_decode_parts = msgspec.json.Decoder(list[tuple[str, int]]).decode


# ---------------------------------------------------------------------------------------------- beginning


class SessionState(msgspec.Struct, frozen=True):
    """Everything that determines what a session does next."""

    is_held: bool  # by another live worker
    now: float
    id: int
    holder: str | None  # the worker that holds the lease
    fence: int
    history_from: int
    compacted: int
    idle_since: float
    began: float | None  # start of the conversation
    next_seq: int
    open_turn: str | None  # an interrupted turn
    waiting: int | None  # the oldest message that no turn has taken
    is_parked: bool

    def claim(self, owner: str, key: str, accepted: int | None = None) -> Claim:
        """Return the claim on the session's next work; `accepted` is the inbox row of the message that came with it."""
        made = Claim(owner, self.id, key, self.fence + 1, "", self.history_from, self.next_seq, self.next_seq)
        made.compacted, made.idle_since, made.began = self.compacted, self.idle_since, self.began or self.now
        made.accepted = accepted
        return made

    def new_turn(self, kind: Kind) -> str | None:
        """Return the id of the turn that a message opens on arrival, if nothing precedes it."""
        is_busy = self.is_held or self.is_parked or self.open_turn is not None or self.waiting is not None
        return None if is_busy or kind != "message" else new_turn_id()


class Held(msgspec.Struct):
    """Another live worker holds the session; the message is in the inbox."""

    worker: str
    accepted: int | None


class Parked(msgspec.Struct):
    """The session's turn waits for a person; the message is in the inbox behind it."""

    accepted: int | None


class Resume(NamedTuple):
    turn: str


class Open(NamedTuple):
    """Start the turn of the claim's message."""


class Take(NamedTuple):
    """Take a message from the inbox."""

    row: int


Work = Held | Parked | Resume | Open | Take | None


def note_accepted(claim: Claim, message: InboundMessage, row: Incoming, new_turn: str | None) -> None:
    """Note that the claim's message is in the inbox; it was there before if its id is known."""
    claim.accepted = row.id
    if new_turn is not None and row.turn == new_turn:
        claim.turn, claim.inbox, claim.message = new_turn, [row.id], message


def next_work(state: SessionState, claim: Claim, row: Incoming | None = None) -> Work:
    """Return the next work of a claim: an interrupted turn before the oldest message; None if there is none."""
    if state.is_held:
        return Held(state.holder or "", claim.accepted)
    if state.is_parked:
        return Parked(claim.accepted)
    if state.open_turn is not None:
        return Resume(state.open_turn)
    if claim.turn:
        return Open()
    waiting = state.waiting
    if waiting is None and row is not None and row.session == state.id and not row.done and row.kind != "urgent":
        waiting = row.id
    return None if waiting is None else Take(waiting)


def resumed(claim: Claim, turn: str, inbox: Sequence[Sequence[Any]]) -> Damaged | None:
    """Fill in an interrupted turn. `inbox` has (id, data, first_seq) of its messages, the one that opened it first."""
    id, data, first_seq = inbox[0]
    message = _message(id, data)
    if isinstance(message, Damaged):
        return message
    claim.turn, claim.resumed = turn, True
    claim.inbox = [row[0] for row in inbox]
    claim.message, claim.first_seq = message, first_seq
    return None


def took(claim: Claim, row: int, data: str | bytes, kind: str) -> Damaged | None:
    """Fill in a pending message.

    It opens a turn unless it is a command, which is answered by the write that marks it done.
    """
    message = _message(row, data)
    if isinstance(message, Damaged):
        return message
    claim.inbox, claim.message, claim.command = [row], message, kind == "command"
    if not claim.command:
        claim.turn = new_turn_id()
    return None


def abandoned(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that end an interrupted turn whose message is damaged.

    Without the message, its sender and limits are unknown, so the turn must not continue. Every call has a result
    afterwards.
    """
    calls = {call.id: call.name for entry in entries if isinstance(entry, ModelAnswered) for call in entry.calls}
    for entry in entries:
        if isinstance(entry, CallEnded):
            calls.pop(entry.id, None)
    why = "the message that opened this turn is damaged in the store"
    cut = [CallEnded(id, name, f"interrupted, outcome unknown: {why}", "interrupted") for id, name in calls.items()]
    return [*cut, TurnEnded.failed(why)]


def first_entry(claim: Claim, now: float) -> LogRows | None:
    """Return the entry that opens the claim's turn.

    None if the loop must read attachments first, and writes the entry itself.
    """
    if not claim.message.plain:
        return None
    at = claim.began if claim.next_seq == claim.history_from + 1 else now
    said = claim.message.said(now=claim.time_to_tell(at))
    rows = rows_from(claim.next_seq, [said], at)
    claim.next_seq += 1
    claim.entries = [said]
    return rows


class Begun(NamedTuple):
    """The result of `begin`: the work to do, and the rows that were set aside on the way."""

    work: Claim | Held | Parked | None
    damaged: Sequence[Damaged] = ()


def begun(result: Claim | Held | Parked | None) -> Claim | None:
    """Return the claim, or raise for the caller of `begin` why there is none."""
    if isinstance(result, Held):
        raise Busy(result.worker, result.accepted)
    if isinstance(result, Parked):
        raise Waiting(result.accepted)
    return result


def or_busy(result: T | Held) -> T:
    if isinstance(result, Held):
        raise Busy(result.worker, result.accepted)
    return result


def stale(claim: Claim) -> StaleLease:
    return StaleLease(f"session {claim.key} was taken over by another worker; this one has stopped writing to it")


def incomplete(claim: Claim, last: int) -> StoreError:
    return StoreError(f"the log of session {claim.key} ends at {last}: the end of its turn is missing")


# ---------------------------------------------------------------------------------------------- the log


class LogRows(NamedTuple):
    """Entries to be written to a log."""

    seqs: list[int]
    kinds: list[str]
    data: list[bytes]
    at: float | None  # None for the current time

    @property
    def texts(self) -> list[str]:
        return [data.decode() for data in self.data]

    def each(self) -> Iterator[tuple[int, str, bytes]]:
        return zip(self.seqs, self.kinds, self.data, strict=True)


def rows_of(claim: Claim, entries: Sequence[Entry]) -> LogRows:
    """Return the rows of these entries, at the claim's next positions."""
    # Every prompt includes the start of the conversation, so that time must not change after the first entry.
    began = claim.began if claim.next_seq == claim.history_from + 1 else None
    first, claim.next_seq = claim.next_seq, claim.next_seq + len(entries)
    return rows_from(first, entries, began)


def rows_from(first: int, entries: Sequence[Entry], at: float | None = None) -> LogRows:
    seqs = list(range(first, first + len(entries)))
    return LogRows(seqs, list(map(kind_of, entries)), list(map(entry_bytes, entries)), at)


def boundaries(rows: LogRows) -> Iterator[tuple[str, int]]:
    """Return (kind, position) of the entries that change which part of the log is shown: "new" and "compacted"."""
    return ((kind, seq) for seq, kind, _ in rows.each() if kind in ("new", "compacted"))


class TurnStep(NamedTuple):
    """The writes of one step of a turn: entries, the pending messages that they contain, and usage."""

    rows: LogRows
    took: Sequence[int]
    spent: Sequence[Spent]

    @classmethod
    def of(cls, claim: Claim, entries: Sequence[Entry], took: Sequence[int]) -> TurnStep:
        """Assign the claim's next positions to these entries, and take over its usage."""
        claim.inbox += took
        spent, claim.spent = claim.spent, []
        return cls(rows_of(claim, entries), took, spent)

    @property
    def is_plain(self) -> bool:
        """Return whether it changes nothing about the session itself."""
        return not any(True for _ in boundaries(self.rows))


def logged(session: int, rows: Iterable[Sequence[Any]]) -> Iterator[Logged]:
    """Decode entries from rows (seq, turn, at, data)."""
    for seq, turn, at, data in rows:
        try:
            entry = decode_entry(data)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"entry {seq} of session {session} is damaged ({error}): restore a copy of the store"
            ) from error
        yield Logged(seq, turn, at, entry)


def end_reason(entries: Sequence[Entry]) -> str | None:
    return next((entry.reason for entry in entries if isinstance(entry, TurnEnded)), None)


def builds_on(entry: Compacted, history_from: int, compacted: int) -> bool:
    """Return whether a compaction still applies to what is shown of the session."""
    return entry.until >= history_from and entry.follows == compacted


INTERRUPTED = "an interrupted turn that resumes at the next start"  # "holds" a session that no worker holds


# ---------------------------------------------------------------------------------------------- messages


class Damaged(NamedTuple):
    """An inbox row that cannot be decoded. It is set aside, so that it does not block other messages."""

    id: int
    why: str


def _message(id: int, data: str | bytes) -> InboundMessage | Damaged:
    try:
        return _decode_inbound(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        return Damaged(id, str(error))


def incoming(row: Sequence[Any], instead: InboundMessage | None = None) -> Incoming:
    """Decode a message from a row of INBOX_COLUMNS; `instead` replaces one that cannot be decoded."""
    message = _message(row[0], row[2])
    if isinstance(message, Damaged):
        if instead is None:
            raise StoreError(f"row {row[0]} of the inbox is damaged ({message.why}): repair it or restore a copy")
        message = instead
    return _incoming(row, message)


def _incoming(row: Sequence[Any], message: InboundMessage) -> Incoming:
    id, session, _, kind, state, turn, first_seq = row
    return Incoming(id, session, message, kind, state == "done", turn, first_seq)


def readable(rows: Iterable[Sequence[Any]]) -> tuple[list[Incoming], list[Damaged]]:
    """Return the messages of rows of INBOX_COLUMNS, and the rows that cannot be decoded."""
    found: list[Incoming] = []
    damaged: list[Damaged] = []
    for row in rows:
        message = _message(row[0], row[2])
        if isinstance(message, Damaged):
            damaged.append(message)
        else:
            found.append(_incoming(row, message))
    return found, damaged


def log_damaged(rows: Iterable[Damaged]) -> None:
    """Warn of each damaged row, once: it is not read again."""
    for id, why in rows:
        log.warning(
            "inbox row %d cannot be decoded (%s) and was set aside; the other messages are answered. Once repaired, it "
            "is answered after UPDATE inbox SET damaged = NULL, state = 'new' WHERE id = %d",
            id,
            why,
            id,
        )


def inbox_kind(kind: Kind, has_question: bool) -> Kind:
    """Return the stored kind: a reply answers the session's question if there is one; otherwise it is a message."""
    return kind if kind != "reply" else "urgent" if has_question else "message"


def inbox_data(message: InboundMessage, opens: object) -> str:
    """Encode a message for the inbox, without default values.

    If the message has opened a turn, the API client's request is omitted as well, because it is in the log.
    """
    kept = message if opens is None else message.opened()
    data = {name: getattr(kept, name) for name in _ALWAYS}
    for name, usual in _USUAL:
        if (value := getattr(kept, name)) != usual:
            data[name] = value
    return encode(data).decode()


def timer_data(data: str) -> dict[str, Any]:
    """Decode a timer's data; empty if it is damaged, because a damaged timer must not keep the others from firing."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def usage_of(data: str) -> dict[str, int]:
    """Decode a session's stored token counts; empty if they are damaged."""
    try:
        return msgspec.json.decode(data, type=dict[str, int]) if data else {}
    except msgspec.MsgspecError:
        return {}


def added_usage(data: str, more: dict[str, int]) -> str:
    """Add the tokens of another call to a session's stored token counts."""
    total = usage_of(data)
    return encode({name: total.get(name, 0) + more.get(name, 0) for name in total | more}).decode()


# ---------------------------------------------------------------------------------------------- the outbox


class Outbound(NamedTuple):
    """An encoded outgoing message with its columns."""

    data: str
    channel: str
    chat_id: str


class Address(NamedTuple):
    """The channel and chat of a row that an older version wrote without them."""

    id: int
    channel: str
    chat_id: str


class Taken(msgspec.Struct):
    """The rows that a worker took from the outbox."""

    rows: list[Outgoing] = []
    damaged: list[tuple[int, str]] = []  # row and reason, to be set aside

    def log_damaged(self) -> None:
        """Warn of each damaged row, once: it is not read again."""
        for id, why in self.damaged:
            log.warning(
                "outbox row %d cannot be decoded (%s) and was set aside; the other messages are sent. Once repaired, "
                "it is sent after UPDATE outbox SET damaged = NULL WHERE id = %d",
                id,
                why,
                id,
            )


def encoded_outgoing(messages: Iterable[OutboundMessage]) -> list[Outbound]:
    return [
        Outbound(encode(message).decode(), outbox_column(message.channel), outbox_column(message.chat_id))
        for message in messages
    ]


def outbox_column(text: str) -> str:
    """Return a channel or chat id as stored in its column: PostgreSQL cannot store NUL."""
    return text.replace("\0", "\ufffd")


def outbox_filter(chat: tuple[str, str] | None, channels: Sequence[str] | None) -> tuple[list[str] | None, str | None]:
    """Return the columns of the outbox rows to take: those of one chat or of some channels, or all (None)."""
    names = channels if chat is None else chat[:1]
    of = None if names is None else [outbox_column(name) for name in names]
    return of, None if chat is None else outbox_column(chat[1])


def missing_addresses(rows: Iterable[Sequence[Any]], taken: Taken) -> list[Address]:
    """Return the addresses of rows (id, data) that have none yet."""
    found = []
    for id, data in rows:
        if (message := _outbound(id, data, taken)) is not None:
            found.append(Address(id, outbox_column(message.channel), outbox_column(message.chat_id)))
    return found


def take_outgoing(rows: Iterable[Sequence[Any]], limit: int, taken: Taken) -> None:
    """Decode rows (id, data, turn, tries) up to a limit."""
    for id, data, turn, tries in rows:
        if len(taken.rows) >= limit:
            return
        if (message := _outbound(id, data, taken)) is not None:
            message.repeat = message.repeat or tries > 0
            taken.rows.append(Outgoing(id, message, turn))


def _outbound(id: int, data: str, taken: Taken) -> OutboundMessage | None:
    try:
        return _decode_outbound(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        taken.damaged.append((id, str(error)))
        return None


def encoded_parts(parts: Iterable[SentPart]) -> str:
    return encode([(outbox_column(part.id), part.end) for part in parts]).decode()


def delivery(at: float, session: str, parts: str | None) -> Delivery:
    return Delivery(at, session, tuple(SentPart(*part) for part in _decode_parts(parts)) if parts else ())


def dead_letter(row: Sequence[Any]) -> DeadLetter:
    """Decode a dead letter from a row (id, at, channel, chat, reason, data)."""
    id, at, channel, chat_id, reason, data = row
    return DeadLetter(id, at, channel, chat_id, reason, _decode_outbound(data).content)


# ---------------------------------------------------------------------------------------------- questions


class Decision(NamedTuple):
    """A person's answer to the question of a parked turn."""

    asked: CallsAsked | None
    rows: LogRows | None = None  # the answer, unless the turn is only woken to be stopped
    granted: Sequence[str] = ()  # grants for the rest of the session


def decision(
    log: Iterable[Sequence[Any]], answer: Sequence[Any] | None, allowed: bool | None, by: str, note: str, always: bool
) -> Decision | None:
    """Return the effect of an answer on a parked turn with these entries (seq, data, at); None if it answers nothing.

    `answer` has (state, first_seq, at) of the answering message. It must have arrived after the question, and must not
    have answered another one: delivered twice, it must not answer a question that the person has not seen.
    """
    entries = [(seq, decode_entry(data), at) for seq, data, at in log]
    asked, since = next(((entry, at) for _, entry, at in reversed(entries) if isinstance(entry, CallsAsked)), (None, 0))
    if answer is not None:
        state, first_seq, at = answer
        if state != "new" or first_seq is not None or at < since:
            return None
    if allowed is None or asked is None:
        return Decision(asked)
    decided, granted = asked.decided(allowed, by, note, always)
    return Decision(asked, rows_from(entries[-1][0] + 1, [decided]), granted)


# ---------------------------------------------------------------------------------------------- forks


class Fork(msgspec.Struct):
    """A copy of the first entries of a session's log."""

    rows: list[tuple[int, str | None, str, str, float]] = []  # (seq, turn, kind, data, at)
    history_from: int = 0
    compacted: int = 0
    message: InboundMessage | None = None  # opens the copy's turn, if one was in progress
    opens: tuple[str, int] | None = None  # that turn and its first entry


def check_fork(rows: Sequence[Sequence[Any]], key: str, until: int | None) -> None:
    if not rows or (until is not None and rows[-1][0] != until):
        last = rows[-1][0] if rows else 0
        raise StoreError(f'the session "{key}" has no entry {until}: its log ends at {last}')


def no_session(key: str) -> StoreError:
    return StoreError(f'there is no session "{key}": `everloop sessions` lists them')


def session_exists(key: str) -> StoreError:
    return StoreError(f'the session "{key}" exists already: choose another name')


def fork_of(rows: Sequence[Sequence[Any]], owner: str, new_key: str) -> Fork:
    """Copy rows (seq, turn, kind, data, at). A turn that was in progress is open in the copy.

    Calls that a person has approved but that have not started need approval again: the answer was for one run.
    """
    entries = [decode_entry(row[3]) for row in rows]
    under_way = len(open_turn(entries))
    turn = new_turn_id() if under_way else None
    left_out = _unused_answers(entries, under_way)
    fork = Fork()
    for n, (seq, old_turn, kind, data, at) in enumerate(rows):
        entry = entries[n]
        if isinstance(entry, Cleared):
            fork.history_from, fork.compacted = seq, 0
        elif isinstance(entry, Compacted):
            fork.compacted = seq
            if entry.aside:  # the files belong to the other session: the copy shows the full results
                data = encode_entry(msgspec.structs.replace(entry, aside={}))
        if n not in left_out:
            fork.rows.append((seq, turn if n >= len(rows) - under_way else old_turn, kind, data, at))
    if turn is not None:
        channel, _, chat_id = new_key.partition(":")
        # Its answer belongs to its session and to no chat.
        fork.message = InboundMessage(channel, "user", chat_id, "", owner=owner, session=new_key, reply=False)
        fork.opens = (turn, rows[-under_way][0])
    return fork


def _unused_answers(entries: Sequence[Entry], under_way: int) -> set[int]:
    """Return the positions of approvals for calls that had not started."""
    current = entries[len(entries) - under_way :]  # an earlier conversation may have had calls with the same ids
    started = {id for entry in current if isinstance(entry, CallsBegun) for id in entry.ids}
    started |= {entry.id for entry in current if isinstance(entry, CallEnded)}
    return {
        n
        for n, entry in enumerate(entries)
        if isinstance(entry, CallsDecided) and entry.allowed and not started.issuperset(entry.ids)
    }


# ---------------------------------------------------------------------------------------------- restored stores


class Restored(msgspec.Struct, frozen=True):
    """What a store resumes from that was restored from a backup."""

    sessions: int
    entries: int
    open_turns: int
    unsent: int  # answers that may have been sent since
    cut_off: int = 0  # calls that may have run since
    moved: tuple[str, ...] = ()  # owners who have moved to another database since, and are deleted here


def may_have_run(log: Sequence[Entry]) -> tuple[str, ...]:
    """The calls of a restored turn that were about to run, without those for which a person is asked first."""
    calls = [call.id for entry in log if isinstance(entry, ModelAnswered) for call in entry.calls]
    known: set[str] = set()
    for entry in log:
        match entry:
            case CallEnded(id=id):
                known.add(id)
            case CallsBegun(ids=ids) | CallsAsked(ids=ids):
                known.update(ids)
    return tuple(id for id in calls if id not in known)
