"""Turns that wait for a person's word: how one is left on disk, and how the word opens it again."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from ..bus import InboundMessage, OutboundMessage
from ..log import CallsAsked, decode_entry, encode_entry, kind_of
from .base import Claim, Finished, Incoming, Spent
from .transactions import INSERT_ENTRY, Row, accept, append_taking, let_go, send
from .trust import GRANT

PARKED = """SELECT i.id, i.session, i.turn, i.first_seq FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = ? AND s.key = ? AND i.state <> 'done' AND i.state = 'parked' ORDER BY i.opened DESC LIMIT 1"""


def park(
    db: sqlite3.Connection,
    claim: Claim,
    rows: Sequence[Row],
    took: Sequence[int],
    outgoing: Sequence[OutboundMessage],
    sender: str | None,
    spent: Sequence[Spent],
) -> Finished:
    """Leave a turn on disk until a person has answered."""
    let_go(db, claim, time.time())
    append_taking(db, claim, rows, took, spent)
    for id in claim.inbox:
        db.execute("UPDATE inbox SET state = 'parked' WHERE id = ?", (id,))
    sent = [send(db, claim.owner, claim.session, claim.turn, message, sender) for message in outgoing]
    return Finished(sent, more=False)


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
    """Write a person's answer into the log of the parked turn, with what it grants, and open the turn again."""
    row = db.execute(PARKED, (owner, key)).fetchone()
    if row is None:
        return None
    id, session, turn, first_seq = row
    if isinstance(word, InboundMessage):
        word = accept(db, word, "urgent", session) if word.id is not None else None
    log = db.execute(
        "SELECT seq, data, at FROM entry WHERE session = ? AND seq >= ? ORDER BY seq", (session, first_seq)
    )
    entries = [(seq, decode_entry(data), at) for seq, data, at in log]
    asked, since = next(((entry, at) for _, entry, at in reversed(entries) if isinstance(entry, CallsAsked)), (None, 0))
    if word is not None and not _may_answer(db, word.id, since):
        return None
    if allowed is not None and asked is not None:
        decided, granted = asked.decided(allowed, by, note, always)
        now, seq = time.time(), entries[-1][0] + 1
        db.executemany(GRANT, [(owner, key, name, now) for name in granted])
        db.execute(INSERT_ENTRY, (session, seq, turn, kind_of(decided), encode_entry(decided), now))
        if word is not None:  # delivered once more, it must not answer a question that the person has not seen
            db.execute("UPDATE inbox SET first_seq = ? WHERE id = ?", (seq, word.id))
    # A higher fence: whoever parked the turn and is still about can write no more to it.
    db.execute("UPDATE session SET fence = fence + 1 WHERE id = ?", (session,))
    db.execute(
        "UPDATE inbox SET state = 'taken' WHERE session = ? AND state <> 'done' AND state = 'parked'", (session,)
    )
    return id, asked


def _may_answer(db: sqlite3.Connection, id: int, since: float) -> bool:
    """Whether a message may be about a question: it came after it, and has answered no other."""
    state, first_seq, at = db.execute("SELECT state, first_seq, at FROM inbox WHERE id = ?", (id,)).fetchone()
    return state == "new" and first_seq is None and at >= since
