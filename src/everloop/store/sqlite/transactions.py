"""The writes of the SQLite store, as functions on a connection inside the writer's transaction."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from msgspec.structs import replace

from ...bus import InboundMessage, Kind, OutboundMessage
from ...log import CallsAsked, Compacted, Entry, decode_entry
from .. import claims
from ..base import ChannelRow, Claim, FileMark, Finished, Incoming, Spent, Timer, Token
from ..claims import INBOX_COLUMNS, Begun, Damaged, Held, LogRows, Parked, SessionState
from ..peers import alive
from ..tokens import checked_agent, checked_name, checked_owner, checked_rights, joined_rights, name_taken

# An entry's data is bound and read as bytes: Python would convert every character of a long text.
ENTRY = "(?, ?, ?, ?, CAST(? AS TEXT), ?)"
INSERT_ENTRY = f"INSERT INTO entry (session, seq, turn, kind, data, at) VALUES {ENTRY}"
INSERT_INBOX = """INSERT INTO inbox (owner, session, message_id, kind, data, at, turn, first_seq, state, opened)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
# Everything that determines what a session does next, in one statement.
BEGIN = """SELECT id, worker, fence, history_from, compacted, updated_at,
        (SELECT at FROM entry WHERE session = s.id AND seq = s.history_from + 1),
        (SELECT coalesce(max(seq), 0) + 1 FROM entry WHERE session = s.id),
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'taken' LIMIT 1),
        (SELECT id FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'new' AND kind <> 'urgent'
            ORDER BY id LIMIT 1),
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked')
    FROM session s WHERE owner = ? AND key = ?"""
# As bytes: SQLite refuses to return text that is not valid UTF-8, but a damaged row must be read to be set aside.
INBOX_ROW = INBOX_COLUMNS.replace("data", "CAST(data AS BLOB)")
OF_TURN = """SELECT id, CAST(data AS BLOB), first_seq FROM inbox WHERE session = ? AND state <> 'done' AND turn = ?
    ORDER BY opened DESC, id"""
MORE = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND kind <> 'urgent' LIMIT 1"
SET_ASIDE = "UPDATE inbox SET state = 'done', ended_at = ?, damaged = ? WHERE id = ? AND state = 'new'"
# The message was delivered again, with its id.
REPAIR = """UPDATE inbox SET data = ?, damaged = NULL, state = iif(damaged IS NULL, state, 'new') WHERE id = ?
    RETURNING state"""
HAS_PARKED = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND state = 'parked' LIMIT 1"
OPEN_TURN = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1"
PARKED = """SELECT i.id, i.session, i.turn, i.first_seq FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = ? AND s.key = ? AND i.state <> 'done' AND i.state = 'parked' ORDER BY i.opened DESC LIMIT 1"""
PAGE_MARKS = {
    # A title given by a model was for the conversation that ends here.
    "new": """UPDATE session SET history_from = ?, compacted = 0,
        title = CASE WHEN named_by = '' THEN title ELSE '' END, named_by = '' WHERE id = ?""",
    "compacted": "UPDATE session SET compacted = ? WHERE id = ?",
}
SEND = """INSERT INTO outbox (owner, session, turn, data, channel, chat_id, worker, tries, at, key)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
UNADDRESSED = "SELECT id, CAST(data AS BLOB) FROM outbox WHERE sent_at IS NULL AND channel IS NULL AND damaged IS NULL"
UNSENT = """SELECT id, CAST(data AS BLOB), turn, tries, worker FROM outbox WHERE sent_at IS NULL AND damaged IS NULL
    AND (?1 IS NULL OR channel IN (SELECT value FROM json_each(?1))) AND (?2 IS NULL OR chat_id = ?2) ORDER BY id"""
SPEND = """INSERT INTO spent (owner, scope, tokens, cost) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, cost = cost + excluded.cost"""
# A window that starts in the future comes from a clock that was wrong: it must not lock anyone out.
ADMIT = """INSERT INTO rate (owner, name, began, number) VALUES (?1, ?2, ?3, 1)
    ON CONFLICT DO UPDATE SET
        began = iif(abs(?3 - began) < ?4, began, ?3), number = iif(abs(?3 - began) < ?4, number + 1, 1)
    WHERE abs(?3 - began) >= ?4 OR number < ?5
    RETURNING number"""
WINDOW_LEFT = "SELECT began + ?3 - ?4 FROM rate WHERE owner = ?1 AND name = ?2"
MARK_FILE = """INSERT INTO file_mark (owner, digest, tainted, path, at) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET tainted = tainted AND excluded.tainted, path = excluded.path, at = excluded.at"""
GRANT = "INSERT INTO session_grant (owner, key, name, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
REVOKE_GRANTS = "DELETE FROM session_grant WHERE owner = ? AND key = ?"
REVOKE_GRANTS_OF = "DELETE FROM session_grant WHERE (owner, key) = (SELECT owner, key FROM session WHERE id = ?)"


# ---------------------------------------------------------------------------------------------- sessions and inbox


def session_id(db: sqlite3.Connection, owner: str, key: str) -> int | None:
    row = db.execute("SELECT id FROM session WHERE owner = ? AND key = ?", (owner, key)).fetchone()
    return None if row is None else int(row[0])


def new_session(db: sqlite3.Connection, owner: str, key: str) -> int:
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
    """Put a message into the inbox, unless its id is already there.

    With `opens`, a turn and the position of its first entry, it is taken at once and opens that turn.
    """
    if message.id is not None:
        known = f"SELECT {INBOX_ROW} FROM inbox WHERE owner = ? AND message_id = ?"
        row = db.execute(known, (message.owner, message.id)).fetchone()
        if row is not None:
            return _known(db, row, message)
    if session is None:
        session = session_id(db, message.owner, message.session_key)
    if session is None:
        session = new_session(db, message.owner, message.session_key)
    if kind == "reply":
        kind = claims.inbox_kind(kind, db.execute(HAS_PARKED, (session,)).fetchone() is not None)
    turn, first_seq = opens if opens is not None else (None, None)
    data, state = claims.inbox_data(message, opens), "new" if turn is None else "taken"
    values = (message.owner, session, message.id, kind, data, time.time(), turn, first_seq, state, turn is not None)
    new = db.execute(INSERT_INBOX, values)
    return Incoming(int(new.lastrowid or 0), session, message, kind, False, turn, first_seq)


def _known(db: sqlite3.Connection, row: Sequence[Any], message: InboundMessage) -> Incoming:
    """Return a message that was accepted before. If its row is damaged, it is repaired."""
    if not claims.readable([row])[1]:
        return claims.incoming(row)
    (state,) = db.execute(REPAIR, (claims.inbox_data(message, None), row[0])).fetchone()
    return replace(claims.incoming(row, message), done=state == "done")


def set_aside(db: sqlite3.Connection, damaged: Iterable[Damaged]) -> list[Damaged]:
    """Remove pending rows that cannot be decoded from the inbox; return those that were there."""
    now = time.time()
    return [row for row in damaged if db.execute(SET_ASIDE, (now, row.why, row.id)).rowcount]


# ---------------------------------------------------------------------------------------------- turns


def begin(
    db: sqlite3.Connection, owner: str, key: str, worker: str, message: InboundMessage | None, kind: Kind
) -> Begun:
    """Take the lease of a session and its next work: an interrupted turn, else the oldest pending message."""
    row = db.execute(BEGIN, (owner, key)).fetchone()
    if row is None:
        if message is None:
            return Begun(None)
        row = (new_session(db, owner, key), None, 0, 0, 0, 0.0, None, 1, None, None, 0)
    is_held = row[1] is not None and row[1] != worker and alive(row[1])
    state = SessionState(is_held, time.time(), *row)
    claim, accepted = state.claim(owner, key), None
    if message is not None:
        new_turn = state.new_turn(kind)
        accepted = accept(db, message, kind, state.id, (new_turn, state.next_seq) if new_turn else None)
        claims.note_accepted(claim, message, accepted, new_turn)
    damaged: list[Damaged] = []
    while isinstance(work := _take_up(db, state, claim, accepted), Damaged):
        damaged.append(work)
        if accepted is not None and work.id == accepted.id:
            accepted = None  # it is set aside, like any other
        state = SessionState(is_held, state.now, *db.execute(BEGIN, (owner, key)).fetchone())
        claim = state.claim(owner, key, claim.accepted)
    if isinstance(work, Claim):
        held = "UPDATE session SET worker = ?, fence = ?, updated_at = ? WHERE id = ?"
        db.execute(held, (worker, claim.fence, state.now, state.id))
    return Begun(work, damaged)


def _take_up(
    db: sqlite3.Connection, state: SessionState, claim: Claim, accepted: Incoming | None
) -> Claim | Held | Parked | Damaged | None:
    """Take up a session's next work, or set it aside if it is damaged."""
    match claims.next_work(state, claim, accepted):
        case Held() | Parked() | None as nothing:
            return nothing
        case claims.Resume(turn):
            rows = db.execute(OF_TURN, (state.id, turn)).fetchall()
            log = "SELECT CAST(data AS BLOB) FROM entry WHERE session = ? AND seq >= ? ORDER BY seq"
            claim.entries = [decode_entry(data) for (data,) in db.execute(log, (state.id, rows[0][2]))]
            if (damaged := claims.resumed(claim, turn, rows)) is not None:
                _abandon(db, claim, turn, damaged, state.now)
                return damaged
        case claims.Open():
            _open(db, claim, state.now)
        case claims.Take(waiting):
            row = "SELECT CAST(data AS BLOB), kind FROM inbox WHERE id = ?"
            if (damaged := claims.took(claim, waiting, *db.execute(row, (waiting,)).fetchone())) is not None:
                set_aside(db, [damaged])
                return damaged
            if not claim.command:
                taken = "UPDATE inbox SET state = 'taken', turn = ?, first_seq = ?, opened = 1 WHERE id = ?"
                db.execute(taken, (claim.turn, claim.first_seq, waiting))
                _open(db, claim, state.now)
    return claim


def _abandon(db: sqlite3.Connection, claim: Claim, turn: str, damaged: Damaged, now: float) -> None:
    """End an interrupted turn whose message is damaged. A turn without log entries leaves nothing in the log."""
    if claim.entries:
        _insert(db, claim.session, turn, claims.rows_from(claim.next_seq, claims.abandoned(claim.entries)))
    done = "UPDATE inbox SET state = 'done', ended_at = ?, reason = 'error' WHERE session = ? AND turn = ?"
    db.execute(done, (now, claim.session, turn))
    db.execute("UPDATE inbox SET damaged = ? WHERE id = ?", (damaged.why, damaged.id))


def _open(db: sqlite3.Connection, claim: Claim, now: float) -> None:
    if (rows := claims.first_entry(claim, now)) is not None:
        _insert(db, claim.session, claim.turn, rows)


def _insert(db: sqlite3.Connection, session: int, turn: str | None, rows: LogRows) -> None:
    """Append to the log of a session that no worker writes to."""
    at = time.time() if rows.at is None else rows.at
    db.executemany(
        INSERT_ENTRY,
        [
            (session, seq, turn, kind, data, at)
            for seq, kind, data in zip(rows.seqs, rows.kinds, rows.data, strict=True)
        ],
    )
    _turn_pages(db, session, rows)


def append(db: sqlite3.Connection, claim: Claim, rows: LogRows) -> None:
    """Append to the log in one statement, refused unless the claim's fencing token is current."""
    at, turn = time.time() if rows.at is None else rows.at, claim.turn or None
    values: list[Any] = []
    for seq, kind, data in rows.each():
        values += claim.session, seq, turn, kind, data, at
    values += claim.session, claim.fence
    if db.execute(_append(len(rows.seqs)), values).rowcount != len(rows.seqs):
        raise claims.stale(claim)


@cache
def _append(n: int) -> str:
    # With a stale fencing token this selects nothing, so nothing is written.
    return (
        "INSERT INTO entry (session, seq, turn, kind, data, at) "
        f"SELECT * FROM (VALUES {', '.join([ENTRY] * n)}) "
        "WHERE EXISTS (SELECT 1 FROM session WHERE id = ? AND fence = ?)"
    )


def append_taking(
    db: sqlite3.Connection, claim: Claim, rows: LogRows, took: Sequence[int], spent: Sequence[Spent] = ()
) -> None:
    """Append entries, and take the pending messages that they contain."""
    if rows.seqs:  # a command may leave nothing in the log
        append(db, claim, rows)
    spend(db, claim.owner, spent)
    _turn_pages(db, claim.session, rows)
    taken = "UPDATE inbox SET state = 'taken', turn = ?, first_seq = ? WHERE id = ?"
    db.executemany(taken, [(claim.turn, claim.first_seq, id) for id in took])


def _turn_pages(db: sqlite3.Connection, session: int, rows: LogRows) -> None:
    """Record in the session's row where its conversation starts and how it is compacted."""
    for kind, seq in claims.page_marks(rows):
        db.execute(PAGE_MARKS[kind], (seq, session))
        if kind == "new":  # grants were for the conversation that ends here
            db.execute(REVOKE_GRANTS_OF, (session,))


def finish(
    db: sqlite3.Connection,
    claim: Claim,
    rows: LogRows,
    entries: Sequence[Entry],
    took: Sequence[int],
    outgoing: Sequence[OutboundMessage],
    sender: str | None,
    incoming: Sequence[InboundMessage] = (),
    spent: Sequence[Spent] = (),
) -> Finished:
    """End a turn or a command: write everything that it leaves behind, or nothing."""
    now = time.time()
    _release(db, claim, now)
    append_taking(db, claim, rows, took, spent)
    done = "UPDATE inbox SET state = 'done', ended_at = ?, reason = ? WHERE id = ? AND coalesce(turn, '') = ?"
    reason = claims.end_reason(entries)
    for id in claim.inbox:  # a row whose taking failed has no turn, and stays: it is not in the log
        db.execute(done, (now, reason, id, claim.turn))
    sent = send(db, claim.owner, claim.session, claim.turn or None, outgoing, sender)
    for message in incoming:
        accept(db, message, "message")
    return Finished(sent, db.execute(MORE, (claim.session,)).fetchone() is not None)


def park(
    db: sqlite3.Connection,
    claim: Claim,
    rows: LogRows,
    took: Sequence[int],
    outgoing: Sequence[OutboundMessage],
    sender: str | None,
    spent: Sequence[Spent],
) -> Finished:
    """Park a turn on disk until a person has answered."""
    _release(db, claim, time.time())
    append_taking(db, claim, rows, took, spent)
    db.executemany("UPDATE inbox SET state = 'parked' WHERE id = ?", [(id,) for id in claim.inbox])
    return Finished(send(db, claim.owner, claim.session, claim.turn, outgoing, sender), more=False)


def decide(
    db: sqlite3.Connection,
    owner: str,
    key: str,
    allowed: bool | None,
    by: str,
    note: str,
    word: Incoming | InboundMessage | None = None,
    always: bool = False,
) -> tuple[int, CallsAsked | None] | None:
    """Write a person's answer to the log of the parked turn, with its grants, and reopen the turn."""
    row = db.execute(PARKED, (owner, key)).fetchone()
    if row is None:
        return None
    id, session, turn, first_seq = row
    if isinstance(word, InboundMessage):
        word = accept(db, word, "urgent", session) if word.id is not None else None
    answer = None
    if word is not None:
        answer = db.execute("SELECT state, first_seq, at FROM inbox WHERE id = ?", (word.id,)).fetchone()
    log = "SELECT seq, data, at FROM entry WHERE session = ? AND seq >= ? ORDER BY seq"
    decision = claims.decision(db.execute(log, (session, first_seq)), answer, allowed, by, note, always)
    if decision is None:
        return None
    if decision.rows is not None:
        _insert(db, session, turn, decision.rows)
        grant(db, owner, key, decision.granted)
        if word is not None:
            db.execute("UPDATE inbox SET first_seq = ? WHERE id = ?", (decision.rows.seqs[0], word.id))
    # Raise the fence: the worker that parked the turn can no longer write to it.
    db.execute("UPDATE session SET fence = fence + 1 WHERE id = ?", (session,))
    db.execute(
        "UPDATE inbox SET state = 'taken' WHERE session = ? AND state <> 'done' AND state = 'parked'", (session,)
    )
    return id, decision.asked


def _release(db: sqlite3.Connection, claim: Claim, now: float) -> None:
    """Release the lease, refused unless the claim's fencing token is current."""
    released = "UPDATE session SET worker = NULL, updated_at = ? WHERE id = ? AND fence = ?"
    if db.execute(released, (now, claim.session, claim.fence)).rowcount != 1:
        raise claims.stale(claim)


def note(db: sqlite3.Connection, owner: str, key: str, entries: Sequence[Entry]) -> int | Held:
    row = db.execute("SELECT id, worker FROM session WHERE owner = ? AND key = ?", (owner, key)).fetchone()
    id, holder = row if row is not None else (new_session(db, owner, key), None)
    if holder is not None and alive(holder):
        return Held(holder, None)
    if db.execute(OPEN_TURN, (id,)).fetchone():
        return Held(claims.INTERRUPTED, None)
    last: int = db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = ?", (id,)).fetchone()[0]
    _insert(db, id, None, claims.rows_from(last + 1, entries))
    db.execute("UPDATE session SET updated_at = ? WHERE id = ?", (time.time(), id))
    return last + len(entries)


def compact(db: sqlite3.Connection, owner: str, key: str, entry: Compacted) -> bool:
    """Append a compaction, if the session is idle and still shows what the compaction builds on."""
    row = db.execute("SELECT history_from, compacted FROM session WHERE owner = ? AND key = ?", (owner, key)).fetchone()
    return row is not None and claims.builds_on(entry, *row) and not isinstance(note(db, owner, key, [entry]), Held)


def fork(db: sqlite3.Connection, owner: str, key: str, until: int | None, new_key: str) -> None:
    """Copy the log up to a position to a new session."""
    if (source := session_id(db, owner, key)) is None:
        raise claims.no_session(key)
    if session_id(db, owner, new_key) is not None:
        raise claims.session_exists(new_key)
    log = "SELECT seq, turn, kind, data, at FROM entry WHERE session = ? AND seq <= ? ORDER BY seq"
    rows = db.execute(log, (source, until if until is not None else 2**62)).fetchall()
    claims.check_fork(rows, key, until)
    copy, new = claims.fork_of(rows, owner, new_key), new_session(db, owner, new_key)
    db.executemany(INSERT_ENTRY, [(new, *row) for row in copy.rows])
    if copy.message is not None:
        accept(db, copy.message, "message", new, copy.opens)
    shown = "UPDATE session SET history_from = ?, compacted = ? WHERE id = ?"
    db.execute(shown, (copy.history_from, copy.compacted, new))


# ---------------------------------------------------------------------------------------------- outbox


def send(
    db: sqlite3.Connection,
    owner: str,
    session: int,
    turn: str | None,
    messages: Sequence[OutboundMessage],
    sender: str | None,
    key: str | None = None,
) -> list[int]:
    """Put messages into the outbox; with a sender, they count as tried once."""
    now, tries = time.time(), 1 if sender else 0
    rows = claims.encoded_outgoing(messages)
    made = [db.execute(SEND, (owner, session, turn, *row, sender, tries, now, key)).lastrowid for row in rows]
    return [int(id or 0) for id in made]


def post(db: sqlite3.Connection, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> int | None:
    """Put a message of a running turn into the outbox, once per idempotency key."""
    if not db.execute("SELECT 1 FROM session WHERE id = ? AND fence = ?", (claim.session, claim.fence)).fetchone():
        raise claims.stale(claim)
    if db.execute("SELECT 1 FROM outbox WHERE owner = ? AND key = ?", (claim.owner, key)).fetchone():
        return None
    return send(db, claim.owner, claim.session, claim.turn, [message], sender, key)[0]


def answer(
    db: sqlite3.Connection, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None
) -> list[int]:
    if isinstance(row, InboundMessage):
        row = accept(db, row, "urgent")
    done = "UPDATE inbox SET state = 'done' WHERE id = ? AND state = 'new'"
    if row.done or db.execute(done, (row.id,)).rowcount == 0:
        return []
    return send(db, row.message.owner, row.session, None, outgoing, sender)


def take_outgoing(
    db: sqlite3.Connection,
    worker: str,
    limit: int,
    chat: tuple[str, str] | None = None,
    channels: Sequence[str] | None = None,
) -> claims.Taken:
    taken = claims.Taken()
    for id, channel, chat_id in claims.missing_addresses(db.execute(UNADDRESSED).fetchall(), taken):
        db.execute("UPDATE outbox SET channel = ?, chat_id = ? WHERE id = ?", (channel, chat_id, id))
    names = [chat[0]] if chat is not None else channels
    of = None if names is None else claims.encode([claims.outbox_column(name) for name in names]).decode()
    rows = db.execute(UNSENT, (of, None if chat is None else claims.outbox_column(chat[1]))).fetchall()
    free = (row[:4] for row in rows if row[4] is None or (row[4] != worker and not alive(row[4])))
    claims.take_outgoing(free, limit, taken)
    db.executemany("UPDATE outbox SET damaged = ? WHERE id = ?", [(why, id) for id, why in taken.damaged])
    sending = "UPDATE outbox SET worker = ?, tries = tries + 1 WHERE id = ?"
    db.executemany(sending, [(worker, row.id) for row in taken.rows])
    return taken


# ---------------------------------------------------------------------------------------------- channels


def hold(db: sqlite3.Connection, name: str, worker: str) -> bool:
    row = db.execute("SELECT worker FROM channel_lease WHERE name = ?", (name,)).fetchone()
    if row is not None and row[0] != worker and alive(row[0]):
        return False
    if row is None or row[0] != worker:
        db.execute("INSERT OR REPLACE INTO channel_lease (name, worker) VALUES (?, ?)", (name, worker))
    return True


def revive(db: sqlite3.Connection, ids: Sequence[int]) -> list[int]:
    revived = (
        "UPDATE outbox SET failed = NULL, sent_at = NULL, worker = NULL, tries = 0 WHERE id = ? AND failed IS NOT NULL"
    )
    return [id for id in ids if db.execute(revived, (id,)).rowcount]


# ---------------------------------------------------------------------------------------------- everything else


def write_channel_state(db: sqlite3.Connection, rows: Sequence[ChannelRow], expected: ChannelRow) -> bool:
    *where, value = expected
    found = db.execute("SELECT value FROM channel_state WHERE channel = ? AND key = ?", where).fetchone()
    if (found and found[0]) != value:
        return False
    db.executemany("DELETE FROM channel_state WHERE channel = ? AND key = ?", [row[:2] for row in rows])
    kept = [row for row in rows if row[2] is not None]
    db.executemany("INSERT INTO channel_state (channel, key, value) VALUES (?, ?, ?)", kept)
    return True


def spend(db: sqlite3.Connection, owner: str, spent: Sequence[Spent]) -> None:
    db.executemany(SPEND, [(owner, one.scope, one.tokens, one.cost) for one in spent])


def admit(db: sqlite3.Connection, owner: str, name: str, most: int, seconds: float) -> float:
    """Count one event if the limit allows it; otherwise return the seconds until it does.

    A window starts with the first event counted in it. One row per owner and name is reused for every window.
    """
    now = time.time()
    if db.execute(ADMIT, (owner, name, now, seconds, most)).fetchall():
        return 0.0
    (left,) = db.execute(WINDOW_LEFT, (owner, name, seconds, now)).fetchone()
    return max(float(left), 0.001)


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


def add_token(db: sqlite3.Connection, name: str, owner: str, hash: str, rights: Iterable[str], agent: str) -> Token:
    """Store a new token by its hash."""
    checked_name(name)
    checked_owner(owner)
    rights = checked_rights(rights)
    checked_agent(agent)
    if db.execute("SELECT 1 FROM token WHERE name = ? AND revoked_at IS NULL", (name,)).fetchone():
        raise name_taken(name)
    made = Token(secrets.token_hex(6), name, owner, time.time(), rights=rights, agent=agent)
    db.execute(
        "INSERT INTO token (id, hash, name, owner, created_at, rights, agent) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (made.id, hash, name, owner, made.created_at, joined_rights(rights), agent),
    )
    return made


def mark_files(db: sqlite3.Connection, owner: str, marks: Sequence[FileMark]) -> None:
    now = time.time()
    db.executemany(MARK_FILE, [(owner, mark.digest, mark.tainted, mark.path, now) for mark in marks])


def grant(db: sqlite3.Connection, owner: str, key: str, names: Sequence[str]) -> None:
    now = time.time()
    db.executemany(GRANT, [(owner, key, name, now) for name in names])


def join(db: sqlite3.Connection, worker: str, address: str) -> None:
    """Register a worker, and remove dead ones."""
    for (id,) in db.execute("SELECT id FROM worker").fetchall():
        if not alive(id):
            db.execute("DELETE FROM worker WHERE id = ?", (id,))
    db.execute("INSERT OR REPLACE INTO worker (id, address, at) VALUES (?, ?, ?)", (worker, address, time.time()))
