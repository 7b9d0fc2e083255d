"""Opens the store at an address. Each store is imported on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ..config.sources import DSN
from .location import checked

if TYPE_CHECKING:
    from .postgres.store import PostgresStore
    from .sqlite import SQLiteStore


@overload
def store_at(where: DSN, config: Any = None) -> PostgresStore: ...


@overload
def store_at(where: str | Path | DSN, config: Any = None) -> SQLiteStore | PostgresStore: ...


def store_at(where: str | Path | DSN, config: Any = None) -> SQLiteStore | PostgresStore:
    """The store at a path or a `postgresql://` address. Nothing is opened before its first call."""
    place = checked(where)
    flush_always = getattr(config, "flush", "needed") == "always"
    if isinstance(place, DSN):
        from .postgres.store import LEASE_SECONDS, PostgresStore

        lease = getattr(config, "lease_seconds", LEASE_SECONDS)
        pool = getattr(config, "store_pool", None) if getattr(config, "store", None) == place else None
        return PostgresStore(place, pool=pool, lease_seconds=lease, flush_always=flush_always)
    from .sqlite import SQLiteStore

    return SQLiteStore(place, flush_always=flush_always)
