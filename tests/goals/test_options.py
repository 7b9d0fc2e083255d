"""Model options and initial messages of a definition reach the provider."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from everloop import AgentDefinition, OutputObject
from everloop.goals.definitions import DefinitionError
from everloop.goals.executor import AgentExecutor
from everloop.providers.openai import OpenAIProvider
from everloop.testing import FakeOpenAI, ScriptedProvider, call

from .goals import definition, executor

EXAMPLE = [{"role": "user", "content": "Count 2 ${what}."}, {"role": "assistant", "content": "two ${what}"}]
WHAT = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
FILE = """---
name: worker
description: Works.
temperature: 0.25
top_p: 0.5
reasoning: low
query: Do it.
initial_messages:
  - {role: user, content: "two and two?"}
  - {role: assistant, content: "four"}
---
You work.
"""


@asynccontextmanager
async def answering() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as server:
        server.reply("ok")
        server.reply("done")
        yield server


def bodies_of(server: FakeOpenAI) -> list[dict[str, Any]]:
    return [seen.body or {} for seen in server.requests]


async def run(folder: Any, made: AgentDefinition, **inputs: Any) -> tuple[OutputObject, list[dict[str, Any]]]:
    """Run a definition with a model over HTTP; return the output and the request bodies."""
    async with answering() as server:
        agent = await AgentExecutor.create(made, provider=OpenAIProvider(server.base_url, model="m"), workspace=folder)
        output = await agent.run(inputs)
        return output, bodies_of(server)


async def test_options_in_a_file_reach_the_model_in_every_phase(folder):
    output, bodies = await run(folder, AgentDefinition.from_markdown(FILE))
    assert output.terminate_reason == "goal"
    for body in bodies:
        assert (body["temperature"], body["top_p"], body["reasoning_effort"]) == (0.25, 0.5, "low")
        assert [(one["role"], one["content"]) for one in body["messages"][1:4]] == [
            ("user", "two and two?"),
            ("assistant", "four"),
            ("user", "Do it."),
        ]
    assert len(bodies) == 2


async def test_a_subclass_that_overrides_call_model_also_sends_them(folder):
    class Own(AgentExecutor):
        async def call_model(self, *args: Any, **kwargs: Any) -> Any:
            return await super().call_model(*args, **kwargs)

    async with answering() as server:
        provider = OpenAIProvider(server.base_url, model="m")
        agent = await Own.create(definition(temperature=1), provider=provider, workspace=folder)
        await agent.run({})
        assert [body["temperature"] for body in bodies_of(server)] == [1, 1]


async def test_without_options_none_are_sent(folder):
    _, bodies = await run(folder, definition())
    assert all(not {"temperature", "top_p", "reasoning_effort"} & body.keys() for body in bodies)


async def test_inputs_are_substituted_in_initial_messages_which_are_logged(folder):
    provider = ScriptedProvider([call("list_dir", path="."), "ok", "done"])
    agent = await executor(
        folder, provider, inputs=WHAT, initial_messages=EXAMPLE, query="Count ${what}.", tools=["list_dir"]
    )
    output = await agent.run({"what": "beans"})
    for request in provider.requests:
        said = [message["content"] for message in request.messages[1:4]]
        assert said == ["Count 2 beans.", "two beans", "Count beans."]
    assert "two beans" in repr(output.log)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("temperature", 3, "must be a number from 0 to 2, not 3"),
        ("temperature", True, "must be a number from 0 to 2, not True"),
        ("top_p", "half", "must be a number from 0 to 1, not 'half'"),
        ("reasoning", "hard", "must be one of none, minimal, low, medium, high, not 'hard'"),
        ("initial_messages", "hello", "must be a list of messages"),
        ("initial_messages", [{"role": "user"}], "message 1 must have a role and a content"),
        ("initial_messages", [{"role": "system", "content": "x"}], "must be user or assistant, not 'system'"),
        ("initial_messages", [{"role": "user", "content": ""}], "must be a string, not an empty one"),
        ("initial_messages", [{"role": "assistant", "content": "x"}], "a message of the user must precede it"),
    ],
)
def test_an_invalid_option_is_named_in_the_error(field, value, problem):
    with pytest.raises(DefinitionError) as caught:
        definition(**{field: value})
    assert str(caught.value).startswith(f"agent worker: {field}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
