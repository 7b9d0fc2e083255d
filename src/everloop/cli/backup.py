"""`everloop backup` and `everloop restore`: copy the SQLite store into a file, and go on from such a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..config.sources import DSN
from ..errors import EverloopError
from ..text import counted
from .common import load_with_store


def command(options: argparse.Namespace) -> int:
    store, file = load_with_store(options).store, Path(options.file).expanduser()
    if isinstance(store, DSN):
        raise EverloopError("the store is a PostgreSQL database: back it up with its own tools (docs/backup.md)")
    return _restore(file, store) if options.restore else _back_up(store, file)


def _back_up(store: Path, file: Path) -> int:
    from ..store.sqlite.backup import backup

    found = backup(store, file, _Bar("copied"))
    print(f"{file}: {counted(found.sessions, 'session')}, {counted(found.entries, 'entry', 'entries')}; checked.")
    print("Files of the workspace are not in it: copy the folder too.")
    return 0


def _restore(file: Path, store: Path) -> int:
    from ..store.sqlite.backup import restore

    found = restore(file, store, _Bar("restored"))
    print(f"{store} has {counted(found.sessions, 'session')}, {counted(found.entries, 'entry', 'entries')}.")
    if found.set_aside is not None:
        print(f"The previous store is kept as {found.set_aside}.")
    if found.open_turns:
        print(f"{counted(found.open_turns, 'unfinished turn')}: the next start continues there.")
    if found.cut_off:
        print(f"{counted(found.cut_off, 'call')} may have run since: the model is told so and decides.")
    if found.unsent:
        print(f"{counted(found.unsent, 'answer')} may have been sent since, and will be sent again with a mark.")
    return 0


class _Bar:
    """How far the copy is, on a terminal."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown:
            end = "\r\x1b[K" if done >= total else ""
            print(f"\r{100 * done // max(total, 1):3d}% {self._verb}{end}", end="", file=sys.stderr, flush=True)
