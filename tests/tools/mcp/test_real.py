"""Unmodified servers from the package registries."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everloop import AgentLoop, MessageBus
from everloop import events as ev
from everloop.config import McpServer
from everloop.log import Call
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Tool
from everloop.tools.context import CallContext
from everloop.tools.mcp import servers
from everloop.tools.mcp.servers import McpServers
from everloop.tools.registry import ToolRegistry

from .servers import by_name, failure, installed, run, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "beans.txt").write_text("water the beans\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[dict[str, Tool]]:
    """The tools of four servers from the registries, started once."""
    group = McpServers(
        [
            McpServer(name="time", command=sys.executable, args=("-m", "mcp_server_time"), tools=("get_*",)),
            McpServer(name="git", command=sys.executable, args=("-m", "mcp_server_git", "--repository", str(folder))),
            McpServer(name="files", command=installed("mcp-server-filesystem"), args=(str(folder),)),
            McpServer(name="everything", command=installed("mcp-server-everything")),
        ]
    )
    yield by_name(asyncio.run(group.ready()))
    asyncio.run(group.close())


async def test_a_real_server_tells_the_time(real):
    assert json.loads(await text(real["mcp_time_get_current_time"], timezone="Asia/Tokyo"))["timezone"] == "Asia/Tokyo"
    assert "Nowhere" in await failure(real["mcp_time_get_current_time"], timezone="Nowhere/Land")


async def test_only_tools_that_match_their_servers_patterns_exist(real):
    assert [name for name in real if name.startswith("mcp_time_")] == ["mcp_time_get_current_time"]


async def test_a_real_server_reads_and_writes_files_and_refuses_those_outside_its_folder(real, folder):
    assert "water the beans" in await text(real["mcp_files_read_text_file"], path=str(folder / "beans.txt"))
    await text(real["mcp_files_write_file"], path=str(folder / "peas.txt"), content="eat the peas")
    assert (folder / "peas.txt").read_text() == "eat the peas"
    assert "denied" in await failure(real["mcp_files_read_text_file"], path="/etc/passwd")


async def test_a_real_server_works_on_a_git_repository(real, folder):
    (folder / "seeds.txt").write_text("carrots")
    await text(real["mcp_git_git_add"], repo_path=str(folder), files=["seeds.txt"])
    assert "seeds.txt" in await text(real["mcp_git_git_status"], repo_path=str(folder))


async def test_a_tools_annotations_decide_whether_it_sends_data_and_may_be_repeated(real):
    reading, adding, committing = (real[f"mcp_git_git_{name}"] for name in ("status", "add", "commit"))
    assert [tool.sends for tool in (reading, adding, committing)] == [False] * 3  # they declare openWorldHint: false
    assert [tool.replay for tool in (reading, adding, committing)] == ["safe", "safe", "never"]
    assert not committing.plan({}).sends
    assert all(tool.untrusted and tool.timeout == 60 for tool in real.values())


async def test_pictures_structured_content_and_resources_of_a_real_server_arrive(real):
    picture = await run(real["mcp_everything_get-tiny-image"])
    assert picture.images[0].startswith("data:image/png;base64,iVBOR")
    assert "logo" in picture.text
    weather = json.loads(await text(real["mcp_everything_get-structured-content"], location="Chicago"))
    assert "temperature" in weather
    assert "demo://" in await text(real["mcp_everything_get-resource-links"], count=2)
    assert "demo://" in await text(real["mcp_everything_get-resource-reference"], resourceType="Text", resourceId=1)


async def test_progress_of_a_real_server_is_shown_while_it_works(real, monkeypatch):
    monkeypatch.setattr(servers, "PROGRESS_SECONDS", 0.0)
    shown: list[str] = []
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", shown.append)
    registry = ToolRegistry(real.values())
    arguments = {"duration": 0.8, "steps": 4}
    result = await registry.run(Call("c", "mcp_everything_trigger-long-running-operation", arguments), context)
    assert result.status == "ok", result
    assert len(shown) >= 3


async def test_a_turn_of_the_whole_loop_uses_a_real_server(real, tmp_path, folder):
    name = "mcp_files_read_text_file"
    model = ScriptedProvider([call(name, path=str(folder / "beans.txt")), call(name, path="/etc/passwd"), "Watered."])
    ended: list[ev.ToolEnded] = []

    def show(event: ev.Event) -> None:
        if isinstance(event, ev.ToolEnded):
            ended.append(event)

    async with AgentLoop(MessageBus(), model, workspace=tmp_path) as agent:
        for tool in real.values():
            agent.tools.register(tool)
        assert await agent.process_direct("What is to do?", on_event=show) == "Watered."
    assert "water the beans" in ended[0].content
    assert "root:" not in ended[1].content
