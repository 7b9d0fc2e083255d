"""Starting servers, and keeping their tools in sync."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

import pytest

from everloop.config import McpServer
from everloop.log import Call
from everloop.tools.context import CallContext
from everloop.tools.mcp.servers import McpServers
from everloop.tools.registry import ToolRegistry

from .servers import by_name, connected, lists, odd, seen, text


async def test_without_servers_nothing_is_loaded_or_started():
    program = (
        "import asyncio, sys, threading\n"
        "from everloop.tools.mcp.servers import McpServers\n"
        "servers = McpServers([])\n"
        "assert asyncio.run(servers.ready()) == []\n"
        "asyncio.run(servers.close())\n"
        "assert not {'mcp', 'anyio', 'pydantic', 'httpx2'} & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0


async def test_a_missing_sdk_is_one_line_that_says_what_to_install():
    program = (
        "import asyncio, sys\n"
        "sys.modules['mcp'] = None\n"
        "from everloop.config import McpServer\n"
        "from everloop.errors import EverloopError\n"
        "from everloop.tools.mcp.servers import McpServers\n"
        "async def main():\n"
        "    servers = McpServers([McpServer(name='a', command='true')])\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            await servers.ready()\n"
        "        except EverloopError as error:\n"
        "            print(error)\n"
        "    await servers.close()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ['MCP servers need the MCP SDK: pip install "everloop[mcp]"'] * 2


async def test_servers_that_fail_are_one_warning_each_and_the_others_work(caplog):
    caplog.set_level(logging.INFO)
    servers = (
        odd("plain", "slow"), odd("plain", "die", name="dying", env={"SERVER_KEY": "canary-key"}),
        odd("plain", "silent", name="silent", connect_timeout=3), odd("plain", "babble", name="babbling"),
        McpServer(name="missing", command="no-such-program"), McpServer(name="cat", command="cat"),
        odd("nothing", name="toolless"),
    )  # fmt: skip
    began = time.monotonic()
    async with connected(*servers) as (_, tools):
        assert time.monotonic() - began < 15  # the others have a longer timeout to connect
        assert await text(tools["mcp_odd_echo"], text="here") == "here"
        assert all(name.startswith("mcp_odd_") for name in tools)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5
    for name, said in {
        "dying": "no database", "silent": "Godot", "babbling": "Welcome", "missing": "no-such-program", "cat": "cat",
    }.items():  # fmt: skip
        (line,) = [line for line in lines if f"server {name}:" in line]
        assert said in line
        assert "\n" not in line
        assert "canary-key" not in line


async def test_repeated_calls_of_ready_cost_nothing_and_give_the_same_tools():
    async with connected(odd()) as (group, tools):
        pid = (await seen(tools))["pid"]
        again = await group.ready()
        assert (await seen(tools))["pid"] == pid
        assert [id(tool) for tool in again] == [id(tool) for tool in tools.values()]


async def test_concurrent_callers_at_startup_share_one_connection():
    group = McpServers([odd("plain", "slow")])
    try:
        first, second = await asyncio.gather(group.ready(), group.ready())
        assert first == second
        assert first
    finally:
        await group.close()


async def test_cancelling_one_wait_does_not_close_the_connection_for_others():
    group = McpServers([odd("plain", "slow")])
    waiting = asyncio.create_task(group.ready())
    try:
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        tools = by_name(await group.ready())
        assert await text(tools["mcp_odd_echo"], text="x") == "x"
    finally:
        await group.close()


async def test_a_server_that_was_missing_at_startup_is_used_once_available(tmp_path):
    async with connected(odd("plain", "late", env={"MARK": str(tmp_path / "mark")})) as (group, tools):
        assert not tools
        async with asyncio.timeout(30):
            while not await group.ready():
                await asyncio.sleep(0.05)


async def test_after_closing_there_are_no_tools_and_calls_fail_cleanly():
    async with connected(odd()) as (group, tools):
        await group.close()
        assert await group.ready() == []
        result = await ToolRegistry(tools.values()).run(
            Call("c", "mcp_odd_echo", {"text": "x"}),
            CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", lambda text: None),
        )
        assert result.status == "error"


async def test_a_changed_list_of_tools_is_read_at_the_next_round():
    async with connected(odd()) as (group, tools):
        await text(tools["mcp_odd_change"])
        await lists(group, {"mcp_odd_renamed", "mcp_odd_change"})
        await text(by_name(await group.ready())["mcp_odd_change"])
        await lists(group, set(tools))


async def test_a_registry_is_kept_in_sync_and_untouched_if_nothing_changed():
    async with connected(odd()) as (group, tools):
        registry = ToolRegistry()
        await group.provide(registry)
        assert set(registry.names) == set(tools)
        definitions = registry.get_definitions()
        await group.provide(registry)
        assert registry.get_definitions() is definitions
        await text(tools["mcp_odd_change"])
        await lists(group, {"mcp_odd_renamed", "mcp_odd_change"})
        await group.provide(registry)
        assert registry.names == ["mcp_odd_change", "mcp_odd_renamed"]
