"""What ends a run early: turns, time, the abort signal; and the short grace turn that may still give a result."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from everloop.goals import extraction
from everloop.goals.activities import ActivityError, ToolEnded, ToolStarted
from everloop.log import CallEnded, CallsBegun, ModelAnswered, TurnEnded
from everloop.providers.base import Delta, LLMProvider, ProviderError
from everloop.replay import replay
from everloop.testing import ChatOnlyProvider, ScriptedProvider, call
from everloop.tools.base import tool

from .goals import NUMBER, executor

SHORT = 2 / 60  # minutes


@tool(replay="safe")
async def slow() -> str:
    """Takes for ever."""
    await asyncio.sleep(60)
    return "never"


@tool
async def quick() -> str:
    """Takes no time."""
    return "quick"


async def forever(messages: Any, tools: Any) -> str:
    await asyncio.sleep(60)
    return "never"


def then(signal: asyncio.Event) -> Any:
    """A scripted step that sets the signal and then never returns."""

    async def step(messages, tools):
        signal.set()
        return await forever(messages, tools)

    return step


def when(signal: asyncio.Event, seen: list[Any], started: int, ended: int) -> Any:
    """A watcher that sets the signal once a number of calls have started and ended."""

    def watch(activity: Any) -> None:
        seen.append(activity)
        kinds = [type(one) for one in seen]
        if kinds.count(ToolStarted) == started and kinds.count(ToolEnded) == ended:
            signal.set()

    return watch


@pytest.fixture
def short_grace(monkeypatch):
    """A grace turn lasts at least six seconds, which is long for a test that waits for its end."""
    monkeypatch.setattr(extraction, "MIN_GRACE_SECONDS", 0.3)


# ---------------------------------------------------------------------------------------------- turns


async def test_after_the_last_turn_a_grace_turn_without_tools_may_give_a_result(folder):
    provider = ScriptedProvider([call("quick"), call("quick"), "the best I have"])
    seen: list[Any] = []
    output = await (await executor(folder, provider, quick, max_turns=2, seen=seen)).run({})
    assert (output.result, output.terminate_reason, output.turns) == ("the best I have", "max_turns", 2)
    assert (output.recovered, output.recovered_from) == (True, "max_turns")
    assert [request.tools is None for request in provider.requests] == [False, False, True]
    assert sum(isinstance(activity, ToolEnded) for activity in seen) == 2
    assert seen[-1].context == "max_turns"


@pytest.mark.parametrize(
    "last", [ProviderError("down"), call("quick"), "", "no number"], ids=["error", "call", "empty", "invalid"]
)
async def test_without_a_result_in_the_grace_turn_there_is_none(folder, last):
    provider = ScriptedProvider([call("quick"), last])
    seen: list[Any] = []
    output = await (await executor(folder, provider, quick, max_turns=1, seen=seen, output_schema=NUMBER)).run({})
    assert (output.result, output.terminate_reason) == (None, "max_turns")
    assert (output.recovered, output.recovered_from) == (False, None)
    assert len(provider.requests) == 2
    assert [activity for activity in seen if isinstance(activity, ActivityError) and activity.context == "grace"]


async def test_a_result_in_the_grace_turn_is_validated_too(folder):
    provider = ScriptedProvider([call("quick"), 'so far: {"n": 2}'])
    output = await (await executor(folder, provider, quick, max_turns=1, output_schema=NUMBER)).run({})
    assert (output.result, output.terminate_reason, output.recovered) == ({"n": 2}, "max_turns", True)


async def test_an_answer_in_the_last_turn_ends_the_work_without_reaching_the_limit(folder):
    provider = ScriptedProvider([call("quick"), "ok", "done"])
    output = await (await executor(folder, provider, quick, max_turns=2)).run({})
    assert (output.result, output.terminate_reason, output.turns) == ("done", "goal", 2)


@pytest.mark.parametrize(
    ("turns", "seconds", "reason"), [(1, 2.1, "max_turns"), (5, 2.1, "timeout"), (5, 0.0, "aborted")]
)
async def test_limits_are_checked_in_the_order_turns_time_signal(folder, turns, seconds, reason):
    signal = asyncio.Event()

    class Late(ChatOnlyProvider):
        async def chat(self, messages, tools=None, model=None):
            time.sleep(seconds)  # blocks the loop, so that no limit is checked meanwhile
            signal.set()
            return await super().chat(messages, tools, model)

    # An empty answer: the limits are checked next.
    output = await (await executor(folder, Late([""] * 9), max_turns=turns, max_time_minutes=SHORT)).run({}, signal)
    assert (output.terminate_reason, output.turns) == (reason, 1)


# ---------------------------------------------------------------------------------------------- time


async def test_a_slow_model_is_interrupted_by_the_deadline(folder):
    provider = ScriptedProvider([forever, "what I have"])
    started = time.monotonic()
    output = await (await executor(folder, provider, max_time_minutes=SHORT)).run({})
    assert time.monotonic() - started < 25
    assert (output.result, output.terminate_reason, output.turns) == ("what I have", "timeout", 0)
    assert (output.recovered, output.recovered_from) == (True, "timeout")


async def test_a_slow_tool_is_interrupted_by_the_deadline_and_ends_as_timeout(folder):
    provider = ScriptedProvider([[call("quick"), call("slow")], "what I have"])
    seen: list[Any] = []
    output = await (await executor(folder, provider, quick, slow, max_time_minutes=SHORT, seen=seen)).run({})
    assert (output.result, output.terminate_reason) == ("what I have", "timeout")
    assert [entry.status for entry in output.log if isinstance(entry, CallEnded)] == ["ok", "timeout"]
    told = {activity.name: activity for activity in seen if isinstance(activity, ToolEnded)}
    assert (told["quick"].status, told["slow"].status) == ("ok", "timeout")
    assert told["slow"].seconds >= 0.2
    assert "running" in told["slow"].content


async def test_the_deadline_also_applies_to_the_extraction(folder):
    provider = ScriptedProvider(["ok", forever, "in a hurry"])
    output = await (await executor(folder, provider, max_time_minutes=SHORT)).run({})
    assert (output.result, output.terminate_reason, output.recovered_from) == ("in a hurry", "timeout", "timeout")


async def test_the_grace_turn_has_its_own_deadline(folder, short_grace):
    provider = ScriptedProvider([forever], repeat_last=True)
    started = time.monotonic()
    output = await (await executor(folder, provider, max_time_minutes=SHORT)).run({})
    assert time.monotonic() - started < 25
    assert (output.result, output.terminate_reason, output.recovered) == (None, "timeout", False)


@pytest.mark.parametrize(("minutes", "seconds"), [(10, 60), (60, 60), (2, 12), (1, 6), (0.1, 6)])
def test_the_grace_turn_has_a_tenth_of_the_time_within_bounds(minutes, seconds):
    assert extraction.grace_seconds(minutes * 60) == seconds


async def test_a_command_that_runs_at_the_deadline_is_ended(folder):
    command = "echo begun > begun; sleep 50; echo canary > canary"
    provider = ScriptedProvider([call("exec", command=command), "what I have"])
    output = await (await executor(folder, provider, tools=["exec"], max_time_minutes=4 / 60)).run({})
    assert output.terminate_reason == "timeout"
    assert [entry.status for entry in output.log if isinstance(entry, CallEnded)] == ["timeout"]
    assert (folder / "begun").exists()
    assert not (folder / "canary").exists()
    assert output.duration < 30


async def test_a_tool_that_ignores_cancellation_is_abandoned(folder, monkeypatch):
    monkeypatch.setattr("everloop.runtime.steps.STOP_SECONDS", 0.2)
    over = asyncio.Event()

    @tool
    async def stubborn() -> str:
        """Ignores everybody."""
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    provider = ScriptedProvider([call("stubborn"), "what I have"])
    output = await (await executor(folder, provider, stubborn, max_time_minutes=SHORT)).run({})
    over.set()
    await asyncio.sleep(0)
    assert (output.result, output.terminate_reason) == ("what I have", "timeout")


# ---------------------------------------------------------------------------------------------- the signal


async def test_a_signal_set_in_advance_ends_the_run_before_the_first_model_call(folder):
    signal = asyncio.Event()
    signal.set()
    provider = ScriptedProvider([])
    seen: list[Any] = []
    output = await (await executor(folder, provider, seen=seen)).run({}, signal)
    assert (output.result, output.terminate_reason, output.turns) == (None, "aborted", 0)
    assert provider.requests == []
    assert [activity.context for activity in seen] == ["aborted"]


async def test_a_signal_while_the_answer_streams_ends_the_run_at_once(folder):
    signal = asyncio.Event()
    asked = 0

    class Streams(LLMProvider):
        async def stream(self, messages, tools=None, model=None):
            nonlocal asked
            asked += 1
            for piece in ("<think>hm</think>", " one", " two"):
                yield Delta(text=piece)
            signal.set()
            await forever(messages, tools)

    agent = await executor(folder, Streams(), seen=[])
    started = time.monotonic()
    output = await agent.run({}, signal)
    assert time.monotonic() - started < 25
    assert (output.result, output.terminate_reason, output.recovered) == (None, "aborted", False)
    assert output.turns == 0
    assert asked == 1  # no grace turn
    partial = [entry for entry in output.log if isinstance(entry, ModelAnswered)]
    assert partial[0].finish_reason == "cancelled"
    assert "one" in (partial[0].content or "")
    assert "hm" not in (partial[0].content or "")


async def test_a_signal_while_tools_run_ends_them_as_aborted(folder):
    signal = asyncio.Event()
    provider = ScriptedProvider([[call("quick"), call("slow"), call("slow")]])
    seen: list[Any] = []
    agent = await executor(folder, provider, quick, slow, on_activity=when(signal, seen, started=3, ended=1))
    output = await agent.run({}, signal)
    assert output.terminate_reason == "aborted"
    assert [entry.status for entry in output.log if isinstance(entry, CallEnded)] == ["ok", "aborted", "aborted"]
    assert [activity.status for activity in seen if isinstance(activity, ToolEnded)] == ["ok", "aborted", "aborted"]
    assert sum(isinstance(activity, ToolStarted) for activity in seen) == 3


async def test_a_call_that_had_not_started_at_the_signal_is_reported_as_not_started(folder):
    @tool(parallel=False)
    async def alone() -> str:
        """One at a time."""
        signal.set()
        await asyncio.sleep(60)
        return "never"

    signal = asyncio.Event()
    provider = ScriptedProvider([[call("alone"), call("alone")]])
    agent = await executor(folder, provider, alone)
    output = await agent.run({}, signal)
    ended = [entry for entry in output.log if isinstance(entry, CallEnded)]
    assert [entry.status for entry in ended] == ["aborted", "aborted"]
    assert ended[0].content != ended[1].content
    assert ended[1].seconds == 0


async def test_a_signal_during_the_extraction_leaves_no_result(folder):
    signal = asyncio.Event()
    output = await (await executor(folder, ScriptedProvider(["ok", then(signal)]))).run({}, signal)
    assert (output.result, output.terminate_reason) == (None, "aborted")


async def test_a_signal_in_the_grace_turn_ends_it_and_the_limit_remains_the_reason(folder, monkeypatch):
    monkeypatch.setattr("everloop.goals.extraction.MIN_GRACE_SECONDS", 60.0)
    signal = asyncio.Event()
    started = time.monotonic()
    provider = ScriptedProvider([call("quick"), then(signal)])
    output = await (await executor(folder, provider, quick, max_turns=1)).run({}, signal)
    assert time.monotonic() - started < 50  # of the sixty seconds of the grace turn
    assert (output.result, output.terminate_reason, output.recovered) == (None, "max_turns", False)


async def test_cancelling_a_run_cancels_its_tools(folder):
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def watched() -> str:
        """Says when it begins and when it ends."""
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "never"

    agent = await executor(folder, ScriptedProvider([call("watched")]), watched)
    running = asyncio.create_task(agent.run({}))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert others == []


@pytest.mark.parametrize("reason", ["timeout", "aborted"])
async def test_a_turn_cut_short_by_a_limit_can_be_replayed_up_to_that_point(folder, reason):
    signal, seen = asyncio.Event(), list[Any]()
    watch = when(signal, seen, started=2, ended=1) if reason == "aborted" else seen.append
    provider = ScriptedProvider([call("quick"), [call("slow")], "what I have"])
    minutes = SHORT if reason == "timeout" else 1
    agent = await executor(folder, provider, quick, slow, max_time_minutes=minutes, on_activity=watch)
    output = await agent.run({}, signal)
    first = next(place for place, entry in enumerate(output.log) if isinstance(entry, TurnEnded))
    assert isinstance(ended := output.log[first], TurnEnded)
    assert ended.reason == reason
    replayed = await replay([entry for entry in output.log[: first + 1] if not isinstance(entry, CallsBegun)])
    assert replayed.same
    assert reason in replayed.cut
