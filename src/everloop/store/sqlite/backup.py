"""Backups of a SQLite store: a copy made while the store is in use, and a store restored from such a copy.

A backup is an ordinary SQLite file. A restored store has missed what happened after the backup: calls may have run and
answers may have been sent that it knows nothing about. `restore` records this, so that the next start treats them like
what a killed process left behind.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from ...errors import StoreError
from ...log import CallsBegun, decode_entry, encode_entry, kind_of
from ..claims import Restored, may_have_run
from .schema import MIGRATIONS, migrate
from .writer import FILES, CommitMark

PAGES_AT_ONCE = 4096
IN_USE_SECONDS = 2.0  # how long a restore waits for a process that is about to exit
OPEN_TURNS = "SELECT session, turn, first_seq FROM inbox WHERE opened AND state <> 'done' AND turn IS NOT NULL"
Progress = Callable[[int, int], None]  # pages copied, total pages


class Contents(Restored, frozen=True, kw_only=True):
    """The contents of a backup, and the state that a restored store resumes from."""

    set_aside: Path | None = None  # the previous store


def backup(store: Path, target: Path, progress: Progress = lambda done, total: None) -> Contents:
    """Copy a consistent snapshot of a store while others write to it. The copy is checked before it gets its name."""
    if target.exists():
        raise StoreError(f"{target} exists already: name another file, or remove it first")
    if not store.exists():
        raise StoreError(f"there is no store {store} yet: nothing to back up")
    draft = target.with_name(f"{target.name}.part")
    try:
        with _private(draft), _opened(store, read_only=True) as source, _opened(draft) as copy:
            source.execute("BEGIN")
            source.execute("SELECT 1 FROM sqlite_schema").fetchone()  # the snapshot starts here
            source.backup(copy, pages=PAGES_AT_ONCE, progress=lambda _, left, total: progress(total - left, total))
            copy.execute("PRAGMA journal_mode = DELETE")  # a single file, whatever mode the store uses
            found = _checked(copy, store)
        _flush(draft)
        draft.replace(target)
        _flush(target.parent)
    except (OSError, sqlite3.OperationalError) as error:
        raise StoreError(f"cannot write the backup {target}: {_reason(error)}") from error
    except sqlite3.Error as error:
        raise _damaged(store, error) from error
    finally:
        _remove(draft)
    return found


def restore(source: Path, store: Path, progress: Progress = lambda done, total: None) -> Contents:
    """Replace a store that no process uses by a backup. The previous store is kept next to it."""
    if not source.is_file():
        raise StoreError(f"there is no backup {source}: name a file that `everloop backup` wrote")
    if store.exists() and source.samefile(store):
        raise StoreError(f"{source} is the store itself")
    draft = store.with_name(f"{store.name}.part")
    try:
        store.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _private(draft), _opened(source, read_only=True) as kept, _opened(draft) as copy:
            kept.backup(copy, pages=PAGES_AT_ONCE, progress=lambda _, left, total: progress(total - left, total))
            copy.execute("PRAGMA journal_mode = DELETE")
            _checked(copy, source)
            migrate(copy)
            found = _mark(copy)
        _flush(draft)
        aside = _set_aside(store)
        draft.replace(store)
        _flush(store.parent)
    except (OSError, sqlite3.OperationalError) as error:
        raise StoreError(f"cannot restore {source}: {_reason(error)}") from error
    except sqlite3.Error as error:
        raise _damaged(source, error) from error
    finally:
        _remove(draft)
    return replace(found, set_aside=aside)


# ---------------------------------------------------------------------------------------------- what may have happened


def _mark(db: sqlite3.Connection) -> Contents:
    """Record what may have happened since the backup was made."""
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE session SET worker = NULL, fence = fence + 1")
    db.execute("DELETE FROM worker")
    db.execute("UPDATE commit_mark SET lost_at = NULL")
    # An answer to one of these may have been sent, from the outbox or by a turn that had not ended yet.
    unsent = db.execute("UPDATE outbox SET worker = NULL, tries = tries + 1 WHERE sent_at IS NULL").rowcount
    db.execute("UPDATE inbox SET data = json_set(data, '$.restored', json('true')) WHERE state <> 'done'")
    # An Olm session state that is behind what was sent must not be used to encrypt again.
    decrypts_only = """UPDATE channel_state SET value = replace(value, '"encrypts":true', '"encrypts":false')"""
    db.execute(f"{decrypts_only} WHERE channel LIKE '%:keys' AND key LIKE 'olm:%'")
    cut_off = 0
    for session, turn, first in db.execute(OPEN_TURNS).fetchall():
        sql = "SELECT data FROM entry WHERE session = ? AND seq >= ? AND turn = ? ORDER BY seq"
        log = [decode_entry(data) for (data,) in db.execute(sql, (session, first or 0, turn))]
        if calls := may_have_run(log):
            begun, cut_off = CallsBegun(calls), cut_off + len(calls)
            db.execute(
                "INSERT INTO entry (session, seq, turn, kind, data, at)"
                " SELECT ?1, max(seq) + 1, ?2, ?3, ?4, ?5 FROM entry WHERE session = ?1",
                (session, turn, kind_of(begun), encode_entry(begun), time.time()),
            )
    counted = _contents(db, unsent, cut_off)
    db.execute("COMMIT")
    return counted


# ---------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _opened(path: Path, read_only: bool = False) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        if read_only:
            db.execute("PRAGMA query_only = ON")
        yield db
    finally:
        db.close()


@contextlib.contextmanager
def _private(draft: Path) -> Iterator[None]:
    """Create a new file that only its owner can read."""
    _remove(draft)  # which a killed process may have left
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    yield


def _checked(db: sqlite3.Connection, path: Path) -> Contents:
    """Return the contents of a copy; raise an error if it is damaged or not a store."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if version == 0 or not {"session", "entry", "inbox", "outbox"} <= tables:
        raise StoreError(f"{path} is not an Everloop store")
    if version > len(MIGRATIONS):
        raise StoreError(f"{path} was written by a newer version of Everloop: update Everloop to use it")
    if (found := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise _damaged(path, found)
    return _contents(db, db.execute("SELECT count(*) FROM outbox WHERE sent_at IS NULL").fetchone()[0])


def _damaged(path: Path, why: object) -> StoreError:
    return StoreError(f"{path} is damaged ({why}): restore an older backup")


def _contents(db: sqlite3.Connection, unsent: int, cut_off: int = 0) -> Contents:
    counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("session", "entry")]
    open_turns = len(db.execute(OPEN_TURNS).fetchall())
    return Contents(sessions=counts[0], entries=counts[1], open_turns=open_turns, unsent=unsent, cut_off=cut_off)


def _set_aside(store: Path) -> Path | None:
    """Rename a store and its accompanying files, once no process uses it."""
    if not store.exists():
        CommitMark.forget(store)
        return None
    db = sqlite3.connect(store, timeout=IN_USE_SECONDS, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = DELETE")  # needs exclusive access, and merges the -wal file
    except sqlite3.OperationalError as error:
        raise StoreError(f"{store} is in use: stop Everloop first (`everloop status` shows what runs)") from error
    except sqlite3.DatabaseError:
        pass  # it is damaged, which may be the reason for restoring an older copy
    finally:
        db.close()
    aside = store.with_name(f"{store.stem}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}{store.suffix}")
    for suffix in FILES[1:]:
        with contextlib.suppress(FileNotFoundError):
            store.with_name(store.name + suffix).rename(aside.with_name(aside.name + suffix))
    try:
        os.link(store, aside)  # so that there is a store at every moment
    except OSError:  # a file system without links
        store.rename(aside)
    return aside


def _remove(draft: Path) -> None:
    for suffix in FILES:
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
