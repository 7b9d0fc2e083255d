"""The writes of the PostgreSQL store.

Each function runs inside one transaction; those named `…_alone` are the same write as a single statement, which is a
transaction by itself, and raise `MustTransact` in all but the common case. A transaction that decides something about a
session locks its row (`FOR NO KEY UPDATE`); one that only appends to the log takes a shared lock, so that the lease
cannot change hands in between. Accepting a message waits for neither.

State is read by a separate statement after the lock, so that it sees what the previous holder has written. Statements
are pipelined: fetching a result waits for it and for all statements before it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from ...bus import InboundMessage, Kind, OutboundMessage
from ...log import CallsAsked, Compacted, Entry, decode_entry
from .. import claims
from ..base import Claim, FileMark, Finished, Incoming, Spent, Timer, Token
from ..claims import INBOX_COLUMNS, Begun, Damaged, Held, LogRows, Outbound, Parked, SessionState
from ..peers import gone
from ..tokens import checked_agent, checked_name, checked_owner, checked_rights, joined_rights, name_taken
from . import prepared
from .prepared import Call, MustTransact

if TYPE_CHECKING:
    from .connections import Connection, Result

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
PAGE_MARKS = {
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
GRANT = f"""INSERT INTO session_grant (owner, key, name, at) SELECT %s, %s, name, {NOW} FROM unnest(%s::text[]) name
    ON CONFLICT DO NOTHING"""
REVOKE_GRANTS = "DELETE FROM session_grant WHERE owner = %s AND key = %s"
REVOKE_GRANTS_OF = "DELETE FROM session_grant g USING session s WHERE s.id = %s AND (g.owner, g.key) = (s.owner, s.key)"


# ---------------------------------------------------------------------------------------------- sessions and inbox


class Locked(NamedTuple):
    """A session whose row is locked until the transaction ends."""

    id: int
    worker: str | None
    fence: int
    history_from: int
    compacted: int
    updated_at: float


def living(holder: str, fresh: bool) -> bool:
    """Return whether a worker's lease is valid: it was renewed, and the worker is not known to have ended."""
    return fresh and not gone(holder)


def is_alive(db: Connection, worker: str | None, lease: float) -> bool:
    if worker is None:
        return False
    row = db.execute(f"SELECT {FRESH} FROM worker w WHERE id = %s", (lease, worker)).fetchone()
    return row is not None and living(worker, row[0])


def _locked(db: Connection, owner: str, key: str) -> Locked | None:
    row = db.execute(LOCK, (owner, key)).fetchone()
    return None if row is None else Locked(*row)


def accept(
    db: Connection,
    message: InboundMessage,
    kind: Kind,
    session: int | None = None,
    opens: tuple[str, int] | None = None,
) -> Incoming:
    """Put a message into the inbox, unless its id is already there.

    With `opens`, a turn and the position of its first entry, it is taken at once and opens that turn.
    """
    session = session if session is not None else _session_id(db, message.owner, message.session_key)
    if kind == "reply":
        kind = claims.inbox_kind(kind, db.execute(PARKED, (session,)).fetchone() is not None)
    data = claims.inbox_data(message, opens)
    turn, first_seq = opens if opens is not None else (None, None)
    values = (message.owner, session, message.id, kind, data, turn, first_seq, "taken" if turn else "new", bool(turn))
    new = db.execute(INSERT_INBOX, values).fetchone()
    if new is not None:
        return Incoming(new[0], session, message, kind, False, turn, first_seq)
    known = f"SELECT {INBOX_COLUMNS} FROM inbox WHERE owner = %s AND message_id = %s"
    row: Any = db.execute(known, (message.owner, message.id)).fetchone()
    return _known(db, row, message)


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


def _known(db: Connection, row: Sequence[Any], message: InboundMessage) -> Incoming:
    """Return a message that was accepted before. If its row is damaged, it is repaired."""
    if not claims.readable([row])[1]:
        return claims.incoming(row)
    repaired: Any = db.execute(REPAIR, (claims.inbox_data(message, None), row[0])).fetchone()
    return replace(claims.incoming(row, message), done=repaired[0] == "done")


def set_aside(db: Connection, damaged: Iterable[Damaged]) -> list[Damaged]:
    """Remove pending rows that cannot be decoded from the inbox; return those that were there."""
    return [row for row in damaged if db.execute(SET_ASIDE, (row.why, row.id)).fetchone() is not None]


def _session_id(db: Connection, owner: str, key: str) -> int:
    """Return the id of a session, which is created if it does not exist. Its row is locked only against deletion."""
    found = "SELECT id FROM session WHERE owner = %s AND key = %s FOR KEY SHARE"
    while (row := db.execute(found, (owner, key)).fetchone()) is None:
        db.execute(NEW_SESSION, (owner, key))
    return int(row[0])


# ---------------------------------------------------------------------------------------------- turns


def begin(
    db: Connection,
    owner: str,
    key: str,
    worker: str,
    message: InboundMessage | None,
    kind: Kind,
    lease: float,
    renew: bool,
) -> Begun:
    """Take the lease of a session and its next work: an interrupted turn, else the oldest pending message.

    With `renew`, the worker's row is written first, because its heartbeat does not know it yet. Without a message, it
    does not wait for a transaction that has locked the session, but reports that the session is held.
    """
    found = _state(db, owner, key, lease) if message is not None else _state_if_free(db, owner, key, lease)
    if found is None or isinstance(found, Held):
        return Begun(found)
    session, (*row, fresh, now) = found
    is_held = session.worker is not None and session.worker != worker and living(session.worker, fresh)
    state = SessionState(is_held, now, *session, *row)
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
        *row, _, _ = db.execute(STATE, (lease, owner, key)).fetchone() or ()
        state = SessionState(is_held, now, *session, *row)
        claim = state.claim(owner, key, claim.accepted)
    if isinstance(work, Claim):
        if renew:
            db.execute(RENEW, (worker,))
        db.execute(HOLD, (worker, claim.fence, state.id))
    return Begun(work, damaged)


class Looked(NamedTuple):
    """The result of a look at a session."""

    state: SessionState
    data: str  # of the pending message, if there is one
    kind: Kind

    @classmethod
    def of(cls, row: Sequence[Any]) -> Looked:
        *facts, now, data, kind = row
        return cls(SessionState(False, now, *facts), data, kind)

    @property
    def is_ready(self) -> bool:
        state = self.state
        return (state.open_turn is not None or state.waiting is not None) and not state.is_parked


class LookedAt(NamedTuple):
    """One of several sessions that were looked at."""

    owner: str
    key: str
    is_fresh: bool  # its worker has renewed its lease
    has_urgent: bool
    looked: Looked

    @classmethod
    def of(cls, row: Sequence[Any]) -> LookedAt:
        owner, key, is_fresh, has_urgent, *looked = row
        return cls(owner, key, bool(is_fresh), bool(has_urgent), Looked.of(looked))


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
        looked = LookedAt.of(found[0]).looked
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


def _take_up(
    db: Connection, state: SessionState, claim: Claim, accepted: Incoming | None
) -> Claim | Held | Parked | Damaged | None:
    """Take up a session's next work, or set it aside if it is damaged."""
    match claims.next_work(state, claim, accepted):
        case Held() | Parked() | None as nothing:
            return nothing
        case claims.Resume(turn):
            rows = db.execute(OF_TURN, (state.id, turn)).fetchall()
            log = "SELECT data FROM entry WHERE session = %s AND seq >= %s ORDER BY seq"
            claim.entries = [decode_entry(data) for (data,) in db.execute(log, (state.id, rows[0][2])).fetchall()]
            if (damaged := claims.resumed(claim, turn, rows)) is not None:
                _abandon(db, claim, turn, damaged)
                return damaged
        case claims.Open():
            _open(db, claim, state.now)
        case claims.Take(waiting):
            taken: Any = db.execute("SELECT data, kind FROM inbox WHERE id = %s", (waiting,)).fetchone()
            if (damaged := claims.took(claim, waiting, *taken)) is not None:
                set_aside(db, [damaged])
                return damaged
            if not claim.command:
                db.execute(OPEN, (claim.turn, claim.first_seq, waiting))
                _open(db, claim, state.now)
    return claim


def _abandon(db: Connection, claim: Claim, turn: str, damaged: Damaged) -> None:
    """End an interrupted turn whose message is damaged. A turn without log entries leaves nothing in the log."""
    if claim.entries:
        _insert(db, claim.session, turn, claims.rows_from(claim.next_seq, claims.abandoned(claim.entries)))
    db.execute(ABANDON, (damaged.id, damaged.why, claim.session, turn))


def _state(db: Connection, owner: str, key: str, lease: float) -> tuple[Locked, Any]:
    """Lock the session, which is created if it does not exist, and read its state."""
    while True:
        row = db.execute(LOCK, (owner, key))
        state = db.execute(STATE, (lease, owner, key))
        if (found := row.fetchone()) is not None:
            return Locked(*found), state.fetchone()
        db.execute(NEW_SESSION, (owner, key))


def _state_if_free(db: Connection, owner: str, key: str, lease: float) -> tuple[Locked, Any] | Held | None:
    """Lock and read a session that exists and is not locked; None if it does not exist."""
    row = db.execute(f"{LOCK} SKIP LOCKED", (owner, key))
    state = db.execute(STATE, (lease, owner, key))
    if (found := row.fetchone()) is not None:
        return Locked(*found), state.fetchone()
    return Held("", None) if state.fetchone() is not None else None


def _open(db: Connection, claim: Claim, now: float) -> None:
    if (rows := claims.first_entry(claim, now)) is not None:
        _insert(db, claim.session, claim.turn, rows)


def _insert(db: Connection, session: int, turn: str | None, rows: LogRows) -> None:
    """Append to the log of a session whose row is locked."""
    db.execute(INSERT_ENTRIES, (session, turn, rows.at, rows.seqs, rows.kinds, rows.texts))
    _turn_pages(db, session, rows)


class TurnStep(NamedTuple):
    """The writes of one step of a turn: entries, the pending messages that they contain, and usage."""

    rows: LogRows
    took: Sequence[int]
    spent: Sequence[Spent]

    @property
    def is_plain(self) -> bool:
        """Return whether it changes nothing about the session itself."""
        return not any(True for _ in claims.page_marks(self.rows))

    def values(self, claim: Claim) -> tuple[Any, ...]:
        rows, spent = self.rows, self.spent
        return (
            *(claim.turn, claim.first_seq, rows.at, rows.seqs, rows.kinds, rows.texts, list(self.took), claim.owner),
            *([one.scope for one in spent], [one.tokens for one in spent], [one.cost for one in spent]),
        )


class Appended(NamedTuple):
    """A step of a turn, and the earlier ones that a crash of the database may have undone."""

    claim: Claim
    step: TurnStep
    before: Sequence[TurnStep]
    next_seq: int  # position of the step's first entry

    @classmethod
    def of(cls, claim: Claim, entries: Sequence[Entry], took: Sequence[int], flush: bool = True) -> Appended:
        """Assign the claim's next positions to these entries. With `flush`, no earlier steps need be kept."""
        claim.inbox += took
        first, rows = claim.next_seq, claims.rows_of(claim, entries)
        spent, claim.spent = claim.spent, []
        step, before = TurnStep(rows, took, spent), tuple(claim.unflushed)
        claim.unflushed = [] if flush else [*before, step]
        return cls(claim, step, before, first)

    def values(self) -> tuple[Any, ...]:
        claim = self.claim
        return (claim.session, claim.fence, self.next_seq - 1, *self.step.values(claim))


def _restore(db: Connection, appended: Appended) -> None:
    """Rewrite the steps that are missing in the log.

    The database has crashed and undone unflushed writes, but the worker that holds the session is alive and has them.
    """
    claim = appended.claim
    held = "SELECT 1 FROM session WHERE id = %s AND fence = %s FOR NO KEY UPDATE"
    _check(db.execute(held, (claim.session, claim.fence)), claim)
    row: Any = db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = %s", (claim.session,)).fetchone()
    last = int(row[0])
    for step in appended.before:
        if step.rows.seqs[0] == last + 1:
            db.execute(WRITE, (claim.session, *step.values(claim)))
            _turn_pages(db, claim.session, step.rows)
            last = step.rows.seqs[-1]
    if last != appended.next_seq - 1:
        raise claims.incomplete(claim, last)


def _check(result: Result, claim: Claim) -> None:
    """Refuse the writes of a worker that has lost its lease; the transaction is rolled back."""
    if result.fetchone() is None:
        raise claims.stale(claim)


def append_alone(db: Connection, call: Call, appended: Appended, flush: bool) -> None:
    if not appended.step.is_plain:
        raise MustTransact
    ((kept,),) = call(STEP_APPEND, flush, *appended.values())
    if kept is None:
        raise claims.stale(appended.claim)
    if kept == [LOST]:
        raise MustTransact


def append(db: Connection, appended: Appended) -> None:
    """Append entries, and take the pending messages that they contain."""
    _kept(db, STEP_APPEND, (*NO_MARK, True, *appended.values()), appended)
    _turn_pages(db, appended.claim.session, appended.step.rows)


def _kept(db: Connection, query: str, values: Sequence[Any], appended: Appended) -> list[int]:
    """Run a step inside a transaction; if earlier steps are missing from the log, restore them first."""
    for _ in range(2):
        row: Any = db.execute(query, values).fetchone()
        if row[0] is None:
            raise claims.stale(appended.claim)
        if row[0] != [LOST]:
            break
        _restore(db, appended)
    return list(row[0])


def _turn_pages(db: Connection, session: int, rows: LogRows) -> None:
    """Record in the session's row where its conversation starts and how it is compacted."""
    for kind, seq in claims.page_marks(rows):
        db.execute(PAGE_MARKS[kind], (seq, session))
        if kind == "new":  # grants were for the conversation that ends here
            db.execute(REVOKE_GRANTS_OF, (session,))


def finish_values(
    appended: Appended, entries: Sequence[Entry], outgoing: Sequence[OutboundMessage], sender: str | None
) -> tuple[Any, ...]:
    """Return the values of STEP_FINISH after its mark."""
    columns = [list(column) for column in zip(*claims.encoded_outgoing(outgoing), strict=True)] or [[], [], []]
    return (*appended.values(), appended.claim.inbox, claims.end_reason(entries), sender, *columns)


def finish_alone(db: Connection, call: Call, appended: Appended, values: Sequence[Any]) -> Finished:
    if not appended.step.is_plain:
        raise MustTransact
    ((kept,),) = call(STEP_FINISH, *values)
    if kept is None:
        raise claims.stale(appended.claim)
    if kept == [LOST]:
        raise MustTransact
    return Finished(kept[1:], kept[0] == MORE_TO_DO)


def finish(
    db: Connection, appended: Appended, values: Sequence[Any], incoming: Sequence[InboundMessage] = ()
) -> Finished:
    """End a turn or a command: write everything that it leaves behind, or nothing."""
    claim = appended.claim
    more, *sent = _kept(db, STEP_FINISH, (*NO_MARK, *values), appended)
    _turn_pages(db, claim.session, appended.step.rows)
    for message in incoming:
        accept(db, message, "message")
    if incoming:
        row: Any = db.execute(MORE, (claim.session,)).fetchone()
        more = MORE_TO_DO if row[0] else 1
    return Finished(sent, more == MORE_TO_DO)


def park(db: Connection, appended: Appended, outgoing: Sequence[OutboundMessage], sender: str | None) -> Finished:
    """Park a turn in the store until a person has answered."""
    claim, messages = appended.claim, claims.encoded_outgoing(outgoing)
    _check(db.execute(RELEASE, (claim.session, claim.fence)), claim)
    append(db, appended)
    db.execute("UPDATE inbox SET state = 'parked' WHERE id = ANY(%s)", (claim.inbox,))
    sent = _send(db, claim.owner, claim.session, claim.turn, messages, sender)
    return Finished(_ids(sent), more=False)


def decide(
    db: Connection,
    owner: str,
    key: str,
    allowed: bool | None,
    by: str,
    note: str,
    word: Incoming | InboundMessage | None,
    always: bool = False,
) -> tuple[int, CallsAsked | None] | None:
    """Write a person's answer to the log of the parked turn, with its grants, and reopen the turn."""
    session = _locked(db, owner, key)
    row = None if session is None else db.execute(PARKED, (session.id,)).fetchone()
    if session is None or row is None:
        return None
    id, turn, first_seq = row
    if isinstance(word, InboundMessage):
        word = accept(db, word, "urgent", session.id) if word.id is not None else None
    answer = None
    if word is not None:
        sql = "SELECT state, first_seq, at FROM inbox WHERE id = %s FOR NO KEY UPDATE"
        answer = db.execute(sql, (word.id,)).fetchone()
    log = "SELECT seq, data, at FROM entry WHERE session = %s AND seq >= %s ORDER BY seq"
    entries = db.execute(log, (session.id, first_seq)).fetchall()
    decision = claims.decision(entries, answer, allowed, by, note, always)
    if decision is None:
        return None
    if decision.rows is not None:
        _insert(db, session.id, turn, decision.rows)
        if decision.granted:
            db.execute(GRANT, (owner, key, list(decision.granted)))
        if word is not None:
            db.execute("UPDATE inbox SET first_seq = %s WHERE id = %s", (decision.rows.seqs[0], word.id))
    # Raise the fence: the worker that parked the turn can no longer write to it.
    db.execute("UPDATE session SET fence = fence + 1 WHERE id = %s", (session.id,))
    db.execute(
        "UPDATE inbox SET state = 'taken' WHERE session = %s AND state <> 'done' AND state = 'parked'", (session.id,)
    )
    return id, decision.asked


def note(db: Connection, owner: str, key: str, entries: Sequence[Entry], lease: float) -> int | Held:
    while (session := _locked(db, owner, key)) is None:
        db.execute(NEW_SESSION, (owner, key))
    if session.worker is not None and is_alive(db, session.worker, lease):
        return Held(session.worker, None)
    if db.execute(OPEN_TURN, (session.id,)).fetchone():
        return Held(claims.INTERRUPTED, None)
    row: Any = db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = %s", (session.id,)).fetchone()
    _insert(db, session.id, None, claims.rows_from(row[0] + 1, entries))
    db.execute(f"UPDATE session SET updated_at = {NOW} WHERE id = %s", (session.id,))
    return int(row[0]) + len(entries)


def compact(db: Connection, owner: str, key: str, entry: Compacted, lease: float) -> bool:
    """Append a compaction, if the session is idle and still shows what the compaction builds on."""
    session = _locked(db, owner, key)
    if session is None or not claims.builds_on(entry, session.history_from, session.compacted):
        return False
    return not isinstance(note(db, owner, key, [entry], lease), Held)


def fork(db: Connection, owner: str, key: str, until: int | None, new_key: str) -> None:
    """Copy the log up to a position to a new session."""
    if (source := _locked(db, owner, key)) is None:
        raise claims.no_session(key)
    log = "SELECT seq, turn, kind, data, at FROM entry WHERE session = %s AND seq <= %s ORDER BY seq"
    rows = db.execute(log, (source.id, until if until is not None else 2**62)).fetchall()
    new = db.execute(NEW_SESSION, (owner, new_key)).fetchone()
    if new is None:
        raise claims.session_exists(new_key)
    claims.check_fork(rows, key, until)
    copy = claims.fork_of(rows, owner, new_key)
    db.execute(COPY_ENTRIES, (new[0], *(list(column) for column in zip(*copy.rows, strict=True))))
    if copy.message is not None:
        accept(db, copy.message, "message", new[0], copy.opens)
    shown = "UPDATE session SET history_from = %s, compacted = %s WHERE id = %s"
    db.execute(shown, (copy.history_from, copy.compacted, new[0]))


# ---------------------------------------------------------------------------------------------- outbox


def _send(
    db: Connection,
    owner: str,
    session: int,
    turn: str | None,
    messages: Sequence[Outbound],
    sender: str | None,
    key: str | None = None,
) -> Result | None:
    """Put messages into the outbox; with a sender, they count as tried once. `_ids` reads their ids."""
    if not messages:
        return None
    columns = [list(column) for column in zip(*messages, strict=True)]
    return db.execute(SEND, (owner, session, turn, sender, 1 if sender else 0, key, *columns))


def _ids(result: Result | None) -> list[int]:
    return [] if result is None else [row[0] for row in result.fetchall()]


def post(db: Connection, claim: Claim, message: Outbound, key: str, sender: str | None) -> int | None:
    """Put a message of a running turn into the outbox, once per idempotency key."""
    held = db.execute("SELECT 1 FROM session WHERE id = %s AND fence = %s FOR SHARE", (claim.session, claim.fence))
    known = db.execute("SELECT 1 FROM outbox WHERE owner = %s AND key = %s", (claim.owner, key))
    _check(held, claim)
    if known.fetchone() is not None:
        return None
    return _ids(_send(db, claim.owner, claim.session, claim.turn, [message], sender, key))[0]


def answer(
    db: Connection, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None
) -> list[int]:
    messages = claims.encoded_outgoing(outgoing)
    if isinstance(row, InboundMessage):
        row = accept(db, row, "urgent")
    done = "UPDATE inbox SET state = 'done' WHERE id = %s AND state = 'new' RETURNING id"
    if row.done or db.execute(done, (row.id,)).fetchone() is None:
        return []
    return _ids(_send(db, row.message.owner, row.session, None, messages, sender))


def take_outgoing(
    db: Connection,
    worker: str,
    limit: int,
    chat: tuple[str, str] | None,
    channels: Sequence[str] | None,
    lease: float,
    known: Sequence[tuple[int, str]] = (),
) -> claims.Taken:
    """Take rows that no live worker is sending, and set aside those that turn out to be damaged.

    Two workers that do so concurrently get different rows. Only rows to be taken are locked: another worker that looks
    at the same time skips locked rows.
    """
    taken = claims.Taken()
    _set_aside(db, known)
    db.execute("UPDATE outbox SET worker = NULL, tries = tries - 1 WHERE id = ANY(%s)", ([id for id, _ in known],))
    unaddressed = db.execute(UNADDRESSED)
    senders = db.execute(SENDERS, (lease,)).fetchall()
    for id, channel, chat_id in claims.missing_addresses(unaddressed.fetchall(), taken):
        db.execute("UPDATE outbox SET channel = %s, chat_id = %s WHERE id = %s", (channel, chat_id, id))
    _set_aside(db, taken.damaged)
    # Exclude the dead ones, rather than all but the live ones: a worker unknown a moment ago may have taken rows since.
    dead = [id for id, fresh in senders if id != worker and not living(id, fresh)]
    names = [chat[0]] if chat is not None else channels
    of = None if names is None else [claims.outbox_column(name) for name in names]
    in_chat = None if chat is None else claims.outbox_column(chat[1])
    while len(taken.rows) < limit:
        wanted, before, damaged = limit - len(taken.rows), len(taken.rows), len(taken.damaged)
        rows = db.execute(UNSENT, (dead, of, of, in_chat, in_chat, wanted)).fetchall()
        claims.take_outgoing(rows, limit, taken)
        _set_aside(db, taken.damaged[damaged:])
        ids = [row.id for row in taken.rows[before:]]
        db.execute("UPDATE outbox SET worker = %s, tries = tries + 1 WHERE id = ANY(%s)", (worker, ids))
        if len(rows) < wanted:
            break
    return taken


def keep_outgoing(db: Connection, id: int, worker: str) -> bool:
    """Renew a worker's lease, which may have expired, and keep a row that no other worker has taken in the meantime."""
    db.execute(RENEW, (worker,))
    held = "SELECT 1 FROM outbox WHERE id = %s AND worker = %s AND sent_at IS NULL FOR UPDATE"
    return db.execute(held, (id, worker)).fetchone() is not None


class TakenAlone(NamedTuple):
    rows: Sequence[Any]  # (id, data, turn, tries) as read by `claims.take_outgoing`
    ids: Sequence[int] = ()  # rows that were taken, but not received: the connection broke
    has_more: bool = False  # for a transaction: rows of an older version, or of a worker known here to be dead


TAKEN = "SELECT id, data, turn, tries - 1 FROM outbox WHERE id = ANY(%s) ORDER BY id"


def take_outgoing_alone(
    call: Call,
    worker: str,
    limit: int,
    chat: tuple[str, str] | None,
    channels: Sequence[str] | None,
    lease: float,
) -> TakenAlone:
    names = [chat[0]] if chat is not None else channels
    of = None if names is None else [claims.outbox_column(name) for name in names]
    in_chat = None if chat is None else claims.outbox_column(chat[1])
    found = call(STEP_TAKE, worker, limit, of, in_chat, lease)
    if found and len(found[0]) == 1:
        return TakenAlone((), found[0][0])
    others = [row for row in found if row[0] is None]
    has_more = any(unaddressed or gone(sender) for _, _, sender, _, unaddressed in others)
    return TakenAlone([row[:4] for row in found if row[0] is not None], has_more=has_more)


def _set_aside(db: Connection, damaged: Sequence[tuple[int, str]]) -> None:
    for id, why in damaged:
        db.execute("UPDATE outbox SET damaged = %s WHERE id = %s", (why, id))


# ---------------------------------------------------------------------------------------------- channels


def hold(db: Connection, name: str, worker: str, lease: float) -> bool:
    new = "INSERT INTO channel_lease (name, worker) VALUES (%s, %s) ON CONFLICT DO NOTHING"
    db.execute(new, (name, worker))
    row = db.execute("SELECT worker FROM channel_lease WHERE name = %s FOR UPDATE", (name,)).fetchone()
    if row is not None and row[0] != worker and is_alive(db, row[0], lease):
        return False
    db.execute("UPDATE channel_lease SET worker = %s WHERE name = %s", (worker, name))
    db.execute(RENEW, (worker,))
    return True


# ---------------------------------------------------------------------------------------------- everything else


def spend(db: Connection, owner: str, spent: Sequence[Spent]) -> None:
    for one in sorted(
        spent, key=lambda one: one.scope
    ):  # always in the same order, so that no two transactions deadlock
        db.execute(SPEND, (owner, one.scope, one.tokens, one.cost))


def admit(db: Connection, owner: str, name: str, most: int, seconds: float) -> float:
    """Count one event if the limit allows it; otherwise return the seconds until it does."""
    values = {"owner": owner, "name": name, "most": most, "seconds": seconds}
    if db.execute(ADMIT, values).fetchone() is not None:
        return 0.0
    left = db.execute(WINDOW_LEFT, values).fetchone()
    return max(float(left[0]), 0.001) if left is not None else 0.001


def fire_timer(db: Connection, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
    where: tuple[Any, ...] = (timer.owner, timer.id, timer.due_at)
    sql = "DELETE FROM timer WHERE owner = %s AND id = %s AND due_at = %s RETURNING id"
    if next_due is not None:
        sql = "UPDATE timer SET due_at = %s WHERE owner = %s AND id = %s AND due_at = %s RETURNING id"
        where = (next_due, *where)
    if db.execute(sql, where).fetchone() is None:
        return False
    accept(db, message, "message")
    return True


def add_token(db: Connection, name: str, owner: str, hash: str, rights: Iterable[str], agent: str) -> Token:
    """Store a new token by its hash."""
    checked_name(name)
    checked_owner(owner)
    rights = checked_rights(rights)
    checked_agent(agent)
    new = db.execute(
        f"""INSERT INTO token (id, hash, name, owner, rights, agent, created_at) VALUES (%s, %s, %s, %s, %s, %s, {NOW})
            ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING RETURNING id, created_at""",
        (secrets.token_hex(6), hash, name, owner, joined_rights(rights), agent),
    ).fetchone()
    if new is None:
        raise name_taken(name)
    return Token(new[0], name, owner, new[1], rights=rights, agent=agent)


def mark_files(db: Connection, owner: str, marks: Sequence[FileMark]) -> None:
    latest = {mark.digest: mark for mark in marks}.values()  # one statement may only change a row once
    columns = [[mark.digest for mark in latest], [mark.tainted for mark in latest], [mark.path for mark in latest]]
    db.execute(MARK_FILES, (owner, *columns))
