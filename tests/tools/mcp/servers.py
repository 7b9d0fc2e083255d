"""The misbehaving server, the installed ones, and helpers that call their tools."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everloop.config import McpServer
from everloop.tools.base import Output, Tool
from everloop.tools.mcp.servers import McpServers
from tests.support.places import ROOT

FOLDER = ROOT / "tests" / "mcp_servers"
NODE = FOLDER / "node_modules" / ".bin"


def odd(listing: str = "plain", start: str = "", *, name: str = "odd", **options: Any) -> McpServer:
    options.setdefault("connect_timeout", 40)
    arguments = (str(FOLDER / "odd.py"), listing, start)
    return McpServer(name=name, command=sys.executable, args=arguments, **options)


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


@asynccontextmanager
async def connected(*servers: McpServer) -> AsyncIterator[tuple[McpServers, dict[str, Tool]]]:
    group = McpServers(servers)
    try:
        yield group, by_name(await group.ready())
    finally:
        await group.close()


async def run(tool: Tool, **arguments: Any) -> Output:
    output = await tool.execute(**arguments)
    assert isinstance(output, Output)
    assert output.untrusted, "everything from a server is data"
    return output


async def text(tool: Tool, **arguments: Any) -> str:
    output = await run(tool, **arguments)
    assert not output.failed, output.text
    return output.text


async def failure(tool: Tool, **arguments: Any) -> str:
    output = await run(tool, **arguments)
    assert output.failed, output.text
    assert "\n" not in output.text
    assert "\x1b" not in output.text
    return output.text


async def seen(tools: dict[str, Tool]) -> Any:
    return json.loads(await text(tools["mcp_odd_seen"]))


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it may end while being read
        return False


async def cancel_a_call(tools: dict[str, Tool]) -> None:
    """Cancel a call that the server has received but does not answer."""
    waiting = asyncio.create_task(run(tools["mcp_odd_wait"]))
    async with asyncio.timeout(20):
        while not (await seen(tools))["waiting"]:
            await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def lists(group: McpServers, names: set[str]) -> None:
    """Wait until these are the tools; a server's change notification arrives independently of answers to calls."""
    async with asyncio.timeout(20):
        while set(by_name(await group.ready())) != names:
            await asyncio.sleep(0.02)


def installed(name: str) -> str:
    path = NODE / name
    if not path.exists() or shutil.which("node") is None:
        pytest.fail(f"{name} is not installed: run sh scripts/node.sh", pytrace=False)
    return str(path)
