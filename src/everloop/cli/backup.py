"""`everloop backup` and `everloop restore`: copy the SQLite store into a file, and go on from such a file, or from a
PostgreSQL database that was restored."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..config.sources import DSN
from ..errors import EverloopError
from ..store.claims import Restored
from ..text import counted
from .common import load_with_store


def command(options: argparse.Namespace) -> int:
    config = load_with_store(options)
    file = Path(options.file).expanduser() if options.file is not None else None
    if isinstance(config.store, DSN):
        if not options.restore or not options.in_place or file is not None:
            raise EverloopError(
                "the store is a PostgreSQL database: back it up and restore it with its own tools, and run "
                "`everloop restore --in-place` after a restore (docs/backup.md)"
            )
        return _mark(config.store, config.lease_seconds)
    if file is None or (options.restore and options.in_place):
        raise EverloopError("name the file of the backup; --in-place is for a PostgreSQL database")
    return _restore(file, config.store) if options.restore else _back_up(config.store, file)


def _mark(store: DSN, lease: float) -> int:
    from ..store.postgres.restored import mark_restored

    _report(store, mark_restored(store, lease))
    return 0


def _back_up(store: Path, file: Path) -> int:
    from ..store.sqlite.backup import backup

    found = backup(store, file, _Bar("copied"))
    print(f"{file}: {counted(found.sessions, 'session')}, {counted(found.entries, 'entry', 'entries')}; checked.")
    print("Files of the workspace are not in it: copy the folder too.")
    return 0


def _restore(file: Path, store: Path) -> int:
    from ..store.sqlite.backup import restore

    found = restore(file, store, _Bar("restored"))
    _report(store, found, found.set_aside)
    return 0


def _report(store: Path | DSN, found: Restored, set_aside: Path | None = None) -> None:
    print(f"{store} has {counted(found.sessions, 'session')}, {counted(found.entries, 'entry', 'entries')}.")
    if set_aside is not None:
        print(f"The previous store is kept as {set_aside}.")
    if found.open_turns:
        print(f"{counted(found.open_turns, 'unfinished turn')}: the next start continues there.")
    if found.cut_off:
        print(f"{counted(found.cut_off, 'call')} may have run since: the model is told so and decides.")
    if found.unsent:
        print(f"{counted(found.unsent, 'answer')} may have been sent since, and will be sent again with a mark.")


class _Bar:
    """How far the copy is, on a terminal."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown:
            end = "\r\x1b[K" if done >= total else ""
            print(f"\r{100 * done // max(total, 1):3d}% {self._verb}{end}", end="", file=sys.stderr, flush=True)
