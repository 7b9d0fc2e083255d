"""The overview of a SQLite store: its SQL, and what it adds up to."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter

from ..overview import MAX_LISTED, PATIENCE, Lease, Overview, Unheld, WorkerSeen
from ..peers import alive, process_of

# Finished work is not read: the cost depends on the amount of open work.
TOTALS = """SELECT coalesce(sum(state = 'new' AND kind <> 'urgent'), 0),
        min(at) FILTER (WHERE state = 'new' AND kind <> 'urgent'),
        coalesce(sum(state = 'taken' AND opened), 0), coalesce(sum(state = 'parked' AND opened), 0)
    FROM inbox WHERE state <> 'done'"""
# The holder of a session has an open row in its inbox, so none is missing here.
OPEN = """SELECT s.owner, s.key, s.worker, max(s.updated_at, i.oldest), i.ready FROM session s JOIN (
        SELECT session, min(at) FILTER (WHERE kind <> 'urgent') AS oldest,
            max(kind <> 'urgent') AND NOT max(state = 'parked') AS ready
        FROM inbox WHERE state <> 'done' GROUP BY session) i ON i.session = s.id ORDER BY 4, s.id"""
UNSENT = """SELECT count(*) FILTER (WHERE damaged IS NULL), min(at) FILTER (WHERE damaged IS NULL),
        count(*) FILTER (WHERE damaged IS NOT NULL)
    FROM outbox WHERE sent_at IS NULL"""
SET_ASIDE = "SELECT count(*) FROM inbox WHERE damaged IS NOT NULL"
# Ids are never reused, so the last one is the number of sessions ever created.
COUNT = "SELECT coalesce((SELECT max(id) FROM session), 0) - sessions FROM deletion"
LOST = "SELECT lost, lost_at FROM commit_mark"


def overview(db: sqlite3.Connection) -> Overview:
    db.execute("BEGIN")  # a consistent snapshot for all queries
    try:
        waiting, oldest_waiting, running, parked = db.execute(TOTALS).fetchone()
        rows = db.execute(OPEN).fetchall()
        joined = {id for (id,) in db.execute("SELECT id FROM worker")}
        unsent, oldest_unsent, damaged = db.execute(UNSENT).fetchone()
        (damaged_incoming,) = db.execute(SET_ASIDE).fetchone()
        (sessions,) = db.execute(COUNT).fetchone()
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
        leases=tuple(leases[:MAX_LISTED]),
        held=len(leases),
        unheld=tuple(unheld[:MAX_LISTED]),
        unheld_count=len(unheld),
        waited_out=sum(now - one.since > PATIENCE for one in unheld),
        waiting=waiting,
        oldest_waiting=oldest_waiting,
        open_turns=running,
        parked_turns=parked,
        unsent=unsent,
        oldest_unsent=oldest_unsent,
        damaged=damaged,
        damaged_incoming=damaged_incoming,
        lost_commits=lost,
        lost_at=lost_at,
    )
