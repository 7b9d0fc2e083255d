"""A workspace and its file tools, called as a model calls them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from everloop.log import Call
from everloop.tools.context import CallContext
from everloop.tools.files.files import file_tools
from everloop.tools.registry import ToolRegistry, ToolResult


class Desk:
    """Calls tools in a workspace; other options go into the call's context."""

    def __init__(self, folder: Path, restricted: bool = True, **options: Any) -> None:
        self.folder = folder
        self.registry = ToolRegistry(file_tools(), timeout=30)
        made = CallContext("me", "s", "t", "c", "cli", "d", folder, restricted, "k", lambda text: None)
        self.context = dataclasses.replace(made, **options)

    async def run(self, name: str, **arguments: Any) -> ToolResult:
        return await self.registry.run(Call("c", name, arguments), self.context)

    async def __call__(self, name: str, **arguments: Any) -> str:
        result = await self.run(name, **arguments)
        assert result.status == "ok", result.content
        return result.content

    async def fails(self, name: str, **arguments: Any) -> str:
        result = await self.run(name, **arguments)
        assert result.status == "error", result.content
        message: str = json.loads(result.content)["message"]
        return message

    def with_context(self, **options: Any) -> Desk:
        """Return the same tools with another call context."""
        other = Desk(self.folder)
        other.registry = self.registry
        other.context = dataclasses.replace(self.context, **options)
        return other
