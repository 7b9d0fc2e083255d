"""When a backend is used, and what a command with network access does."""

from __future__ import annotations

import asyncio

from everloop.tools.base import Output, Plan
from everloop.tools.shell.shell import ShellSettings

from .desks import Desk


async def test_a_command_without_network_says_how_to_get_it(folder):
    for mode in ("bubblewrap", "landlock"):
        desk = Desk(folder, ShellSettings(mode=mode))
        assert "network=true" in await desk("curl -sS http://no-such-host.invalid/")
        assert "network=true" not in await desk("exit 4")


async def test_a_command_with_network_reaches_a_server_and_its_output_is_untrusted(folder):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nfrom outside")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        for mode in ("bubblewrap", "landlock", "off"):
            desk = Desk(folder, ShellSettings(mode=mode))
            output = await desk.output("exec", command=f"curl -sS {url}", network=True)
            assert output == Output("from outside", untrusted=True)
            late = await desk.output("exec", command="sleep 9", network=True, timeout=0.2)
            assert late.untrusted


async def test_an_unrestricted_workspace_means_no_sandbox_unless_configured(folder):
    (folder.parent / "other.txt").write_text("there")
    free = Desk(folder, ShellSettings(), restricted=False)
    assert await free("cat ../other.txt") == "there"
    assert await free("pwd", working_dir="..") == str(folder.parent)
    confined = Desk(folder, ShellSettings(confine=True), restricted=False)
    assert "there" not in await confined("cat ../other.txt")
    loose = Desk(folder, ShellSettings(confine=False))
    assert await loose("cat ../other.txt") == "there"


def test_a_plan_says_exactly_what_will_run(folder):
    desk = Desk(folder, ShellSettings())
    plan = desk.plan(command="make test", working_dir="sub")
    assert plan == Plan(f"make test\n(in {folder}/sub, in the sandbox without network)", command="make test")
    networked = desk.plan(command="curl x", network=True, background=True, keep=True)
    assert (networked.network, networked.sends, networked.unconfined) == (True, True, False)
    assert "with network, in the background, also after the turn" in networked.shown
    for free in (Desk(folder, ShellSettings(mode="off")), Desk(folder, ShellSettings(), restricted=False)):
        plan = free.plan(command="ls")
        assert (plan.network, plan.sends, plan.unconfined) == (False, False, True)


def test_the_flags_match_what_the_tools_do(folder):
    tools = Desk(folder, ShellSettings(max_timeout=100)).tools
    assert {name: (tool.replay, tool.parallel) for name, tool in tools.items()} == {
        "exec": ("never", False), "process": ("never", True)
    }  # fmt: skip
    assert (tools["exec"].timeout or 0) > 100
