"""Locates the store: by default one SQLite file per workspace, which is found again when the folder moves."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from ..config.sources import DSN, is_dsn
from ..errors import ConfigError
from ..text import printable

if TYPE_CHECKING:
    from .postgres.store import PostgresStore
    from .sqlite import SQLiteStore

log = logging.getLogger(__name__)

_AT_FDCWD = -100
# A folder in a lower layer of overlayfs gets a new creation time when it is first written to.
_OVERLAY = 0x794C7630
_STATX_INO, _STATX_BTIME = 0x100, 0x800


def home() -> Path:
    """Return the folder for settings and data: `EVERLOOP_HOME`, or `~/.everloop`."""
    return Path(os.environ.get("EVERLOOP_HOME", "").strip() or "~/.everloop").expanduser()


def store_path(workspace: str | Path | None = None) -> Path | DSN:
    """Return the store named by `EVERLOOP_STORE`, else the workspace's own file."""
    if named := os.environ.get("EVERLOOP_STORE"):
        return checked(named)
    return home() / "everloop.db" if workspace is None else own_path(workspace)


@overload
def store_at(where: DSN, config: Any = None, pool: DSN | None = None) -> PostgresStore: ...


@overload
def store_at(where: str | Path | DSN, config: Any = None, pool: DSN | None = None) -> SQLiteStore | PostgresStore: ...


def store_at(where: str | Path | DSN, config: Any = None, pool: DSN | None = None) -> SQLiteStore | PostgresStore:
    """Return the store at a path or a `postgresql://` address.

    Nothing is opened before its first call, and only the module of that store is imported. `pool` is the pooler of a
    database other than that of the settings, which name their own.
    """
    place = checked(where)
    flush_always = getattr(config, "flush", "needed") == "always"
    if isinstance(place, DSN):
        from .postgres.store import LEASE_SECONDS, PostgresStore

        lease = getattr(config, "lease_seconds", LEASE_SECONDS)
        if getattr(config, "store", None) == place:
            pool = getattr(config, "store_pool", None)
        return PostgresStore(place, pool=pool, lease_seconds=lease, flush_always=flush_always)
    from .sqlite import SQLiteStore

    return SQLiteStore(place.absolute(), flush_always=flush_always)


def own_path(workspace: str | Path, home_folder: Path | None = None) -> Path:
    """Return the path of a workspace's store, which is outside of the workspace. Reads from disk: call it in a thread.

    The agent's own tools could modify a store inside the workspace, and a single store for all workspaces would mix the
    sessions of unrelated programs.
    """
    found = find_own(workspace, home_folder or home())
    if found.earlier is not None:
        log.warning("%s", found.notice)
    found.claim()
    return found.path


class Folder(msgspec.Struct, frozen=True):
    """A folder on disk."""

    path: Path  # the real path
    identity: str  # survives moves; "" if the file system does not provide it
    device: int = 0
    exists: bool = True

    @classmethod
    def at(cls, path: str | Path) -> Folder:
        real = Path(path).resolve()
        try:
            return cls(real, folder_identity(real), real.stat().st_dev)
        except OSError:
            return cls(real, "", exists=False)


class Record(msgspec.Struct, frozen=True):
    """The folder that a store belongs to, as recorded next to the store."""

    store: Path
    workspace: Path  # where the folder was when the store was last used
    identity: str

    def write(self) -> None:
        beside = _record_of(self.store)
        if _read_record(beside) == self:
            return
        beside.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = beside.with_name(f"{beside.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps({"workspace": str(self.workspace), "folder": self.identity}))
        draft.replace(beside)


class OwnStore(msgspec.Struct, frozen=True):
    """The store of a workspace, and the folder that it belongs to."""

    path: Path
    folder: Folder
    new: bool = False  # the store does not exist yet
    # the store of a vanished folder that may be this one's predecessor: a person must decide
    earlier: Record | None = None

    @property
    def is_replaced(self) -> bool:
        """Return whether the folder with the earlier sessions was at this very path."""
        return self.earlier is not None and self.earlier.workspace == self.folder.path

    @property
    def notice(self) -> str:
        """A one-line notice for unattended use: which sessions are left alone, and how to continue them."""
        assert self.earlier is not None
        here, there = self.folder.path, self.earlier.workspace
        gone = "the folder that was here before" if self.is_replaced else f"{there}, which is gone,"
        command = f"everloop sessions --adopt {shlex.quote(str(there))} --workspace {shlex.quote(str(here))}"
        return printable(f"{here} starts without sessions; those of {gone} are kept: `{command}` continues them here")

    def claim(self) -> None:
        """Record that the store belongs to this folder, if the folder exists."""
        if self.folder.exists:
            Record(self.path, self.folder.path, self.folder.identity).write()

    def adopt(self, earlier: Record) -> OwnStore:
        """Take over the store of an earlier folder. This folder's own store is recorded as the earlier one's."""
        mine = _read_record(_record_of(self.path))
        if mine is not None:
            Record(self.path, earlier.workspace, earlier.identity).write()
        adopted = OwnStore(earlier.store, self.folder)
        adopted.claim()
        return adopted


def find_own(workspace: str | Path, home_folder: Path) -> OwnStore:
    """Find a workspace's store, or the path for a new one."""
    return choose(Folder.at(workspace), _records(home_folder / "stores"), home_folder / "stores", Folder.at)


def choose(here: Folder, records: Sequence[Record], stores: Path, look: Callable[[Path], Folder]) -> OwnStore:
    """Choose the store of a folder from the records of all stores; `look` returns the folder at another path.

    A folder is identified by its inode and creation time, which survive a move and which no copy, clone or file in it
    can imitate. A path alone is not enough: a folder that was deleted and recreated, cloned again or restored from a
    backup is a different one, and only the user knows whether it should continue the sessions of the first.
    """
    for record in sorted(records, key=lambda one: one.workspace != here.path):
        if _belongs(record, here, look):
            return OwnStore(record.store, here, new=not record.store.exists())
    name = hashlib.sha256(os.fsencode(here.path)).hexdigest()[:16]
    path, taken = stores / f"{name}.db", {record.store for record in records}
    number = 1
    while path in taken:  # by the folder that was previously at this path
        number += 1
        path = stores / f"{name}-{number}.db"
    if path.exists():  # created before stores had records
        return OwnStore(path, here)
    alike = [record for record in records if record.workspace.name == here.path.name and record.store.exists()]
    lost = [record for record in alike if _is_gone(record, look)]
    # If there are several, prefer the one that was at this path, then the most recently used one.
    earlier = max(lost, key=lambda one: (one.workspace == here.path, one.store.stat().st_mtime), default=None)
    return OwnStore(path, here, new=True, earlier=earlier)


def find_earlier(home_folder: Path, workspace: str | Path, own: OwnStore) -> Record:
    """Return the store of a vanished folder that was at `workspace`; raise a ConfigError if there is none."""
    there = Path(workspace).expanduser().resolve()
    kept = [one for one in _records(home_folder / "stores") if one.store.exists() and one.store != own.path]
    found = [one for one in kept if one.workspace == there]
    if not found:
        raise ConfigError(f"--adopt: there are no sessions of {there}")
    free = [one for one in found if _is_gone(one, Folder.at)]
    if not free:
        raise ConfigError(f"--adopt: {there} is still there, and its sessions with it; a copy begins without any")
    return max(free, key=lambda one: one.store.stat().st_mtime)


def folder_identity(folder: str | Path) -> str:
    """Return what survives a move of the folder, its inode and creation time; "" if nothing does."""
    buffer = ctypes.create_string_buffer(256)
    library = ctypes.CDLL(None)
    if not hasattr(library, "statx") or library.statfs(os.fsencode(folder), buffer) != 0:
        return ""
    if _number(buffer, 0, ctypes.sizeof(ctypes.c_long)) == _OVERLAY:
        return ""
    if library.statx(_AT_FDCWD, os.fsencode(folder), 0, _STATX_INO | _STATX_BTIME, buffer) != 0:
        return ""
    mask, inode = _number(buffer, 0, 4), _number(buffer, 32, 8)
    seconds, nanoseconds = _number(buffer, 80, 8), _number(buffer, 88, 4)
    return f"{inode}-{seconds}.{nanoseconds:09}" if mask & _STATX_BTIME and seconds else ""


def checked(store: str | Path | DSN) -> Path | DSN:
    """Return the address as a path or a DSN."""
    if isinstance(store, DSN):
        return store
    if isinstance(store, str) and is_dsn(store):
        return DSN(store.strip())
    return Path(store).expanduser()


def _number(buffer: ctypes.Array[ctypes.c_char], start: int, length: int) -> int:
    return int.from_bytes(buffer.raw[start : start + length], "little")


def _belongs(record: Record, here: Folder, look: Callable[[Path], Folder]) -> bool:
    """Return whether a store belongs to this folder."""
    if record.workspace == here.path:
        return _may_be(record, here)
    if not here.identity or record.identity != here.identity:
        return False
    there = look(record.workspace)
    # A file system snapshot has the same identities as its original; another mount of the folder is the folder itself.
    return there.identity != here.identity or there.device == here.device


def _is_gone(record: Record, look: Callable[[Path], Folder]) -> bool:
    """Return whether the folder of a record is no longer at its path."""
    there = look(record.workspace)
    return not there.exists or not _may_be(record, there)


def _may_be(record: Record, folder: Folder) -> bool:
    """Return whether the folder at a record's path can be the recorded one: it is, or one of them has no identity."""
    return not (record.identity and folder.identity) or record.identity == folder.identity


def _records(folder: Path) -> list[Record]:
    """Return the records of all workspaces, in a fixed order."""
    found = (_read_record(path) for path in sorted(folder.glob("*.json")))
    return [record for record in found if record is not None]


def _record_of(store: Path) -> Path:
    return store.with_suffix(".json")


def _read_record(path: Path) -> Record | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    fits = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("workspace", "folder"))
    return Record(path.with_suffix(".db"), Path(record["workspace"]), record["folder"]) if fits else None
