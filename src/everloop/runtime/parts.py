"""What a loop is put together from, as its settings say."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..config.dsn import DSN
from ..store.base import Store
from ..store.location import is_home_workspace, own_path
from ..store.opening import store_at
from ..store.sqlite import SQLiteStore

if TYPE_CHECKING:
    from ..observability.tracing import Tracer
    from ..tools.mcp.servers import McpServers


def open_store(store: Store | str | Path | DSN | None, config: Config | None, workspace: Path) -> Store:
    """The store that is given, else the one that the settings or `EVERLOOP_STORE` name, else the workspace's own."""
    if not store:
        store = config.store if config is not None and config.store_named else os.environ.get("EVERLOOP_STORE")
    if not store:
        return SQLiteStore(partial(_default_store, workspace, config))  # off the event loop: it looks at the disk
    return store_at(store, config) if isinstance(store, str | Path | DSN) else store


def _default_store(workspace: Path, config: Config | None) -> Path:
    if config is None:
        return own_path(workspace)
    if isinstance(config.store, Path) and is_home_workspace(workspace, config):
        return config.store
    return own_path(workspace, config.home)


def allowed(patterns: tuple[str, ...], wish: str) -> str | None:
    return wish if any(fnmatchcase(wish, pattern) for pattern in patterns) else None


def mcp_servers(settings: Config) -> McpServers | None:
    """The MCP servers of the settings; with none, nothing of MCP is even loaded."""
    if not settings.mcp:
        return None
    from ..tools.mcp.servers import McpServers

    return McpServers(settings.mcp)


def tracer(settings: Config, store: Store, model: str) -> Tracer | None:
    """What sends turns away as spans; with no address for them, nothing of it is even loaded."""
    if not settings.telemetry_endpoint:
        return None
    from ..observability.tracing import Tracer

    provider = settings.provider or "openai"
    return Tracer(
        store, settings.telemetry_endpoint, content=settings.telemetry_content, provider=provider, model=model
    )
