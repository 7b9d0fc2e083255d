"""Clients from the npm registry that start the agent themselves: a headless editor, and the MCP inspector.

Neither needs the network: any connection beyond this machine fails at once.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.testing import FakeOpenAI, call
from tests.support.commands import FRESH, environment
from tests.support.settings import ASK_BEFORE_WRITING, home_with

from .environments import node_environment
from .test_coding_agents import OFFLINE

pytestmark = pytest.mark.timeout(300)  # two programs start one after the other, which takes long on a busy machine
SECONDS = 200


@pytest.fixture
async def model() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


async def run(model: FakeOpenAI, folder: Path, *command: str, status: int = 0) -> str:
    """Return the output of a program for Node.js."""
    process = await asyncio.create_subprocess_exec(
        "node", *command, cwd=folder, env={**environment(model), **OFFLINE},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == status, (out + err).decode()
    return out.decode()


DENIED = 5  # a headless editor's exit status after it has refused something


async def edited(model: FakeOpenAI, folder: Path, option: str, status: int = 0) -> list[dict[str, Any]]:
    """The messages of a prompt that reads a file, edits it and writes another; each must be allowed."""
    home_with(ASK_BEFORE_WRITING)
    folder.mkdir()
    (folder / "plan.txt").write_text("beans\n")
    model.calls(call("read_file", path="plan.txt"))
    model.calls(
        call("edit_file", path="plan.txt", old_text="beans", new_text="peas"),
        call("write_file", path="new.txt", content="carrots\n"),
    )
    model.reply("That is all.")
    program = str(node_environment() / "node_modules/acpx/dist/cli.js")
    options = ["--agent", shlex.join([*FRESH, "acp"]), "--cwd", str(folder), "--format", "json", option]
    out = await run(model, folder, program, *options, "exec", "change the plan", status=status)
    lines = [json.loads(line) for line in out.splitlines()]
    updates = [line["params"]["update"] for line in lines if line.get("method") == "session/update"]
    said = "".join(one["content"]["text"] for one in updates if one["sessionUpdate"] == "agent_message_chunk")
    assert said == "That is all."
    (diff,) = [one["content"][0] for one in updates if one.get("kind") == "edit" and "edit_file" in one["title"]]
    assert (diff["type"], diff["oldText"], diff["newText"]) == ("diff", "beans", "peas")
    ends = [line["result"]["stopReason"] for line in lines if "stopReason" in line.get("result", {})]
    assert ends == ["end_turn"]
    assert [line.get("method") for line in lines].count("session/request_permission") == 1
    return lines


async def test_a_headless_editor_shows_the_work_answers_questions_and_writes_the_files(model, tmp_path):
    folder = tmp_path / "project"
    lines = await edited(model, folder, "--approve-all")
    written = [line["params"]["path"] for line in lines if line.get("method") == "fs/write_text_file"]
    assert sorted(written) == [str(folder / "new.txt"), str(folder / "plan.txt")]
    assert [path.read_text() for path in sorted(folder.iterdir())] == ["carrots\n", "peas\n"]


async def test_an_access_that_a_headless_editor_refuses_is_not_made_in_another_way(model, tmp_path):
    folder = tmp_path / "project"
    await edited(model, folder, "--deny-all", status=DENIED)
    assert [path.read_text() for path in folder.iterdir()] == ["beans\n"]
    assert "beans" not in str([said for said in model.requests[1].body["messages"] if said["role"] == "tool"])


async def test_the_inspector_lists_the_tools_asks_the_agent_and_finds_the_session(model):
    home_with("")
    # It looks for its own package.json in the folder above the one in which it is started.
    folder = node_environment() / "node_modules/@modelcontextprotocol/inspector-cli/build"

    async def inspected(*method: str) -> Any:
        return json.loads(await run(model, folder, "cli.js", "--cli", *FRESH, "mcp", "--method", *method))

    tools = (await inspected("tools/list"))["tools"]
    assert [tool["name"] for tool in tools] == ["ask", "sessions", "search"]
    assert all(tool["inputSchema"]["type"] == tool["outputSchema"]["type"] == "object" for tool in tools)
    model.reply("Water the beans.")
    called = await inspected("tools/call", "--tool-name", "ask", "--tool-arg", "message=what needs doing?")
    answer = called["structuredContent"]
    assert (answer["answer"], answer["reason"]) == ("Water the beans.", "answer")
    listed = (await inspected("tools/call", "--tool-name", "sessions"))["structuredContent"]["result"]
    assert [(one["key"], one["title"]) for one in listed] == [(answer["session"], "what needs doing?")]
    found = await inspected("tools/call", "--tool-name", "search", "--tool-arg", "query=beans", "limit=3")
    assert found["structuredContent"]["result"][0]["text"] == "Water the beans."
