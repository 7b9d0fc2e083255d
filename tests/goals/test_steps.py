"""The named steps of a run, which a subclass can override."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from everloop.goals.activities import ActivityError
from everloop.goals.executor import AgentExecutor
from everloop.log import CallEnded
from everloop.providers.base import LLMResponse
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import tool

from .goals import executor, results


@tool
async def say(text: str) -> str:
    """Says."""
    return text


async def test_every_step_is_called_in_its_place(folder):
    steps = []

    class Noting(AgentExecutor):
        def build_system_prompt(self, inputs):
            steps.append("build_system_prompt")
            return super().build_system_prompt(inputs)

        async def call_model(self, *args, **kwargs):
            steps.append("call_model")
            return await super().call_model(*args, **kwargs)

        async def process_function_calls(self, *args, **kwargs):
            steps.append("process_function_calls")
            return await super().process_function_calls(*args, **kwargs)

        def build_extraction_message(self):
            steps.append("build_extraction_message")
            return super().build_extraction_message()

    provider = ScriptedProvider([[call("say", text="a"), call("say", text="b")], "ok", "done"])
    output = await (await executor(folder, provider, say, kind=Noting)).run({})
    assert output.result == "done"
    assert steps == [
        "build_system_prompt", "call_model", "process_function_calls", "call_model", "build_extraction_message",
        "call_model",
    ]  # fmt: skip


async def test_the_prompts_can_be_overridden_even_by_async_methods(folder):
    class Other(AgentExecutor):
        async def build_system_prompt(self, inputs):  # type: ignore[override]
            return f"system {inputs}"

        async def build_extraction_message(self):  # type: ignore[override]
            return f"extract {self.inputs}"

    provider = ScriptedProvider(["ok", "done"])
    schema = {"properties": {"a": {"type": "integer"}}}
    agent = await executor(folder, provider, kind=Other, inputs=schema)
    await agent.run({"a": 1})
    assert agent.inputs == {}  # no state of the run is left behind
    assert provider.requests[1].messages[0]["content"] == "system {'a': 1}"
    assert provider.requests[1].messages[-1]["content"] == "extract {'a': 1}"


async def test_a_step_that_fails_before_a_turn_begins_is_a_reported_error(folder):
    class Broken(AgentExecutor):
        def build_system_prompt(self, inputs):
            raise RuntimeError("no prompt")

    seen: list[Any] = []
    provider = ScriptedProvider([])
    output = await (await executor(folder, provider, kind=Broken, seen=seen)).run({})
    assert (output.terminate_reason, output.error) == ("error", "no prompt")
    assert seen == [ActivityError("no prompt", "error")]


async def test_the_model_call_can_be_overridden(folder):
    class Echo(AgentExecutor):
        async def call_model(self, conversation, tools, emit=None):
            return LLMResponse(f"<think>hm</think>{len(conversation)} messages")

    provider = ScriptedProvider([])
    seen: list[Any] = []
    output = await (await executor(folder, provider, kind=Echo, seen=seen)).run({})
    assert output.result == "4 messages"
    assert [activity.text for activity in seen] == ["hm", "hm"]


async def test_tool_results_can_be_changed(folder):
    class Loud(AgentExecutor):
        async def process_function_calls(self, calls, run):
            given = await super().process_function_calls(calls, run)
            return [replace(result, content=result.content.upper()) for result in given]

    provider = ScriptedProvider([[call("say", text="a"), call("say", text="b")], "ok", "done"])
    await (await executor(folder, provider, say, kind=Loud)).run({})
    assert [text for _, text in results(provider.requests[1].messages)] == ["A", "B"]


async def test_calls_can_be_answered_without_running_them(folder):
    class Dry(AgentExecutor):
        async def process_function_calls(self, calls, run):
            return [f"would call {call.name}" for call in calls]

    provider = ScriptedProvider([call("write_file", path="canary", content="x"), "ok", "done"])
    await (await executor(folder, provider, tools=["write_file"], kind=Dry)).run({})
    assert results(provider.requests[1].messages)[0][1] == "would call write_file"
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("fault", ["raises", "too_few", "none", "cancels"])
async def test_an_exception_in_a_step_gives_each_call_an_error_result_and_no_hang(folder, fault):
    class Faulty(AgentExecutor):
        async def process_function_calls(self, calls, run):
            if fault == "raises":
                raise RuntimeError("beans")
            if fault == "cancels":
                raise asyncio.CancelledError
            return None if fault == "none" else [await run(calls[0])]

    provider = ScriptedProvider([[call("say", text="a"), call("say", text="b")], "ok", "done"])
    seen: list[Any] = []
    agent = await executor(folder, provider, say, kind=Faulty, seen=seen)
    output = await asyncio.wait_for(agent.run({}), 40)
    assert output.terminate_reason == "goal"
    statuses = [entry.status for entry in output.log if isinstance(entry, CallEnded)]
    assert sorted(statuses) == (["error", "ok"] if fault == "too_few" else ["error", "error"])
    if fault == "raises":
        assert ActivityError("beans", "tool") in seen
