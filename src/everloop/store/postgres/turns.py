"""Turns in PostgreSQL: how they begin, go on, wait for a person's word, and end. Each function is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...bus import InboundMessage, Kind, OutboundMessage
from ...log import CallsAsked, Entry, TurnEnded, decode_entry
from ..base import Claim, Finished, Incoming, Spent, new_turn_id
from ..outbox import Outbound, encoded
from ..transactions import Behind, Held, decode_inbound
from .reading import GRANT
from .rows import (
    FRESH,
    LOCK,
    NEW_SESSION,
    NOW,
    Locked,
    Rows,
    accept,
    append,
    held,
    insert_entries,
    living,
    locked,
    numbers,
    rows_of,
    send,
    spend,
    turn_page,
)

if TYPE_CHECKING:
    from .connecting import Asked, Connection

# What a session does next, looked at while its row is held.
STATE = f"""SELECT
        (SELECT at FROM entry WHERE session = s.id AND seq = s.history_from + 1),
        (SELECT coalesce(max(seq), 0) + 1 FROM entry WHERE session = s.id),
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'taken' LIMIT 1),
        (SELECT id FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'new' AND kind <> 'urgent'
            ORDER BY id LIMIT 1),
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked'),
        {FRESH}, {NOW}
    FROM session s LEFT JOIN worker w ON w.id = s.worker WHERE s.owner = %s AND s.key = %s"""
RENEW = f"""INSERT INTO worker (id, at) VALUES (%s, {NOW}) ON CONFLICT (id) DO UPDATE SET at = excluded.at"""
HOLD = f"UPDATE session SET worker = %s, fence = %s, updated_at = {NOW} WHERE id = %s"
LET_GO = f"UPDATE session SET worker = NULL, updated_at = {NOW} WHERE id = %s AND fence = %s RETURNING id"
TAKE = "UPDATE inbox SET state = 'taken', turn = %s, first_seq = %s WHERE id = ANY(%s)"
OPEN = "UPDATE inbox SET state = 'taken', turn = %s, first_seq = %s, opened = true WHERE id = %s"
DONE = f"UPDATE inbox SET state = 'done', ended_at = {NOW}, reason = %s WHERE id = ANY(%s) AND coalesce(turn, '') = %s"
MORE = "SELECT EXISTS (SELECT 1 FROM inbox WHERE session = %s AND state <> 'done' AND kind <> 'urgent')"
OF_TURN = """SELECT id, data, first_seq FROM inbox WHERE session = %s AND state <> 'done' AND turn = %s
    ORDER BY opened DESC, id"""
LOG = "SELECT data FROM entry WHERE session = %s AND seq >= %s ORDER BY seq"
PARKED = """SELECT id, turn, first_seq FROM inbox WHERE session = %s AND state <> 'done' AND state = 'parked'
    ORDER BY opened DESC LIMIT 1"""


def begin(
    db: Connection,
    owner: str,
    key: str,
    worker: str,
    message: InboundMessage | None,
    kind: Kind,
    lease: float,
    renew: bool,
) -> Claim | Held | Behind | None:
    """Take the lease and the next work of a session: a turn that was cut off, else the oldest waiting message.

    With `renew`, the worker is not known to renew its leases yet, and its row is made first. Without a message it waits
    for nobody who has the session's row just now, and says that it is held, by whoever that is.
    """
    found = _look(db, owner, key, lease) if message is not None else _glance(db, owner, key, lease)
    if found is None or isinstance(found, Held):
        return found
    session, (began, next_seq, turn, waiting, parked, fresh, now) = found
    claim = Claim(owner, session.id, key, session.fence + 1, "", session.history_from, next_seq, next_seq)
    claim.compacted, claim.idle_since, claim.began = session.compacted, session.updated_at, began or now
    holder = session.worker
    others = holder is not None and holder != worker and living(holder, fresh)
    if message is not None:
        first = not others and not parked and turn is None and waiting is None and kind == "message"
        new_turn = new_turn_id() if first else None  # with nothing before it, it becomes a turn as it comes in
        accepted = accept(db, message, kind, session.id, (new_turn, next_seq) if new_turn else None)
        claim.accepted = accepted.id
        if new_turn is not None and accepted.turn == new_turn:
            claim.turn, claim.inbox, claim.message = new_turn, [accepted.id], message
        elif waiting is None and accepted.session == session.id and not accepted.done and accepted.kind != "urgent":
            waiting = accepted.id
    if others:
        assert holder is not None
        return Held(holder, claim.accepted)
    if parked:
        return Behind(claim.accepted)
    if turn is not None:
        _resume(db, claim, turn)
    elif claim.turn:
        _open(db, claim, now)
    elif waiting is None:
        return None
    else:
        _take(db, claim, waiting, now)
    if renew:
        db.execute(RENEW, (worker,))
    db.execute(HOLD, (worker, claim.fence, session.id))
    return claim


def _look(db: Connection, owner: str, key: str, lease: float) -> tuple[Locked, Any]:
    """The session's row, made if it is not there and held from now on, and what it has to do."""
    while True:
        row = db.execute(LOCK, (owner, key))
        state = db.execute(STATE, (lease, owner, key))
        if (found := row.fetchone()) is not None:
            return Locked(*found), state.fetchone()
        db.execute(NEW_SESSION, (owner, key))


def _glance(db: Connection, owner: str, key: str, lease: float) -> tuple[Locked, Any] | Held | None:
    """The same for a session that is there and whose row is free; None when there is none."""
    row = db.execute(f"{LOCK} SKIP LOCKED", (owner, key))
    state = db.execute(STATE, (lease, owner, key))
    if (found := row.fetchone()) is not None:
        return Locked(*found), state.fetchone()
    return Held("", None) if state.fetchone() is not None else None


def _resume(db: Connection, claim: Claim, turn: str) -> None:
    """Take up a turn that was cut off."""
    claim.turn, claim.resumed = turn, True
    rows = db.execute(OF_TURN, (claim.session, turn)).fetchall()
    claim.inbox = [row[0] for row in rows]
    claim.message, claim.first_seq = decode_inbound(rows[0][1]), rows[0][2]
    claim.entries = [decode_entry(data) for (data,) in db.execute(LOG, (claim.session, claim.first_seq)).fetchall()]


def _take(db: Connection, claim: Claim, waiting: int, now: float) -> None:
    """Take the oldest waiting message: a command as it is, any other as a new turn."""
    row = db.execute("SELECT data, kind FROM inbox WHERE id = %s", (waiting,)).fetchone()
    assert row is not None
    claim.inbox, claim.message, claim.command = [waiting], decode_inbound(row[0]), row[1] == "command"
    if not claim.command:  # a command is answered in the transaction that marks it done, so it needs no turn
        claim.turn = new_turn_id()
        db.execute(OPEN, (claim.turn, claim.first_seq, waiting))
        _open(db, claim, now)


def _open(db: Connection, claim: Claim, now: float) -> None:
    """Begin the turn of the claim's message."""
    if claim.message.plain:  # attachments and the like are read by the loop, which then writes the first entry
        at = claim.began if claim.next_seq == claim.history_from + 1 else now
        said = claim.message.said(now=claim.time_to_tell(at))
        insert_entries(db, claim.session, claim.turn, rows_of(claim.next_seq, [said], at))
        claim.next_seq += 1
        claim.entries = [said]


def append_taking(
    db: Connection, claim: Claim, rows: Rows, took: Sequence[int] = (), spent: Sequence[Spent] = ()
) -> None:
    """Append entries, with the waiting messages that they hold and what they change in what is shown."""
    ours = _added(db, claim, rows, took, spent)
    if ours is not None:
        held(ours, claim)


def _added(db: Connection, claim: Claim, rows: Rows, took: Sequence[int], spent: Sequence[Spent]) -> Asked | None:
    added = append(db, claim, rows) if rows.seqs else None  # a command may leave nothing in the log
    spend(db, claim.owner, spent)
    turn_page(db, claim.session, rows)
    if took:
        db.execute(TAKE, (claim.turn, claim.first_seq, list(took)))
    return added


def finish(
    db: Connection,
    claim: Claim,
    rows: Rows,
    entries: Sequence[Entry],
    took: Sequence[int],
    outgoing: Sequence[OutboundMessage],
    sender: str | None,
    incoming: Sequence[InboundMessage] = (),
    spent: Sequence[Spent] = (),
) -> Finished:
    """The end of a turn or of a command: everything it leaves behind, or nothing."""
    messages = encoded(outgoing)
    given_back = db.execute(LET_GO, (claim.session, claim.fence))
    _added(db, claim, rows, took, spent)
    reason = next((entry.reason for entry in entries if isinstance(entry, TurnEnded)), None)
    # But for what was to be taken by a write that failed: it is not in the log.
    db.execute(DONE, (reason, claim.inbox, claim.turn))
    sent = send(db, claim.owner, claim.session, claim.turn or None, messages, sender)
    for message in incoming:
        accept(db, message, "message")
    more = db.execute(MORE, (claim.session,))
    held(given_back, claim)
    row = more.fetchone()
    return Finished(numbers(sent), bool(row and row[0]))


def park(
    db: Connection,
    claim: Claim,
    rows: Rows,
    took: Sequence[int],
    outgoing: Sequence[OutboundMessage],
    sender: str | None,
    spent: Sequence[Spent],
) -> Finished:
    """Leave a turn in the store until a person has answered."""
    messages = encoded(outgoing)
    given_back = db.execute(LET_GO, (claim.session, claim.fence))
    _added(db, claim, rows, took, spent)
    db.execute("UPDATE inbox SET state = 'parked' WHERE id = ANY(%s)", (claim.inbox,))
    sent = send(db, claim.owner, claim.session, claim.turn, messages, sender)
    held(given_back, claim)
    return Finished(numbers(sent), more=False)


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
    """Write a person's answer into the log of the parked turn, with what it grants, and open the turn again."""
    session = locked(db, owner, key)
    row = None if session is None else db.execute(PARKED, (session.id,)).fetchone()
    if session is None or row is None:
        return None
    id, turn, first_seq = row
    if isinstance(word, InboundMessage):
        word = accept(db, word, "urgent", session.id) if word.id is not None else None
    log = db.execute(
        "SELECT seq, data, at FROM entry WHERE session = %s AND seq >= %s ORDER BY seq", (session.id, first_seq)
    ).fetchall()
    entries = [(seq, decode_entry(data), at) for seq, data, at in log]
    asked, since = next(((entry, at) for _, entry, at in reversed(entries) if isinstance(entry, CallsAsked)), (None, 0))
    if word is not None and not _may_answer(db, word.id, since):
        return None
    if allowed is not None and asked is not None:
        decided, granted = asked.decided(allowed, by, note, always)
        seq = entries[-1][0] + 1
        insert_entries(db, session.id, turn, rows_of(seq, [decided]))
        if granted:
            db.execute(GRANT, (owner, key, list(granted)))
        if word is not None:  # delivered once more, it must not answer a question that the person has not seen
            db.execute("UPDATE inbox SET first_seq = %s WHERE id = %s", (seq, word.id))
    # A higher fence: whoever parked the turn and is still about can write no more to it.
    db.execute("UPDATE session SET fence = fence + 1 WHERE id = %s", (session.id,))
    db.execute(
        "UPDATE inbox SET state = 'taken' WHERE session = %s AND state <> 'done' AND state = 'parked'", (session.id,)
    )
    return id, asked


def _may_answer(db: Connection, id: int, since: float) -> bool:
    """Whether a message may be about a question: it came after it, and has answered no other."""
    row = db.execute("SELECT state, first_seq, at FROM inbox WHERE id = %s FOR NO KEY UPDATE", (id,)).fetchone()
    assert row is not None
    state, first_seq, at = row
    return bool(state == "new" and first_seq is None and at >= since)


def post(db: Connection, claim: Claim, message: Outbound, key: str, sender: str | None) -> int | None:
    """Put a message of a running turn into the outbox, once for each key."""
    ours = db.execute("SELECT 1 FROM session WHERE id = %s AND fence = %s FOR SHARE", (claim.session, claim.fence))
    known = db.execute("SELECT 1 FROM outbox WHERE owner = %s AND key = %s", (claim.owner, key))
    held(ours, claim)
    if known.fetchone() is not None:
        return None
    return numbers(send(db, claim.owner, claim.session, claim.turn, [message], sender, key))[0]
