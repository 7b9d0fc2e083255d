"""Where the store is when nobody says."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError


class DSN:
    """The address of a PostgreSQL database. Shown, it has no password; `secret` is the whole of it."""

    __slots__ = ("secret",)

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __str__(self) -> str:
        try:
            parts = urlsplit(self.secret)
            user = f"{parts.username}@" if parts.username else ""
            return f"postgresql://{user}{parts.netloc.rpartition('@')[2]}{parts.path}"
        except ValueError:
            return "postgresql://…"

    def __repr__(self) -> str:
        return f"DSN({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DSN) and other.secret == self.secret

    def __hash__(self) -> int:
        return hash(self.secret)

    def exists(self) -> bool:
        """Whether there is something to read: a database is asked for it, which only its server can answer."""
        return True


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
