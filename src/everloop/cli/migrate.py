"""`everloop migrate`: copy a SQLite store into a PostgreSQL database."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config.sources import DSN, is_dsn
from ..errors import EverloopError


def command(options: argparse.Namespace) -> int:
    if not is_dsn(options.target):
        raise EverloopError("the target must be the address of a PostgreSQL database: postgresql://USER@HOST/DATABASE")
    if is_dsn(options.source):
        raise EverloopError("the source must be the file of a SQLite store; it is copied to a PostgreSQL database")
    from ..store.postgres.import_sqlite import move

    target = DSN(options.target)
    moved = move(Path(options.source).expanduser(), target, lambda table, rows: print(f"{table:<8} {rows:>9}"))
    logs = "the log of 1 session is" if moved.logs == 1 else f"the logs of {moved.logs} sessions are"
    print(f"All rows have arrived, and {logs} the same in both, entry by entry.")
    print(f"EVERLOOP_STORE={target} (with its password) uses it from now on. The file is still there.")
    return 0
