"""Helpers: a definition, an executor with a scripted model, and the activities its watcher received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everloop.goals.activities import Activity
from everloop.goals.definitions import AgentDefinition
from everloop.goals.executor import AgentExecutor
from everloop.tools.base import Tool
from everloop.tools.registry import ToolRegistry

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def definition(**options: Any) -> AgentDefinition:
    """Return a definition with the required fields; `options` are the others."""
    facts = {"name": "worker", "description": "Works.", "system_prompt": "You work.", "query": "Do it."}
    return AgentDefinition(**(facts | options))


async def executor(
    folder: Path,
    provider: Any,
    *tools: Tool,
    seen: list[Activity] | None = None,
    kind: type[AgentExecutor] = AgentExecutor,
    **options: Any,
) -> AgentExecutor:
    """Return an executor that may use all given tools; `options` are those of its definition."""
    names = options.pop("tools", [tool.name for tool in tools])
    created = {
        key: options.pop(key) for key in ("config", "restrict_to_workspace", "on_activity", "store") if key in options
    }
    if seen is not None:
        created["on_activity"] = seen.append
    return await kind.create(
        definition(tools=names, **options), provider=provider, workspace=folder, tools=ToolRegistry(tools), **created
    )


def results(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (call, content) of the tool results in a request."""
    return [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]
