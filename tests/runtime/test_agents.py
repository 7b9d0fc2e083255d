"""Agents of the workspace: the model sees a list of them, and passes them their inputs."""

from __future__ import annotations

import json
import os
from typing import Any

from everloop.goals.definitions import AgentDefinition
from everloop.goals.files import describe
from everloop.testing import call

from .test_subagents import Both, House, hear, house, say

__all__ = ["house"]

GARDENER = """---
name: gardener
description: Plans a bed.
inputs:
  type: object
  properties:
    bed: {type: string, description: Which bed.}
    rows: {type: integer}
    note: {type: string, default: none}
  required: [bed, rows]
tools: [list_dir]
query: Plan ${rows} rows in the ${bed} bed (${note}).
---
You plan ${bed}.
"""
TOLD = "- gardener: Plans a bed. Inputs: bed (string) Which bed.; rows (integer); note (string, optional)."


def write(house: House, name: str, text: str) -> None:
    folder = house.folder / "work" / "agents"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)


def spawn_of(request: Any) -> str:
    return next(one["function"]["description"] for one in request.tools if one["function"]["name"] == "spawn")


async def results_of(house: House, *calls: Any, child: list[Any] | None = None) -> tuple[list[str], Both]:
    """Return the results of one round of calls."""
    model = Both([list(calls), "ok"], child or [])
    agent = house.start(model)
    await say(agent, "go")
    await hear(agent)
    return [m["content"] for m in model.asked["parent"][-1][0] if m["role"] == "tool"], model


async def test_an_agent_with_several_inputs_is_spawned_with_them(house):
    write(house, "gardener", GARDENER)
    spawned = call("spawn", agent="gardener", inputs={"bed": "north", "rows": "3"}, wait=True)
    (result,), model = await results_of(house, spawned, child=["planned", "three rows"])
    assert result == "three rows"
    messages, _ = model.asked["child"][0]
    assert messages[-1]["content"] == "Plan 3 rows in the north bed (none)."
    assert "You plan north." in messages[0]["content"]


async def test_a_task_given_with_inputs_fills_the_missing_one_or_follows_them(house):
    write(house, "gardener", GARDENER)
    calls = [
        call("spawn", task="north", agent="gardener", inputs={"rows": 3}, wait=True),
        call("spawn", task="Beans.", agent="gardener", inputs={"bed": "south", "rows": 2}, wait=True),
    ]
    _, model = await results_of(house, *calls)
    said = sorted(messages[1]["content"] for messages, tools in model.asked["child"] if tools)
    assert said == ["Plan 2 rows in the south bed (none).\n\nBeans.", "Plan 3 rows in the north bed (none)."]


async def test_inputs_that_are_missing_unknown_or_wrong_are_an_error_that_names_them(house):
    write(house, "gardener", GARDENER)
    calls = [
        call("spawn", task="plan it", agent="gardener"),
        call("spawn", agent="gardener", inputs={"bed": "north", "row": 3}),
        call("spawn", agent="gardener", inputs={"bed": "north", "rows": "many"}),
        call("spawn", task="x", inputs={"bed": "north"}),
        call("spawn", agent="gardener"),
    ]
    results, _ = await results_of(house, *calls)
    told = [json.loads(result)["message"] for result in results]
    assert "missing inputs: bed, rows" in told[0]
    assert "Its inputs are: bed, rows, note" in told[0]
    assert 'unknown input "row" (did you mean "rows"?)' in told[1]
    assert "rows: must be an integer" in told[2]
    assert "Only an agent with a name has inputs" in told[3]
    assert "There is no task" in told[4]
    assert await house.children() == []


async def test_the_model_sees_names_descriptions_and_inputs_which_change_only_with_a_file(house):
    write(house, "gardener", GARDENER)
    model = Both(["one", "two", "three", "four"], [])
    agent = house.start(model)
    for _ in range(2):
        await say(agent, "hello")
        await hear(agent)
    first, second = model.requests
    assert TOLD in spawn_of(first)
    assert json.dumps(second.tools) == json.dumps(first.tools)
    assert second.messages[: len(first.messages)] == first.messages
    write(house, "digger", GARDENER.replace("gardener", "digger"))
    os.unlink(house.folder / "work/agents/gardener.md")
    await say(agent, "hello")
    await hear(agent)
    assert "- digger: Plans a bed." in spawn_of(model.requests[2])
    assert "gardener" not in spawn_of(model.requests[2])


async def test_without_workspace_agents_the_prompt_does_not_mention_them(house):
    agent = house.start(model := Both(["one"], []))
    await say(agent, "hello")
    await hear(agent)
    assert "Agents of this workspace" not in spawn_of(model.requests[0])


async def test_agents_of_an_untrusted_folder_are_not_listed(house):
    write(house, "gardener", GARDENER)
    agent = house.start(model := Both(["one"], []), trusted=False)
    await say(agent, "hello")
    await hear(agent)
    assert "gardener" not in json.dumps(model.requests[0].tools)


async def test_a_broken_agent_is_not_listed(house):
    write(house, "gardener", GARDENER.replace("query:", "qeury:"))
    write(house, "digger", GARDENER.replace("gardener", "digger"))
    agent = house.start(model := Both(["one"], []))
    await say(agent, "hello")
    await hear(agent)
    assert "digger" in spawn_of(model.requests[0])
    assert "gardener" not in spawn_of(model.requests[0])


def test_the_list_of_agents_is_bounded():
    made = [AgentDefinition(f"agent{n}", "d" * 1000, "You work.") for n in range(100)]
    told = describe(made)
    assert len(told) < 13_000
    assert told.endswith("- and 89 more in agents/")
