"""`everloop acp`: a client of the ACP SDK drives every method against the real program, as an editor does."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from acp import (
    PROTOCOL_VERSION,
    RequestError,
    embedded_text_resource,
    image_block,
    resource_block,
    resource_link_block,
    spawn_agent_process,
    text_block,
)
from acp.schema import AllowedOutcome, DeniedOutcome, McpServerStdio, RequestPermissionResponse

from everloop.testing import FakeOpenAI, call
from everloop.testing.openai_server import Reply

from .support.commands import COMMAND, environment
from .support.drawing import drawn
from .support.held import HeldOpenAI
from .support.settings import ASK_BEFORE_WRITING, home_with

pytestmark = pytest.mark.timeout(300)  # a fresh process loads the SDK, which takes long on a busy machine
SECONDS = 140

SETTINGS = f'[provider]\nfallbacks = ["second"]\n{ASK_BEFORE_WRITING}'


@pytest.fixture
async def server() -> AsyncIterator[HeldOpenAI]:
    async with HeldOpenAI() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home_with(SETTINGS)
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


class Editor:
    """What an editor sees of the agent, and what its person answers."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[Any] = []
        self.answers: list[str] = []
        self.asked = asyncio.Event()

    def on_connect(self, conn: Any) -> None:
        pass

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        self.questions.append((tool_call, options))
        self.asked.set()
        answer = self.answers.pop(0)
        if answer == "cancelled":
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=answer))

    def kinds(self) -> list[str]:
        return [update.session_update for update in self.updates]

    def said(self, kind: str = "agent_message_chunk") -> str:
        return "".join(update.content.text for update in self.updates if update.session_update == kind)

    def of(self, kind: str) -> list[Any]:
        return [update for update in self.updates if update.session_update == kind]


@asynccontextmanager
async def connected(server: FakeOpenAI) -> AsyncIterator[tuple[Any, Editor]]:
    editor = Editor()
    env = environment(server)
    async with (
        asyncio.timeout(SECONDS),
        spawn_agent_process(editor, COMMAND[0], *COMMAND[1:], "acp", env=env) as (agent, _),  # type: ignore[arg-type]
    ):
        start = await agent.initialize(protocol_version=PROTOCOL_VERSION)
        assert start.protocol_version == PROTOCOL_VERSION
        facts = start.model_dump()
        assert facts["agent_info"]["name"] == "everloop"
        assert facts["agent_capabilities"]["load_session"]
        assert facts["agent_capabilities"]["prompt_capabilities"]["image"]
        yield agent, editor


async def test_an_editor_prompts_sees_the_work_and_finds_the_session_again(server, folder):
    (folder / "plan.txt").write_text("beans\n")
    server.calls(
        call("read_file", path="plan.txt", offset=1),
        call("edit_file", path="plan.txt", old_text="beans", new_text="peas"),
    )
    server.reply("It says peas now.")
    picture = base64.b64encode(drawn()).decode()
    async with connected(server) as (agent, editor):
        await agent.authenticate(method_id="none")
        session = await agent.new_session(cwd=str(folder), mcp_servers=[])
        assert [mode.id for mode in session.modes.available_modes] == ["ask", "refuse"]
        ended = await agent.prompt(
            session_id=session.session_id,
            prompt=[
                text_block("look at "),
                resource_link_block("notes", (folder / "notes.md").as_uri()),
                resource_block(embedded_text_resource((folder / "a b.py").as_uri(), "print(1)")),
                image_block(picture, "image/png"),
            ],
        )
        assert ended.stop_reason == "end_turn"
        sent = server.requests[0].body["messages"][-1]["content"]
        assert f"data:image/png;base64,{picture}" in str(sent)
        assert f"look at [file {folder}/notes.md]" in str(sent)
        assert f"[file {folder}/a b.py]" in str(sent)
        assert "print(1)" in str(sent)
        assert editor.said() == "It says peas now."
        read, edit = editor.of("tool_call")
        assert (read.kind, read.locations[0].path, read.locations[0].line) == ("read", f"{folder}/plan.txt", 1)
        assert edit.kind == "edit"
        diff = edit.content[0]
        assert (diff.type, diff.path, diff.old_text, diff.new_text) == ("diff", f"{folder}/plan.txt", "beans", "peas")
        done = {update.tool_call_id: update.status for update in editor.of("tool_call_update")}
        assert done == {read.tool_call_id: "completed", edit.tool_call_id: "completed"}
        assert editor.of("usage_update")[0].size > 0
        assert (folder / "plan.txt").read_text() == "peas\n"

        server.reply("By the second.")
        chosen = await agent.set_config_option(session_id=session.session_id, config_id="model", value="second")
        assert chosen.config_options[0].current_value == "second"
        await agent.prompt(session_id=session.session_id, prompt=[text_block("who are you?")])
        assert server.requests[-1].body["model"] == "second"
        with pytest.raises(RequestError):
            await agent.set_config_option(session_id=session.session_id, config_id="model", value="third")
        for wrong in ("relative", str(folder / "plan.txt")):
            with pytest.raises(RequestError):
                await agent.new_session(cwd=wrong, mcp_servers=[])

    async with connected(server) as (agent, editor):
        listed = (await agent.list_sessions(cwd=str(folder))).sessions
        assert [(one.session_id, one.cwd) for one in listed] == [(session.session_id, str(folder))]
        assert listed[0].title.startswith("look at")
        with pytest.raises(RequestError):
            await agent.prompt(session_id=session.session_id, prompt=[text_block("not open")])
        with pytest.raises(RequestError):
            await agent.load_session(cwd=str(folder), session_id="acp:none", mcp_servers=[])
        await agent.load_session(cwd=str(folder), session_id=session.session_id, mcp_servers=[])
        assert "look at" in editor.said("user_message_chunk")
        assert editor.said() == "It says peas now.By the second."
        assert len(editor.of("tool_call")) == 2
        server.reply("Peas.")
        await agent.prompt(session_id=session.session_id, prompt=[text_block("what does it say?")])
        assert "It says peas now." in str(server.requests[-1].body["messages"])


async def test_questions_are_asked_in_the_editor_a_turn_is_cancelled_and_its_mcp_server_is_used(server, folder):
    async with connected(server) as (agent, editor):
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        for number, answer in enumerate(("once", "refuse", "cancelled")):
            server.calls(call("write_file", path=f"plan{number}.txt", content="beans"))
            server.reply("Done.")
            editor.answers.append(answer)
            assert (await agent.prompt(session_id=key, prompt=[text_block("plan")])).stop_reason == "end_turn"
        assert [path.name for path in sorted(folder.glob("plan*"))] == ["plan0.txt"]
        question, options = editor.questions[0]
        assert "plan0.txt" in str(question.content)
        assert [option.kind for option in options] == ["allow_once", "allow_always", "reject_once"]

        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        server.replies.clear()
        await agent.set_session_mode(session_id=key, mode_id="refuse")
        server.calls(call("write_file", path="plan9.txt", content="beans"))
        server.reply("I may not.")
        await agent.prompt(session_id=key, prompt=[text_block("plan")])
        assert len(editor.questions) == 3
        assert not (folder / "plan9.txt").exists()
        with pytest.raises(RequestError):
            await agent.set_session_mode(session_id=key, mode_id="none")

        server.hold(Reply("never heard"))
        asking = asyncio.create_task(agent.prompt(session_id=key, prompt=[text_block("slowly")]))
        while not server.heard:  # within the limit of the connection
            await asyncio.sleep(0.05)
        await agent.cancel(session_id=key)
        assert (await asking).stop_reason == "cancelled"
        server.go.set()

        clock = McpServerStdio(
            name="clock",
            command=sys.executable,
            args=["-m", "mcp_server_time", "--local-timezone", "Europe/Berlin"],
            env=[],
        )
        server.calls(call("mcp_clock_get_current_time", timezone="Europe/Berlin"))
        server.reply("Late.")
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[clock])).session_id
        editor.answers.append("once")
        await agent.prompt(session_id=key, prompt=[text_block("what time is it?")])
        offered = [tool["function"]["name"] for tool in server.requests[-1].body["tools"]]
        assert "mcp_clock_get_current_time" in offered
        assert "Europe/Berlin" in str(server.requests[-1].body["messages"][-1])
