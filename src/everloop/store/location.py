"""Where the store is when nobody says, and what its address may be: a file, or a PostgreSQL database."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..config.dsn import DSN, is_dsn


def home() -> Path:
    return Path(os.environ.get("EVERLOOP_HOME") or "~/.everloop").expanduser()


def store_path(workspace: str | Path | None = None) -> Path | DSN:
    """What `EVERLOOP_STORE` names, else the workspace's own file."""
    if named := os.environ.get("EVERLOOP_STORE"):
        return checked(named)
    return home() / "everloop.db" if workspace is None else own_path(workspace)


def own_path(workspace: str | Path) -> Path:
    """One file a workspace, outside of it.

    A store inside the workspace could be changed by the agent's own tools; one for all workspaces would mix up
    the sessions of programs that know nothing of each other.
    """
    name = hashlib.sha256(os.fsencode(Path(workspace).resolve())).hexdigest()[:16]
    return home() / "stores" / f"{name}.db"


def checked(store: str | Path | DSN) -> Path | DSN:
    """The address as what it is."""
    if isinstance(store, DSN):
        return store
    if isinstance(store, str) and is_dsn(store):
        return DSN(store.strip())
    return Path(store).expanduser()
