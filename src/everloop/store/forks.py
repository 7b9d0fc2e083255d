"""A copy of a session's log, up to a point, as a new session."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from ..bus import InboundMessage
from ..errors import StoreError
from ..log import CallEnded, CallsBegun, CallsDecided, Cleared, Compacted, Entry, decode_entry, encode_entry, open_turn
from .base import new_turn_id
from .transactions import INSERT_ENTRY, accept, session_row


def fork(db: sqlite3.Connection, owner: str, key: str, until: int | None, new_key: str) -> None:
    """Copy the log up to a point into a new session. A turn that was under way there is open in the copy.

    What a person has allowed and has not begun is asked for again: the word was given for one run.
    """
    source = session_row(db, owner, key, create=False)
    if source is None:
        raise StoreError(f'there is no session "{key}": `everloop sessions` lists them')
    if session_row(db, owner, new_key, create=False) is not None:
        raise StoreError(f'the session "{new_key}" exists already: choose another name')
    rows = db.execute(
        "SELECT seq, turn, kind, data, at FROM entry WHERE session = ? AND seq <= ? ORDER BY seq",
        (source[0], until if until is not None else 2**62),
    ).fetchall()
    if not rows or (until is not None and rows[-1][0] != until):
        last = rows[-1][0] if rows else 0
        raise StoreError(f'the session "{key}" has no entry {until}: its log ends at {last}')
    made = session_row(db, owner, new_key, create=True)
    assert made is not None
    new = made[0]
    entries = [decode_entry(data) for _, _, _, data, _ in rows]
    under_way = len(open_turn(entries))
    turn = new_turn_id() if under_way else None
    left_out = granted(entries, under_way)
    for n, (seq, old_turn, kind, data, at) in enumerate(rows):
        if n in left_out:
            continue
        db.execute(INSERT_ENTRY, (new, seq, turn if n >= len(rows) - under_way else old_turn, kind, data, at))
    if turn is not None:
        channel, _, chat_id = new_key.partition(":")
        message = InboundMessage(channel, "user", chat_id, "", owner=owner, session=new_key, reply=False)
        # Its answer belongs to its session and to no chat.
        accept(db, message, "message", new, (turn, rows[-under_way][0]))
    history_from = compacted = 0
    for (seq, *_), entry in zip(rows, entries, strict=True):
        if isinstance(entry, Cleared):
            history_from, compacted = seq, 0
        elif isinstance(entry, Compacted):
            compacted = seq
            if entry.aside:  # the files are the other session's: here the results are shown whole
                own = encode_entry(msgspec.structs.replace(entry, aside={}))
                db.execute("UPDATE entry SET data = ? WHERE session = ? AND seq = ?", (own, new, seq))
    db.execute("UPDATE session SET history_from = ?, compacted = ? WHERE id = ?", (history_from, compacted, new))


def granted(entries: Sequence[Entry], under_way: int) -> set[int]:
    """Where a person has allowed what was not begun then: the word was given for one run, and not for a copy."""
    current = entries[len(entries) - under_way :]  # an earlier conversation may have had calls of the same ids
    started = {id for entry in current if isinstance(entry, CallsBegun) for id in entry.ids}
    started |= {entry.id for entry in current if isinstance(entry, CallEnded)}
    return {
        n
        for n, entry in enumerate(entries)
        if isinstance(entry, CallsDecided) and entry.allowed and not started.issuperset(entry.ids)
    }
