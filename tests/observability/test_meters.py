"""What is counted about a turn, and what is not exposed about it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from everloop.bus import InboundMessage
from everloop.log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Compacted,
    Entry,
    ModelAnswered,
    Request,
    TurnEnded,
    UserSaid,
)
from everloop.observability.metrics import Meters
from everloop.store.base import Claim

from .reading import Family, read, value

CANARY = "canary-51c3aa"
TOOLS = {"read_file", "exec"}
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 60, "reasoning_tokens": 5, "total_tokens": 120}


def claimed(*entries: Entry, resumed: bool = False) -> Claim:
    claim = Claim(CANARY, 1, f"test:{CANARY}", 1, "turn", 0, 1, 1, resumed=resumed)
    claim.message = InboundMessage("test", CANARY, CANARY, CANARY)
    claim.entries = list(entries)
    return claim


def counted(claim: Claim, *further: Entry, tools: Sequence[str] | set[str] = TOOLS) -> dict[str, Family]:
    meters = Meters()
    meters.ran(claim, [*claim.entries, *further], tools)
    return seen(meters)


def seen(meters: Meters) -> dict[str, Family]:
    text = "".join(f"{line}\n" for line in meters.lines())
    assert CANARY not in text
    return read(text)


def test_a_turn_is_counted_with_its_calls_and_tokens():
    found = counted(
        claimed(UserSaid(CANARY)),
        ModelAnswered(None, (Call("c1", "read_file"),), usage=USAGE, seconds=0.2, first_token=0.06),
        CallEnded("c1", "read_file", CANARY),
        UserSaid("and this"),
        ModelAnswered("done", usage=USAGE, seconds=3.0),
        TurnEnded("answer", CANARY),
    )
    assert value(found, "everloop_turns_total", reason="answer") == 1
    assert value(found, "everloop_messages_taken_total") == 2
    assert value(found, "everloop_model_calls_total") == 2
    assert value(found, "everloop_model_call_seconds_count") == 2
    assert value(found, "everloop_model_call_seconds_sum") == 3.2
    assert value(found, "everloop_model_call_seconds_bucket", le="0.25") == 1
    assert value(found, "everloop_model_first_token_seconds_count") == 1
    assert value(found, "everloop_model_first_token_seconds_bucket", le="0.1") == 1
    kinds = {"input": 200, "output": 40, "cached": 120, "reasoning": 10}
    for kind, count in kinds.items():
        assert value(found, "everloop_model_tokens_total", kind=kind) == count
    assert len(found["everloop_model_tokens_total"].samples) == len(kinds)
    assert value(found, "everloop_tool_calls_total", tool="read_file", status="ok") == 1
    assert value(found, "everloop_turns_taken_over_total") == 0


def test_steps_before_a_takeover_are_not_counted_again():
    found = counted(
        claimed(
            UserSaid("hi"),
            ModelAnswered(None, (Call("c1", "exec"),), usage=USAGE),
            CallsBegun(("c1",)),
            resumed=True,
        ),
        CallEnded("c1", "exec", "interrupted", "interrupted"),
        ModelAnswered("done"),
        TurnEnded("answer", "done"),
    )
    assert value(found, "everloop_turns_taken_over_total") == 1
    assert value(found, "everloop_messages_taken_total") == 0
    assert value(found, "everloop_model_calls_total") == 1
    assert found["everloop_model_tokens_total"].samples == {}
    assert value(found, "everloop_tool_calls_total", tool="exec", status="interrupted") == 1


@pytest.mark.parametrize("last", [CallsAsked(("c1",), "May I?"), CallsDecided(("c1",), True)])
def test_a_turn_that_continues_after_an_approval_does_not_count_as_a_takeover(last):
    before = (UserSaid("hi"), ModelAnswered(None, (Call("c1", "exec"),)), last)
    found = counted(claimed(*before, resumed=True), TurnEnded("answer", "x"))
    assert value(found, "everloop_turns_taken_over_total") == 0
    assert value(found, "everloop_turns_total", reason="answer") == 1


def test_resuming_a_turn_interrupted_before_its_first_entry_counts_as_a_takeover():
    assert value(counted(claimed(resumed=True)), "everloop_turns_taken_over_total") == 1


def test_a_turn_that_ended_elsewhere_is_not_counted_as_ended():
    found = counted(claimed(UserSaid("hi")), ModelAnswered(None, (Call("c1", "exec"),)), CallsAsked(("c1",), "May I?"))
    assert found["everloop_turns_total"].samples == {}
    assert value(found, "everloop_model_calls_total") == 1
    assert value(found, "everloop_messages_taken_total") == 1


def test_tool_names_made_up_by_a_model_are_not_exposed():
    further = [CallEnded(f"c{n}", f"{CANARY}{n}", "no such tool", "error") for n in range(1000)]
    found = counted(claimed(UserSaid("hi")), *further)
    assert value(found, "everloop_tool_calls_total", tool="other", status="error") == 1000
    assert len(found["everloop_tool_calls_total"].samples) == 1


def test_calls_run_by_a_client_are_not_counted():
    own = {"type": "function", "function": {"name": "exec", "parameters": {}}}
    found = counted(
        claimed(UserSaid("hi", request=Request(tools=(own,)))),
        ModelAnswered(None, (Call("c1", "exec"),)),
        CallEnded("c1", "exec", "handed"),
        TurnEnded("handed"),
    )
    assert found["everloop_tool_calls_total"].samples == {}
    assert value(found, "everloop_turns_total", reason="handed") == 1


def test_the_tokens_of_a_summary_count():
    found = counted(claimed(UserSaid("hi")), Compacted(1, "so far", usage={"prompt_tokens": 7}))
    assert value(found, "everloop_model_tokens_total", kind="input") == 7


def test_refused_writes_and_requests_are_counted():
    meters = Meters()
    meters.refused()
    meters.requested("/healthz", 200)
    meters.requested("/healthz", 200)
    meters.requested("other", 404)
    found = seen(meters)
    assert value(found, "everloop_stale_writes_total") == 1
    assert value(found, "everloop_http_requests_total", route="/healthz", status="200") == 2
    assert value(found, "everloop_http_requests_total", route="other", status="404") == 1


def test_every_metric_has_a_value_before_anything_happens():
    found = seen(Meters())
    assert value(found, "process_start_time_seconds") > 1.7e9
    assert all(name.startswith(("everloop_", "process_")) for name in found)
