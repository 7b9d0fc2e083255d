"""The commands that maintain stores: back up and restore, check the history, migrate, and move owners."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..config.sources import DSN, is_dsn
from ..errors import ConfigError, EverloopError
from ..store.claims import Restored
from ..store.tokens import checked_owner
from ..text import counted
from .common import OWNER, load_config, load_with_store
from .output import as_json

if TYPE_CHECKING:
    from ..store.history_check import Checked, Rows


# ---------------------------------------------------------------------------------------------- backup and restore


def back_up(options: argparse.Namespace) -> int:
    """Copy the SQLite store into a file."""
    from ..store.sqlite.backup import backup

    store, file = _store_and_file(options)
    found = backup(store, file, _Bar("copied"))
    print(f"{file}: {counted(found.sessions, 'session')}, {counted(found.entries, 'entry', 'entries')}; checked.")
    print("Files of the workspace are not in it: copy the folder too.")
    return 0


def restore(options: argparse.Namespace) -> int:
    """Replace the store with a backup, or mark a PostgreSQL store that its own tools have restored."""
    config = load_with_store(options)
    if isinstance(config.store, DSN) and options.in_place and options.file is None:
        from ..store.postgres.restored import mark_restored

        places = asyncio.run(_places(config.store_directory)) if config.store_directory else {}
        found = mark_restored(config.store, config.lease_seconds, places)
        _report(config.store, found)
        for owner in found.moved:
            print(f"{owner} has moved to {places[owner]} since: what the backup had of them is deleted here.")
        return 0
    if options.in_place and not isinstance(config.store, DSN):
        raise EverloopError("name the file of the backup; --in-place is for a PostgreSQL database")
    from ..store.sqlite import backup

    store, file = _store_and_file(options)
    found = backup.restore(file, store, _Bar("restored"))
    _report(store, found, found.set_aside)
    return 0


async def _places(dsn: DSN) -> dict[str, DSN]:
    """The databases of the owners in the directory."""
    from ..store.postgres.directory import Directory

    directory = Directory(dsn)
    try:
        return {owner: place for owner, place, _ in await directory.places()}
    finally:
        await directory.close()


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


def _store_and_file(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the SQLite store of the settings, and the file of the backup."""
    store = load_with_store(options).store
    if isinstance(store, DSN):
        raise EverloopError(
            "the store is a PostgreSQL database: back it up and restore it with its own tools, and run "
            "`everloop restore --in-place` after a restore (docs/backup.md)"
        )
    if options.file is None:
        raise EverloopError("name the file of the backup; --in-place is for a PostgreSQL database")
    return store, Path(options.file).expanduser()


class _Bar:
    """Show the progress of the copy on a terminal."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown:
            end = "\r\x1b[K" if done >= total else ""
            print(f"\r{100 * done // max(total, 1):3d}% {self._verb}{end}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- history


def check_history(options: argparse.Namespace) -> int:
    """Check the whole store for broken promises."""
    from ..store import history_check

    with _reading(load_with_store(options).store) as rows:
        found = history_check.check_history(rows, _progress)
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
    """Yield a query function whose results all come from one moment of the store."""
    if isinstance(store, DSN):
        from ..store.postgres.connect import connect, explain

        with connect(store) as database:
            import psycopg

            try:
                database.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                database.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # a long log takes a while
                if database.execute("SELECT to_regclass('session')").fetchone() == (None,):
                    raise EverloopError(f"there is no store in {store} yet")
                yield lambda sql: database.execute(sql).fetchall()
            except psycopg.Error as error:
                raise explain(store, error) from error
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


# ---------------------------------------------------------------------------------------------- moving


def migrate(options: argparse.Namespace) -> int:
    """Copy a SQLite store into a PostgreSQL database."""
    if not is_dsn(options.target):
        raise EverloopError("the target must be the address of a PostgreSQL database: postgresql://USER@HOST/DATABASE")
    if is_dsn(options.source):
        raise EverloopError("the source must be the file of a SQLite store; it is copied to a PostgreSQL database")
    from ..store.postgres import import_sqlite

    target = DSN(options.target)
    source = Path(options.source).expanduser()
    moved = import_sqlite.import_store(source, target, lambda table, rows: print(f"{table:<8} {rows:>9}"))
    logs = "the log of 1 session is" if moved.logs == 1 else f"the logs of {moved.logs} sessions are"
    print(f"All rows have arrived, and {logs} the same in both, entry by entry.")
    print(f"EVERLOOP_STORE={target.without_password} (with its password) uses it from now on. The file is still there.")
    return 0


def move(options: argparse.Namespace) -> int:
    """Move one owner from a PostgreSQL database to another."""
    if not is_dsn(options.source) or not is_dsn(options.target):
        raise EverloopError("an owner is moved between PostgreSQL databases: name two postgresql:// addresses")
    checked_owner(options.owner)
    config = load_config(options)
    folders = _folders(options.owner, config.home, Path(options.files).expanduser()) if options.files else None
    from ..store.postgres.move_owner import move_owner

    source, target = DSN(options.source), DSN(options.target)
    lease, directory = config.lease_seconds, config.store_directory
    if folders is not None:
        files = _Files(*folders)
        files.copy()
        moved = move_owner(options.owner, source, target, files.copy, lease=lease, directory=directory)
    else:
        moved = move_owner(options.owner, source, target, lease=lease, directory=directory)
    if any(moved.rows.values()):
        for table, rows in moved.rows.items():
            print(f"{table:<13} {rows:>9}")
        logs = "the log of 1 session is" if moved.logs == 1 else f"the logs of {moved.logs} sessions are"
        waited = f"work waited for {moved.pause:.1f} s"
        print(f"All rows have arrived in {target}, and {logs} the same, entry by entry; {waited}.")
    else:
        print(f"All rows had arrived in {target} before.")
    if folders is not None and folders[0].is_dir():
        print(f"Files: {folders[0]} is copied to {folders[1]}; the first is still there.")
    elif folders is not None:
        print(f"Files: there is no {folders[0]}.")
    if directory is not None:
        print(f"The directory {directory} names {target} for {options.owner}.")
    return 0


def _folders(owner: str, home: Path, other: Path) -> tuple[Path, Path]:
    """Return the owner's folder, with the workspace and its memory, in this home and in another."""
    if owner == OWNER:
        raise EverloopError("--files: the workspace of the owner `me` is your own folder: copy it yourself")
    return home / "owners" / owner, other / "owners" / owner


class _Files:
    """Copies a folder: first while its owner works, and then only what has changed since."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        self._copied: set[Path] = set()

    def copy(self) -> None:
        if not self._source.is_dir():
            return
        before, self._copied = self._copied, set()
        try:
            self._copy(self._source, self._target)
            for deleted in before - self._copied:
                deleted.unlink(missing_ok=True)
        except OSError as error:
            raise EverloopError(f"the files cannot be copied ({error}): correct that and run it again") from None

    def _copy(self, source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        with os.scandir(source) as found:
            entries = list(found)
        for one in entries:
            other = target / one.name
            with contextlib.suppress(FileNotFoundError):  # it was deleted a moment ago
                if one.is_dir(follow_symlinks=False):
                    self._copy(Path(one.path), other)
                    continue
                if one.is_symlink():
                    other.unlink(missing_ok=True)
                    other.symlink_to(os.readlink(one.path))
                elif _look(other) != _look(Path(one.path)):
                    other.unlink(missing_ok=True)
                    shutil.copy2(one.path, other)
                self._copied.add(other)
        shutil.copystat(source, target)


def _look(path: Path) -> tuple[int, int, int] | None:
    """What tells a changed file from an unchanged one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_mode, found.st_size, found.st_mtime_ns


# ---------------------------------------------------------------------------------------------- directory


def directory(options: argparse.Namespace) -> int:
    """Show which database each owner is in, or give a new owner one."""
    config = load_config(options)
    if options.owner is not None:
        checked_owner(options.owner)
    if options.store_of_owner is not None and not is_dsn(options.store_of_owner):
        raise EverloopError("an owner's database is a postgresql:// address")
    dsn = _directory(config)
    if options.pool or options.no_pool:
        if options.owner is not None or (options.pool and options.no_pool):
            raise EverloopError("--pool and --no-pool are about a database: name no owner, and one of the two")
        store, pool = options.pool or (options.no_pool, None)
        return asyncio.run(_put_pool(config, dsn, store, pool))
    if options.store_of_owner is not None:
        return asyncio.run(_put(config, dsn, options.owner, DSN(options.store_of_owner)))
    return asyncio.run(_show(config, dsn, options.owner, options.json))


def _directory(config: Config) -> DSN:
    if config.store_directory is None:
        raise ConfigError("there is no directory: name the database that has it as store_directory in config.toml")
    return config.store_directory


async def _show(config: Config, dsn: DSN, owner: str | None, json: bool) -> int:
    from ..store.postgres.directory import Directory

    directory = Directory(dsn)
    try:
        found = [one for one in await directory.places() if owner in (None, one[0])]
        pools = {store.without_password: pool for store, pool in await directory.pools()}
    finally:
        await directory.close()
    if json:
        for name, store, held in found:
            pool = pools.get(store.without_password)
            print(as_json({"owner": name, "store": str(store), "pool": pool and str(pool), "moving": held}))
        return 0
    for name, store, held in found:
        print(f"{name}  {store}{'  (being moved)' if held else ''}")
    if owner is None:
        print(f"All others are in {config.store}.")
        for address, pool in pools.items():
            print(f"Servers reach {DSN(address)} through {pool}.")
    elif not found:
        print(f"{owner}  {config.store}")
    return 0


async def _put_pool(config: Config, dsn: DSN, address: str, pooler: str | None) -> int:
    """Name the pooler in front of a database, once it is known to lead there."""
    from ..store.postgres.connect import parts_of
    from ..store.postgres.directory import check_password, put_pool
    from ..store.postgres.store import PostgresStore

    if not is_dsn(address) or (pooler is not None and not is_dsn(pooler)):
        raise EverloopError("a database and its pooler are postgresql:// addresses")
    store, pool = DSN(address), None if pooler is None else DSN(pooler)
    parts_of(store)
    if isinstance(config.store, DSN) and config.store.without_password == store.without_password:
        raise EverloopError(f"{store} is the store of the settings: name its pooler there, as store_pool")
    if pool is not None:
        check_password(store, dsn)
        check_password(pool, dsn)
        opened = PostgresStore(store.with_password_of(dsn), pool=pool.with_password_of(dsn))
        try:
            await opened.workers()
        finally:
            await opened.close()
    await asyncio.to_thread(put_pool, store, pool, dsn)
    reached = f"through {pool}" if pool is not None else "directly"
    print(f"Servers that open {store} from now on reach it {reached}.")
    return 0


async def _put(config: Config, dsn: DSN, owner: str, store: DSN) -> int:
    """Give a new owner a database. An owner with data is moved by `everloop move`."""
    from ..store.postgres.directory import check_password, owner_row

    check_password(store, dsn)
    with owner_row(owner, dsn) as entry:
        known = await asyncio.to_thread(entry.place)
        place = config.store if known is None else DSN(known).with_password_of(dsn)
        if isinstance(place, DSN) and place.without_password != store.without_password and await _has_any(place, owner):
            raise EverloopError(f"{owner} has sessions or tokens in {place}: `everloop move` moves them")
        await _has_any(store.with_password_of(dsn), owner)  # the database can be reached, and gets its tables
        await asyncio.to_thread(entry.put, store)
    print(f"{owner} is in {store}.")
    return 0


async def _has_any(place: DSN, owner: str) -> bool:
    from ..store.postgres.store import PostgresStore

    store = PostgresStore(place)
    try:
        return bool(await store.sessions(owner, 1) or await store.tokens(owner))
    finally:
        await store.close()
