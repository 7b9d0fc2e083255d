"""A workspace with the shell tools, and checks for processes that outlive a command."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everloop.tools.base import Output, Plan, ToolError
from everloop.tools.context import CallContext, current
from everloop.tools.shell.shell import ShellSettings, shell_tools


class Desk:
    """A workspace and its two shell tools."""

    def __init__(self, folder: Path, settings: ShellSettings, **context: Any) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.context = CallContext("me", "s", "t", "c", "cli", "d", folder, True, "k", self.lines.append)
        self.context = replace(self.context, **context)
        self.tools = {tool.name: tool for tool in shell_tools(settings)}

    async def output(self, name: str, **arguments: Any) -> Output:
        token = current.set(self.context)
        try:
            result = await self.tools[name].execute(**arguments)
        finally:
            current.reset(token)
        assert isinstance(result, Output)
        return result

    async def __call__(self, command: str, **arguments: Any) -> str:
        return (await self.output("exec", command=command, **arguments)).text

    async def process(self, action: str, id: str = "", **arguments: Any) -> str:
        return (await self.output("process", action=action, id=id, **arguments)).text

    async def fails(self, command: str, **arguments: Any) -> str:
        with pytest.raises(ToolError) as caught:
            await self(command, **arguments)
        return str(caught.value)

    def plan(self, name: str = "exec", **arguments: Any) -> Plan:
        token = current.set(self.context)
        try:
            return self.tools[name].plan(arguments)
        finally:
            current.reset(token)

    async def start(self, command: str, **arguments: Any) -> str:
        """Start a background command; return its id."""
        said = await self(command, background=True, **arguments)
        return next(word.rstrip(";") for word in said.split() if word.startswith("p") and word[1:2].isdigit())

    async def until(self, id: str, text: str) -> str:
        """Return the output of a background command once it contains this text."""
        said = ""
        async with asyncio.timeout(20):
            while text not in said:
                said += await self.process("poll", id, wait=5)
        return said

    async def close(self) -> None:
        for tool in self.tools.values():
            await tool.close()


def beats(name: str) -> str:
    """A command that writes signs of life to a file repeatedly, but not forever."""
    return f"for i in $(seq 600); do echo >> {name}; sleep 0.05; done"


async def silent(folder: Path) -> bool:
    """Return whether the signs of life have stopped."""
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    await asyncio.sleep(0.5)
    return before == {path.name: path.stat().st_size for path in folder.iterdir()}
