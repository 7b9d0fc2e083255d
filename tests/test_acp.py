"""`everloop acp`: a client of the ACP SDK drives every method against the real program, as an editor does."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from acp import (
    PROTOCOL_VERSION,
    RequestError,
    embedded_blob_resource,
    embedded_text_resource,
    image_block,
    resource_block,
    resource_link_block,
    spawn_agent_process,
    text_block,
)
from acp.schema import (
    AllowedOutcome,
    ClientCapabilities,
    DeniedOutcome,
    FileSystemCapabilities,
    HttpHeader,
    HttpMcpServer,
    McpServerStdio,
    ReadTextFileResponse,
    RequestPermissionResponse,
    SseMcpServer,
    WriteTextFileResponse,
)

from everloop import events
from everloop.acp.updates import TurnPlan
from everloop.testing import FakeOpenAI, call
from everloop.testing.openai_server import Reply

from .support.commands import COMMAND, environment, finished, start
from .support.drawing import drawn
from .support.held import HeldOpenAI
from .support.settings import ASK_BEFORE_WRITING, home_with
from .tools.mcp.test_http import WebServer

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
    """An editor's view of the agent, and the answers of its user."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[Any] = []
        self.answers: list[str] = []
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()
        self.buffers: dict[str, str] = {}  # its open files, saved or not
        self.reads: list[str] = []
        self.writes: list[tuple[str, str]] = []

    def on_connect(self, conn: Any) -> None:
        pass

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        self.questions.append((tool_call, options))
        self.asked.set()
        answer = self.answers.pop(0)
        if answer == "later":
            await self.cancelled.wait()
        if answer in ("cancelled", "later"):
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=answer))

    async def create_terminal(self, **_: Any) -> Any:
        raise AssertionError("commands run in the sandbox of the agent")

    async def read_text_file(self, session_id: str, path: str, **_: Any) -> ReadTextFileResponse:
        self.reads.append(path)
        if path.endswith("hidden.txt"):
            raise RequestError(-32603, "hidden by its person")
        if path not in self.buffers:
            raise RequestError(-32002, "not open")
        return ReadTextFileResponse(content=self.buffers[path])

    async def write_text_file(self, session_id: str, path: str, content: str, **_: Any) -> WriteTextFileResponse:
        if path.endswith("locked.txt"):
            raise RequestError(-32603, "locked by its person")
        self.writes.append((path, content))
        self.buffers[path] = content
        return WriteTextFileResponse()

    def said(self, kind: str = "agent_message_chunk") -> str:
        return "".join(update.content.text for update in self.updates if update.session_update == kind)

    def of(self, kind: str) -> list[Any]:
        return [update for update in self.updates if update.session_update == kind]

    def plans(self) -> list[list[tuple[str, str]]]:
        return [[(one.content, one.status) for one in plan.entries] for plan in self.of("plan")]


@asynccontextmanager
async def connected(server: FakeOpenAI, *files: str) -> AsyncIterator[tuple[Any, Editor]]:
    """Start an editor that offers these requests for its own file system."""
    editor = Editor()
    offered = ClientCapabilities(fs=FileSystemCapabilities.model_validate(dict.fromkeys(files, True)), terminal=True)
    # The SDK fails if a process ends just when it would be terminated, so it gets enough time to end by itself.
    process = spawn_agent_process(
        cast("Any", editor), *COMMAND, "acp", env=environment(server), transport_kwargs={"shutdown_timeout": 60.0}
    )
    async with asyncio.timeout(SECONDS), process as (agent, _):
        start = await agent.initialize(protocol_version=PROTOCOL_VERSION, client_capabilities=offered)
        assert start.protocol_version == PROTOCOL_VERSION
        facts = start.model_dump()
        assert facts["agent_info"]["name"] == "everloop"
        assert facts["agent_capabilities"]["load_session"]
        assert facts["agent_capabilities"]["prompt_capabilities"]["image"]
        yield agent, editor


async def test_an_editor_sends_prompts_sees_the_work_and_finds_the_session_again(server, folder):
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
        assert editor.reads == []  # it has not offered its files

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

        shown = len(editor.updates)
        copy = await agent.fork_session(cwd=str(folder), session_id=session.session_id, mcp_servers=[])
        server.reply("Peas, in a copy.")
        await agent.prompt(session_id=copy.session_id, prompt=[text_block("and here?")])
        assert "what does it say?" in str(server.requests[-1].body["messages"])
        await agent.close_session(session_id=session.session_id)
        with pytest.raises(RequestError):
            await agent.prompt(session_id=session.session_id, prompt=[text_block("closed")])
        await agent.resume_session(cwd=str(folder), session_id=session.session_id, mcp_servers=[])
        assert "what does it say?" not in str(editor.updates[shown:])  # nothing is shown twice
        server.reply("Still peas.")
        await agent.prompt(session_id=session.session_id, prompt=[text_block("still?")])
        assert "and here?" not in str(server.requests[-1].body["messages"])
        for method in (agent.fork_session, agent.resume_session):
            with pytest.raises(RequestError):
                await method(cwd=str(folder), session_id="acp:none", mcp_servers=[])
        listed = (await agent.list_sessions(cwd=str(folder))).sessions
        assert {one.session_id for one in listed} == {session.session_id, copy.session_id}


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
        with pytest.raises(RequestError, match="is running"):
            await agent.fork_session(cwd=str(folder), session_id=key, mcp_servers=[])
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


async def test_a_command_is_shown_while_it_runs_and_its_whole_output_at_its_end(server, folder):
    command = "echo first; echo second; until test -e go; do sleep 0.05; done; echo third"
    async with connected(server) as (agent, editor):
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        server.calls(call("exec", command=command))
        server.reply("Done.")
        asking = asyncio.create_task(agent.prompt(session_id=key, prompt=[text_block("run it")]))
        while not any("second" in str(update.content) for update in editor.of("tool_call_update")):
            assert not asking.done()
            await asyncio.sleep(0.05)
        (folder / "go").touch()
        assert (await asking).stop_reason == "end_turn"
        *running, ended = editor.of("tool_call_update")
        assert {update.status for update in running} == {"in_progress"}
        assert ended.status == "completed"
        output = ended.content[0].content.text
        assert [word for word in output.split() if word in ("first", "second", "third")] == ["first", "second", "third"]

    async with connected(server) as (agent, editor):
        await agent.load_session(cwd=str(folder), session_id=key, mcp_servers=[])
        assert editor.of("tool_call_update")[-1].content[0].content.text == output


async def test_a_question_can_be_cancelled_answered_for_the_session_and_thoughts_and_files_are_passed_on(
    server, folder
):
    picture = base64.b64encode(drawn()).decode()
    async with connected(server) as (agent, editor):
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        editor.answers.append("later")
        server.calls(call("write_file", path="plan.txt", content="beans"))
        asking = asyncio.create_task(agent.prompt(session_id=key, prompt=[text_block("plan")]))
        await editor.asked.wait()
        await agent.cancel(session_id=key)
        editor.cancelled.set()
        assert (await asking).stop_reason == "cancelled"
        assert not (folder / "plan.txt").exists()

        editor.answers.append("always")
        server.calls(call("write_file", path="plan.txt", content="beans"))
        server.calls(call("write_file", path="plan.txt", content="peas"))
        server.replies.append(Reply("It says peas.", reasoning="So be it."))
        files = [
            resource_block(embedded_blob_resource("file:///drawn.png", picture, mime_type="image/png")),
            resource_block(embedded_blob_resource((folder / "plan.zip").as_uri(), "UEsFBg==")),
        ]
        await agent.prompt(session_id=key, prompt=[text_block("plan again"), *files])
        assert (folder / "plan.txt").read_text() == "peas"
        assert len(editor.questions) == 2  # one answer covered both files
        sent = str([said for request in server.requests for said in request.body["messages"] if said["role"] == "user"])
        assert f"data:image/png;base64,{picture}" in sent
        assert f"[file {folder}/plan.zip]" in sent
        assert editor.said("agent_thought_chunk") == "So be it."

        copies = [
            (await agent.fork_session(cwd=str(folder), session_id=key, mcp_servers=[])).session_id for _ in range(50)
        ]
        first = await agent.list_sessions(cwd=str(folder))
        rest = await agent.list_sessions(cwd=str(folder), cursor=first.next_cursor)
        assert (len(first.sessions), len(rest.sessions), rest.next_cursor) == (50, 1, None)
        assert {one.session_id for one in (*first.sessions, *rest.sessions)} == {key, *copies}

        await agent.ext_notification("of_another_editor", {})
        with pytest.raises(RequestError, match="not found"):
            await agent.ext_method("of_another_editor", {})


async def test_an_mcp_server_over_http_gets_the_editors_headers_and_one_over_sse_is_refused(server, folder):
    web = WebServer()
    await web.start()
    headers = [HttpHeader(name="X-Key", value="canary")]
    async with AsyncExitStack() as ending:
        ending.push_async_callback(web.stop)
        agent, editor = await ending.enter_async_context(connected(server))
        sse = SseMcpServer(name="old", url=web.url, headers=[], type="sse")
        with pytest.raises(RequestError, match="stdio and HTTP"):
            await agent.new_session(cwd=str(folder), mcp_servers=[sse])
        assert web.requests == []
        by_http = HttpMcpServer(name="web", url=web.url, headers=headers, type="http")
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[by_http])).session_id
        server.calls(call("mcp_web_echo", text="from the web"))
        server.reply("Done.")
        editor.answers.append("once")
        await agent.prompt(session_id=key, prompt=[text_block("say it")])
        assert "from the web" in str(server.requests[-1].body["messages"][-1])
        assert {headers.get("X-Key") for _, headers, _ in web.requests} == {"canary"}


async def results(server: HeldOpenAI, agent: Any, key: str, *calls: Any) -> list[str]:
    """Return the calls' results as the model got them."""
    server.calls(*calls)
    server.reply("Done.")
    await agent.prompt(session_id=key, prompt=[text_block("go on")])
    body = server.requests[-1].body
    assert body is not None
    return [said["content"] for said in body["messages"][-len(calls) :]]


async def test_unsaved_text_is_what_the_agent_reads_and_the_editor_writes_within_the_agents_reach(server, folder):
    plan, locked, secret = folder / "plan.txt", folder / "locked.txt", folder.parent / "secret.txt"
    plan.write_text("saved\r\n")
    locked.write_text("locked")
    secret.write_text("canary")
    (folder / "link.txt").symlink_to(secret)

    async with connected(server, "read_text_file", "write_text_file") as (agent, editor):
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        editor.buffers = {str(plan): "unsaved\n", str(locked): "locked", str(secret): "of the editor"}

        async def told(*calls: Any, answers: tuple[str, ...] = ()) -> list[str]:
            editor.answers += answers
            return await results(server, agent, key, *calls)

        assert "unsaved" in (await told(call("read_file", path="plan.txt")))[0]
        edit = call("edit_file", path="plan.txt", old_text="unsaved", new_text="edited")
        assert "Edited" in (await told(edit))[0]
        assert editor.writes == [(str(plan), "edited\r\n")]  # in the file's own form
        assert plan.read_bytes() == b"saved\r\n"  # the editor writes to the disk
        editor.buffers[str(plan)] = "typed meanwhile, and edited\n"
        back = call("edit_file", path="plan.txt", old_text="edited", new_text="back")
        assert "has changed" in (await told(back))[0]
        new = call("write_file", path="new/bean.txt", content="beans")
        assert "Created" in (await told(new, answers=("once",)))[0]
        assert editor.writes[-1] == (str(folder / "new/bean.txt"), "beans")

        assert (
            "locked by its person"
            in (await told(call("write_file", path="locked.txt", content=""), answers=("once",)))[0]
        )
        await told(call("write_file", path="refused.txt", content="beans"), answers=("refuse",))
        linked = await told(call("read_file", path="link.txt"))
        assert "of the editor" not in linked[0]
        assert "canary" not in linked[0]
        assert "canary" in (await told(call("read_file", path=str(secret)), answers=("once",)))[0]  # not by the editor
        link = call("edit_file", path="link.txt", old_text="of", new_text="off")
        assert "Edited" not in (await told(link))[0]
        assert str(secret) not in editor.reads
        assert len(editor.writes) == 2

        (folder / "hidden.txt").write_text("canary")
        assert "canary" not in (await told(call("read_file", path="hidden.txt")))[0]
        (folder / "disk.txt").write_text("only on disk")
        assert "only on disk" in (await told(call("read_file", path="disk.txt")))[0]
        # A command could put a link in the editor's way, which is not confined.
        waits = call("exec", command="sleep 200", background=True, keep=True)
        assert "Started" in (await told(waits, answers=("once",)))[0]
        asked = len(editor.reads)
        assert "saved" in (await told(call("read_file", path="plan.txt")))[0]
        assert len(editor.reads) == asked


async def test_an_editor_that_only_reads_gets_nothing_to_write(server, folder):
    plan = folder / "plan.txt"
    plan.write_text("saved\n")
    async with connected(server, "read_text_file") as (agent, editor):
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        editor.buffers = {str(plan): "unsaved\n"}
        assert "unsaved" in (await results(server, agent, key, call("read_file", path="plan.txt")))[0]
        await results(server, agent, key, call("edit_file", path="plan.txt", old_text="saved", new_text="on disk"))
        assert (editor.writes, plan.read_bytes()) == ([], b"on disk\n")  # without the user's unsaved changes


@pytest.mark.parametrize("line", [b"garbage", b"\xff\xfe", b"[]", b"null", b'"hello"', b"5", b"{}", b"[" * 100_000])
async def test_an_invalid_line_is_reported_in_one_line_and_the_next_one_is_answered(server, line):
    process = await start("acp", env=environment(server))
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": PROTOCOL_VERSION}}
    process.stdin.write(line + b"\n\n" + json.dumps(hello).encode() + b"\n")
    async with asyncio.timeout(SECONDS):
        answer = json.loads(await process.stdout.readline())
    done = await finished(process)
    assert (answer["id"], answer["result"]["protocolVersion"]) == (1, PROTOCOL_VERSION)
    assert re.fullmatch(r"everloop: the editor sent [^\n]* not [^\n]*\n", done.err), done.err


@pytest.mark.parametrize("streams", ["</dev/null | cat", "</dev/zero | cat", "<file | cat", "<&- | cat", ">file"])
async def test_a_file_or_a_device_in_the_place_of_the_editor_is_a_clear_error(server, tmp_path, streams):
    (tmp_path / "file").write_text("")
    line = f"set -o pipefail; sleep 0 | {shlex.join(COMMAND)} acp {streams}"
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", line], cwd=tmp_path, env=environment(server), capture_output=True, text=True
    )
    stream = "output" if streams.startswith(">") else "input"
    assert done.returncode == 2
    told = f"everloop acp speaks to an editor, so its standard {stream} must be a pipe: let the editor start it"
    assert done.stderr == f"everloop: {told}\n"


async def test_sub_agents_are_a_plan_of_their_turn_that_is_shown_again_when_the_session_is_loaded(server, folder):
    async with connected(server) as (agent, editor):
        key = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        server.calls(call("spawn", task="Count the beans"))
        server.reply("Seven beans.")
        server.reply("There are seven.")
        await agent.prompt(session_id=key, prompt=[text_block("how many?")])
        assert editor.said() == "There are seven."
        assert "Seven beans." in str(server.requests[-1].body["messages"][-1])
        shown = [[("Count the beans", "in_progress")], [("Count the beans", "completed")]]
        assert editor.plans() == shown
        server.calls(call("spawn", task="Count the peas"))
        server.reply("Nine peas.")
        server.reply("And nine.")
        await agent.prompt(session_id=key, prompt=[text_block("and peas?")])
        shown += [[("Count the peas", "in_progress")], [("Count the peas", "completed")]]  # a turn has its own plan
        assert editor.plans() == shown

    async with connected(server) as (agent, editor):
        await agent.load_session(cwd=str(folder), session_id=key, mcp_servers=[])
        assert editor.plans() == shown
        assert editor.said() == "There are seven.And nine."


def test_the_models_list_of_steps_is_shown_as_its_plan_once_the_tool_has_accepted_it():
    plan = TurnPlan()
    todos = [
        {"content": "dig", "status": "completed"},
        {"content": "sow", "status": "in_progress"},
        {"content": "water"},
    ]
    assert plan.after(events.ToolStarted("1", "mcp_list_todo_write", {"todos": todos})) is None
    shown = plan.after(events.ToolEnded("1", "mcp_list_todo_write", "ok", "ok", 0.1))
    assert shown is not None
    statuses = [(one.content, one.status) for one in shown.entries]
    assert statuses == [("dig", "completed"), ("sow", "in_progress"), ("water", "pending")]
    for name, arguments in (
        ("update_plan", {"plan": [{"step": "", "status": "done"}, 7]}),
        ("write_file", {"todos": todos}),
    ):
        plan.after(events.ToolStarted("2", name, arguments))
        assert plan.after(events.ToolEnded("2", name, "ok", "ok", 0.1)) is None
    plan.after(events.ToolStarted("3", "todo", {"items": ["weed"]}))
    assert plan.after(events.ToolEnded("3", "todo", "no", "error", 0.1)) is None
