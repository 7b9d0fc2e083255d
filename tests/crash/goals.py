"""A program that runs an executor and is killed at some point; restarted, it resumes its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everloop import AgentDefinition, AgentExecutor, LLMProvider, LLMResponse, ToolRegistry
from everloop.config import Config
from everloop.store.sqlite import SQLiteStore
from everloop.testing import call

from .programs import kill_at, make_tools, note

COUNTER = AgentDefinition(
    name="counter",
    description="Counts.",
    system_prompt="You count ${what}.",
    query="Count the ${what}.",
    inputs={"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    tools=["safe", "never", "spawn"],
    max_time_minutes=2,
    output_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
)
STEPS = 7  # answers of the model: four of the work, one of the sub-agent, two of the extraction


class Counting(LLMProvider):
    """A stateless model: its answer follows from the conversation alone. It records each request."""

    default_model = "counting"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> LLMResponse:
        note(self._folder, "asked", messages=len(messages), tools=bool(tools))
        if "You are a sub-agent" in messages[0]["content"]:
            return LLMResponse("there are two")
        if not tools:
            wrong = messages[-1]["content"].startswith("That is not a valid result")
            return LLMResponse('{"n": 2}' if wrong else "about two")
        done = sum(message["role"] == "assistant" for message in messages)
        steps = [
            [call("safe", text="one")],
            [call("never", text="two"), call("safe", text="three")],
            [call("spawn", task="count them again")],
        ]
        return LLMResponse(None, steps[done]) if done < len(steps) else LLMResponse("I have counted.")


async def run_goal(folder: str, at: int = 0, when: str = "before") -> None:
    """Run the goal in a folder; die at the n-th commit. The output ends up in the file `output`."""
    place = Path(folder)
    store = SQLiteStore(place / "store.db")
    if at:
        kill_at(store, at, when)
    executor = await AgentExecutor.create(
        COUNTER,
        provider=Counting(place),
        workspace=place,
        tools=ToolRegistry(make_tools(place)),
        config=Config(home=place / "home"),
        store=store,
    )
    output = await executor.run({"what": "beans"})
    facts = {"result": output.result, "reason": output.terminate_reason, "session": output.session}
    (place / "output").write_text(json.dumps({**facts, "error": output.error}))
