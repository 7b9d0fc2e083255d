"""What each write of the SQLite store does, as functions on a connection inside the writer's transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from ..bus import InboundMessage, Kind, OutboundMessage
from ..errors import StaleLease
from ..log import (
    Compacted,
    Entry,
    TurnEnded,
    decode_entry,
    encode_entry,
    kind_of,
)
from . import outbox
from .base import Claim, Finished, Incoming, Spent, Timer, new_turn_id
from .trust import REVOKE_GRANTS_OF
from .workers import alive

_encode = msgspec.json.Encoder().encode
decode_inbound = msgspec.json.Decoder(InboundMessage).decode

INSERT_WAITING = "INSERT INTO inbox (owner, session, message_id, kind, data, at) VALUES (?, ?, ?, ?, ?, ?)"
INSERT_OPENING = """INSERT INTO inbox (owner, session, message_id, kind, data, at, turn, first_seq, state, opened)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'taken', 1)"""
INSERT_ENTRY = "INSERT INTO entry (session, seq, turn, kind, data, at) VALUES (?, ?, ?, ?, ?, ?)"

SEND = """INSERT INTO outbox (owner, session, turn, data, channel, chat_id, worker, tries, at, key)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
UNADDRESSED = "SELECT id, data FROM outbox WHERE sent_at IS NULL AND channel IS NULL AND damaged IS NULL"
UNSENT = """SELECT id, data, turn, tries, worker FROM outbox WHERE sent_at IS NULL AND damaged IS NULL
    AND (?1 IS NULL OR channel IN (SELECT value FROM json_each(?1))) AND (?2 IS NULL OR chat_id = ?2) ORDER BY id"""

SPEND = """INSERT INTO spent (owner, scope, tokens, cost) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, cost = cost + excluded.cost"""

# All that decides what a session does next, in one look.
BEGIN = """SELECT id, worker, fence, history_from, compacted, updated_at,
        (SELECT at FROM entry WHERE session = s.id AND seq = s.history_from + 1),
        (SELECT coalesce(max(seq), 0) + 1 FROM entry WHERE session = s.id),
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'taken' LIMIT 1),
        (SELECT id FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'new' AND kind <> 'urgent'
            ORDER BY id LIMIT 1),
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked')
    FROM session s WHERE owner = ? AND key = ?"""
MORE = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND kind <> 'urgent' LIMIT 1"
PARKED = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND state = 'parked' LIMIT 1"
OPEN_TURN = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1"


@dataclass(slots=True)
class Behind:
    """The session's turn is parked; what was handed in waits behind it."""

    accepted: int | None


@dataclass(slots=True)
class Held:
    """The session is another living worker's; what was handed in waits in the inbox."""

    worker: str
    accepted: int | None


def session_row(db: sqlite3.Connection, owner: str, key: str, create: bool) -> tuple[int, str | None, int, int] | None:
    """(id, worker, fence, history_from) of a session."""
    row = db.execute("SELECT id, worker, fence, history_from FROM session WHERE owner = ? AND key = ?", (owner, key))
    found: tuple[int, str | None, int, int] | None = row.fetchone()
    return (_new_session(db, owner, key), None, 0, 0) if found is None and create else found


def _new_session(db: sqlite3.Connection, owner: str, key: str) -> int:
    now = time.time()
    new = db.execute(
        "INSERT INTO session (owner, key, created_at, updated_at) VALUES (?, ?, ?, ?)", (owner, key, now, now)
    )
    return int(new.lastrowid or 0)


def accept(
    db: sqlite3.Connection,
    message: InboundMessage,
    kind: Kind,
    session: int | None = None,
    opens: tuple[str, int] | None = None,
) -> Incoming:
    """Put a message into the inbox, unless one with its id is there.

    With `opens`, a turn and the place of its first entry, it is taken at once and opens that turn. A reply becomes an
    urgent message if a question is open in its session now, and an ordinary one otherwise.
    """
    if message.id is not None:
        row = db.execute(
            "SELECT id, session, data, kind, state, turn, first_seq FROM inbox WHERE owner = ? AND message_id = ?",
            (message.owner, message.id),
        ).fetchone()
        if row is not None:
            return incoming(row)
    if session is None:
        found = session_row(db, message.owner, message.session_key, create=True)
        assert found is not None
        session = found[0]
    if kind == "reply":
        kind = "urgent" if db.execute(PARKED, (session,)).fetchone() else "message"
    now, data = time.time(), _encode(message if opens is None else message.opened()).decode()
    if opens is None:
        new = db.execute(INSERT_WAITING, (message.owner, session, message.id, kind, data, now))
        return Incoming(int(new.lastrowid or 0), session, message, kind)
    new = db.execute(INSERT_OPENING, (message.owner, session, message.id, kind, data, now, *opens))
    return Incoming(int(new.lastrowid or 0), session, message, kind, False, *opens)


def incoming(row: tuple[int, int, str, Kind, str, str | None, int | None]) -> Incoming:
    id, session, data, kind, state, turn, first_seq = row
    return Incoming(id, session, decode_inbound(data), kind, state == "done", turn, first_seq)


def begin(
    db: sqlite3.Connection, owner: str, key: str, worker: str, message: InboundMessage | None, kind: Kind
) -> Claim | Held | Behind | None:
    """Take the lease and the next work of a session: a turn that was cut off, else the oldest waiting message."""
    row = db.execute(BEGIN, (owner, key)).fetchone()
    if row is None:
        if message is None:
            return None
        row = (_new_session(db, owner, key), None, 0, 0, 0, 0.0, None, 1, None, None, 0)
    id, holder, fence, history_from, compacted, idle_since, began, next_seq, turn, waiting, parked = row
    claim = Claim(owner, id, key, fence + 1, "", history_from, next_seq, next_seq)
    claim.compacted, claim.idle_since = compacted, idle_since
    claim.began = began or time.time()
    held = holder is not None and holder != worker and alive(holder)
    if message is not None:
        first = not held and not parked and turn is None and waiting is None and kind == "message"
        new_turn = new_turn_id() if first else None  # with nothing before it, it becomes a turn as it comes in
        accepted = accept(db, message, kind, id, (new_turn, next_seq) if new_turn else None)
        claim.accepted = accepted.id
        if new_turn is not None and accepted.turn == new_turn:
            claim.turn, claim.inbox, claim.message = new_turn, [accepted.id], message
        elif waiting is None and accepted.session == id and not accepted.done and accepted.kind != "urgent":
            waiting = accepted.id
    if held:
        return Held(holder, claim.accepted)
    if parked:
        return Behind(claim.accepted)
    if turn is not None:
        _resume(db, claim, turn)
    elif claim.turn:
        _open(db, claim)
    elif waiting is None:
        return None
    else:
        _take(db, claim, waiting)
    db.execute(
        "UPDATE session SET worker = ?, fence = ?, updated_at = ? WHERE id = ?", (worker, claim.fence, time.time(), id)
    )
    return claim


def _resume(db: sqlite3.Connection, claim: Claim, turn: str) -> None:
    """Take up a turn that was cut off."""
    claim.turn, claim.resumed = turn, True
    rows = db.execute(
        """SELECT id, data, first_seq FROM inbox WHERE session = ? AND state <> 'done' AND turn = ?
            ORDER BY opened DESC, id""",
        (claim.session, turn),
    ).fetchall()
    claim.inbox = [row[0] for row in rows]
    claim.message, claim.first_seq = decode_inbound(rows[0][1]), rows[0][2]
    log = db.execute(
        "SELECT data FROM entry WHERE session = ? AND seq >= ? ORDER BY seq", (claim.session, claim.first_seq)
    )
    claim.entries = [decode_entry(data) for (data,) in log]


def _take(db: sqlite3.Connection, claim: Claim, waiting: int) -> None:
    """Take the oldest waiting message: a command as it is, any other as a new turn."""
    data, kind = db.execute("SELECT data, kind FROM inbox WHERE id = ?", (waiting,)).fetchone()
    claim.inbox, claim.message, claim.command = [waiting], decode_inbound(data), kind == "command"
    if not claim.command:  # a command is answered in the transaction that marks it done, so it needs no turn
        claim.turn = new_turn_id()
        db.execute(
            "UPDATE inbox SET state = 'taken', turn = ?, first_seq = ?, opened = 1 WHERE id = ?",
            (claim.turn, claim.first_seq, waiting),
        )
        _open(db, claim)


def _open(db: sqlite3.Connection, claim: Claim) -> None:
    """Begin the turn of the claim's message."""
    if claim.message.plain:  # attachments and the like are read by the loop, which then writes the first entry
        now = claim.began if claim.next_seq == claim.history_from + 1 else time.time()
        said = claim.message.said(now=claim.time_to_tell(now))
        row = (claim.session, claim.next_seq, claim.turn, kind_of(said), encode_entry(said), now)
        db.execute(INSERT_ENTRY, row)
        claim.next_seq += 1
        claim.entries = [said]


Row = tuple[int, int, str | None, str, str, float]  # of the entry table


def append(db: sqlite3.Connection, claim: Claim, rows: Sequence[Row]) -> None:
    """Append to the log in one statement, refused unless the claim's fence is the session's."""
    values = [value for row in rows for value in row]
    if db.execute(_append_entries(len(rows)), (*values, claim.session, claim.fence)).rowcount != len(rows):
        raise StaleLease(f"session {claim.key} was taken over by another worker; this one has stopped writing to it")


@cache
def _append_entries(n: int) -> str:
    # With a stale fence this selects nothing, so nothing is written.
    return (
        "INSERT INTO entry (session, seq, turn, kind, data, at) "
        f"SELECT * FROM (VALUES {', '.join(['(?, ?, ?, ?, ?, ?)'] * n)}) "
        "WHERE EXISTS (SELECT 1 FROM session WHERE id = ? AND fence = ?)"
    )


def append_taking(
    db: sqlite3.Connection, claim: Claim, rows: Sequence[Row], took: Sequence[int], spent: Sequence[Spent] = ()
) -> None:
    """Append entries that hold waiting messages, which are taken with them, or that change what is shown."""
    if rows:  # a command may leave nothing in the log
        append(db, claim, rows)
    spend(db, claim.owner, spent)
    _turn_page(db, claim.session, rows)
    for id in took:
        db.execute(
            "UPDATE inbox SET state = 'taken', turn = ?, first_seq = ? WHERE id = ?", (claim.turn, claim.first_seq, id)
        )


def spend(db: sqlite3.Connection, owner: str, spent: Sequence[Spent]) -> None:
    db.executemany(SPEND, [(owner, one.scope, one.tokens, one.cost) for one in spent])


PAGES = {"new": "UPDATE session SET history_from = ?, compacted = 0 WHERE id = ?"}
PAGES["compacted"] = "UPDATE session SET compacted = ? WHERE id = ?"


def _turn_page(db: sqlite3.Connection, session: int, rows: Sequence[Row]) -> None:
    """Keep in the session where its conversation begins and what of it is left out, as the entries say."""
    for row in rows:
        if (sql := PAGES.get(row[3])) is not None:
            db.execute(sql, (row[1], session))
        if row[3] == "new":  # what was granted was granted for the conversation that ends here
            db.execute(REVOKE_GRANTS_OF, (session,))


def finish(
    db: sqlite3.Connection,
    claim: Claim,
    rows: Sequence[Row],
    entries: Sequence[Entry],
    took: Sequence[int],
    outgoing: Sequence[OutboundMessage],
    sender: str | None,
    incoming: Sequence[InboundMessage] = (),
    spent: Sequence[Spent] = (),
) -> Finished:
    """The end of a turn or of a command: everything it leaves behind, or nothing."""
    now = time.time()
    let_go(db, claim, now)
    append_taking(db, claim, rows, took, spent)
    reason = next((entry.reason for entry in entries if isinstance(entry, TurnEnded)), None)
    done = "UPDATE inbox SET state = 'done', ended_at = ?, reason = ? WHERE id = ? AND coalesce(turn, '') = ?"
    for id in claim.inbox:  # but for one that was to be taken by a write that failed: it is not in the log
        db.execute(done, (now, reason, id, claim.turn))
    sent = [send(db, claim.owner, claim.session, claim.turn or None, message, sender) for message in outgoing]
    for message in incoming:
        accept(db, message, "message")
    return Finished(sent, db.execute(MORE, (claim.session,)).fetchone() is not None)


def let_go(db: sqlite3.Connection, claim: Claim, now: float) -> None:
    """Give the lease back, refused unless the claim's fence is the session's."""
    released = db.execute(
        "UPDATE session SET worker = NULL, updated_at = ? WHERE id = ? AND fence = ?", (now, claim.session, claim.fence)
    )
    if released.rowcount != 1:
        raise StaleLease(f"session {claim.key} was taken over by another worker; this one has stopped writing to it")


def post(db: sqlite3.Connection, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> int | None:
    """Put a message of a running turn into the outbox, once for each key."""
    held = db.execute("SELECT 1 FROM session WHERE id = ? AND fence = ?", (claim.session, claim.fence)).fetchone()
    if held is None:
        raise StaleLease(f"session {claim.key} was taken over by another worker; this one has stopped writing to it")
    if db.execute("SELECT 1 FROM outbox WHERE owner = ? AND key = ?", (claim.owner, key)).fetchone():
        return None
    return send(db, claim.owner, claim.session, claim.turn, message, sender, key)


def send(
    db: sqlite3.Connection,
    owner: str,
    session: int,
    turn: str | None,
    message: OutboundMessage,
    sender: str | None,
    key: str | None = None,
) -> int:
    """Put a message into the outbox; with a sender it counts as tried once."""
    (row,) = outbox.encoded([message])
    new = db.execute(SEND, (owner, session, turn, *row, sender, 1 if sender else 0, time.time(), key))
    return int(new.lastrowid or 0)


def answer(
    db: sqlite3.Connection, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None
) -> list[int]:
    if isinstance(row, InboundMessage):
        row = accept(db, row, "urgent")
    if (
        row.done
        or db.execute("UPDATE inbox SET state = 'done' WHERE id = ? AND state = 'new'", (row.id,)).rowcount == 0
    ):
        return []
    return [send(db, row.message.owner, row.session, None, message, sender) for message in outgoing]


def take_outgoing(
    db: sqlite3.Connection,
    worker: str,
    limit: int,
    chat: tuple[str, str] | None = None,
    channels: Sequence[str] | None = None,
) -> outbox.Taken:
    taken = outbox.Taken()
    for id, channel, chat_id in outbox.addresses(db.execute(UNADDRESSED).fetchall(), taken):
        db.execute("UPDATE outbox SET channel = ?, chat_id = ? WHERE id = ?", (channel, chat_id, id))
    names = [chat[0]] if chat is not None else channels
    of = None if names is None else _encode([outbox.column(name) for name in names]).decode()
    rows = db.execute(UNSENT, (of, None if chat is None else outbox.column(chat[1]))).fetchall()
    free = (row[:4] for row in rows if row[4] is None or (row[4] != worker and not alive(row[4])))
    outbox.take(free, limit, taken)
    for id, why in taken.damaged:
        db.execute("UPDATE outbox SET damaged = ? WHERE id = ?", (why, id))
    for row in taken.rows:
        db.execute("UPDATE outbox SET worker = ?, tries = tries + 1 WHERE id = ?", (worker, row.id))
    return taken


def note(db: sqlite3.Connection, owner: str, key: str, entries: Sequence[Entry]) -> int | Held:
    session = session_row(db, owner, key, create=True)
    assert session is not None
    id, holder, _, _ = session
    if holder is not None and alive(holder):
        return Held(holder, None)
    if db.execute(OPEN_TURN, (id,)).fetchone():
        return Held("a turn that was cut off and goes on at the next start", None)
    seq = db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = ?", (id,)).fetchone()[0]
    now = time.time()
    rows: list[Row] = [
        (id, seq + n, None, kind_of(entry), encode_entry(entry), now) for n, entry in enumerate(entries, start=1)
    ]
    db.executemany(INSERT_ENTRY, rows)
    _turn_page(db, id, rows)
    db.execute("UPDATE session SET updated_at = ? WHERE id = ?", (now, id))
    return int(seq) + len(entries)


def compact(db: sqlite3.Connection, owner: str, key: str, entry: Compacted) -> bool:
    """Append it, if the session is idle and what it builds on is still what is shown."""
    row = db.execute("SELECT history_from, compacted FROM session WHERE owner = ? AND key = ?", (owner, key)).fetchone()
    if row is None or entry.until < row[0] or entry.follows != row[1]:
        return False
    return not isinstance(note(db, owner, key, [entry]), Held)


def fire_timer(db: sqlite3.Connection, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
    where = (timer.owner, timer.id, timer.due_at)
    if next_due is None:
        moved = db.execute("DELETE FROM timer WHERE owner = ? AND id = ? AND due_at = ?", where)
    else:
        moved = db.execute("UPDATE timer SET due_at = ? WHERE owner = ? AND id = ? AND due_at = ?", (next_due, *where))
    if moved.rowcount != 1:
        return False
    accept(db, message, "message")
    return True
