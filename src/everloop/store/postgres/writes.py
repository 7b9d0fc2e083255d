"""Writes to PostgreSQL from outside a turn: notes, forks, urgent answers, the outbox, timers, tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...bus import InboundMessage, OutboundMessage
from ...errors import EverloopError, StoreError
from ...log import Cleared, Compacted, Entry, decode_entry, encode_entry, open_turn
from .. import outbox
from ..base import Incoming, Timer, Token, new_turn_id
from ..forks import granted
from ..tokens import checked_name, checked_owner, checked_rights, joined_rights
from ..transactions import Held
from .rows import (
    FRESH,
    NEW_SESSION,
    NOW,
    accept,
    insert_entries,
    lives,
    living,
    locked,
    locked_or_new,
    numbers,
    rows_of,
    send,
    turn_page,
)

if TYPE_CHECKING:
    from .connecting import Connection

OPEN_TURN = "SELECT 1 FROM inbox WHERE session = %s AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1"
SENDERS = f"""SELECT o.worker, {FRESH}
    FROM (SELECT DISTINCT worker FROM outbox WHERE sent_at IS NULL AND worker IS NOT NULL) AS o
    LEFT JOIN worker w ON w.id = o.worker"""
UNADDRESSED = "SELECT id, data FROM outbox WHERE sent_at IS NULL AND channel IS NULL AND damaged IS NULL FOR UPDATE"
UNSENT = """SELECT id, data, turn, tries FROM outbox
    WHERE sent_at IS NULL AND damaged IS NULL AND (worker IS NULL OR worker = ANY(%s))
        AND (%s::text[] IS NULL OR channel = ANY(%s)) AND (%s::text IS NULL OR chat_id = %s)
    ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"""


def note(db: Connection, owner: str, key: str, entries: Sequence[Entry], lease: float) -> int | Held:
    session = locked_or_new(db, owner, key)
    if session.worker is not None and lives(db, session.worker, lease):
        return Held(session.worker, None)
    if db.execute(OPEN_TURN, (session.id,)).fetchone():
        return Held("a turn that was cut off and goes on at the next start", None)
    last = db.execute("SELECT coalesce(max(seq), 0) FROM entry WHERE session = %s", (session.id,)).fetchone()
    assert last is not None
    rows = rows_of(last[0] + 1, entries)
    insert_entries(db, session.id, None, rows)
    turn_page(db, session.id, rows)
    db.execute(f"UPDATE session SET updated_at = {NOW} WHERE id = %s", (session.id,))
    return int(last[0]) + len(entries)


def compact(db: Connection, owner: str, key: str, entry: Compacted, lease: float) -> bool:
    """Append it, if the session is idle and what it builds on is still what is shown."""
    session = locked(db, owner, key)
    if session is None or entry.until < session.history_from or entry.follows != session.compacted:
        return False
    return not isinstance(note(db, owner, key, [entry], lease), Held)


def fork(db: Connection, owner: str, key: str, until: int | None, new_key: str) -> None:
    """Copy the log up to a point into a new session. A turn that was under way there is open in the copy."""
    source = locked(db, owner, key)
    if source is None:
        raise StoreError(f'there is no session "{key}": `everloop sessions` lists them')
    rows = db.execute(
        "SELECT seq, turn, kind, data, at FROM entry WHERE session = %s AND seq <= %s ORDER BY seq",
        (source.id, until if until is not None else 2**62),
    ).fetchall()
    made = db.execute(NEW_SESSION, (owner, new_key)).fetchone()
    if made is None:
        raise StoreError(f'the session "{new_key}" exists already: choose another name')
    if not rows or (until is not None and rows[-1][0] != until):
        last = rows[-1][0] if rows else 0
        raise StoreError(f'the session "{key}" has no entry {until}: its log ends at {last}')
    _copy(db, owner, new_key, made[0], rows)


def _copy(db: Connection, owner: str, new_key: str, new: int, rows: list[Any]) -> None:
    entries = [decode_entry(data) for _, _, _, data, _ in rows]
    under_way = len(open_turn(entries))
    turn = new_turn_id() if under_way else None
    left_out = granted(entries, under_way)
    history_from = compacted = 0
    copies = []
    for n, (seq, old_turn, kind, data, at) in enumerate(rows):
        entry = entries[n]
        if isinstance(entry, Cleared):
            history_from, compacted = seq, 0
        elif isinstance(entry, Compacted):
            compacted = seq
            if entry.aside:  # the files are the other session's: here the results are shown whole
                data = encode_entry(msgspec.structs.replace(entry, aside={}))
        if n not in left_out:
            copies.append((seq, turn if n >= len(rows) - under_way else old_turn, kind, data, at))
    seqs, turns, kinds, texts, times = (list(column) for column in zip(*copies, strict=True))
    db.execute(
        """INSERT INTO entry (session, seq, turn, kind, data, at) SELECT %s, e.* FROM
            unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::float8[]) AS e""",
        (new, seqs, turns, kinds, texts, times),
    )
    if turn is not None:
        channel, _, chat_id = new_key.partition(":")
        message = InboundMessage(channel, "user", chat_id, "", owner=owner, session=new_key, reply=False)
        # Its answer belongs to its session and to no chat.
        accept(db, message, "message", new, (turn, rows[-under_way][0]))
    db.execute("UPDATE session SET history_from = %s, compacted = %s WHERE id = %s", (history_from, compacted, new))


def answer(
    db: Connection, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None
) -> list[int]:
    messages = outbox.encoded(outgoing)
    if isinstance(row, InboundMessage):
        row = accept(db, row, "urgent")
    done = "UPDATE inbox SET state = 'done' WHERE id = %s AND state = 'new' RETURNING id"
    if row.done or db.execute(done, (row.id,)).fetchone() is None:
        return []
    return numbers(send(db, row.message.owner, row.session, None, messages, sender))


def take_outgoing(
    db: Connection,
    worker: str,
    limit: int,
    chat: tuple[str, str] | None,
    channels: Sequence[str] | None,
    lease: float,
) -> outbox.Taken:
    """Rows that no living worker is sending. Two that ask at once get different ones.

    A row is locked only if it is to be taken: another that looks at the same time skips it.
    """
    taken = outbox.Taken()
    unaddressed = db.execute(UNADDRESSED)
    senders = db.execute(SENDERS, (lease,)).fetchall()
    for id, channel, chat_id in outbox.addresses(unaddressed.fetchall(), taken):
        db.execute("UPDATE outbox SET channel = %s, chat_id = %s WHERE id = %s", (channel, chat_id, id))
    _set_aside(db, taken.damaged)
    # Those that are dead, not those that are not: one that nobody knew a moment ago may have taken rows since.
    dead = [id for id, fresh in senders if id != worker and not living(id, fresh)]
    names = [chat[0]] if chat is not None else channels
    of = None if names is None else [outbox.column(name) for name in names]
    in_chat = None if chat is None else outbox.column(chat[1])
    while len(taken.rows) < limit:
        wanted, before, known = limit - len(taken.rows), len(taken.rows), len(taken.damaged)
        rows = db.execute(UNSENT, (dead, of, of, in_chat, in_chat, wanted)).fetchall()
        outbox.take(rows, limit, taken)
        _set_aside(db, taken.damaged[known:])
        ids = [row.id for row in taken.rows[before:]]
        db.execute("UPDATE outbox SET worker = %s, tries = tries + 1 WHERE id = ANY(%s)", (worker, ids))
        if len(rows) < wanted:
            break
    return taken


def _set_aside(db: Connection, damaged: Sequence[tuple[int, str]]) -> None:
    for id, why in damaged:
        db.execute("UPDATE outbox SET damaged = %s WHERE id = %s", (why, id))


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


def add_token(db: Connection, name: str, owner: str, hash: str, rights: Iterable[str]) -> Token:
    """Keep a new token, of which only the hash is known here."""
    checked_name(name)
    checked_owner(owner)
    rights = checked_rights(rights)
    new = db.execute(
        f"""INSERT INTO token (id, hash, name, owner, rights, created_at) VALUES (%s, %s, %s, %s, %s, {NOW})
            ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING RETURNING id, created_at""",
        (secrets.token_hex(6), hash, name, owner, joined_rights(rights)),
    ).fetchone()
    if new is None:
        raise EverloopError(f'there is a token "{name}" already: choose another name, or revoke that one first')
    return Token(new[0], name, owner, new[1], rights=rights)
