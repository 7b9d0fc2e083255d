"""The built-in tools of an agent, made from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..config import Config
from .base import Tool
from .files.files import file_tools
from .memory import Search, memory_tools
from .message import MessageTool
from .shell.running import ShellSettings
from .shell.shell import shell_tools
from .web.web import WebSettings, web_tools


def builtin_tools(
    config: Config, search: Search, *, brave_api_key: str | None = None, exec_config: Any = None
) -> list[Tool]:
    """Return the tools for files, commands, the web, messages and memory.

    `search` is the store's search; `exec_config` overrides shell settings by name.
    """
    web = WebSettings(
        search=config.search,
        brave_api_key=brave_api_key or config.brave_api_key,
        searxng_url=config.searxng_url,
        private_hosts=config.private_hosts,
        timeout=config.web_timeout,
    )
    return [
        *file_tools(),
        *shell_tools(shell_settings(config, exec_config)),
        *web_tools(web),
        MessageTool(config.message_to),
        *memory_tools(search, config.memory_limit),
    ]


def shell_settings(config: Config, exec_config: Any = None) -> ShellSettings:
    """Return the shell settings; `exec_config` is a mapping, or an object with some of their names as attributes."""
    settings = ShellSettings(
        timeout=config.exec_timeout,
        mode=config.sandbox,
        readable=config.readable,
        writable=config.writable,
        environment=config.environment,
        memory_mb=config.memory_mb,
        processes=config.processes,
    )
    known = {item.name for item in fields(ShellSettings)}
    if isinstance(exec_config, Mapping):
        if unknown := sorted(set(exec_config) - known):
            raise ValueError(f"exec_config: unknown {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        return replace(settings, **exec_config)
    given = {name: getattr(exec_config, name) for name in known if hasattr(exec_config, name)}
    return replace(settings, **given)
