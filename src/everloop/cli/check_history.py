"""`everloop check-history`: check the whole store for broken promises."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ..config.sources import DSN
from ..errors import EverloopError
from ..store.history_check import Checked, Rows, check_history
from ..text import counted
from .common import load_with_store


def command(options: argparse.Namespace) -> int:
    store = load_with_store(options).store
    with _reading(store) as rows:
        found = check_history(rows, _progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    else:
        _print(found)
    return 1 if found.violations else 0


def _print(found: Checked) -> None:
    for line in found.violations:
        print(f"✗ {line}")
    read = [
        counted(found.sessions, "session"),
        counted(found.turns, "turn"),
        counted(found.entries, "entry", "entries"),
    ]
    if found.under_way:
        read[1] += f" ({found.under_way:,} unfinished)"
    wrong = counted(len(found.violations), "violation") if found.violations else "no violations"
    print(f"{', '.join(read)}: {wrong}.")


def _progress(sessions: int) -> None:
    if sys.stderr.isatty() and sessions % 50 == 0:
        print(f"\r{sessions:,} sessions checked", end="", file=sys.stderr, flush=True)


@contextmanager
def _reading(store: Path | DSN) -> Iterator[Rows]:
    """Queries that all see one moment of the store."""
    if isinstance(store, DSN):
        from ..store.postgres.connections import connect

        with connect(store) as database:
            database.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield lambda sql: database.execute(sql).fetchall()
        return
    import sqlite3

    if not store.exists():
        raise EverloopError(f"there is no store {store} yet")
    file = sqlite3.connect(store, isolation_level=None)
    try:
        file.execute("PRAGMA query_only = ON")
        file.execute("BEGIN")
        yield lambda sql: file.execute(sql).fetchall()
    except sqlite3.DatabaseError as error:
        raise EverloopError(f"{store} cannot be read: {error}") from error
    finally:
        file.close()
