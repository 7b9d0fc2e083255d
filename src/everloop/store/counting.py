"""The overview of a SQLite store. What is finished is not looked at: the cost goes with what is open."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter

from .overview import MOST, PATIENCE, Lease, Overview, Unheld, WorkerSeen
from .workers import alive, process_of

TOTALS = """SELECT coalesce(sum(state = 'new' AND kind <> 'urgent'), 0),
        min(at) FILTER (WHERE state = 'new' AND kind <> 'urgent'),
        coalesce(sum(state = 'taken' AND opened), 0), coalesce(sum(state = 'parked' AND opened), 0)
    FROM inbox WHERE state <> 'done'"""
# Whoever holds a session has an open row of its inbox, so none is missing here.
OPEN = """SELECT s.owner, s.key, s.worker, max(s.updated_at, i.oldest), i.ready FROM session s JOIN (
        SELECT session, min(at) FILTER (WHERE kind <> 'urgent') AS oldest,
            max(kind <> 'urgent') AND NOT max(state = 'parked') AS ready
        FROM inbox WHERE state <> 'done' GROUP BY session) i ON i.session = s.id ORDER BY 4, s.id"""
UNSENT = """SELECT count(*) FILTER (WHERE damaged IS NULL), min(at) FILTER (WHERE damaged IS NULL),
        count(*) FILTER (WHERE damaged IS NOT NULL)
    FROM outbox WHERE sent_at IS NULL"""
# No session is ever taken away, so the last number is how many there are.
SESSIONS = "SELECT coalesce(max(id), 0) FROM session"
LOST = "SELECT lost, lost_at FROM commit_mark"


def look(db: sqlite3.Connection) -> Overview:
    db.execute("BEGIN")  # all of one moment
    try:
        waiting, oldest_waiting, running, parked = db.execute(TOTALS).fetchone()
        rows = db.execute(OPEN).fetchall()
        joined = {id for (id,) in db.execute("SELECT id FROM worker")}
        unsent, oldest_unsent, damaged = db.execute(UNSENT).fetchone()
        (sessions,) = db.execute(SESSIONS).fetchone()
        lost, lost_at = db.execute(LOST).fetchone()
    finally:
        db.execute("COMMIT")
    now = time.time()
    living = {worker for worker in joined | {row[2] for row in rows} if worker is not None and alive(worker)}
    leases = [Lease(owner, key, worker) for owner, key, worker, _, _ in rows if worker in living]
    unheld = [Unheld(owner, key, at) for owner, key, worker, at, ready in rows if ready and worker not in living]
    held = Counter(lease.worker for lease in leases)
    return Overview(
        at=now,
        sessions=sessions,
        workers=tuple(WorkerSeen(id, process_of(id), held[id], 0.0, id in joined) for id in sorted(living)),
        leases=tuple(leases[:MOST]),
        held=len(leases),
        unheld=tuple(unheld[:MOST]),
        unheld_count=len(unheld),
        waited_out=sum(now - one.since > PATIENCE for one in unheld),
        waiting=waiting,
        oldest_waiting=oldest_waiting,
        open_turns=running,
        parked_turns=parked,
        unsent=unsent,
        oldest_unsent=oldest_unsent,
        damaged=damaged,
        lost_commits=lost,
        lost_at=lost_at,
    )
