"""Opens the store at an address. Each store is imported on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.sources import DSN
from .location import checked

if TYPE_CHECKING:
    from .postgres.store import PostgresStore
    from .sqlite import SQLiteStore


def store_at(where: str | Path | DSN, config: Any = None, pool: DSN | None = None) -> SQLiteStore | PostgresStore:
    """The store at a path or a `postgresql://` address. Nothing is opened before its first call.

    `pool` is the pooler before a database other than that of the settings, which name their own."""
    place = checked(where)
    flush_always = getattr(config, "flush", "needed") == "always"
    if isinstance(place, DSN):
        from .postgres.store import LEASE_SECONDS, PostgresStore

        lease = getattr(config, "lease_seconds", LEASE_SECONDS)
        if getattr(config, "store", None) == place:
            pool = getattr(config, "store_pool", None)
        return PostgresStore(place, pool=pool, lease_seconds=lease, flush_always=flush_always)
    from .sqlite import SQLiteStore

    return SQLiteStore(place, flush_always=flush_always)
