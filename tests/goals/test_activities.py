"""What a watcher receives: everything, in order, whatever the watcher does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop.goals import activities
from everloop.goals.activities import ActivityError, ThoughtChunk, ToolEnded, ToolStarted
from everloop.providers.base import Delta, LLMProvider, LLMResponse, ToolCallRequest
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import tool

from .goals import executor


@tool
async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def script() -> tuple[ScriptedProvider, ToolCallRequest, ToolCallRequest]:
    first, second = call("add", a=1, b=2), call("add", a=1, b="x")
    answer = LLMResponse(None, [first], "tool_calls", reasoning="Let me add.")
    provider = ScriptedProvider(
        [answer, second, "<think>Good. So</think> it is 3.", LLMResponse("3", reasoning="Short.")]
    )
    return provider, first, second


def check(seen: list[Any], first: ToolCallRequest, second: ToolCallRequest) -> None:
    kinds = [type(activity) for activity in seen if not isinstance(activity, ThoughtChunk)]
    assert kinds == [ToolStarted, ToolEnded, ToolStarted, ToolEnded]
    assert [activity.call for activity in seen if isinstance(activity, ToolEnded)] == [first.id, second.id]
    thoughts = "".join("|" if not isinstance(activity, ThoughtChunk) else activity.text for activity in seen)
    assert thoughts == "Let me add.||||Good. SoShort."


async def test_thoughts_calls_and_results_are_reported_completely_and_in_order(folder):
    provider, first, second = script()
    seen: list[Any] = []
    output = await (await executor(folder, provider, add, seen=seen)).run({})
    check(seen, first, second)
    assert seen[seen.index(next(a for a in seen if isinstance(a, ToolStarted)))] == ToolStarted(
        first.id, "add", {"a": 1, "b": 2}
    )
    ended = [activity for activity in seen if isinstance(activity, ToolEnded)]
    assert (ended[0].content, ended[0].status, ended[1].status) == ("3", "ok", "error")
    assert output.result == "3"
    sent = repr([request.messages for request in provider.requests])
    assert "Let me add" not in sent
    assert "Good. So" not in sent


async def test_an_async_watcher_receives_everything_before_the_run_returns(folder):
    provider, first, second = script()
    seen: list[Any] = []
    running = 0

    async def watch(activity):
        nonlocal running
        running += 1
        assert running == 1  # one after another
        await asyncio.sleep(0.005)
        seen.append(activity)
        running -= 1

    await (await executor(folder, provider, add, on_activity=watch)).run({})
    check(seen, first, second)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_watcher_that_raises_disturbs_nothing_and_keeps_receiving(folder, is_async):
    provider, first, second = script()
    seen: list[Any] = []

    def watch(activity: Any) -> None:
        seen.append(activity)
        raise RuntimeError("not today")

    async def watch_async(activity: Any) -> None:
        watch(activity)

    agent = await executor(folder, provider, add, on_activity=watch_async if is_async else watch)
    output = await agent.run({})
    assert (output.result, output.terminate_reason) == ("3", "goal")
    check(seen, first, second)


async def test_a_hanging_watcher_delays_a_run_only_for_a_limited_time(folder, monkeypatch):
    monkeypatch.setattr(activities, "DRAIN_SECONDS", 0.2)
    provider, _, _ = script()

    async def watch(activity):
        await asyncio.sleep(3600)

    output = await asyncio.wait_for((await executor(folder, provider, add, on_activity=watch)).run({}), 30)
    assert output.result == "3"
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_without_a_watcher_nothing_is_streamed(folder):
    provider, _, _ = script()
    await (await executor(folder, provider, add)).run({})
    assert not any(request.streamed for request in provider.requests)


async def test_thoughts_that_span_chunks_are_streamed_as_thoughts(folder):
    heard_before_the_end = []
    seen: list[Any] = []

    class Streams(LLMProvider):
        async def stream(self, messages, tools=None, model=None):
            for piece in ("<th", "ink>one ", "two</thi", "nk>the ans", "wer"):
                yield Delta(text=piece)
                await asyncio.sleep(0)
            heard_before_the_end.append(list(seen))
            yield LLMResponse("<think>one two</think>the answer")

    output = await (await executor(folder, Streams(), seen=seen)).run({})
    assert output.result == "the answer"
    assert "".join(activity.text for activity in heard_before_the_end[0]) == "one two"
    assert "".join(activity.text for activity in seen) == "one twoone two"


async def test_a_retried_answer_is_split_into_thoughts_and_text_again(folder):
    seen: list[Any] = []

    class Flaky(LLMProvider):
        async def stream(self, messages, tools=None, model=None):
            yield Delta(text="<think>lost")
            yield Delta(restart="the line broke")
            yield Delta(text="plain")
            yield LLMResponse("plain")

    output = await (await executor(folder, Flaky(), seen=seen)).run({})
    assert output.result == "plain"
    assert seen == [ThoughtChunk("lost"), ThoughtChunk("lost")]


async def test_a_stream_without_a_final_response_is_assembled_from_its_chunks(folder):
    class Bare(LLMProvider):
        async def stream(self, messages, tools=None, model=None):
            yield Delta(text="put ")
            yield Delta(text="together")

    output = await (await executor(folder, Bare(), seen=[])).run({})
    assert output.result == "put together"


async def test_a_result_contains_no_thoughts(folder):
    provider = ScriptedProvider(["ok", "<think>canary</think>\nclean"])
    output = await (await executor(folder, provider)).run({})
    assert output.result == "clean"


def test_an_error_names_the_step_that_failed():
    assert ActivityError("x", "model").context == "model"
