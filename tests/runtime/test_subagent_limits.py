"""Limits of a sub-agent: a share of what its parent has left. And stopping it in any process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from typing import Any

import pytest

from everloop import AgentDefinition, LLMResponse, tool
from everloop.log import CallEnded, ModelAnswered, TurnEnded
from everloop.runtime.subagents import ParentTurn
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from tests.support.places import ROOT

from .chat import Gate, said, until
from .test_subagents import Both, House, define, hear, house, say

__all__ = ["house"]

DIGGER = """---
name: counter
description: Digs.
inputs: {type: object, properties: {task: {type: string}}, required: [task]}
tools: [spawn, list_dir]
query: ${task}
max_turns: 30
max_time_minutes: 5
---
You dig.
"""


class Levels(ScriptedProvider):
    """A model that knows its depth from its first message and has an endless script for each depth."""

    def __init__(self, *scripts: list[Any], tokens: int = 0) -> None:
        super().__init__([self._step], repeat_last=True)
        self.scripts = scripts
        self.tokens = tokens
        self.rounds: Counter[str] = Counter()  # of work, by the first message

    def _step(self, messages: Any, tools: Any) -> Any:
        task = said(messages, 1)
        if not tools:
            return "what I have"
        done = sum(message["role"] == "assistant" for message in messages)
        script = self.scripts[int(task[6])]
        self.rounds[task] += 1
        step = script[done] if done < len(script) else call("list_dir", path="." if done % 2 else "./")
        usage = {"prompt_tokens": self.tokens} if self.tokens else {}
        if isinstance(step, str):
            return LLMResponse(step, usage=usage)
        return LLMResponse(None, step if isinstance(step, list) else [step], usage=usage)


def spawns(task: str, **options: Any) -> Any:
    return call("spawn", task=task, agent="counter", wait=True, **options)


def look() -> Any:
    return call("list_dir", path=".")


async def direct(house: House, model: Any, rounds: int, **settings: Any) -> Any:
    agent = house.start(model, subagent_depth=5, **settings)
    agent._turns.specs.limits = type(agent._turns.specs.limits)(rounds=rounds)
    return agent


async def test_a_result_that_never_matches_is_an_error_for_the_waiting_agent(house):
    define(house)
    model = Both([spawns("beans"), "sorry"], ["done", "a", "b", "c", "about nine", "NEVER"])
    agent = house.start(model)
    await say(agent, "count")
    assert (await hear(agent))[2] == "sorry"
    (result,) = [entry for entry in await house.log("test:1") if isinstance(entry, CallEnded)]
    assert result.status == "error"
    assert "about nine" in result.content
    assert "JSON" in result.content
    assert len(model.asked["child"]) == 5


async def test_a_failed_sub_agent_is_an_error_for_the_waiting_agent(house):
    model = Both([call("spawn", task="fail", wait=True), "sorry"], [RuntimeError("no beans")])
    agent = house.start(model)
    await say(agent, "go")
    await hear(agent)
    (result,) = [entry for entry in await house.log("test:1") if isinstance(entry, CallEnded)]
    assert (result.status, "no beans" in result.content) == ("error", True)


async def test_the_error_of_a_tainted_sub_agent_is_marked_as_data(house):
    @tool(untrusted=True)
    async def page() -> str:
        """A page."""
        return "words of a stranger"

    model = Both([call("spawn", task="fail", wait=True), "sorry"], [call("page"), RuntimeError("no beans")])
    agent = house.start(model)
    agent.tools.register(page)
    await say(agent, "go")
    await hear(agent)
    (result,) = [entry for entry in await house.log("test:1") if isinstance(entry, CallEnded)]
    assert (result.status, result.untrusted, "no beans" in result.content) == ("error", True, True)


async def test_a_sub_agent_has_at_most_the_rounds_its_parent_has_left(house):
    define(house, DIGGER)
    model = Levels([look(), spawns("level 1"), "ok"], [look(), spawns("level 2")], [spawns("level 3")], [])
    agent = await direct(house, model, rounds=6)
    await say(agent, "level 0")
    assert (await hear(agent))[2] == "ok"
    assert model.rounds == {"level 0": 3, "level 1": 4, "level 2": 2, "level 3": 1}


async def test_concurrent_sub_agents_each_have_at_most_the_rounds_left(house):
    define(house, DIGGER)
    model = Levels([look(), [spawns(f"level 1 {n}") for n in range(5)], "ok"], [])
    agent = await direct(house, model, rounds=4)
    await say(agent, "level 0")
    assert (await hear(agent))[2] == "ok"
    assert model.rounds == {"level 0": 3, **{f"level 1 {n}": 2 for n in range(5)}}


async def test_a_sub_agent_without_a_definition_has_the_same_limits(house):
    model = Levels([call("spawn", task="level 1", wait=True), "ok"], [])
    agent = await direct(house, model, rounds=4)
    await say(agent, "level 0")
    assert (await hear(agent))[2] == "ok"
    assert model.rounds["level 1"] == 3


async def test_no_sub_agent_starts_in_the_last_round(house):
    model = Levels([call("spawn", task="level 1", wait=True)], ["NEVER"])
    agent = await direct(house, model, rounds=1)
    await say(agent, "level 0")
    await hear(agent)
    assert await house.children() == []
    assert [entry.status for entry in await house.log("test:1") if isinstance(entry, CallEnded)] == ["error"]


async def test_the_remaining_rounds_survive_a_restart(house):
    define(house, DIGGER)
    gate = Gate(look())
    first = Both([spawns("beans")], [gate])
    agent = await direct(house, first, rounds=3)
    await say(agent, "count")
    await gate.reached.wait()
    await house.stop()
    second = Both(["ok"], [look(), call("list_dir", path="./"), "what I have"])
    agent = await direct(house, second, rounds=100)
    assert (await hear(agent))[2] == "ok"
    (child,) = await house.children()
    work = [entry for entry in await house.log(child) if isinstance(entry, ModelAnswered | TurnEnded)]
    assert [type(entry) for entry in work[:3]] == [ModelAnswered, ModelAnswered, TurnEnded]


async def test_no_phase_outlives_the_deadline_of_the_parent(house):
    define(house, DIGGER)
    gate = Gate("never")
    model = Both([], [spawns("slower"), gate, "NEVER", "NEVER"])
    agent = await direct(house, model, rounds=9)
    began = time.time()
    definition = AgentDefinition.from_markdown(DIGGER)
    id = await agent.subagents.spawn("dig", ParentTurn(ends_at=began + 3.0), definition=definition, report=False)
    await asyncio.wait_for(agent.subagents.result(id), 30)
    await until(lambda: not agent.dispatcher._sessions)
    assert time.time() - began >= 3
    logs = [await house.log(child) for child in await house.children()]
    assert [[entry.reason for entry in log if isinstance(entry, TurnEnded)] for log in logs] == [["timeout"]] * 2
    assert len(model.asked["child"]) == 2


async def test_a_sub_agents_token_budget_includes_its_descendants(house):
    define(house, DIGGER)
    model = Levels(
        [spawns("level 1", tokens=40_000), "ok"], [[spawns("level 2 a"), spawns("level 2 b")]], [], tokens=7_000
    )
    agent = await direct(house, model, rounds=20)
    await say(agent, "level 0")
    assert (await hear(agent))[2] == "ok"
    below = sum(count for task, count in model.rounds.items() if task != "level 0")
    assert 3 <= below <= 6  # two concurrent ones may each use the last part
    logs = [await house.log(child) for child in await house.children()]
    assert "budget" in {entry.reason for log in logs for entry in log if isinstance(entry, TurnEnded)}


async def test_a_token_budget_survives_a_restart_and_does_not_limit_the_parent(house):
    define(house, DIGGER)
    model = Levels([spawns("level 1", tokens=25_000), look(), look(), "ok"], [look(), look()], tokens=9_000)
    gate = Gate(look())

    async def step(messages: Any, tools: Any) -> Any:
        answer = model._step(messages, tools)
        if model.rounds["level 1"] == 2 and not gate.reached.is_set():
            await gate(messages, tools)
        return answer

    agent = await direct(house, ScriptedProvider([step], repeat_last=True), rounds=20)
    await say(agent, "level 0")
    await gate.reached.wait()
    await house.stop()
    gate.open.set()
    agent = await direct(house, ScriptedProvider([step], repeat_last=True), rounds=20)
    assert (await hear(agent))[2] == "ok"
    (child,) = await house.children()
    answers = [entry for entry in await house.log(child) if isinstance(entry, ModelAnswered)]
    assert len(answers) == 2  # 18,000 tokens, and a third would not fit


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_stop_ends_sub_agents_in_another_process(house, tmp_path, bus):
    store = tmp_path / "store.db"
    SQLiteStore(store)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.family_process", str(store), bus,
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for _ in range(2):
            assert await asyncio.wait_for(process.stdout.readline(), 30) == b"asked\n"
        agent = house.start(ScriptedProvider([]))
        await say(agent, "/stop")
        assert "Stopped" in (await hear(agent))[2]
        for _ in range(2):
            assert await asyncio.wait_for(process.stdout.readline(), 30) == b"cancelled\n"
        ended: list[Any] = []
        while len(ended) < 2:
            logs = [await house.log(child) for child in await house.children()]
            ended = [log[-1] for log in logs if log and isinstance(log[-1], TurnEnded)]
        assert {entry.reason for entry in ended} == {"cancelled"}
        assert process.returncode is None  # the process itself continues
        assert await agent.subagents.running() == []
    finally:
        process.kill()
        await process.communicate()
