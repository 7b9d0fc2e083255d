"""Where the store is when nobody says."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..errors import ConfigError


def home() -> Path:
    return Path(os.environ.get("EVERLOOP_HOME") or "~/.everloop").expanduser()


def store_path(workspace: str | Path | None = None) -> Path:
    """The file of `EVERLOOP_STORE`, else one a workspace, outside of it.

    A store inside the workspace could be changed by the agent's own tools; one for all workspaces would mix up
    the sessions of programs that know nothing of each other.
    """
    if named := os.environ.get("EVERLOOP_STORE"):
        return checked(named)
    if workspace is None:
        return home() / "everloop.db"
    name = hashlib.sha256(os.fsencode(Path(workspace).resolve())).hexdigest()[:16]
    return home() / "stores" / f"{name}.db"


def checked(store: str | Path) -> Path:
    if str(store).startswith(("postgresql://", "postgres://")):
        raise ConfigError("store: PostgreSQL is not supported yet; use the path of a SQLite file")
    return Path(store).expanduser()
