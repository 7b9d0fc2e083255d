"""A log as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from everloop.activity import ActivityEvent, Timeline
from everloop.log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Compacted,
    Entry,
    Logged,
    ModelAnswered,
    Noted,
    Request,
    TurnEnded,
    UserSaid,
)

A, B = Call("a", "look"), Call("b", "send")
HI = UserSaid("hello", "ada")
USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 4}
CLIENTS_TOOL = {"type": "function", "function": {"name": "look"}}


def logged(*entries: Entry, first: int = 1, turn: str | None = "t1", at: float = 100.0) -> list[Logged]:
    """Entries a second apart."""
    return [Logged(first + n, turn, at + n, entry) for n, entry in enumerate(entries)]


def told(*entries: Entry) -> list[ActivityEvent]:
    return list(Timeline().read(logged(*entries)))


def names(activity: Sequence[ActivityEvent]) -> list[str]:
    return [one.event for one in activity]


def facts(activity: Sequence[ActivityEvent], event: str) -> list[dict[str, Any]]:
    return [one.facts for one in activity if one.event == event]


def test_a_turn_is_shown_in_chronological_order():
    answered = ModelAnswered(None, (A,), usage=USAGE, model="m", seconds=0.4, first_token=0.1)
    found = told(
        HI, answered, CallEnded("a", "look", "seen it", seconds=0.25), ModelAnswered("yes"), TurnEnded("answer")
    )
    assert [(one.event, one.seq, one.at) for one in found] == [
        ("request", 1, 100.0),
        ("model_called", None, pytest.approx(100.6)),
        ("model_answered", 2, 101.0),
        ("tool_started", None, 101.75),
        ("tool_ended", 3, 102.0),
        ("model_called", None, 102.0),
        ("model_answered", 4, 103.0),
        ("turn_ended", 5, 104.0),
    ]
    assert {one.turn for one in found} == {"t1"}
    assert facts(found, "request") == [{"size": 5, "sender": "ada"}]
    assert facts(found, "model_called") == [{"round": 1, "model": "m"}, {"round": 2, "model": "m"}]
    assert facts(found, "model_answered")[0] == {
        "round": 1, "seconds": 0.4, "size": 0, "first_token": 0.1, "model": "m",
        "input_tokens": 10, "output_tokens": 2, "cached_tokens": 4, "finish_reason": "stop", "tools": ["look"],
    }  # fmt: skip
    assert facts(found, "tool_ended") == [{"tool": "look", "call": "a", "status": "ok", "seconds": 0.25, "size": 7}]
    assert facts(found, "turn_ended") == [
        {"reason": "answer", "rounds": 2, "seconds": 4.0, "input_tokens": 10, "output_tokens": 2, "cached_tokens": 4}
    ]


def test_every_entry_is_shown_exactly_once():
    entries: list[Entry] = [
        HI, ModelAnswered(None, (A, B)), CallsBegun(("a", "b")), CallEnded("a", "look", "no", "error", repeats=1),
        CallEnded("b", "send", "sent"), UserSaid("more"), Compacted(1, "short", 1), ModelAnswered("yes"),
        TurnEnded("answer"), Cleared(), Noted({"role": "user", "content": "x"}),
    ]  # fmt: skip
    found = told(*entries)
    assert [one.entry for one in found if one.entry is not None] == entries
    assert [one.seq for one in found if one.seq is not None] == list(range(1, len(entries) + 1))


def test_in_batches_it_is_the_same_timeline_except_for_start_times():
    log = logged(
        HI, ModelAnswered(None, (A, B), seconds=0.5), CallsBegun(("b",)), CallEnded("b", "send", "x", seconds=0.1),
        CallEnded("a", "look", "x", seconds=0.1), ModelAnswered(""), ModelAnswered("yes"), TurnEnded("answer"),
    )  # fmt: skip
    whole = list(Timeline().read(log))
    timeline = Timeline()
    writes = (0, 1, 3, 4, 5, 6, 8)  # an answer and its consequences are one write
    pieces = [one for start, end in pairwise(writes) for one in timeline.read(log[start:end])]

    def key(one: ActivityEvent) -> tuple[str, int, str]:
        return one.event, one.seq or 0, str(one.facts)

    assert sorted(map(key, pieces)) == sorted(map(key, whole))


def test_steps_in_progress_are_shown_before_they_end():
    assert names(told(HI)) == ["request", "model_called"]
    assert names(told(HI, ModelAnswered(None, (A,))))[-1] == "tool_started"
    assert names(told(HI, ModelAnswered(None, (A,)), CallsBegun(("a",))))[-1] == "tool_started"
    waits = told(HI, ModelAnswered(None, (A,)), CallsAsked(("a",), "may I?"))
    assert names(waits)[-1] == "asked"
    assert facts(waits, "asked") == [{"tools": ["look"], "calls": ["a"], "question": "may I?"}]


def test_an_approval_is_shown_and_lets_the_call_start():
    found = told(HI, ModelAnswered(None, (A,)), CallsAsked(("a",), "may I?"), CallsDecided(("a",), True))
    assert names(found)[-2:] == ["decided", "tool_started"]
    found = told(HI, ModelAnswered(None, (A,)), CallsAsked(("a",), "may I?"), CallsDecided(("a",), False, "ada", "no"))
    assert facts(found, "decided") == [{"tools": ["look"], "calls": ["a"], "allowed": False, "by": "ada", "note": "no"}]


def test_a_call_that_never_ran_never_started():
    refused = CallEnded("a", "look", "no", "denied")
    stopped = CallEnded("b", "send", "stopped before it started", "cancelled")
    unread = Call("c", "look", error="no JSON")
    asked = ModelAnswered(None, (A, B, unread))
    found = told(HI, asked, refused, CallEnded("c", "look", "x", "error"), stopped, TurnEnded("cancelled"))
    assert "tool_started" not in names(found)
    for asked in (ModelAnswered(None, (unread,)), ModelAnswered(None, (A,))):
        under_way = told(UserSaid("x", request=Request(tools=(CLIENTS_TOOL,))), asked)
        assert "tool_started" not in names(under_way)
    assert "tool_started" not in names(told(HI, ModelAnswered(None, (unread,))))


def test_calls_handed_to_the_client_do_not_count_as_the_models_time():
    asked: list[Entry] = [UserSaid("x", request=Request(tools=(CLIENTS_TOOL,))), ModelAnswered(None, (A,))]
    assert names(told(*asked, CallEnded("a", "look", "handed")))[-1] == "tool_ended"
    found = told(*asked, CallEnded("a", "look", "handed"), TurnEnded("handed"))
    assert names(found) == ["request", "model_called", "model_answered", "tool_ended", "turn_ended"]
    assert facts(found, "tool_ended")[0]["handed"] is True


@pytest.mark.parametrize(
    ("call", "ended", "kinds"),
    [
        (A, CallEnded("a", "look", '{"status":"error","message":"m","advice":"try"}', "error"), ["error"]),
        (A, CallEnded("a", "look", "m", "denied"), ["denied"]),
        (A, CallEnded("a", "look", "m", "interrupted"), ["interrupted"]),
        (A, CallEnded("a", "look", "m", "error", repeats=2), ["error", "repeat"]),
        (Call("a", "look", error="no JSON"), CallEnded("a", "look", "m", "error"), ["arguments"]),
        (A, CallEnded("a", "look", "m"), []),
        (A, CallEnded("a", "look", "m", "cancelled"), []),
    ],
)
def test_every_kind_of_feedback_is_shown(call, ended, kinds):
    found = facts(told(HI, ModelAnswered(None, (call,)), ended), "feedback")
    assert [one["kind"] for one in found] == kinds
    assert all((one["tool"], one["call"]) == ("look", "a") and one["text"] for one in found)
    if kinds == ["error"]:
        assert found[0]["text"] == "try"
    if "repeat" in kinds:
        assert "3 times" in found[-1]["text"]


def test_an_empty_answer_is_shown_when_the_model_is_asked_again():
    again = told(HI, ModelAnswered(""), ModelAnswered("yes"), TurnEnded("answer"))
    assert names(again) == [
        "request", "model_called", "model_answered", "feedback", "model_called", "model_answered", "turn_ended",
    ]  # fmt: skip
    assert facts(again, "feedback")[0]["kind"] == "empty"
    given_up = told(HI, ModelAnswered(""), ModelAnswered(" "), TurnEnded("empty"))
    assert len(facts(given_up, "feedback")) == 1


def test_a_failed_or_stopped_model_call_is_shown_as_made():
    for cut in (TurnEnded("error"), TurnEnded("cancelled"), TurnEnded("timeout")):
        assert names(told(HI, cut)) == ["request", "model_called", "turn_ended"]
    for never in (TurnEnded("budget"), TurnEnded("max_rounds"), TurnEnded("abandoned")):
        assert names(told(HI, never)) == ["request", "turn_ended"]


def test_a_message_in_the_middle_of_a_turn_steers_it():
    found = told(HI, ModelAnswered(None, (A,)), CallEnded("a", "look", "x"), UserSaid("also"), ModelAnswered("yes"))
    assert names(found)[-3:] == ["steered", "model_called", "model_answered"]
    assert facts(found, "steered") == [{"size": 4}]


def test_turns_are_counted_one_by_one_and_cost_what_their_model_costs():
    timeline = Timeline(lambda model, usage: 0.5 * usage["prompt_tokens"] if model == "m" else None)
    priced = ModelAnswered("x", usage=USAGE, model="m")
    unpriced = ModelAnswered("x", usage=USAGE, model="other")
    first = logged(HI, priced, UserSaid("more"), priced, TurnEnded("answer"))
    second = logged(HI, unpriced, TurnEnded("answer"), first=6, turn="t2", at=200.0)
    ends = facts(list(timeline.read([*first, *second])), "turn_ended")
    assert [(end["rounds"], end["seconds"], end.get("cost"), end["input_tokens"]) for end in ends] == [
        (2, 4.0, 10.0, 20),
        (1, 2.0, None, 10),
    ]


def test_an_old_log_without_model_times_shows_the_elapsed_time():
    found = told(HI, ModelAnswered("yes"))
    assert facts(found, "model_answered")[0]["seconds"] == 1.0


def test_summaries_and_notes_are_shown():
    found = told(Compacted(3, "short", 2, {"a": "file"}, usage=USAGE), Cleared(), Noted({"role": "user"}))
    assert names(found) == ["compacted", "cleared", "noted"]
    assert found[0].facts == {"turns": 2, "results": 1, "input_tokens": 10, "output_tokens": 2, "cached_tokens": 4}
    assert found[2].facts == {"role": "user"}
