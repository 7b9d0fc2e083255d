"""`everloop mcp`: a client of the MCP SDK calls the agent, and a person answers its questions, or nobody can."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import ElicitResult

from everloop.testing import FakeOpenAI, call
from everloop.testing.openai_server import Reply
from tests.support.model_servers import server as server

from .support.commands import COMMAND, environment
from .support.held import HeldOpenAI
from .support.settings import ASK_BEFORE_WRITING, home_with

pytestmark = pytest.mark.timeout(300)  # a fresh process loads the SDK, which takes long on a busy machine
SECONDS = 250


@pytest.fixture
def workspace() -> Path:
    return home_with(ASK_BEFORE_WRITING) / "workspace"


@asynccontextmanager
async def client(server: FakeOpenAI, **options: Any) -> AsyncIterator[Client]:
    program = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], "mcp"], env=environment(server))
    async with asyncio.timeout(SECONDS), Client(stdio_client(program), **options) as connected:
        yield connected


async def asked(connected: Client, message: str, **more: str) -> dict[str, Any]:
    result = await connected.call_tool("ask", {"message": message, **more})
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return result.structured_content


async def test_the_agent_is_asked_its_sessions_are_listed_and_searched(server, workspace):
    server.reply("Water the beans.")
    server.reply("Twice a day.")
    seen: list[str | None] = []
    async with client(server) as connected:
        tools = await connected.list_tools()
        assert [tool.name for tool in tools.tools] == ["ask", "sessions", "search"]
        first = await asked(connected, "what needs doing?")
        assert (first["answer"], first["reason"]) == ("Water the beans.", "answer")
        second = await asked(connected, "how often?", session=first["session"])
        assert second["answer"] == "Twice a day."
        assert "Water the beans." in str(server.requests[1].body["messages"])
        listed = (await connected.call_tool("sessions", {})).structured_content
        assert listed is not None
        assert [(one["key"], one["title"], one["state"]) for one in listed["result"]] == [
            (first["session"], "what needs doing?", "idle")
        ]
        found = (await connected.call_tool("search", {"query": "beans"})).structured_content
        assert found is not None
        assert found["result"][0]["text"] == "Water the beans."
        server.calls(call("list_dir"))
        server.reply("Nothing there.")

        async def progress(progress: float, total: float | None, message: str | None) -> None:
            seen.append(message)

        await connected.call_tool("ask", {"message": "look"}, progress_callback=progress)
        assert seen == ["list_dir"]
        server.calls(call("spawn", task="Count the beans"))
        server.reply("Seven beans.")
        server.reply("There are seven.")
        assert (await asked(connected, "how many?"))["answer"] == "There are seven."
        assert "Seven beans." in str(server.requests[-1].body["messages"][-1])  # of the sub-agent, in the same turn
        server.calls(call("write_file", path="plan.txt", content="beans"))
        server.reply("I may not.")
        assert (await asked(connected, "plan"))["answer"] == "I may not."  # no person can be asked
        assert not (workspace / "plan.txt").exists()
        for wrong in ({"message": " "}, {"message": "x", "session": "sub:1"}, {"message": "x", "id": "1"}):
            assert (await connected.call_tool("ask", wrong)).is_error


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_only_a_person_at_the_client_answers_a_question(server, workspace, mode):
    answers = [
        ("accept", {"answer": "allow", "note": ""}),
        ("accept", {"answer": "refuse", "note": "not there"}),
        ("decline", None),
        ("cancel", None),
    ]
    questions: list[str] = []

    async def person(context: Any, request: Any) -> ElicitResult:
        assert not (workspace / f"plan{len(questions)}.txt").exists()
        action, content = answers[len(questions)]
        questions.append(request.message)
        return ElicitResult(action=action, content=content)  # type: ignore[arg-type]

    for number in range(4):
        server.calls(call("write_file", path=f"plan{number}.txt", content="beans"))
        server.reply("Done.")
    async with client(server, mode=mode, elicitation_callback=person) as connected:
        for _ in range(3):
            assert (await asked(connected, "plan", session="mcp:plan"))["answer"] == "Done."
        parked = await asked(connected, "plan", session="mcp:plan")
        assert parked["reason"] == "question"
        assert len(server.requests) == 7
        for word in ("y", "yes", "a", "always", "/approve", "/approve always", "/aprove", "/new", "/stop"):
            assert (await connected.call_tool("ask", {"message": word, "session": "mcp:plan"})).is_error
        listed = (await connected.call_tool("sessions", {})).structured_content
        assert listed is not None
        assert listed["result"][0]["state"] == "waiting"
    assert all("write_file" in question for question in questions)
    assert [path.name for path in workspace.glob("plan*.txt")] == ["plan0.txt"]
    assert "not there" in str(server.requests[3].body["messages"])
    assert len(server.requests) == 7


async def test_a_turn_survives_a_kill_and_is_answered_once_to_the_same_message():
    async with HeldOpenAI() as server:
        server.hold(Reply("never heard"))
        server.reply("Water the beans.")
        program = (*COMMAND, "mcp")
        pids: list[int] = []

        async def ask_and_be_killed() -> None:
            parameters = StdioServerParameters(
                command="sh", args=["-c", 'echo $$ > "$PID_FILE"; exec "$@"', "sh", *program], env=env
            )
            async with Client(stdio_client(parameters)) as connected:
                await connected.call_tool("ask", {"message": "what now?", "session": "mcp:a", "id": "1"})

        pid_file = Path(os.environ["EVERLOOP_HOME"]).parent / "pid"
        env = {**environment(server), "PID_FILE": str(pid_file)}
        asking = asyncio.create_task(ask_and_be_killed())
        async with asyncio.timeout(SECONDS):
            while not server.heard:
                await asyncio.sleep(0.05)
        pids.append(int(pid_file.read_text()))
        os.kill(pids[0], signal.SIGKILL)
        await asyncio.wait([asking])
        assert asking.exception() is not None
        async with client(server) as connected:
            again = await asked(connected, "what now?", session="mcp:a", id="1")
            assert again["answer"] == "Water the beans."
            once_more = await asked(connected, "what now?", session="mcp:a", id="1")
            assert once_more == again
        assert len(server.requests) == 2
