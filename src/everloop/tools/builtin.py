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
from .shell.shell import ShellSettings, shell_tools
from .web.web import WebSettings, web_tools


def builtin_tools(
    config: Config, search: Search, *, brave_api_key: str | None = None, exec_config: Any = None
) -> list[Tool]:
    """Files, commands, the web, messages and memory, and the tools of the plugins that the settings name.

    `search` is the store's; `exec_config` overrides settings of commands, by name.
    """
    web = WebSettings(
        search=config.search,
        brave_api_key=brave_api_key or config.brave_api_key,
        searxng_url=config.searxng_url,
        private_hosts=config.private_hosts,
        timeout=config.web_timeout,
    )
    tools: list[Tool] = [
        *file_tools(),
        *shell_tools(shell_settings(config, exec_config)),
        *web_tools(web),
        MessageTool(config.message_to, [one.name for one in config.channels], config.home),
        *memory_tools(search, config.memory_limit),
    ]
    if config.plugin_tools:
        from .plugins import plugin_tools

        tools += plugin_tools(config, [tool.name for tool in tools])
    return tools


def check_plugins(config: Config) -> None:
    """Load the plugins that the settings name, so that one that cannot be used is reported before anything starts."""

    async def nothing_found(owner: str, query: str, limit: int) -> list[Any]:
        return []

    builtin_tools(config, nothing_found)


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
        records=config.home / "commands",
    )
    known = {item.name for item in fields(ShellSettings)}
    if isinstance(exec_config, Mapping):
        if unknown := sorted(set(exec_config) - known):
            raise ValueError(f"exec_config: unknown {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        return replace(settings, **exec_config)
    given = {name: getattr(exec_config, name) for name in known if hasattr(exec_config, name)}
    return replace(settings, **given)
