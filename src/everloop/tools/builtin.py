"""The tools of an agent, made from its settings: those built in, and those of other packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..config import Config
from .base import Tool, check_name
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
    if isinstance(exec_config, str | int | float | Sequence):
        raise TypeError(f"exec_config must be a mapping of settings of commands, not {type(exec_config).__name__}")
    given = {name: getattr(exec_config, name) for name in known if hasattr(exec_config, name)}
    return replace(settings, **given)


SETTING = "[plugins] tools"
RESERVED = frozenset({"cron", "spawn"})  # built in, and registered by the agent itself
RESERVED_PREFIX = "mcp_"  # names of MCP servers' tools


def plugin_tools(config: Config, taken: Iterable[str] = ()) -> list[Tool]:
    """The tools of the plugins that the settings name; a ConfigError in one line for one that cannot be used.

    An entry point is a `Tool`, a `@tool` function, or a callable that takes the `Config` and returns one or several
    tools. A tool may not have a name in `taken`, that of another built-in tool, or that of another plugin's tool.
    """
    from ..plugins import TOOLS, find  # it reads the metadata of all installed packages

    names = {*taken, *RESERVED}
    tools: list[Tool] = []
    for name in dict.fromkeys(config.plugin_tools):
        for tool in find(TOOLS, name, SETTING).use(lambda made: _tools(made, config, names)):
            names.add(tool.name)
            tools.append(tool)
    return tools


def _tools(made: Any, config: Config, taken: set[str]) -> list[Tool]:
    """The tools that an entry point's object stands for."""
    if isinstance(made, type) and issubclass(made, Tool):
        made = made()
    elif not isinstance(made, Tool) and callable(made):
        made = made(config)
    tools = [made] if isinstance(made, Tool) else list(made) if isinstance(made, list | tuple) else None
    if not tools or not all(isinstance(tool, Tool) for tool in tools):
        raise TypeError("it must be a Tool, a function under @tool, or a callable(config) that returns tools")
    seen: set[str] = set()
    for tool in tools:
        if check_name(tool.name) in taken | seen or tool.name.startswith(RESERVED_PREFIX):
            raise ValueError(f'there is a tool "{tool.name}" already: its tool must have another name')
        seen.add(tool.name)
    return tools
