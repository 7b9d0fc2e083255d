"""Ending a server process and the processes it started."""

from __future__ import annotations

import asyncio
import sys

from tests.support.commands import until

from .servers import alive, connected, odd


async def test_closing_ends_even_a_stubborn_server_and_its_children(tmp_path):
    mark = tmp_path / "mark"
    async with connected(odd("plain", "stubborn", env={"MARK": str(mark)})) as (_, tools):
        assert tools
        pids = [int(pid) for pid in mark.read_text().split()]
        assert all(map(alive, pids))
    await until(lambda: not any(map(alive, pids)))


async def test_a_server_that_ignores_end_of_input_may_still_clean_up(tmp_path, monkeypatch):
    monkeypatch.setattr("everloop.tools.mcp.stdio.STOP_SECONDS", 4.0)
    mark = tmp_path / "mark"
    async with connected(odd("plain", "tidy", env={"MARK": str(mark)})) as (_, tools):
        assert tools
    assert mark.read_text() == "tidied up"


async def test_closing_ends_processes_that_a_server_left_behind(tmp_path):
    mark = tmp_path / "mark"
    async with connected(odd("plain", "parent", env={"MARK": str(mark)})) as (_, tools):
        assert tools
        child = int(mark.read_text().split()[1])
        assert alive(child)
    await until(lambda: not alive(child))


async def test_a_server_process_ends_when_the_runtime_is_killed(tmp_path):
    mark = tmp_path / "mark"
    server = odd("plain", "stubborn", env={"MARK": str(mark)})
    program = (
        "import asyncio\n"
        "from everloop.config import McpServer\n"
        "from everloop.tools.mcp.servers import McpServers\n"
        "async def main():\n"
        f"    servers = McpServers([McpServer(name='a', command={server.command!r}, args={server.args!r},"
        f" env={dict(server.env)!r})])\n"
        "    print(len(await servers.ready()), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    runtime = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    try:
        assert runtime.stdout is not None
        assert int(await runtime.stdout.readline()) > 0
        pid = int(mark.read_text().split()[0])
        assert alive(pid)
    finally:
        runtime.kill()
        await runtime.wait()
    await until(lambda: not alive(pid))
