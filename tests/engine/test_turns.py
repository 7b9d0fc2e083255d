"""Single turns: interrupted, over a limit, steered, stopped, and with a sloppy provider."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest

from everloop import events
from everloop.actions import Limits, Progress
from everloop.engine import Review, Turn, fail_turn, run_turn
from everloop.log import Call, CallEnded, CallsBegun, Entry, ModelAnswered, TurnEnded, UserSaid, messages_of
from everloop.messages import Conversation
from everloop.providers.base import LLMResponse, ProviderError, ToolCallRequest
from everloop.testing import check_conversation

from .world import (
    ASKED,
    HI,
    SYSTEM,
    Plan,
    Result,
    ToolPlan,
    World,
    WorldLog,
    WorldModel,
    WorldToolbox,
    check_log,
    live_through,
)


def plan_of(*answers: Any, tools: dict[str, ToolPlan] | None = None, **options: Any) -> Plan:
    plan = Plan({"x": ToolPlan(True, False, 0, "ok")}, [(answer, 0) for answer in answers], [], {}, 0, False, Limits())
    plan.tools.update(tools or {})
    for name, value in options.items():
        setattr(plan, name, value)
    return plan


async def test_a_call_that_was_cut_off_is_reported_not_repeated():
    # append 0: answer and intent; append 1: the result, which never gets to disk
    world, ended, seen = await live_through(plan_of([("c", "x", {})], "sorry", crash_at={1: False}, watched=True))
    assert world.started == {"c": 1}
    told = "interrupted, outcome unknown: check before you retry"
    assert world.log[-3] == CallEnded("c", "x", told, "interrupted")
    place = seen.index(events.ToolEnded("c", "x", told, "interrupted", 0.0))  # a person sees it, too
    assert seen[place - 1] == events.ToolStarted("c", "x", {})
    assert ended == TurnEnded("answer", "sorry")


async def test_an_interrupted_replay_safe_call_is_run_again():
    safe = {"x": ToolPlan(True, True, 0, "ok")}
    # append 0: the answer; append 1: the result, which never gets to disk
    world, ended, _ = await live_through(plan_of([("c", "x", {})], "good", tools=safe, crash_at={1: False}))
    assert world.started == {"c": 2}
    assert not [entry for entry in world.log if isinstance(entry, CallsBegun)]
    assert ended.text == "good"


async def test_a_model_call_that_had_answered_is_not_repeated():
    world, ended, _ = await live_through(plan_of([("c", "x", {})], "good", crash_at={0: True}))
    assert len(world.sent) == 2
    assert ended.text == "good"


async def test_calls_with_duplicate_or_missing_ids_are_distinguished():
    same: list[Any] = [("c", "x", {}), ("c", "x", {}), ("", "x", {})]
    world, _, _ = await live_through(plan_of(same, [("c", "x", {})], "ok"))
    ids = [call.id for entry in world.log if isinstance(entry, ModelAnswered) for call in entry.calls]
    assert len(set(ids)) == 4
    assert ids[0] == "c"
    assert all(ids)


async def test_a_generated_id_never_collides_with_one_from_the_model():
    world, _, _ = await live_through(plan_of([("c", "x", {}), ("t1_2", "x", {}), ("c", "x", {})], "ok"))
    ids = [call.id for entry in world.log if isinstance(entry, ModelAnswered) for call in entry.calls]
    assert len(set(ids)) == 3


async def test_more_calls_than_the_limit_are_answered_and_not_run():
    calls: list[Any] = [(f"c{n}", "x", {}) for n in range(5)]
    world, _, _ = await live_through(plan_of(calls, "ok", limits=Limits(calls=2)))
    errors = [call.error for entry in world.log if isinstance(entry, ModelAnswered) for call in entry.calls]
    assert errors[:2] == [None, None]
    assert all(error and "at most 2 calls" in error for error in errors[2:])


@pytest.mark.parametrize("answer", ["", [("c", "x", {})]])
async def test_a_steered_message_without_a_round_left_waits_for_the_next_turn(answer):
    plan = plan_of(answer, answer, answer, limits=Limits(rounds=2), happenings=[(0, "steer")])
    plan.happenings = [(n, "steer") for n in range(40)]
    world, ended, _ = await live_through(plan)
    said = [entry.content for entry in world.log if isinstance(entry, UserSaid)]
    assert {"role": "user", "content": said[-1]} in world.sent[-1]
    assert isinstance(ended, TurnEnded)


async def test_an_answer_in_the_last_round_is_delivered_even_if_a_message_was_steered_in_after_it():
    world, ended, _ = await live_through(
        plan_of("the answer", limits=Limits(rounds=1), happenings=[(n, "steer") for n in range(1, 9)], hops=2)
    )
    assert ended == TurnEnded("answer", "the answer")
    assert world.inbox


async def test_other_tasks_run_in_each_round_even_if_neither_the_model_nor_the_disk_waits():
    ticks, asked_at = 0, list[int]()

    class AtOnce(WorldLog):
        def append(self, entries: Sequence[Entry], flush: bool = True) -> asyncio.Future[None]:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settle(list(entries), written)
            return written

    class Model(WorldModel):
        async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
            asked_at.append(ticks)
            return await super().__call__(conversation, emit)

    async def other() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    world = World()
    log = AtOnce(world, 0)
    model = Model(world, [([(f"c{number}", "x", {})], 0) for number in range(3)])
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    others = asyncio.create_task(other())
    await run_turn(turn, model, WorldToolbox(world, {"x": ToolPlan(True, True, 0, "ok")}, log))
    others.cancel()
    assert len(set(asked_at)) == len(asked_at) == 4


async def test_no_step_of_a_long_turn_reads_the_steps_before_it_again():
    rounds = 40
    read = 0

    def count(frame: FrameType, what: str, value: Any) -> None:
        nonlocal read
        read += what == "call" and frame.f_code is Progress.read.__code__

    answers: list[Any] = [[(f"c{n}", "x", {})] for n in range(rounds)]
    plan = plan_of(*answers, "done", limits=Limits(rounds=rounds + 1))
    sys.setprofile(count)
    try:
        world, ended, _ = await live_through(plan)
    finally:
        sys.setprofile(None)
    assert ended.text == "done"
    # once as they happen, and a few times as a whole by the test
    assert read < 6 * len(world.log)


async def test_a_stopped_turn_keeps_the_text_received_so_far():
    world, ended, seen = await live_through(
        plan_of(*[], answers=[("never said", 4)], happenings=[(3, "stop")], watched=True)
    )
    kept = world.log[1]
    assert isinstance(kept, ModelAnswered)
    assert (kept.content, kept.finish_reason) == ("piece 0 piece 1 piece 2 ", "cancelled")
    assert ended == TurnEnded("cancelled", "Stopped.")
    assert seen[-1] == events.TurnEnded("t1", "cancelled", "Stopped.")


async def test_a_turn_stopped_before_it_starts_does_nothing():
    world = World()
    log = WorldLog(world, 0)
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    turn.stop("cancelled", "Stopped.")
    await run_turn(turn, WorldModel(world, []), WorldToolbox(world, {}, log))
    assert world.log == [HI, TurnEnded("cancelled", "Stopped.")]
    assert list(turn.conversation) == [SYSTEM, *messages_of(world.log)]


async def test_a_turn_that_is_not_running_can_be_ended_in_any_state():
    world = World(log=[HI, ASKED, CallsBegun(("b",))])
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), WorldLog(world, 0))
    await fail_turn(turn, "no reason")
    check_log(world.log)
    assert [entry.status for entry in world.log if isinstance(entry, CallEnded)] == ["cancelled", "cancelled"]
    assert world.log[-1] == TurnEnded.failed("no reason")


async def test_a_turn_without_an_open_entry_is_a_callers_error():
    world = World(log=[HI, TurnEnded("answer")])
    turn = Turn("t1", [], Conversation([SYSTEM]), WorldLog(world, 0))
    with pytest.raises(ValueError, match="no open entries"):
        await run_turn(turn, WorldModel(world, []), WorldToolbox(world, {}, WorldLog(world, 0)))


async def test_a_model_that_cancels_itself_ends_the_turn_with_an_error():
    class Odd:
        async def __call__(self, conversation, emit):
            raise asyncio.CancelledError

    world = World()
    log = WorldLog(world, 0)
    ended = await run_turn(
        Turn("t1", list(world.log), Conversation([SYSTEM]), log), Odd(), WorldToolbox(world, {}, log)
    )
    assert isinstance(ended, TurnEnded)
    assert ended.reason == "error"


@pytest.mark.parametrize(
    "response",
    [
        LLMResponse("hi", usage={"prompt_tokens": 1, "details": {"cached": 1}, "cost": 0.1, "none": None}),  # type: ignore[dict-item]
        LLMResponse("hi", finish_reason=None),  # type: ignore[arg-type]
        LLMResponse(None, None),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest(None, "x", {})]),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest(7, "x", None)]),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest("c", "x", "{}")]),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest("c", "x", {"text": "\ud800"})]),
        LLMResponse(None, [ToolCallRequest("c", "x", {"n": 10**30, "f": float("nan")})]),
        LLMResponse(None, [ToolCallRequest("c", "x", {"odd": object()})]),
        LLMResponse(None, [ToolCallRequest("c", "no such tool, \x00 at all" * 9, {})]),
        LLMResponse(None, [ToolCallRequest("c", "", {})]),
        LLMResponse("\ud800", reasoning="\udfff"),
        LLMResponse("hi", finish_reason=1, model=7),  # type: ignore[arg-type]
        LLMResponse("hi", finish_reason="\ud800", model="\udfff"),
        LLMResponse("hi", finish_reason=object(), model=object()),  # type: ignore[arg-type]
    ],
    ids=range(15),
)
async def test_a_sloppy_provider_cannot_make_the_log_unreadable(response):
    class Sloppy:
        asked = 0

        async def __call__(self, conversation, emit):
            assert check_conversation(list(conversation)) == []
            self.asked += 1
            return response if self.asked == 1 else LLMResponse("over")

    class Anything(WorldToolbox):
        def batch(self, calls):
            return calls

        def replay_safe(self, name):
            return True

        def read_only(self, name):
            return True

        async def review(self, calls, conversation):
            return Review()

        async def run(self, call, progress, approved):
            return Result(call.error or "ran")

    world = World()
    log = WorldLog(world, 0)  # encodes and decodes every entry, as a store does
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    ended = await run_turn(turn, Sloppy(), Anything(world, {}, log))
    check_log(world.log)
    assert isinstance(ended, TurnEnded)
    assert ended.reason == "answer" or (response.tool_calls is None and ended.reason in ("empty", "answer"))


@pytest.mark.parametrize(("status", "kept"), [("RESOURCE_EXHAUSTED", 0), (429, 429), (None, 0), (b"", 0)])
async def test_an_error_from_any_library_leaves_the_log_readable(status, kept):
    class Failed(Exception):
        def __init__(self) -> None:
            super().__init__("no more today")
            self.status = status

    world, ended, _ = await live_through(plan_of(Failed()))
    assert ended == world.log[-1] == TurnEnded.failed("no more today", kept)
    assert (ended.text, ended.error) == ("Sorry, I encountered an error: no more today", "no more today")


@pytest.mark.parametrize("raises", [True, False])
async def test_a_tool_that_swallows_its_cancellation_does_not_swallow_the_stop(raises):
    class Deaf(WorldToolbox):
        async def run(self, call, progress, approved):
            turn.stop("cancelled", "Stopped.")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return Result("late", "error" if raises else "ok")

    world = World(log=[HI, ModelAnswered(calls=(Call("c", "x"),))])
    log = WorldLog(world, 0)
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    model = WorldModel(world, [])
    task = asyncio.ensure_future(run_turn(turn, model, Deaf(world, {"x": ToolPlan(False, True, 0, "ok")}, log)))
    assert await task == TurnEnded("cancelled", "Stopped.")
    assert world.sent == []  # the model was not called again
    assert [(one.id, one.content) for one in world.log if isinstance(one, CallEnded)] == [("c", "late")]
    assert task.cancelling() == 0


@pytest.mark.parametrize("late", [LLMResponse(None, [ToolCallRequest("c", "x", {})]), ProviderError("cut off")])
async def test_a_model_that_swallows_its_cancellation_does_not_swallow_the_stop(late):
    async def deaf(conversation, emit):
        if turn.stopped is not None:
            return LLMResponse("asked once more")
        turn.stop("timeout", "It took too long.")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if isinstance(late, Exception):
                raise late from None
        return late

    world = World()
    log = WorldLog(world, 0)
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    task = asyncio.ensure_future(run_turn(turn, deaf, WorldToolbox(world, {"x": ToolPlan(True, False, 0, "ok")}, log)))
    assert await task == TurnEnded("timeout", "It took too long.")
    check_log(world.log)
    assert not world.started  # calls that arrive too late are not run
    assert task.cancelling() == 0


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("when", range(12))
async def test_a_turn_that_is_handed_off_loses_no_step_and_continues_elsewhere(when: int, safe: bool):
    """Whenever it is handed off, the model is called as often, and the tool call run as often, as without a handoff."""
    tools = {"x": ToolPlan(True, safe, 3, "ok")}
    plan = plan_of([("c", "x", {})], "good", tools=tools, happenings=[(when, "leave")], hops=1)
    plan.answers = [(said, 2) for said, _ in plan.answers]
    world, ended, _ = await live_through(plan)
    assert ended == TurnEnded("answer", "good")
    assert (dict(world.started), len(world.sent)) == ({"c": 1}, 2)
    assert world.left <= 1
    assert world.left == 1 or when > 7
