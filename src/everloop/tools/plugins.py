"""Tools that come from other packages, through the entry point `everloop.tools`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..config import Config
from ..plugins import TOOLS, find
from .base import Tool, check_name

SETTING = "[plugins] tools"
RESERVED = frozenset({"cron", "spawn"})  # built in, and registered by the agent itself
RESERVED_PREFIX = "mcp_"  # names of MCP servers' tools


def plugin_tools(config: Config, taken: Iterable[str] = ()) -> list[Tool]:
    """The tools of the plugins that the settings name; a ConfigError in one line for one that cannot be used.

    An entry point is a `Tool`, a `@tool` function, or a callable that takes the `Config` and returns one or several
    tools. A tool may not have a name in `taken`, that of another built-in tool, or that of another plugin's tool.
    """
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
