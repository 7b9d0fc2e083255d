"""A server's view of its standbys: which it waits for, which lag behind, and whether commits are waiting right now."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from ..overview import Replication, Standby

if TYPE_CHECKING:
    from .connect import Connection

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.5  # interval of looks for the synchronous standby
MAX_WAIT = 1.0  # seconds after which its absence, or a commit that waits for it, is reported

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


def look(db: Connection) -> Replication:
    names: Any = db.execute(NAMES).fetchone()
    standbys = tuple(Standby(*row) for row in db.execute(STANDBYS).fetchall())
    waiting: Any = db.execute(WAITING).fetchone()
    return Replication(names[0], standbys, *waiting)


class StandbyWatch:
    """Looks whether the server's commits wait for a synchronous standby, or would, and reports it once."""

    def __init__(self, always: bool) -> None:
        """With `always`, it looks even if the server is configured to wait for no standby."""
        # Seconds without a synchronous standby, or that a commit had been waiting for one, at the last look.
        self.wait = 0.0
        self.is_needed = False  # the server is configured to wait for one
        self._always = always
        self._missing_since = math.inf  # time of the look that first found none
        self._look_at = 0.0  # time of the next look

    def read_setting(self, db: Connection) -> None:
        self.is_needed = db.execute(NAMES).fetchone() not in (None, ("",))

    def due_in(self) -> float:
        """Return the seconds until the next look; infinity if there is none."""
        return self._look_at - time.monotonic() if self.is_needed or self._always else math.inf

    def look(self, db: Connection) -> None:
        """Report that there is no synchronous standby, or that it confirms nothing, once; and when that is over."""
        now = time.monotonic()
        missing = db.execute(MISSING).fetchone() == (True,)
        row = db.execute(WAITING).fetchone()
        count, seconds = row if row is not None else (0, 0.0)
        self._missing_since = min(self._missing_since, now) if missing else math.inf
        longest = max(seconds, now - self._missing_since)
        waited, self.wait = self.wait, longest if longest > MAX_WAIT else 0.0
        self._look_at = time.monotonic() + LOOK_SECONDS
        if self.wait and not waited:
            waiting = f"{count} writes wait for one, the first for {seconds:.0f} s" if count else "writes will wait"
            log.warning(
                "the store has no synchronous standby: %s; start the standby again, or remove it from "
                "synchronous_standby_names",
                waiting,
            )
        if waited and not self.wait:
            log.warning("the store's writes no longer wait for a synchronous standby")

    def forget(self) -> None:
        """Forget what was found: the server cannot be reached."""
        self.wait = self._look_at = 0.0
        self._missing_since = math.inf
