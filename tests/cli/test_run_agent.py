"""`everloop run --agent`: the real command with a model behind HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from everloop.testing import call
from everloop.testing.openai_server import Reply
from tests.support.commands import Done, environment, everloop, finished, start, until
from tests.support.held import HeldOpenAI

GARDENER = """---
name: gardener
description: Plans a bed.
inputs:
  type: object
  properties:
    bed: {type: string}
    rows: {type: integer}
  required: [bed]
tools: [write_file]
query: Plan ${bed}.
max_turns: 2
output_schema: {type: object, properties: {n: {type: integer}}, required: [n]}
---
You plan.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "garden"
    (made / "agents").mkdir(parents=True)
    (made / "agents" / "gardener.md").write_text(GARDENER)
    return made


def words(folder: Path, *further: str) -> list[str]:
    return ["run", "--trust", "--workspace", str(folder), *further]


def is_one_error(done: Done, *parts: str) -> None:
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch(r"everloop: [^\n]+\n", done.err), done.err
    for part in parts:
        assert part in done.err


async def test_the_result_is_printed_and_the_status_is_0_when_the_goal_is_reached(folder, server):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    server.reply("planned")
    server.reply('{"n": 3}')
    done = await everloop(*words(folder, "--agent", "gardener", "bed=north=1", "rows=3"), server=server)
    assert (done.status, done.out, done.err) == (0, '{"n": 3}\n', "")
    assert (folder / "plan.txt").read_text() == "beans"
    assert server.requests[0].body is not None
    assert server.requests[0].body["messages"][1]["content"] == "Plan north=1."


async def test_a_run_is_in_the_log_and_can_be_replayed(folder, server):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    server.reply("planned")
    server.reply("no number")
    server.reply('{"n": 3}')
    done = await everloop(*words(folder, "--agent", "gardener", "bed=north", "--json"), server=server)
    facts = done.json
    assert (facts["result"], facts["reason"], facts["rounds"], facts["error"]) == ({"n": 3}, "goal", 2, None)
    place = ["--workspace", str(folder)]
    log = await everloop("log", *place, "--session", facts["session"])
    assert "write_file" in log.out
    assert "no number" in log.out
    shown = await everloop("log", *place, "--json", "--session", facts["session"])
    turns = {turn for line in shown.lines if (turn := json.loads(line).get("turn"))}
    assert len(turns) == 3
    for turn in turns:
        replayed = await everloop("replay", *place, turn)
        assert replayed.status == 0, replayed.err


async def test_reaching_a_limit_fails_and_prints_the_best_effort(folder, server):
    for name in ("a", "b"):
        server.calls(call("write_file", path=name, content="x"))
    server.reply('{"n": 1}')
    done = await everloop(*words(folder, "--agent", "gardener", "bed=north"), server=server)
    assert (done.status, done.out) == (1, '{"n": 1}\n')
    assert done.err == (
        "everloop: gardener: the limit of turns was reached; the result is the best effort, not the goal\n"
    )


async def test_a_result_that_never_fits_the_schema_fails(folder, server):
    for _ in range(5):
        server.reply("planned")
    done = await everloop(*words(folder, "--agent", "gardener", "bed=north"), server=server)
    assert (done.status, done.out) == (1, "")
    assert "no valid result" in done.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--agent", "gardner"], ['there is no agent "gardner" (did you mean "gardener"?)']),
        (["--agent", "gardener"], ["missing inputs: bed; given: none"]),
        (["--agent", "gardener", "bde=north"], ['unknown input "bde" (did you mean "bed"?)']),
        (["--agent", "gardener", "bed=north", "rows=many"], ["rows: must be an integer"]),
        (["--agent", "gardener", "north"], ['KEY=VALUE, not "north"']),
        (["--agent", "gardener", "bed=a", "bed=b"], ['the input "bed" is given twice']),
        (["two", "words"], ["write it in quotes"]),
        ([], ["the goal is empty"]),
    ],
)
async def test_a_usage_error_is_one_line(folder, server, arguments: list[str], parts: list[str]):
    is_one_error(await everloop(*words(folder, *arguments), server=server), *parts)
    assert server.requests == []


async def test_a_tool_that_needs_a_chat_is_refused_in_one_line(folder, server):
    (folder / "agents" / "gardener.md").write_text(GARDENER.replace("[write_file]", "[message]"))
    done = await everloop(*words(folder, "--agent", "gardener", "bed=north"), server=server)
    is_one_error(done, "message writes to a chat")


async def test_an_invalid_agent_file_is_reported_in_one_line_with_its_position(folder, server):
    (folder / "agents" / "gardener.md").write_text(GARDENER.replace("query:", "qeury:"))
    done = await everloop(*words(folder, "--agent", "gardener", "bed=north"), server=server)
    is_one_error(done, 'agents/gardener.md:11: unknown key "qeury" (did you mean "query"?)')


async def test_agents_of_an_untrusted_folder_are_not_run(folder, server):
    arguments = ["run", "--workspace", str(folder), "--agent", "gardener", "bed=north"]
    done = await everloop(*arguments, server=server)
    assert done.status == 2
    assert 'there is no agent "gardener"' in done.err
    assert server.requests == []


async def test_a_killed_run_is_resumed_by_running_it_again(folder):
    async with HeldOpenAI() as server:
        server.calls(call("write_file", path="plan.txt", content="beans"))
        server.hold(Reply("planned"))
        process = await start(*words(folder, "--agent", "gardener", "bed=north"), env=environment(server))
        await until(server.reached.is_set)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        before = len(server.requests)
        server.go.set()
        server.reply("planned")
        server.reply('{"n": 3}')
        done = await everloop(*words(folder, "--agent", "gardener", "bed=north", "--json"), server=server)
        assert (done.json["result"], done.json["rounds"]) == ({"n": 3}, 2)
        assert "resuming the interrupted run executor:gardener/" in done.err
        assert len(server.requests) - before == 2


async def test_a_run_in_a_named_session_is_stored_there(folder, server):
    server.reply("planned")
    server.reply('{"n": 3}')
    arguments = words(folder, "--agent", "gardener", "bed=north", "--session", "garden:plan", "--json")
    assert (await everloop(*arguments, server=server)).json["session"] == "garden:plan"
    log = await everloop("log", "--workspace", str(folder), "--session", "garden:plan")
    assert "planned" in log.out


async def test_ctrl_c_ends_a_run_for_good(folder):
    async with HeldOpenAI() as server:
        server.hold(Reply("planned"))
        process = await start(*words(folder, "--agent", "gardener", "bed=north"), env=environment(server))
        await until(server.reached.is_set)
        process.send_signal(signal.SIGINT)
        done = await finished(process)
        assert (done.status, done.out) == (130, "")
        assert "aborted" in done.err
        server.go.set()
    sessions: Any = (await everloop("sessions", "--json", "--workspace", str(folder))).json
    assert sessions["open_turn"] is None
