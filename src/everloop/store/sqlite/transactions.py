"""The writes of the SQLite store."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from ...bus import InboundMessage, Kind, OutboundMessage
from ...log import Entry
from .. import claims
from ..base import ChannelRow, Claim, FileMark, Finished, Incoming, Naming, Spent, Timer, Token
from ..claims import INBOX_COLUMNS, Damaged, LogRows, SessionState, TurnStep
from ..peers import HOLDS, alive
from ..tokens import checked_fields, joined_rights, name_taken
from ..transaction import ParkedTurn, SessionRow, Transaction
from .peers import send_datagram

# An entry's data is bound and read as bytes: Python would convert every character of a long text.
ENTRY = "(?, ?, ?, ?, CAST(? AS TEXT), ?)"
INSERT_ENTRY = f"INSERT INTO entry (session, seq, turn, kind, data, at) VALUES {ENTRY}"
INSERT_INBOX = """INSERT INTO inbox (owner, session, message_id, kind, data, at, turn, first_seq, state, opened)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
NEW_SESSION = "INSERT INTO session (owner, key, created_at, updated_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
SESSION = "SELECT id, worker, fence, history_from, compacted, updated_at FROM session WHERE owner = ? AND key = ?"
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
ENTRIES = "SELECT seq, CAST(data AS BLOB), at FROM entry WHERE session = ? AND seq >= ? ORDER BY seq"
MORE = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND kind <> 'urgent' LIMIT 1"
SET_ASIDE = "UPDATE inbox SET state = 'done', ended_at = ?, damaged = ? WHERE id = ? AND state = 'new'"
# The message was delivered again, with its id.
REPAIR = """UPDATE inbox SET data = ?, damaged = NULL, state = iif(damaged IS NULL, state, 'new') WHERE id = ?
    RETURNING state"""
HAS_PARKED = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND state = 'parked' LIMIT 1"
OPEN_TURN = "SELECT 1 FROM inbox WHERE session = ? AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1"
PARKED = """SELECT i.id, i.session, i.turn, i.first_seq FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = ? AND s.key = ? AND i.state <> 'done' AND i.state = 'parked' ORDER BY i.opened DESC LIMIT 1"""
BOUNDARIES = {
    # A title given by a model was for the conversation that ends here.
    "new": """UPDATE session SET history_from = ?, compacted = 0,
        title = CASE WHEN named_by = '' THEN title ELSE '' END, named_by = '' WHERE id = ?""",
    "compacted": "UPDATE session SET compacted = ? WHERE id = ?",
}
SEND = """INSERT INTO outbox (owner, session, turn, data, channel, chat_id, worker, tries, at, key)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
REVIVE = """UPDATE outbox SET failed = NULL, sent_at = NULL, worker = NULL, tries = 0
    WHERE id = ? AND failed IS NOT NULL"""
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
NAME = "UPDATE session SET title = ?, named_by = ? WHERE id = ? AND title = '' AND named_by = ''"
ARCHIVE = """UPDATE session SET archived_at = (SELECT coalesce(max(seq), 0) FROM entry e WHERE e.session = session.id)
    WHERE owner = ? AND key = ?"""
BRING_BACK = "UPDATE session SET archived_at = 0 WHERE owner = ? AND key = ?"
GRANT = "INSERT INTO session_grant (owner, key, name, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
REVOKE_GRANTS = "DELETE FROM session_grant WHERE owner = ? AND key = ?"
REVOKE_GRANTS_OF = "DELETE FROM session_grant WHERE (owner, key) = (SELECT owner, key FROM session WHERE id = ?)"


def session_id(db: sqlite3.Connection, owner: str, key: str) -> int | None:
    row = db.execute("SELECT id FROM session WHERE owner = ? AND key = ?", (owner, key)).fetchone()
    return None if row is None else int(row[0])


@cache
def append_to_log(n: int) -> str:
    """Return the statement that appends entries. With a stale fencing token it selects nothing, and writes nothing."""
    return (
        "INSERT INTO entry (session, seq, turn, kind, data, at) "
        f"SELECT * FROM (VALUES {', '.join([ENTRY] * n)}) "
        "WHERE EXISTS (SELECT 1 FROM session WHERE id = ? AND fence = ?)"
    )


class SQLiteTransaction(Transaction):
    """The writes on a connection inside the writer's transaction, or of one statement that is a transaction itself."""

    __slots__ = ("db",)

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    # ------------------------------------------------------------------------------------------ sessions

    def session(self, owner: str, key: str) -> SessionRow | None:
        row = self.db.execute(SESSION, (owner, key)).fetchone()
        return None if row is None else SessionRow(*row)

    def new_session(self, owner: str, key: str) -> int | None:
        now = time.time()
        new = self.db.execute(NEW_SESSION, (owner, key, now, now))
        return new.lastrowid if new.rowcount else None

    def read_state(self, owner: str, key: str, worker: str, create: bool) -> SessionState | None:
        row = self.db.execute(BEGIN, (owner, key)).fetchone()
        if row is None:
            if not create:
                return None
            row = (self.new_session(owner, key), None, 0, 0, 0, 0.0, None, 1, None, None, 0)
        is_held = row[1] is not None and row[1] != worker and alive(row[1])
        return SessionState(is_held, time.time(), *row)

    def reread_state(self, state: SessionState, owner: str, key: str) -> SessionState:
        return SessionState(state.is_held, state.now, *self.db.execute(BEGIN, (owner, key)).fetchone())

    def take_lease(self, claim: Claim, worker: str) -> None:
        held = "UPDATE session SET worker = ?, fence = ?, updated_at = ? WHERE id = ?"
        self.db.execute(held, (worker, claim.fence, time.time(), claim.session))

    def _release(self, claim: Claim, now: float) -> None:
        """Release the lease, refused unless the claim's fencing token is current."""
        released = "UPDATE session SET worker = NULL, updated_at = ? WHERE id = ? AND fence = ?"
        if self.db.execute(released, (now, claim.session, claim.fence)).rowcount != 1:
            raise claims.stale(claim)

    def is_alive(self, worker: str) -> bool:
        return alive(worker)

    def has_open_turn(self, session: int) -> bool:
        return self.db.execute(OPEN_TURN, (session,)).fetchone() is not None

    def touch(self, session: int) -> None:
        self.db.execute("UPDATE session SET updated_at = ? WHERE id = ?", (time.time(), session))

    def show_from(self, session: int, history_from: int, compacted: int) -> None:
        shown = "UPDATE session SET history_from = ?, compacted = ? WHERE id = ?"
        self.db.execute(shown, (history_from, compacted, session))

    def set_title(self, owner: str, key: str, title: str, naming: Naming | None) -> bool:
        if naming is None:
            named = "UPDATE session SET title = ?, named_by = '' WHERE owner = ? AND key = ?"
            return self.db.execute(named, (title, owner, key)).rowcount > 0
        known = "SELECT id, naming_usage FROM session WHERE owner = ? AND key = ?"
        if (row := self.db.execute(known, (owner, key)).fetchone()) is None:
            return False
        id, usage = row
        usage = claims.added_usage(usage, naming.usage)
        self.db.execute("UPDATE session SET naming_usage = ? WHERE id = ?", (usage, id))
        return self.db.execute(NAME, (title, naming.model, id)).rowcount > 0

    def set_archived(self, owner: str, key: str, archived: bool) -> bool:
        return self.db.execute(ARCHIVE if archived else BRING_BACK, (owner, key)).rowcount > 0

    # ------------------------------------------------------------------------------------------ the log

    def last_seq(self, session: int) -> int:
        (last,) = self.db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = ?", (session,)).fetchone()
        return int(last)

    def read_entries(self, session: int, first_seq: int) -> Iterable[Sequence[Any]]:
        return self.db.execute(ENTRIES, (session, first_seq))

    def read_log(self, session: int, until: int) -> list[Any]:
        log = "SELECT seq, turn, kind, data, at FROM entry WHERE session = ? AND seq <= ? ORDER BY seq"
        return self.db.execute(log, (session, until)).fetchall()

    def insert_entries(self, session: int, turn: str | None, rows: LogRows) -> None:
        at = time.time() if rows.at is None else rows.at
        self.db.executemany(INSERT_ENTRY, [(session, seq, turn, kind, data, at) for seq, kind, data in rows.each()])
        self._note_boundaries(session, rows)

    def copy_entries(self, session: int, rows: Sequence[Sequence[Any]]) -> None:
        self.db.executemany(INSERT_ENTRY, [(session, *row) for row in rows])

    def _note_boundaries(self, session: int, rows: LogRows) -> None:
        """Record in the session's row where its conversation starts and how it is compacted."""
        for kind, seq in claims.boundaries(rows):
            self.db.execute(BOUNDARIES[kind], (seq, session))
            if kind == "new":  # grants were for the conversation that ends here
                self.db.execute(REVOKE_GRANTS_OF, (session,))

    def append(self, claim: Claim, rows: LogRows) -> None:
        """Append to the log in one statement, refused unless the claim's fencing token is current."""
        at, turn = time.time() if rows.at is None else rows.at, claim.turn or None
        values: list[Any] = []
        for seq, kind, data in rows.each():
            values += claim.session, seq, turn, kind, data, at
        values += claim.session, claim.fence
        if self.db.execute(append_to_log(len(rows.seqs)), values).rowcount != len(rows.seqs):
            raise claims.stale(claim)

    def append_step(self, claim: Claim, step: TurnStep) -> None:
        """Append entries, and take the pending messages that they contain."""
        if step.rows.seqs:  # a command may leave nothing in the log
            self.append(claim, step.rows)
        self.spend(claim.owner, step.spent)
        self._note_boundaries(claim.session, step.rows)
        taken = "UPDATE inbox SET state = 'taken', turn = ?, first_seq = ? WHERE id = ?"
        self.db.executemany(taken, [(claim.turn, claim.first_seq, id) for id in step.took])

    # ------------------------------------------------------------------------------------------ turns

    def finish(
        self,
        claim: Claim,
        step: TurnStep,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage],
        sender: str | None,
        incoming: Sequence[InboundMessage],
    ) -> Finished:
        """End a turn or a command: write everything that it leaves behind, or nothing."""
        now = time.time()
        self._release(claim, now)
        self.append_step(claim, step)
        done = "UPDATE inbox SET state = 'done', ended_at = ?, reason = ? WHERE id = ? AND coalesce(turn, '') = ?"
        reason = claims.end_reason(entries)
        for id in claim.inbox:  # a row whose taking failed has no turn, and stays: it is not in the log
            self.db.execute(done, (now, reason, id, claim.turn))
        sent = self.send(claim.owner, claim.session, claim.turn or None, outgoing, sender)
        for message in incoming:
            self.accept(message, "message")
        return Finished(sent, self.db.execute(MORE, (claim.session,)).fetchone() is not None)

    def park(
        self,
        claim: Claim,
        step: TurnStep,
        outgoing: Sequence[OutboundMessage],
        sender: str | None,
    ) -> Finished:
        """Park a turn on disk until a person has answered."""
        self._release(claim, time.time())
        self.append_step(claim, step)
        self.db.executemany("UPDATE inbox SET state = 'parked' WHERE id = ?", [(id,) for id in claim.inbox])
        return Finished(self.send(claim.owner, claim.session, claim.turn, outgoing, sender), more=False)

    def parked_turn(self, owner: str, key: str) -> ParkedTurn | None:
        row = self.db.execute(PARKED, (owner, key)).fetchone()
        return None if row is None else ParkedTurn(*row)

    def reopen(self, session: int) -> None:
        self.db.execute("UPDATE session SET fence = fence + 1 WHERE id = ?", (session,))
        reopened = "UPDATE inbox SET state = 'taken' WHERE session = ? AND state <> 'done' AND state = 'parked'"
        self.db.execute(reopened, (session,))

    def read_answer(self, row: int) -> Sequence[Any]:
        state, first_seq, at = self.db.execute("SELECT state, first_seq, at FROM inbox WHERE id = ?", (row,)).fetchone()
        return state, first_seq, at

    def use_answer(self, row: int, seq: int) -> None:
        self.db.execute("UPDATE inbox SET first_seq = ? WHERE id = ?", (seq, row))

    def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        now = time.time()
        self.db.executemany(GRANT, [(owner, key, name, now) for name in names])

    # ------------------------------------------------------------------------------------------ inbox

    def accept(
        self,
        message: InboundMessage,
        kind: Kind,
        session: int | None = None,
        opens: tuple[str, int] | None = None,
    ) -> Incoming:
        if message.id is not None:
            known = f"SELECT {INBOX_ROW} FROM inbox WHERE owner = ? AND message_id = ?"
            row = self.db.execute(known, (message.owner, message.id)).fetchone()
            if row is not None:
                return self._known(row, message)
        if session is None:
            session = session_id(self.db, message.owner, message.session_key)
        if session is None:
            session = self.new_session(message.owner, message.session_key) or 0
        if kind == "reply":
            kind = claims.inbox_kind(kind, self.db.execute(HAS_PARKED, (session,)).fetchone() is not None)
        turn, first_seq = opens if opens is not None else (None, None)
        data, state = claims.inbox_data(message, opens), "new" if turn is None else "taken"
        values = (message.owner, session, message.id, kind, data, time.time(), turn, first_seq, state, turn is not None)
        new = self.db.execute(INSERT_INBOX, values)
        return Incoming(int(new.lastrowid or 0), session, message, kind, False, turn, first_seq)

    def repair(self, row: int, data: str) -> str:
        (state,) = self.db.execute(REPAIR, (data, row)).fetchone()
        return str(state)

    def set_aside(self, damaged: Iterable[Damaged]) -> list[Damaged]:
        now = time.time()
        return [row for row in damaged if self.db.execute(SET_ASIDE, (now, row.why, row.id)).rowcount]

    def pending_message(self, row: int) -> tuple[bytes, str]:
        data, kind = self.db.execute("SELECT CAST(data AS BLOB), kind FROM inbox WHERE id = ?", (row,)).fetchone()
        return data, kind

    def messages_of_turn(self, session: int, turn: str) -> list[Any]:
        return self.db.execute(OF_TURN, (session, turn)).fetchall()

    def open_turn(self, claim: Claim, row: int) -> None:
        taken = "UPDATE inbox SET state = 'taken', turn = ?, first_seq = ?, opened = 1 WHERE id = ?"
        self.db.execute(taken, (claim.turn, claim.first_seq, row))

    def abandon(self, session: int, turn: str, damaged: Damaged) -> None:
        done = "UPDATE inbox SET state = 'done', ended_at = ?, reason = 'error' WHERE session = ? AND turn = ?"
        self.db.execute(done, (time.time(), session, turn))
        self.db.execute("UPDATE inbox SET damaged = ? WHERE id = ?", (damaged.why, damaged.id))

    def mark_answered(self, row: int) -> bool:
        return self.db.execute("UPDATE inbox SET state = 'done' WHERE id = ? AND state = 'new'", (row,)).rowcount > 0

    # ------------------------------------------------------------------------------------------ outbox and channels

    def send(
        self,
        owner: str,
        session: int,
        turn: str | None,
        messages: Sequence[OutboundMessage],
        sender: str | None,
        key: str | None = None,
    ) -> list[int]:
        now, tries = time.time(), 1 if sender else 0
        rows = claims.encoded_outgoing(messages)
        made = [self.db.execute(SEND, (owner, session, turn, *row, sender, tries, now, key)).lastrowid for row in rows]
        return [int(id or 0) for id in made]

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> int | None:
        """Put a message of a running turn into the outbox, once per idempotency key."""
        held = "SELECT 1 FROM session WHERE id = ? AND fence = ?"
        if not self.db.execute(held, (claim.session, claim.fence)).fetchone():
            raise claims.stale(claim)
        if self.db.execute("SELECT 1 FROM outbox WHERE owner = ? AND key = ?", (claim.owner, key)).fetchone():
            return None
        return self.send(claim.owner, claim.session, claim.turn, [message], sender, key)[0]

    def take_outgoing(
        self, worker: str, limit: int, chat: tuple[str, str] | None, channels: Sequence[str] | None
    ) -> claims.Taken:
        taken = claims.Taken()
        for id, channel, chat_id in claims.missing_addresses(self.db.execute(UNADDRESSED).fetchall(), taken):
            self.db.execute("UPDATE outbox SET channel = ?, chat_id = ? WHERE id = ?", (channel, chat_id, id))
        of, in_chat = claims.outbox_filter(chat, channels)
        rows = self.db.execute(UNSENT, (None if of is None else claims.encode(of).decode(), in_chat)).fetchall()
        free = (row[:4] for row in rows if row[4] is None or (row[4] != worker and not alive(row[4])))
        claims.take_outgoing(free, limit, taken)
        self.db.executemany("UPDATE outbox SET damaged = ? WHERE id = ?", [(why, id) for id, why in taken.damaged])
        sending = "UPDATE outbox SET worker = ?, tries = tries + 1 WHERE id = ?"
        self.db.executemany(sending, [(worker, row.id) for row in taken.rows])
        return taken

    def revive(self, ids: Sequence[int]) -> list[int]:
        return [id for id in ids if self.db.execute(REVIVE, (id,)).rowcount]

    def hold(self, name: str, worker: str) -> bool:
        row = self.db.execute("SELECT worker FROM channel_lease WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] != worker and alive(row[0]):
            return False
        if row is None or row[0] != worker:
            self.db.execute("INSERT OR REPLACE INTO channel_lease (name, worker) VALUES (?, ?)", (name, worker))
        return True

    def write_channel_state(self, rows: Sequence[ChannelRow], expected: ChannelRow) -> bool:
        *where, value = expected
        found = self.db.execute("SELECT value FROM channel_state WHERE channel = ? AND key = ?", where).fetchone()
        if (found and found[0]) != value:
            return False
        self.db.executemany("DELETE FROM channel_state WHERE channel = ? AND key = ?", [row[:2] for row in rows])
        kept = [row for row in rows if row[2] is not None]
        self.db.executemany("INSERT INTO channel_state (channel, key, value) VALUES (?, ?, ?)", kept)
        return True

    # ------------------------------------------------------------------------------------------ everything else

    def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        self.db.executemany(SPEND, [(owner, one.scope, one.tokens, one.cost) for one in spent])

    def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        """Count one event if the limit allows it; otherwise return the seconds until it does.

        A window starts with the first event counted in it. One row per owner and name is reused for every window.
        """
        now = time.time()
        if self.db.execute(ADMIT, (owner, name, now, seconds, most)).fetchall():
            return 0.0
        (left,) = self.db.execute(WINDOW_LEFT, (owner, name, seconds, now)).fetchone()
        return max(float(left), 0.001)

    def advance_timer(self, timer: Timer, next_due: float | None) -> bool:
        where: tuple[Any, ...] = (timer.owner, timer.id, timer.due_at)
        sql = "DELETE FROM timer WHERE owner = ? AND id = ? AND due_at = ?"
        if next_due is not None:
            sql = "UPDATE timer SET due_at = ? WHERE owner = ? AND id = ? AND due_at = ?"
            where = (next_due, *where)
        return self.db.execute(sql, where).rowcount == 1

    def add_token(self, name: str, owner: str, hash: str, rights: Iterable[str], agent: str) -> Token:
        """Store a new token by its hash."""
        rights = checked_fields(name, owner, rights, agent)
        if self.db.execute("SELECT 1 FROM token WHERE name = ? AND revoked_at IS NULL", (name,)).fetchone():
            raise name_taken(name)
        made = Token(secrets.token_hex(6), name, owner, time.time(), rights=rights, agent=agent)
        self.db.execute(
            "INSERT INTO token (id, hash, name, owner, created_at, rights, agent) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (made.id, hash, name, owner, made.created_at, joined_rights(rights), agent),
        )
        return made

    def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        now = time.time()
        self.db.executemany(MARK_FILE, [(owner, mark.digest, mark.tainted, mark.path, now) for mark in marks])

    # ------------------------------------------------------------------------------------------ workers

    def announce(self, worker: str) -> None:
        """Tell the joined workers that another one takes a session without having joined: they watch its process.

        There is no instant at which its process can die with the session unnoticed: a worker that joins before this
        transaction gets the message, and one that joins after it finds the session held.
        """
        rows = self.db.execute("SELECT id, address FROM worker").fetchall()
        if any(id == worker for id, _ in rows):
            return
        for _, address in rows:
            send_datagram(address, f"{HOLDS} {worker}")

    def join(self, worker: str, address: str) -> None:
        """Register a worker, and remove dead ones."""
        for (id,) in self.db.execute("SELECT id FROM worker").fetchall():
            if not alive(id):
                self.db.execute("DELETE FROM worker WHERE id = ?", (id,))
        joined = "INSERT OR REPLACE INTO worker (id, address, at) VALUES (?, ?, ?)"
        self.db.execute(joined, (worker, address, time.time()))
