"""What the writes have in common: a session's row and its lock, rows of the inbox and outbox, entries of the log.

Whoever decides something about a session holds its row (`FOR NO KEY UPDATE`) until the transaction ends; whoever only
appends to its log holds it shared, so that no lease changes hands in between. Putting a message into its inbox waits
for neither. What is read after the lock is read by a statement of its own: it must see what the one before has done.

Statements are sent one after another without waiting; to look at an answer is to wait for it and for all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...bus import InboundMessage, Kind
from ...errors import StaleLease
from ...log import Entry, encode_entry, kind_of
from ..base import Claim, Incoming, Spent
from ..outbox import Outbound
from ..transactions import incoming
from ..workers import gone

if TYPE_CHECKING:
    from .connecting import Asked, Connection

encode = msgspec.json.Encoder().encode
NOW = "extract(epoch FROM clock_timestamp())::float8"  # the database's clock: all workers have the same
ROW = "id, session, data, kind, state, turn, first_seq"  # of the inbox
# A worker lives while it renews its row. After the server was away, all have the same time to be heard of again.
FRESH = f"""coalesce(greatest(w.at, extract(epoch FROM pg_postmaster_start_time())) > {NOW} - %s, false)"""

NEW_SESSION = f"""INSERT INTO session (owner, key, created_at, updated_at) VALUES (%s, %s, {NOW}, {NOW})
    ON CONFLICT (owner, key) DO NOTHING RETURNING id"""
LOCK = """SELECT id, worker, fence, history_from, compacted, updated_at FROM session
    WHERE owner = %s AND key = %s FOR NO KEY UPDATE"""
INSERT_INBOX = f"""INSERT INTO inbox (owner, session, message_id, kind, data, at, turn, first_seq, state, opened)
    VALUES (%s, %s, %s, %s, %s, {NOW}, %s, %s, %s, %s)
    ON CONFLICT (owner, message_id) WHERE message_id IS NOT NULL DO NOTHING RETURNING id"""
APPEND = f"""WITH held AS (SELECT 1 FROM session WHERE id = %s AND fence = %s FOR SHARE)
    INSERT INTO entry (session, seq, turn, kind, data, at)
    SELECT %s, e.seq, %s, e.kind, e.data, coalesce(%s, {NOW})
    FROM held, unnest(%s::bigint[], %s::text[], %s::text[]) AS e (seq, kind, data) RETURNING seq"""
SEND = f"""INSERT INTO outbox (owner, session, turn, worker, tries, at, key, data, channel, chat_id)
    SELECT %s, %s, %s, %s, %s, {NOW}, %s, m.data, m.channel, m.chat_id
    FROM unnest(%s::text[], %s::text[], %s::text[]) WITH ORDINALITY AS m (data, channel, chat_id, n)
    ORDER BY m.n RETURNING id"""
SPEND = """INSERT INTO spent (owner, scope, tokens, cost) VALUES (%s, %s, %s, %s)
    ON CONFLICT (owner, scope) DO UPDATE
    SET tokens = spent.tokens + excluded.tokens, cost = spent.cost + excluded.cost"""
PAGES = {"new": "UPDATE session SET history_from = %s, compacted = 0 WHERE id = %s"}
PARKED = "SELECT 1 FROM inbox WHERE session = %s AND state <> 'done' AND state = 'parked' LIMIT 1"
REVOKE_GRANTS = "DELETE FROM session_grant g USING session s WHERE s.id = %s AND (g.owner, g.key) = (s.owner, s.key)"
PAGES["compacted"] = "UPDATE session SET compacted = %s WHERE id = %s"


class Locked(NamedTuple):
    """A session whose row is ours until the transaction ends."""

    id: int
    worker: str | None
    fence: int
    history_from: int
    compacted: int
    updated_at: float


class Rows(NamedTuple):
    """Entries on their way into a log."""

    seqs: list[int]
    kinds: list[str]
    data: list[str]
    at: float | None  # None for now


def rows_of(first: int, entries: Sequence[Entry], at: float | None = None) -> Rows:
    seqs = list(range(first, first + len(entries)))
    return Rows(seqs, [kind_of(entry) for entry in entries], [encode_entry(entry) for entry in entries], at)


def living(holder: str, fresh: bool) -> bool:
    """Whether the lease of a worker counts: it has been renewed, and it is not certain from here that it has ended."""
    return fresh and not gone(holder)


def locked(db: Connection, owner: str, key: str) -> Locked | None:
    row = db.execute(LOCK, (owner, key)).fetchone()
    return None if row is None else Locked(*row)


def locked_or_new(db: Connection, owner: str, key: str) -> Locked:
    """The session, made if it is not there yet."""
    while (found := locked(db, owner, key)) is None:
        db.execute(NEW_SESSION, (owner, key))
    return found


def session_of(db: Connection, owner: str, key: str) -> int:
    """The id of a session, made if it is not there yet; its row stays free."""
    while (row := db.execute("SELECT id FROM session WHERE owner = %s AND key = %s", (owner, key)).fetchone()) is None:
        db.execute(NEW_SESSION, (owner, key))
    return int(row[0])


def lives(db: Connection, worker: str | None, lease: float) -> bool:
    if worker is None:
        return False
    row = db.execute(f"SELECT {FRESH} FROM worker w WHERE id = %s", (lease, worker)).fetchone()
    return row is not None and living(worker, row[0])


def accept(
    db: Connection,
    message: InboundMessage,
    kind: Kind,
    session: int | None = None,
    opens: tuple[str, int] | None = None,
) -> Incoming:
    """Put a message into the inbox, unless one with its id is there.

    With `opens`, a turn and the place of its first entry, it is taken at once and opens that turn. A reply becomes an
    urgent message if a question is open in its session now, and an ordinary one otherwise.
    """
    session = session if session is not None else session_of(db, message.owner, message.session_key)
    if kind == "reply":
        kind = "urgent" if db.execute(PARKED, (session,)).fetchone() else "message"
    data = encode(message if opens is None else message.opened()).decode()
    turn, first_seq = opens if opens is not None else (None, None)
    values = (message.owner, session, message.id, kind, data, turn, first_seq, "taken" if turn else "new", bool(turn))
    new = db.execute(INSERT_INBOX, values).fetchone()
    if new is not None:
        return Incoming(new[0], session, message, kind, False, turn, first_seq)
    known = f"SELECT {ROW} FROM inbox WHERE owner = %s AND message_id = %s"
    row: Any = db.execute(known, (message.owner, message.id)).fetchone()
    return incoming(row)


def append(db: Connection, claim: Claim, rows: Rows) -> Asked:
    """Append to the log, which does nothing unless the claim's fence is the session's: `held` must be asked."""
    values = (claim.session, claim.fence, claim.session, claim.turn or None, rows.at, rows.seqs, rows.kinds, rows.data)
    return db.execute(APPEND, values)


def held(asked: Asked, claim: Claim) -> None:
    """Refuse what a worker does that has lost its lease, which then is undone."""
    if asked.fetchone() is None:
        raise stale(claim)


def turn_page(db: Connection, session: int, rows: Rows) -> None:
    """Keep in the session where its conversation begins and what of it is left out, as the entries say."""
    for seq, kind in zip(rows.seqs, rows.kinds, strict=True):
        if (sql := PAGES.get(kind)) is not None:
            db.execute(sql, (seq, session))
        if kind == "new":  # what was granted was granted for the conversation that ends here
            db.execute(REVOKE_GRANTS, (session,))


def insert_entries(db: Connection, session: int, turn: str | None, rows: Rows) -> None:
    """Add to the log of a session whose row is held."""
    db.execute(
        f"""INSERT INTO entry (session, seq, turn, kind, data, at)
            SELECT %s, e.seq, %s, e.kind, e.data, coalesce(%s, {NOW})
            FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS e (seq, kind, data)""",
        (session, turn, rows.at, rows.seqs, rows.kinds, rows.data),
    )


def spend(db: Connection, owner: str, spent: Sequence[Spent]) -> None:
    for one in sorted(spent, key=lambda one: one.scope):  # always in one order: two owners' writes never cross
        db.execute(SPEND, (owner, one.scope, one.tokens, one.cost))


def send(
    db: Connection,
    owner: str,
    session: int,
    turn: str | None,
    messages: Sequence[Outbound],
    sender: str | None,
    key: str | None = None,
) -> Asked | None:
    """Put encoded messages into the outbox; with a sender they count as tried once. Their numbers are asked for."""
    if not messages:
        return None
    columns = [list(column) for column in zip(*messages, strict=True)]
    return db.execute(SEND, (owner, session, turn, sender, 1 if sender else 0, key, *columns))


def numbers(asked: Asked | None) -> list[int]:
    return [] if asked is None else [row[0] for row in asked.fetchall()]


def stale(claim: Claim) -> StaleLease:
    return StaleLease(f"session {claim.key} was taken over by another worker; this one has stopped writing to it")
