"""A server's view of its standbys: which it waits for, which lag behind, and whether commits are waiting right now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..overview import Replication, Standby

if TYPE_CHECKING:
    from .connections import Connection

# Commits of this database that wait for a synchronous standby, and how long the first of them has waited. Sessions of
# another user are only visible with the privileges of pg_monitor.
WAITING = """SELECT count(*), coalesce(extract(epoch FROM max(clock_timestamp() - query_start)), 0)::float8
    FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"""
NAMES = "SELECT current_setting('synchronous_standby_names')"
# Whether commits wait for a standby, and none is connected that they could wait for. The state of a standby is NULL for
# a user without the privileges of pg_monitor.
MISSING = """SELECT current_setting('synchronous_standby_names') <> '' AND NOT EXISTS (
    SELECT 1 FROM pg_stat_replication WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum'))"""
STANDBYS = """SELECT application_name, state, sync_state, pg_wal_lsn_diff(sent_lsn, replay_lsn)::bigint
    FROM pg_stat_replication ORDER BY application_name, pid"""
# The timeline of a primary, which a promotion raises: the first eight digits of the name of a WAL file.
TIMELINE = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"


def look(db: Connection) -> Replication:
    names: Any = db.execute(NAMES).fetchone()
    standbys = tuple(Standby(*row) for row in db.execute(STANDBYS).fetchall())
    waiting: Any = db.execute(WAITING).fetchone()
    return Replication(names[0], standbys, *waiting)
