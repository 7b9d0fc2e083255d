"""An agent's built-in tools: created from its settings, and released at the end of a turn and of the agent."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus, events
from everloop.config import Config, McpServer
from everloop.testing import ScriptedProvider, call
from everloop.tools.builtin import shell_settings

from ..support.commands import until

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def agent_of(folder: Path, *steps: Any, **options: Any) -> tuple[AgentLoop, ScriptedProvider]:
    model = ScriptedProvider(steps)
    folder.mkdir(exist_ok=True)
    options = {"restrict_to_workspace": True, "store": folder.parent / "store.db", **options}
    return AgentLoop(MessageBus(), model, folder, **options), model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


async def test_an_agent_has_all_tools_of_the_specification(folder):
    agent, _ = agent_of(folder)
    named = "read_file write_file edit_file list_dir find_files grep exec process web_fetch web_search message"
    named += " memory_search remember spawn cron"
    assert agent.tools.names == named.split()
    await agent.close()


async def test_background_commands_end_with_their_turn_and_kept_ones_with_the_agent(folder):
    def lives(name: str) -> Any:
        return call("exec", command=f"while sleep 0.1; do date +%s%N > {name}; done", background=True)

    kept = call("exec", command="while sleep 0.1; do date +%s%N > kept; done", background=True, keep=True)
    both = call("exec", command="until [ -s mortal ] && [ -s kept ]; do sleep 0.1; done")
    agent, _ = agent_of(folder, lives("mortal"), kept, both, "done")
    async with agent:
        await agent.process_direct("go")
        mortal, alive = (folder / "mortal").read_text(), (folder / "kept").read_text()
        await asyncio.sleep(0.5)
        assert (folder / "mortal").read_text() == mortal
        await until(lambda: (folder / "kept").read_text() != alive)
    alive = (folder / "kept").read_text()
    await asyncio.sleep(0.5)
    assert (folder / "kept").read_text() == alive


async def test_the_brave_key_passed_to_the_agent_is_used(folder):
    with_key, _ = agent_of(folder, brave_api_key="a key")
    without, _ = agent_of(folder)
    searches = [tool for agent in (with_key, without) for tool in agent.tools if tool.name == "web_search"]
    shown = [search.plan({"query": "beans"}).shown for search in searches]
    assert "Brave" in shown[0]
    assert "Brave" not in shown[1]
    await with_key.close()
    await without.close()


@pytest.mark.parametrize("given", [{"timeout": 0.3}, SimpleNamespace(timeout=0.3)])
async def test_command_settings_can_be_passed_to_the_agent(folder, given):
    agent, model = agent_of(folder, call("exec", command="sleep 20"), "done", exec_config=given)
    async with agent, asyncio.timeout(18):  # without the setting it would take twenty seconds
        await agent.process_direct("go")
    assert "0.3 seconds" in model.requests[-1].messages[-1]["content"]


def test_an_unknown_command_setting_is_refused():
    with pytest.raises(ValueError, match="timeuot"):
        shell_settings(Config(), {"timeuot": 1})


async def test_a_picture_read_by_a_tool_is_shown_to_the_model(folder):
    agent, model = agent_of(folder, [call("read_file", path="a.png"), call("list_dir")], "seen")
    (folder / "a.png").write_bytes(PICTURE)
    async with agent:
        await agent.process_direct("look")
    *_, one, other, shown = model.requests[-1].messages
    assert [one["role"], other["role"], shown["role"]] == ["tool", "tool", "user"]
    (url,) = [part["image_url"]["url"] for part in shown["content"] if part["type"] == "image_url"]
    assert base64.b64decode(url.partition(",")[2]) == PICTURE


async def test_a_long_command_streams_its_lines(folder):
    waits = "echo one; while [ ! -e seen ]; do sleep 0.1; done; echo two"
    agent, _ = agent_of(folder, call("exec", command=waits, timeout=30), "done")
    seen: list[str] = []
    ended: list[int] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.ToolProgress):
            seen.append(event.text)
            (folder / "seen").touch()
        elif isinstance(event, events.ToolEnded):
            ended.append(len(seen))

    async with agent:
        await agent.process_direct("go", on_event=watch)
    assert "one" in "\n".join(seen[: ended[0]])


async def test_a_configured_mcp_server_is_used_and_ends_with_the_agent(folder):
    config = Config(mcp=(McpServer(name="clock", command=sys.executable, args=("-m", "mcp_server_time")),))
    agent, model = agent_of(folder, call("mcp_clock_get_current_time", timezone="Europe/Berlin"), "done", config=config)
    async with agent:
        await agent.process_direct("what time is it?")
        children = Path("/proc/self/task").glob("*/children")
        pids = {pid for file in children for pid in file.read_text().split()}
        servers = [pid for pid in pids if b"mcp_server_time" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert servers
    assert "Europe/Berlin" in json.dumps(model.requests[-1].messages)
    assert not [pid for pid in servers if Path(f"/proc/{pid}").exists()]
