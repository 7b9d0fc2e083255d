"""The writes of the PostgreSQL store.

Functions named `…_alone` are the same write as a single statement, which is a transaction by itself, and raise
`MustTransact` in all but the common case. A transaction that decides something about a
session locks its row (`FOR NO KEY UPDATE`); one that only appends to the log takes a shared lock, so that the lease
cannot change hands in between. Accepting a message waits for neither.

State is read by a separate statement after the lock, so that it sees what the previous holder has written. Statements
are pipelined: fetching a result waits for it and for all statements before it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from ...bus import InboundMessage, Kind, OutboundMessage
from ...log import Entry
from .. import claims
from ..base import Claim, FileMark, Finished, Incoming, Naming, Spent, Timer, Token
from ..claims import INBOX_COLUMNS, Begun, Damaged, Held, LogRows, SessionState, TurnStep
from ..peers import gone
from ..tokens import checked_fields, joined_rights, name_taken
from ..transaction import ParkedTurn, SessionRow, Transaction
from . import prepared
from .prepared import Call, MustTransact

if TYPE_CHECKING:
    from .connect import Connection, Result

NOW = "extract(epoch FROM clock_timestamp())::float8"  # the database's clock, the same for all workers
# A worker is alive while it renews its row. After a restart or a failover of the server, all get the full time to do so
# again.
FRESH = "everloop_fresh(w.at, %s)"

NEW_SESSION = f"""INSERT INTO session (owner, key, created_at, updated_at) VALUES (%s, %s, {NOW}, {NOW})
    ON CONFLICT (owner, key) DO NOTHING RETURNING id"""
LOCK = """SELECT id, worker, fence, history_from, compacted, updated_at FROM session
    WHERE owner = %s AND key = %s FOR NO KEY UPDATE"""
# What a session does next, read while its row is locked.
STATE = f"""SELECT
        (SELECT at FROM entry WHERE session = s.id AND seq = s.history_from + 1),
        (SELECT coalesce(max(seq), 0) + 1 FROM entry WHERE session = s.id),
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'taken' LIMIT 1),
        (SELECT id FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'new' AND kind <> 'urgent'
            ORDER BY id LIMIT 1),
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked'),
        {FRESH}, {NOW}
    FROM session s LEFT JOIN worker w ON w.id = s.worker WHERE s.owner = %s AND s.key = %s"""
RENEW = f"INSERT INTO worker (id, at) VALUES (%s, {NOW}) ON CONFLICT (id) DO UPDATE SET at = excluded.at"
HOLD = f"UPDATE session SET worker = %s, fence = %s, updated_at = {NOW} WHERE id = %s"
RELEASE = f"UPDATE session SET worker = NULL, updated_at = {NOW} WHERE id = %s AND fence = %s RETURNING id"
INSERT_INBOX = f"""INSERT INTO inbox (owner, session, message_id, kind, data, at, turn, first_seq, state, opened)
    VALUES (%s, %s, %s, %s, %s, {NOW}, %s, %s, %s, %s)
    ON CONFLICT (owner, message_id) WHERE message_id IS NOT NULL DO NOTHING RETURNING id"""
OPEN = "UPDATE inbox SET state = 'taken', turn = %s, first_seq = %s, opened = true WHERE id = %s"
SET_ASIDE = f"""UPDATE inbox SET state = 'done', ended_at = {NOW}, damaged = %s WHERE id = %s AND state = 'new'
    RETURNING id"""
# The message was delivered again, with its id.
REPAIR = """UPDATE inbox SET data = %s, damaged = NULL, state = CASE WHEN damaged IS NULL THEN state ELSE 'new' END
    WHERE id = %s RETURNING state"""
ABANDON = f"""UPDATE inbox SET state = 'done', ended_at = {NOW}, reason = 'error',
        damaged = CASE WHEN id = %s THEN %s ELSE damaged END
    WHERE session = %s AND turn = %s"""
MORE = "SELECT EXISTS (SELECT 1 FROM inbox WHERE session = %s AND state <> 'done' AND kind <> 'urgent')"
OF_TURN = """SELECT id, data, first_seq FROM inbox WHERE session = %s AND state <> 'done' AND turn = %s
    ORDER BY opened DESC, id"""
TAKEN = "SELECT id, data, turn, tries - 1 FROM outbox WHERE id = ANY(%s) ORDER BY id"
OPEN_TURN = "SELECT 1 FROM inbox WHERE session = %s AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1"
PARKED = """SELECT id, turn, first_seq FROM inbox WHERE session = %s AND state <> 'done' AND state = 'parked'
    ORDER BY opened DESC LIMIT 1"""
INSERT_ENTRIES = f"""INSERT INTO entry (session, seq, turn, kind, data, at)
    SELECT %s, e.seq, %s, e.kind, e.data, coalesce(%s, {NOW})
    FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS e (seq, kind, data)"""
WRITE = f"SELECT everloop_write({', '.join(['%s'] * 12)})"
STEP_ACCEPT = f"SELECT everloop_accept({', '.join(['%s'] * 7)})"
STEP_BEGIN = f"SELECT everloop_begin({', '.join(['%s'] * 14)})"
STEP_APPEND = f"SELECT everloop_append({', '.join(['%s'] * 17)})"
STEP_FINISH = f"SELECT everloop_finish({', '.join(['%s'] * 22)})"
STEP_TAKE = f"SELECT * FROM everloop_take_outgoing({', '.join(['%s'] * 7)})"
LOST, MORE_TO_DO = 0, 2  # as returned by the functions: an entry is missing; the session has more to do
NO_MARK = (None, None)  # a step inside a transaction, which has a mark of its own
# The state of sessions, and the pending message of each, with whether their workers are alive and whether there are
# urgent messages.
LOOK_AT = "SELECT * FROM everloop_look_at(%s, %s)"
LOOK = """SELECT l.* FROM session s, LATERAL everloop_look_at(0, ARRAY[s.id]) AS l
    WHERE s.owner = %s AND s.key = %s"""
COPY_ENTRIES = """INSERT INTO entry (session, seq, turn, kind, data, at) SELECT %s, e.* FROM
    unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::float8[]) AS e"""
BOUNDARIES = {
    # A title given by a model was for the conversation that ends here.
    "new": """UPDATE session SET history_from = %s, compacted = 0,
        title = CASE WHEN named_by = '' THEN title ELSE '' END, named_by = '' WHERE id = %s""",
    "compacted": "UPDATE session SET compacted = %s WHERE id = %s",
}
SEND = f"""INSERT INTO outbox (owner, session, turn, worker, tries, at, key, data, channel, chat_id)
    SELECT %s, %s, %s, %s, %s, {NOW}, %s, m.data, m.channel, m.chat_id
    FROM unnest(%s::text[], %s::text[], %s::text[]) WITH ORDINALITY AS m (data, channel, chat_id, n)
    ORDER BY m.n RETURNING id"""
SENDERS = f"""SELECT o.worker, {FRESH}
    FROM (SELECT DISTINCT worker FROM outbox WHERE sent_at IS NULL AND worker IS NOT NULL) AS o
    LEFT JOIN worker w ON w.id = o.worker"""
UNADDRESSED = "SELECT id, data FROM outbox WHERE sent_at IS NULL AND channel IS NULL AND damaged IS NULL FOR UPDATE"
UNSENT = """SELECT id, data, turn, tries FROM outbox
    WHERE sent_at IS NULL AND damaged IS NULL AND (worker IS NULL OR worker = ANY(%s))
        AND (%s::text[] IS NULL OR channel = ANY(%s)) AND (%s::text IS NULL OR chat_id = %s)
    ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"""
SPEND = """INSERT INTO spent (owner, scope, tokens, cost) VALUES (%s, %s, %s, %s)
    ON CONFLICT (owner, scope) DO UPDATE
    SET tokens = spent.tokens + excluded.tokens, cost = spent.cost + excluded.cost"""
# The counting statement locks the row, and its number is read under the lock. The clock is the database's, so all
# machines share the same window.
ADMIT = f"""INSERT INTO rate (owner, name, began, number) VALUES (%(owner)s, %(name)s, {NOW}, 1)
    ON CONFLICT (owner, name) DO UPDATE SET
        began = CASE WHEN abs(excluded.began - rate.began) < %(seconds)s THEN rate.began ELSE excluded.began END,
        number = CASE WHEN abs(excluded.began - rate.began) < %(seconds)s THEN rate.number + 1 ELSE 1 END
    WHERE abs(excluded.began - rate.began) >= %(seconds)s OR rate.number < %(most)s
    RETURNING number"""
WINDOW_LEFT = f"SELECT began + %(seconds)s - {NOW} FROM rate WHERE owner = %(owner)s AND name = %(name)s"
MARK_FILES = f"""INSERT INTO file_mark (owner, digest, tainted, path, at)
    SELECT %s, *, {NOW} FROM unnest(%s::text[], %s::boolean[], %s::text[])
    ON CONFLICT (owner, digest) DO UPDATE SET
        tainted = file_mark.tainted AND excluded.tainted, path = excluded.path, at = excluded.at"""
INSERT_TOKEN = f"""INSERT INTO token (id, hash, name, owner, rights, agent, created_at)
    VALUES (%s, %s, %s, %s, %s, %s, {NOW})
    ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING RETURNING id, created_at"""
NAME = "UPDATE session SET title = %s, named_by = %s WHERE id = %s AND title = '' AND named_by = '' RETURNING id"
ARCHIVE = """UPDATE session s SET archived_at = (SELECT coalesce(max(seq), 0) FROM entry WHERE session = s.id)
    WHERE owner = %s AND key = %s RETURNING id"""
BRING_BACK = "UPDATE session SET archived_at = 0 WHERE owner = %s AND key = %s RETURNING id"
GRANT = f"""INSERT INTO session_grant (owner, key, name, at) SELECT %s, %s, name, {NOW} FROM unnest(%s::text[]) name
    ON CONFLICT DO NOTHING"""
REVOKE_GRANTS = "DELETE FROM session_grant WHERE owner = %s AND key = %s"
REVOKE_GRANTS_OF = "DELETE FROM session_grant g USING session s WHERE s.id = %s AND (g.owner, g.key) = (s.owner, s.key)"


# ---------------------------------------------------------------------------------------------- rows and values


class Looked(NamedTuple):
    """A session as a look found it."""

    owner: str
    key: str
    is_fresh: bool  # its worker has renewed its lease
    has_urgent: bool
    state: SessionState
    data: str  # of the pending message, if there is one
    kind: Kind

    @classmethod
    def of(cls, row: Sequence[Any]) -> Looked:
        owner, key, is_fresh, has_urgent, *facts, now, data, kind = row
        return cls(owner, key, bool(is_fresh), bool(has_urgent), SessionState(False, now, *facts), data, kind)

    @property
    def is_ready(self) -> bool:
        state = self.state
        return (state.open_turn is not None or state.waiting is not None) and not state.is_parked


class Appended(NamedTuple):
    """A step of a turn, and the earlier ones that a crash of the database may have undone."""

    claim: Claim
    step: TurnStep
    before: Sequence[TurnStep]
    next_seq: int  # position of the step's first entry

    @classmethod
    def of(cls, claim: Claim, entries: Sequence[Entry], took: Sequence[int], flush: bool = True) -> Appended:
        """Assign the claim's next positions to these entries. With `flush`, no earlier steps need be kept."""
        first, before = claim.next_seq, tuple(claim.unflushed)
        step = TurnStep.of(claim, entries, took)
        claim.unflushed = [] if flush else [*before, step]
        return cls(claim, step, before, first)

    def values(self) -> tuple[Any, ...]:
        claim = self.claim
        return (claim.session, claim.fence, self.next_seq - 1, *step_values(claim, self.step))


def step_values(claim: Claim, step: TurnStep) -> tuple[Any, ...]:
    """Return the values of WRITE after the session."""
    rows, spent = step.rows, step.spent
    return (
        *(claim.turn, claim.first_seq, rows.at, rows.seqs, rows.kinds, rows.texts, list(step.took), claim.owner),
        *([one.scope for one in spent], [one.tokens for one in spent], [one.cost for one in spent]),
    )


def finish_values(
    appended: Appended, entries: Sequence[Entry], outgoing: Sequence[OutboundMessage], sender: str | None
) -> tuple[Any, ...]:
    """Return the values of STEP_FINISH after its mark."""
    columns = [list(column) for column in zip(*claims.encoded_outgoing(outgoing), strict=True)] or [[], [], []]
    return (*appended.values(), appended.claim.inbox, claims.end_reason(entries), sender, *columns)


# ---------------------------------------------------------------------------------------------- in a transaction


def living(holder: str, fresh: bool) -> bool:
    """Return whether a worker's lease is valid: it was renewed, and the worker is not known to have ended."""
    return fresh and not gone(holder)


def is_alive(db: Connection, worker: str, lease: float) -> bool:
    row = db.execute(f"SELECT {FRESH} FROM worker w WHERE id = %s", (lease, worker)).fetchone()
    return row is not None and living(worker, row[0])


def _check(result: Result, claim: Claim) -> None:
    """Refuse the writes of a worker that has lost its lease; the transaction is rolled back."""
    if result.fetchone() is None:
        raise claims.stale(claim)


class PostgresTransaction(Transaction):
    """The writes of the store inside one transaction. `lease` is how long a worker's lease lasts, in seconds."""

    __slots__ = ("db", "lease")

    def __init__(self, db: Connection, lease: float) -> None:
        self.db = db
        self.lease = lease

    # ------------------------------------------------------------------------------------------ sessions

    def session(self, owner: str, key: str) -> SessionRow | None:
        row = self.db.execute(LOCK, (owner, key)).fetchone()
        return None if row is None else SessionRow(*row)

    def new_session(self, owner: str, key: str) -> int | None:
        row = self.db.execute(NEW_SESSION, (owner, key)).fetchone()
        return None if row is None else int(row[0])

    def _session_id(self, owner: str, key: str) -> int:
        """Return the id of a session, which is created if necessary. Its row is locked only against deletion."""
        found = "SELECT id FROM session WHERE owner = %s AND key = %s FOR KEY SHARE"
        while (row := self.db.execute(found, (owner, key)).fetchone()) is None:
            self.db.execute(NEW_SESSION, (owner, key))
        return int(row[0])

    def read_state(self, owner: str, key: str, worker: str, create: bool) -> SessionState | Held | None:
        while True:
            row = self.db.execute(LOCK if create else f"{LOCK} SKIP LOCKED", (owner, key))
            state = self.db.execute(STATE, (self.lease, owner, key))
            locked, found = row.fetchone(), state.fetchone()
            if locked is not None and found is not None:
                break
            if not create:
                return None if found is None else Held("", None)
            self.db.execute(NEW_SESSION, (owner, key))
        session, (*facts, fresh, now) = SessionRow(*locked), found
        is_held = session.worker is not None and session.worker != worker and living(session.worker, fresh)
        return SessionState(is_held, now, *session, *facts)

    def reread_state(self, state: SessionState, owner: str, key: str) -> SessionState:
        row: Any = self.db.execute(STATE, (self.lease, owner, key)).fetchone()
        began, next_seq, open_turn, waiting, is_parked, _, _ = row
        return structs.replace(
            state, began=began, next_seq=next_seq, open_turn=open_turn, waiting=waiting, is_parked=is_parked
        )

    def take_lease(self, claim: Claim, worker: str) -> None:
        self.db.execute(HOLD, (worker, claim.fence, claim.session))

    def is_alive(self, worker: str) -> bool:
        return is_alive(self.db, worker, self.lease)

    def has_open_turn(self, session: int) -> bool:
        return self.db.execute(OPEN_TURN, (session,)).fetchone() is not None

    def touch(self, session: int) -> None:
        self.db.execute(f"UPDATE session SET updated_at = {NOW} WHERE id = %s", (session,))

    def show_from(self, session: int, history_from: int, compacted: int) -> None:
        shown = "UPDATE session SET history_from = %s, compacted = %s WHERE id = %s"
        self.db.execute(shown, (history_from, compacted, session))

    def set_title(self, owner: str, key: str, title: str, naming: Naming | None) -> bool:
        if naming is None:
            named = "UPDATE session SET title = %s, named_by = '' WHERE owner = %s AND key = %s RETURNING id"
            return self.db.execute(named, (title, owner, key)).fetchone() is not None
        lock = "SELECT id, naming_usage FROM session WHERE owner = %s AND key = %s FOR NO KEY UPDATE"
        if (row := self.db.execute(lock, (owner, key)).fetchone()) is None:
            return False
        id, usage = row
        usage = claims.added_usage(usage, naming.usage)
        self.db.execute("UPDATE session SET naming_usage = %s WHERE id = %s", (usage, id))
        return self.db.execute(NAME, (title, naming.model, id)).fetchone() is not None

    def set_archived(self, owner: str, key: str, archived: bool) -> bool:
        return self.db.execute(ARCHIVE if archived else BRING_BACK, (owner, key)).fetchone() is not None

    # ------------------------------------------------------------------------------------------ the log

    def last_seq(self, session: int) -> int:
        row: Any = self.db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = %s", (session,)).fetchone()
        return int(row[0])

    def read_entries(self, session: int, first_seq: int) -> list[Any]:
        entries = "SELECT seq, data, at FROM entry WHERE session = %s AND seq >= %s ORDER BY seq"
        return self.db.execute(entries, (session, first_seq)).fetchall()

    def read_log(self, session: int, until: int) -> list[Any]:
        log = "SELECT seq, turn, kind, data, at FROM entry WHERE session = %s AND seq <= %s ORDER BY seq"
        return self.db.execute(log, (session, until)).fetchall()

    def insert_entries(self, session: int, turn: str | None, rows: LogRows) -> None:
        self.db.execute(INSERT_ENTRIES, (session, turn, rows.at, rows.seqs, rows.kinds, rows.texts))
        self._note_boundaries(session, rows)

    def copy_entries(self, session: int, rows: Sequence[Sequence[Any]]) -> None:
        self.db.execute(COPY_ENTRIES, (session, *(list(column) for column in zip(*rows, strict=True))))

    def _note_boundaries(self, session: int, rows: LogRows) -> None:
        """Record in the session's row where its conversation starts and how it is compacted."""
        for kind, seq in claims.boundaries(rows):
            self.db.execute(BOUNDARIES[kind], (seq, session))
            if kind == "new":  # grants were for the conversation that ends here
                self.db.execute(REVOKE_GRANTS_OF, (session,))

    def append(self, appended: Appended) -> None:
        """Append entries, and take the pending messages that they contain."""
        self._run_step(STEP_APPEND, (*NO_MARK, True, *appended.values()), appended)
        self._note_boundaries(appended.claim.session, appended.step.rows)

    def _run_step(self, query: str, values: Sequence[Any], appended: Appended) -> list[int]:
        """Run a step inside a transaction; if earlier steps are missing from the log, restore them first."""
        for _ in range(2):
            row: Any = self.db.execute(query, values).fetchone()
            if row[0] is None:
                raise claims.stale(appended.claim)
            if row[0] != [LOST]:
                break
            self._restore(appended)
        return list(row[0])

    def _restore(self, appended: Appended) -> None:
        """Rewrite the steps that are missing in the log.

        The database has crashed and undone unflushed writes, but the worker that holds the session still has them.
        """
        claim = appended.claim
        held = "SELECT 1 FROM session WHERE id = %s AND fence = %s FOR NO KEY UPDATE"
        _check(self.db.execute(held, (claim.session, claim.fence)), claim)
        last = self.last_seq(claim.session)
        for step in appended.before:
            if step.rows.seqs[0] == last + 1:
                self.db.execute(WRITE, (claim.session, *step_values(claim, step)))
                self._note_boundaries(claim.session, step.rows)
                last = step.rows.seqs[-1]
        if last != appended.next_seq - 1:
            raise claims.incomplete(claim, last)

    # ------------------------------------------------------------------------------------------ turns

    def finish(self, appended: Appended, values: Sequence[Any], incoming: Sequence[InboundMessage]) -> Finished:
        """End a turn or a command: write everything that it leaves behind, or nothing."""
        claim = appended.claim
        more, *sent = self._run_step(STEP_FINISH, (*NO_MARK, *values), appended)
        self._note_boundaries(claim.session, appended.step.rows)
        for message in incoming:
            self.accept(message, "message")
        if incoming:
            row: Any = self.db.execute(MORE, (claim.session,)).fetchone()
            more = MORE_TO_DO if row[0] else 1
        return Finished(sent, more == MORE_TO_DO)

    def park(self, appended: Appended, outgoing: Sequence[OutboundMessage], sender: str | None) -> Finished:
        """Park a turn in the store until a person has answered."""
        claim = appended.claim
        _check(self.db.execute(RELEASE, (claim.session, claim.fence)), claim)
        self.append(appended)
        self.db.execute("UPDATE inbox SET state = 'parked' WHERE id = ANY(%s)", (claim.inbox,))
        return Finished(self.send(claim.owner, claim.session, claim.turn, outgoing, sender), more=False)

    def parked_turn(self, owner: str, key: str) -> ParkedTurn | None:
        session = self.session(owner, key)
        row = None if session is None else self.db.execute(PARKED, (session.id,)).fetchone()
        if session is None or row is None:
            return None
        id, turn, first_seq = row
        return ParkedTurn(id, session.id, turn, first_seq)

    def reopen(self, session: int) -> None:
        self.db.execute("UPDATE session SET fence = fence + 1 WHERE id = %s", (session,))
        reopened = "UPDATE inbox SET state = 'taken' WHERE session = %s AND state <> 'done' AND state = 'parked'"
        self.db.execute(reopened, (session,))

    def read_answer(self, row: int) -> tuple[Any, ...]:
        sql = "SELECT state, first_seq, at FROM inbox WHERE id = %s FOR NO KEY UPDATE"
        answer = self.db.execute(sql, (row,)).fetchone()
        assert answer is not None
        return answer

    def use_answer(self, row: int, seq: int) -> None:
        self.db.execute("UPDATE inbox SET first_seq = %s WHERE id = %s", (seq, row))

    def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        if names:
            self.db.execute(GRANT, (owner, key, list(names)))

    # ------------------------------------------------------------------------------------------ inbox

    def accept(
        self,
        message: InboundMessage,
        kind: Kind,
        session: int | None = None,
        opens: tuple[str, int] | None = None,
    ) -> Incoming:
        session = session if session is not None else self._session_id(message.owner, message.session_key)
        if kind == "reply":
            kind = claims.inbox_kind(kind, self.db.execute(PARKED, (session,)).fetchone() is not None)
        data = claims.inbox_data(message, opens)
        turn, first_seq = opens if opens is not None else (None, None)
        state = "taken" if turn else "new"
        values = (message.owner, session, message.id, kind, data, turn, first_seq, state, turn is not None)
        new = self.db.execute(INSERT_INBOX, values).fetchone()
        if new is not None:
            return Incoming(new[0], session, message, kind, False, turn, first_seq)
        known = f"SELECT {INBOX_COLUMNS} FROM inbox WHERE owner = %s AND message_id = %s"
        row: Any = self.db.execute(known, (message.owner, message.id)).fetchone()
        return self._known(row, message)

    def repair(self, row: int, data: str) -> str:
        repaired: Any = self.db.execute(REPAIR, (data, row)).fetchone()
        return str(repaired[0])

    def set_aside(self, damaged: Iterable[Damaged]) -> list[Damaged]:
        return [row for row in damaged if self.db.execute(SET_ASIDE, (row.why, row.id)).fetchone() is not None]

    def pending_message(self, row: int) -> tuple[str, str]:
        found: Any = self.db.execute("SELECT data, kind FROM inbox WHERE id = %s", (row,)).fetchone()
        data, kind = found
        return data, kind

    def messages_of_turn(self, session: int, turn: str) -> list[Any]:
        return self.db.execute(OF_TURN, (session, turn)).fetchall()

    def open_turn(self, claim: Claim, row: int) -> None:
        self.db.execute(OPEN, (claim.turn, claim.first_seq, row))

    def abandon(self, session: int, turn: str, damaged: Damaged) -> None:
        self.db.execute(ABANDON, (damaged.id, damaged.why, session, turn))

    def mark_answered(self, row: int) -> bool:
        done = "UPDATE inbox SET state = 'done' WHERE id = %s AND state = 'new' RETURNING id"
        return self.db.execute(done, (row,)).fetchone() is not None

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
        if not messages:
            return []
        columns = [list(column) for column in zip(*claims.encoded_outgoing(messages), strict=True)]
        sent = self.db.execute(SEND, (owner, session, turn, sender, 1 if sender else 0, key, *columns))
        return [id for (id,) in sent.fetchall()]

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> int | None:
        """Put a message of a running turn into the outbox, once per idempotency key."""
        fence = "SELECT 1 FROM session WHERE id = %s AND fence = %s FOR SHARE"
        held = self.db.execute(fence, (claim.session, claim.fence))
        known = self.db.execute("SELECT 1 FROM outbox WHERE owner = %s AND key = %s", (claim.owner, key))
        _check(held, claim)
        if known.fetchone() is not None:
            return None
        return self.send(claim.owner, claim.session, claim.turn, [message], sender, key)[0]

    def take_outgoing(
        self,
        worker: str,
        limit: int,
        chat: tuple[str, str] | None,
        channels: Sequence[str] | None,
        known: Sequence[tuple[int, str]] = (),
    ) -> claims.Taken:
        """Take rows that no live worker is sending, and set aside those that turn out to be damaged.

        Two workers that do so concurrently get different rows: each locks only the rows that it takes, and skips those
        that are locked.
        """
        taken = claims.Taken()
        self._set_aside(known)
        ids = [id for id, _ in known]
        self.db.execute("UPDATE outbox SET worker = NULL, tries = tries - 1 WHERE id = ANY(%s)", (ids,))
        unaddressed = self.db.execute(UNADDRESSED)
        senders = self.db.execute(SENDERS, (self.lease,)).fetchall()
        for id, channel, chat_id in claims.missing_addresses(unaddressed.fetchall(), taken):
            self.db.execute("UPDATE outbox SET channel = %s, chat_id = %s WHERE id = %s", (channel, chat_id, id))
        self._set_aside(taken.damaged)
        # Rows of dead workers, rather than all but those of live ones: a worker unknown a moment ago may have some now.
        dead = [id for id, fresh in senders if id != worker and not living(id, fresh)]
        of, in_chat = claims.outbox_filter(chat, channels)
        while len(taken.rows) < limit:
            wanted, before, damaged = limit - len(taken.rows), len(taken.rows), len(taken.damaged)
            rows = self.db.execute(UNSENT, (dead, of, of, in_chat, in_chat, wanted)).fetchall()
            claims.take_outgoing(rows, limit, taken)
            self._set_aside(taken.damaged[damaged:])
            ids = [row.id for row in taken.rows[before:]]
            self.db.execute("UPDATE outbox SET worker = %s, tries = tries + 1 WHERE id = ANY(%s)", (worker, ids))
            if len(rows) < wanted:
                break
        return taken

    def keep_outgoing(self, id: int, worker: str) -> bool:
        """Renew a worker's lease, which may have expired, and keep a row that no other worker has taken since."""
        self.db.execute(RENEW, (worker,))
        held = "SELECT 1 FROM outbox WHERE id = %s AND worker = %s AND sent_at IS NULL FOR UPDATE"
        return self.db.execute(held, (id, worker)).fetchone() is not None

    def _set_aside(self, damaged: Sequence[tuple[int, str]]) -> None:
        for id, why in damaged:
            self.db.execute("UPDATE outbox SET damaged = %s WHERE id = %s", (why, id))

    def hold(self, name: str, worker: str) -> bool:
        new = "INSERT INTO channel_lease (name, worker) VALUES (%s, %s) ON CONFLICT DO NOTHING"
        self.db.execute(new, (name, worker))
        row = self.db.execute("SELECT worker FROM channel_lease WHERE name = %s FOR UPDATE", (name,)).fetchone()
        if row is not None and row[0] != worker and self.is_alive(row[0]):
            return False
        self.db.execute("UPDATE channel_lease SET worker = %s WHERE name = %s", (worker, name))
        self.db.execute(RENEW, (worker,))
        return True

    # ------------------------------------------------------------------------------------------ everything else

    def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        for one in sorted(spent, key=lambda one: one.scope):  # in a fixed order, so that no two transactions deadlock
            self.db.execute(SPEND, (owner, one.scope, one.tokens, one.cost))

    def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        """Count one event if the limit allows it; otherwise return the seconds until it does."""
        values = {"owner": owner, "name": name, "most": most, "seconds": seconds}
        if self.db.execute(ADMIT, values).fetchone() is not None:
            return 0.0
        left = self.db.execute(WINDOW_LEFT, values).fetchone()
        return max(float(left[0]), 0.001) if left is not None else 0.001

    def advance_timer(self, timer: Timer, next_due: float | None) -> bool:
        where: tuple[Any, ...] = (timer.owner, timer.id, timer.due_at)
        sql = "DELETE FROM timer WHERE owner = %s AND id = %s AND due_at = %s RETURNING id"
        if next_due is not None:
            sql = "UPDATE timer SET due_at = %s WHERE owner = %s AND id = %s AND due_at = %s RETURNING id"
            where = (next_due, *where)
        return self.db.execute(sql, where).fetchone() is not None

    def add_token(self, name: str, owner: str, hash: str, rights: Iterable[str], agent: str) -> Token:
        """Store a new token by its hash."""
        rights = checked_fields(name, owner, rights, agent)
        values = (secrets.token_hex(6), hash, name, owner, joined_rights(rights), agent)
        new = self.db.execute(INSERT_TOKEN, values).fetchone()
        if new is None:
            raise name_taken(name)
        return Token(new[0], name, owner, new[1], rights=rights, agent=agent)

    def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        latest = {mark.digest: mark for mark in marks}.values()  # one statement may only change a row once
        columns = [[mark.digest for mark in latest], [mark.tainted for mark in latest], [mark.path for mark in latest]]
        self.db.execute(MARK_FILES, (owner, *columns))


# ---------------------------------------------------------------------------------------------- as a single statement


def accept_alone(db: Connection, call: Call, message: InboundMessage, kind: Kind) -> Incoming:
    if kind == "reply":  # its kind depends on the session's question
        raise MustTransact
    values = (message.owner, message.session_key, message.id, kind, claims.inbox_data(message, None))
    if message.id is None:
        ((kept,),) = call(STEP_ACCEPT, *values)
    else:  # repeated after a lost response, it is found by its id
        ((kept,),) = prepared.run(db, STEP_ACCEPT, (*NO_MARK, *values))
    if kept is None:
        raise MustTransact
    id, session = kept
    return Incoming(id, session, message, kind)


def begin_alone(
    db: Connection,
    call: Call,
    owner: str,
    key: str,
    worker: str,
    message: InboundMessage | None,
    kind: Kind,
    looked: Looked | None = None,
) -> Begun:
    """Start a new turn on a free session. The writing statement checks that nothing has changed since the look."""
    if looked is None:
        found = prepared.run(db, LOOK, (owner, key))
        if not found:
            raise MustTransact
        looked = Looked.of(found[0])
    state, now = looked.state, looked.state.now
    if state.holder not in (None, worker) or state.open_turn is not None or state.is_parked:
        raise MustTransact
    claim = state.claim(owner, key)
    inbox: tuple[Any, ...] = (state.waiting, owner, None, None)
    if message is not None:
        turn = state.new_turn(kind)
        if turn is None:
            raise MustTransact
        claim.turn, claim.message = turn, message
        inbox = (None, owner, message.id, claims.inbox_data(message, (turn, state.next_seq)))
    elif state.waiting is None:
        return Begun(None)
    elif claims.took(claim, state.waiting, looked.data, looked.kind) is not None or claim.command:
        raise MustTransact
    rows = claims.first_entry(claim, now) or LogRows([], [], [], None)
    values = (state.id, state.fence, worker, claim.turn, claim.first_seq, rows.at, rows.kinds, rows.texts, *inbox)
    ((kept,),) = call(STEP_BEGIN, *values)
    if kept is None:
        raise MustTransact
    claim.inbox = list(kept)
    claim.accepted = kept[0] if message is not None else None
    return Begun(claim)


def append_alone(db: Connection, call: Call, appended: Appended, flush: bool) -> None:
    if not appended.step.is_plain:
        raise MustTransact
    ((kept,),) = call(STEP_APPEND, flush, *appended.values())
    if kept is None:
        raise claims.stale(appended.claim)
    if kept == [LOST]:
        raise MustTransact


def finish_alone(db: Connection, call: Call, appended: Appended, values: Sequence[Any]) -> Finished:
    if not appended.step.is_plain:
        raise MustTransact
    ((kept,),) = call(STEP_FINISH, *values)
    if kept is None:
        raise claims.stale(appended.claim)
    if kept == [LOST]:
        raise MustTransact
    return Finished(kept[1:], kept[0] == MORE_TO_DO)


class TakenAlone(NamedTuple):
    rows: Sequence[Any]  # (id, data, turn, tries) as read by `claims.take_outgoing`
    ids: Sequence[int] = ()  # rows that were taken, but not received: the connection broke
    has_more: bool = False  # for a transaction: rows of an older version, or of a worker known here to be dead


def take_outgoing_alone(
    call: Call,
    worker: str,
    limit: int,
    chat: tuple[str, str] | None,
    channels: Sequence[str] | None,
    lease: float,
) -> TakenAlone:
    of, in_chat = claims.outbox_filter(chat, channels)
    found = call(STEP_TAKE, worker, limit, of, in_chat, lease)
    if found and len(found[0]) == 1:
        return TakenAlone((), found[0][0])
    others = [row for row in found if row[0] is None]
    has_more = any(unaddressed or gone(sender) for _, _, sender, _, unaddressed in others)
    return TakenAlone([row[:4] for row in found if row[0] is not None], has_more=has_more)
