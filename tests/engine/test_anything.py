"""No order of answers, tools, stops, steering and crashes makes a log invalid."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop import events
from everloop.actions import Limits
from everloop.log import CallEnded, CallsDecided, Entry, ModelAnswered, TurnEnded, UserSaid, messages_of
from everloop.testing import check_conversation

from .world import SYSTEM, Plan, ToolPlan, World, check_log, live_through

tool_plans = st.builds(
    ToolPlan,
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
    st.sampled_from(["ok", "ok", "error", "denied"]),
    st.sampled_from(["allow", "allow", "ask", "deny"]),
)
call_ids = st.sampled_from(["c1", "c2", "c3", "", "t1_1", "t1_2", "t1_3", "\ud800"])
calls = st.lists(st.tuples(call_ids, st.sampled_from(["x", "y", "z"]), st.just({"n": 1})), min_size=1, max_size=5)
answers = st.one_of(
    st.sampled_from(["done", "fine", "", "   ", None]), calls, calls, st.just(ValueError("the model is down"))
)
plans = st.builds(
    Plan,
    tools=st.fixed_dictionaries({"x": tool_plans, "y": tool_plans, "z": tool_plans}),
    answers=st.lists(st.tuples(answers, st.integers(0, 4)), max_size=7),
    happenings=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(["stop", "steer", "steer", "leave", "cancel"])), max_size=4
    ),
    crash_at=st.dictionaries(st.integers(0, 14), st.booleans(), max_size=3),
    hops=st.integers(0, 4),
    watched=st.booleans(),
    limits=st.builds(Limits, rounds=st.integers(1, 5), calls=st.integers(1, 6)),
    words=st.lists(st.booleans(), max_size=3),
)


@pytest.mark.may_block  # hypothesis reads files to explain a failure
@settings(max_examples=150)
@given(plan=plans)
def test_whatever_happens_the_log_is_valid_and_the_turn_ends(plan):
    world, ended, seen = asyncio.run(live_through(plan))
    log = world.log
    check_log(log)
    assert log[-1] == ended
    assert sum(isinstance(entry, TurnEnded) for entry in log) == 1
    assert check_conversation([SYSTEM, *messages_of(log)]) == []
    assert sum(isinstance(entry, ModelAnswered) for entry in log) <= plan.limits.rounds
    asked = [call for entry in log if isinstance(entry, ModelAnswered) for call in entry.calls]
    results = {entry.id: entry for entry in log if isinstance(entry, CallEnded)}
    assert {call.id for call in asked} == set(results)
    for call in asked:
        result, runs = results[call.id], world.started[call.id]
        refused = call.id in {
            id for entry in log if isinstance(entry, CallsDecided) and not entry.allowed for id in entry.ids
        }
        if refused or plan.tools[call.name].verdict == "deny":
            assert not runs
            assert result.status in ("denied", "cancelled")
        elif result.status in ("ok", "error", "denied"):
            assert world.finished[call.id] >= 1
            assert result.content == f"result of {call.id}"
        if not plan.tools[call.name].safe:
            assert runs <= 1
            if runs and not (world.finished[call.id] and result.status not in ("interrupted", "cancelled")):
                assert "outcome unknown" in result.content
        if result.status == "interrupted":
            assert not plan.tools[call.name].safe
    order_of_results(log)
    steered_messages_are_kept(world, ended)
    if plan.watched and not plan.crash_at and "cancel" not in [what for _, what in plan.happenings]:
        assert [event for event in seen if isinstance(event, events.TurnEnded)] == [
            events.TurnEnded("t1", ended.reason, ended.text)
        ]


def order_of_results(log: Sequence[Entry]) -> None:
    waiting: list[str] = []
    for message in messages_of(log):
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
        elif message.get("tool_calls"):
            waiting = [call["id"] for call in message["tool_calls"]]


def steered_messages_are_kept(world: World, ended: TurnEnded) -> None:
    """Check that each one is in the log, in order, or still in the inbox, and that the model saw those in the log."""
    said = [entry.content for entry in world.log if isinstance(entry, UserSaid)]
    everything = [*said[1:], *(message.content for message in world.inbox)]
    assert everything == [f"steered {n + 1}" for n in range(len(everything))]
    if ended.reason in ("answer", "empty", "max_rounds"):
        assert {"role": "user", "content": said[-1]} in world.sent[-1]
