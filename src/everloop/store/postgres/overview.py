"""The overview of a PostgreSQL store: its SQL, and what it adds up to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..overview import MAX_LISTED, PATIENCE, Lease, Overview, Unheld, WorkerSeen
from ..peers import process_of
from .transactions import FRESH, NOW, living

if TYPE_CHECKING:
    from .connect import Connection

COUNTED = 10_000  # sessions; beyond that the planner's own estimate is used
ALL_WORKERS = f"""SELECT w.id, coalesce(w.address NOT IN ('ear', 'log'), false), greatest({NOW} - w.at, 0), {FRESH}
    FROM worker w ORDER BY w.id"""
# The holder of a session has an open row in its inbox, so none is missing in `busy`. Finished work is not read.
OVERVIEW = f"""
WITH opened AS MATERIALIZED (SELECT session, state, kind, at, opened FROM inbox WHERE state <> 'done'),
busy AS MATERIALIZED (
    SELECT s.id, s.owner, s.key, s.worker, coalesce(s.worker = ANY(%(living)s), false) AS held, i.ready,
        greatest(s.updated_at, i.oldest, w.at) AS since
    FROM (SELECT session, min(at) FILTER (WHERE kind <> 'urgent') AS oldest,
              bool_or(kind <> 'urgent') AND NOT bool_or(state = 'parked') AS ready
          FROM opened GROUP BY session) i
    JOIN session s ON s.id = i.session LEFT JOIN worker w ON w.id = s.worker),
unheld AS (SELECT id, owner, key, since FROM busy WHERE ready AND NOT held),
counted AS (SELECT count(*) AS n FROM (SELECT 1 FROM session LIMIT %(counted)s) s)
SELECT {NOW} AS at,
    (SELECT CASE WHEN n < %(counted)s THEN n
        ELSE greatest(n, (SELECT reltuples::bigint FROM pg_class WHERE oid = 'session'::regclass)) END FROM counted),
    (SELECT coalesce(json_object_agg(worker, n), '{{}}') FROM
        (SELECT worker, count(*) AS n FROM busy WHERE held GROUP BY worker) h),
    (SELECT coalesce(json_agg(json_build_array(owner, key, worker)), '[]') FROM
        (SELECT owner, key, worker FROM busy WHERE held ORDER BY since, id LIMIT %(most)s) l),
    (SELECT coalesce(json_agg(json_build_array(owner, key, since)), '[]') FROM
        (SELECT owner, key, since FROM unheld ORDER BY since, id LIMIT %(most)s) u),
    (SELECT count(*) FROM unheld), (SELECT count(*) FROM unheld WHERE since < {NOW} - %(patience)s),
    o.waiting, o.oldest, o.running, o.parked, m.unsent, m.oldest, m.damaged, d.damaged
FROM (SELECT count(*) FILTER (WHERE state = 'new' AND kind <> 'urgent') AS waiting,
          min(at) FILTER (WHERE state = 'new' AND kind <> 'urgent') AS oldest,
          count(*) FILTER (WHERE state = 'taken' AND opened) AS running,
          count(*) FILTER (WHERE state = 'parked' AND opened) AS parked FROM opened) o,
    (SELECT count(*) FILTER (WHERE damaged IS NULL) AS unsent, min(at) FILTER (WHERE damaged IS NULL) AS oldest,
          count(*) FILTER (WHERE damaged IS NOT NULL) AS damaged FROM outbox WHERE sent_at IS NULL) m,
    (SELECT count(*) AS damaged FROM inbox WHERE damaged IS NOT NULL) d
"""


def overview(db: Connection, lease: float) -> Overview:
    rows = [row for row in db.execute(ALL_WORKERS, (lease,)).fetchall() if living(row[0], row[3])]
    values = {"living": [row[0] for row in rows], "most": MAX_LISTED, "counted": COUNTED, "patience": PATIENCE}
    row: Any = db.execute(OVERVIEW, values).fetchone()
    at, sessions, held, leases, unheld, unheld_count, waited_out, *counts = row
    waiting, oldest_waiting, running, parked, unsent, oldest_unsent, damaged, damaged_incoming = counts
    return Overview(
        at=at,
        sessions=sessions,
        workers=tuple(WorkerSeen(id, process_of(id), held.get(id, 0), silent, takes) for id, takes, silent, _ in rows),
        leases=tuple(Lease(*one) for one in leases),
        held=sum(held.values()),
        unheld=tuple(Unheld(*one) for one in unheld),
        unheld_count=unheld_count,
        waited_out=waited_out,
        waiting=waiting,
        oldest_waiting=oldest_waiting,
        open_turns=running,
        parked_turns=parked,
        unsent=unsent,
        oldest_unsent=oldest_unsent,
        damaged=damaged,
        damaged_incoming=damaged_incoming,
    )
