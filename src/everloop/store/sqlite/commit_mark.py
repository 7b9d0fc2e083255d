"""Detects that a SQLite store has lost commits.

SQLite reads a write-ahead log up to the first incomplete frame, so a log that was truncated, or left behind when the
database was copied, silently loses its last commits. Every flushed commit (the others may be lost without harm)
therefore increments a counter in the database, and writes it to a small file next to the database afterwards, without
a flush. If the file has a higher number than the database, commits are missing. After a power loss the file may lag
behind, which can hide a loss but never invents one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path

log = logging.getLogger(__name__)
DIGITS = 20
ADVANCE = "UPDATE commit_mark SET number = number + 1 RETURNING number"
NUMBER = "SELECT number FROM commit_mark"
# Counting continues from the known number, so that the loss is recorded once.
NOTE_LOSS = "UPDATE commit_mark SET lost = ?1 - number, lost_at = ?2, number = ?1 WHERE number < ?1"


def mark_file(database: Path) -> Path:
    return database.with_name(f"{database.name}-commits")


class CommitMark:
    """The file next to a store that holds the number of its last commit, as maintained by the writer."""

    def __init__(self, database: Path) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # without the file no loss is detected, but everything works
            self._file = os.open(mark_file(database), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def advance(self, db: sqlite3.Connection) -> int:
        """Count a commit, inside its transaction."""
        return int(db.execute(ADVANCE).fetchone()[0])

    def note(self, number: int) -> None:
        """Record the number of a commit that is on disk."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, b"%0*d\n" % (DIGITS, number), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def forget(database: Path) -> None:
    """Discard the mark of an earlier database: this one is new."""
    mark_file(database).unlink(missing_ok=True)


def verify(db: sqlite3.Connection, database: Path) -> None:
    """Warn, and record in the store, if previously known commits are missing."""
    known = _known(database)  # read first: a commit in between can only make the database newer
    (number,) = db.execute(NUMBER).fetchone()
    if known <= number:
        return
    try:
        if db.execute(NOTE_LOSS, (known, time.time())).rowcount == 0:
            return  # another process has recorded it
    except sqlite3.OperationalError:  # the database is read-only
        pass
    log.warning(
        "%s: the last %d commits are missing. Its -wal file was lost or truncated, or an older copy was put in its "
        "place; later writes are lost, and calls with side effects may run again",
        database,
        known - number,
    )


def _known(database: Path) -> int:
    try:
        return int(mark_file(database).read_bytes()[:DIGITS])
    except (OSError, ValueError):
        return 0
