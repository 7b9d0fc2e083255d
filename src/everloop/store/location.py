"""Where the store is by default: one SQLite file for each workspace, which is found again when the folder moves."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from ..config import Config
from ..config.sources import DSN, is_dsn

_AT_FDCWD = -100
_STATX_INO, _STATX_BTIME = 0x100, 0x800


def home() -> Path:
    """The folder of settings and data: `EVERLOOP_HOME`, or `~/.everloop`."""
    return Path(os.environ.get("EVERLOOP_HOME", "").strip() or "~/.everloop").expanduser()


def store_path(workspace: str | Path | None = None) -> Path | DSN:
    """What `EVERLOOP_STORE` names, else the workspace's own file."""
    if named := os.environ.get("EVERLOOP_STORE"):
        return checked(named)
    return home() / "everloop.db" if workspace is None else own_path(workspace)


def is_home_workspace(workspace: str | Path, config: Config) -> bool:
    """Whether it is the user's own workspace: the one in the home, or the one that config.toml names."""
    real = Path(workspace).resolve()
    return real in (config.home_workspace.resolve(), (config.home / "workspace").resolve())


def own_path(workspace: str | Path, home_folder: Path | None = None) -> Path:
    """The store of a workspace, which is outside of it. It looks at the disk: call it in a thread.

    The agent's own tools could change a store inside the workspace, and one store for all workspaces would mix up the
    sessions of programs that know nothing of each other.
    """
    found = find_own(workspace, home_folder or home())
    found.claim()
    return found.path


@dataclass(slots=True, frozen=True)
class OwnStore:
    """The store of a workspace, and the folder that it belongs to."""

    path: Path
    workspace: Path  # the real path
    identity: str  # of the folder; "" where the file system does not tell
    new: bool = False  # there is no store yet
    lost: Path | None = None  # a folder of the same name that had sessions and is gone: perhaps it became this one

    def claim(self) -> None:
        """Record that the store belongs to this folder."""
        record = {"workspace": str(self.workspace), "folder": self.identity}
        beside = _record_of(self.path)
        if _read_record(beside) == record:
            return
        text = json.dumps(record)
        beside.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = beside.with_name(f"{beside.name}.{secrets.token_hex(4)}")
        draft.write_text(text)
        draft.replace(beside)

    def adopt(self) -> OwnStore:
        """The store of the lost folder, as this folder's own."""
        assert self.lost is not None
        old = next(path for path, record in _records(self.path.parent) if record["workspace"] == str(self.lost))
        return OwnStore(old, self.workspace, self.identity)


def find_own(workspace: str | Path, home_folder: Path) -> OwnStore:
    """Find a workspace's store, or the place for a new one.

    A folder is known by its inode and the time of its creation, which it keeps when it moves and no copy, clone or
    file in it can imitate; then by its path, since a folder that was restored from a backup is another one on disk.
    """
    real, identity = Path(workspace).resolve(), folder_identity(workspace)
    folder = home_folder / "stores"
    records = list(_records(folder))
    for path, record in records:
        if identity and record["folder"] == identity:
            return OwnStore(path, real, identity, new=not path.exists())
    for path, record in records:
        if record["workspace"] == str(real):
            return OwnStore(path, real, identity, new=not path.exists())
    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    path, taken = folder / f"{name}.db", {path for path, _ in records}
    number = 1
    while path in taken:  # the folder that was at this path has moved away, and its store with it
        number += 1
        path = folder / f"{name}-{number}.db"
    if path.exists():  # made before stores had records
        return OwnStore(path, real, identity)
    lost = [Path(record["workspace"]) for path, record in records if path.exists()]
    gone = next((old for old in lost if old.name == real.name and not old.exists()), None)
    return OwnStore(path, real, identity, new=True, lost=gone)


def folder_identity(folder: str | Path) -> str:
    """What stays the same when a folder moves: its inode and creation time; "" where there is no creation time."""
    buffer = ctypes.create_string_buffer(256)
    try:
        statx = ctypes.CDLL(None).statx
    except AttributeError:
        return ""
    if statx(_AT_FDCWD, os.fsencode(folder), 0, _STATX_INO | _STATX_BTIME, buffer) != 0:
        return ""
    mask, inode = _number(buffer, 0, 4), _number(buffer, 32, 8)
    seconds, nanoseconds = _number(buffer, 80, 8), _number(buffer, 88, 4)
    return f"{inode}-{seconds}.{nanoseconds:09}" if mask & _STATX_BTIME and seconds else ""


def checked(store: str | Path | DSN) -> Path | DSN:
    """The address as what it is."""
    if isinstance(store, DSN):
        return store
    if isinstance(store, str) and is_dsn(store):
        return DSN(store.strip())
    return Path(store).expanduser()


def _number(buffer: ctypes.Array[ctypes.c_char], start: int, length: int) -> int:
    return int.from_bytes(buffer.raw[start : start + length], "little")


def _records(folder: Path) -> list[tuple[Path, dict[str, str]]]:
    """(store, record) of all workspaces, in a fixed order."""
    found = ((path.with_suffix(".db"), _read_record(path)) for path in sorted(folder.glob("*.json")))
    return [(store, record) for store, record in found if record is not None]


def _record_of(store: Path) -> Path:
    return store.with_suffix(".json")


def _read_record(path: Path) -> dict[str, str] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    fits = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("workspace", "folder"))
    return record if fits else None
