"""`next_action`: the log alone decides each next action of a turn."""

from __future__ import annotations

import pytest

from everloop.actions import CallModel, Finish, Idle, Limits, Park, Progress, Refuse, Report, RunTools, next_action
from everloop.log import CallsAsked, CallsBegun, CallsDecided, ModelAnswered, Noted, TurnEnded, UserSaid

from .world import ASKED, HI, A, B, done


@pytest.mark.parametrize(
    ("log", "action"),
    [
        ([], Idle()),
        ([HI, ModelAnswered("yes"), TurnEnded("answer", "yes")], Idle()),
        ([HI, TurnEnded("error"), Noted({"role": "user", "content": "x"})], Idle()),
        ([HI], CallModel()),
        ([TurnEnded("answer"), HI], CallModel()),
        ([HI, ModelAnswered("yes")], Finish("answer", "yes")),
        ([HI, ASKED], RunTools((A, B))),
        ([HI, ASKED, CallsBegun(("b",))], Report((B,))),
        ([HI, ASKED, CallsBegun(("b",)), done(B)], RunTools((A,))),
        ([HI, ASKED, CallsBegun(("a", "b")), done(A)], Report((B,))),
        ([HI, ASKED, done(B), done(A)], CallModel()),
        ([HI, ModelAnswered("yes"), UserSaid("and this")], CallModel()),
        ([HI, ModelAnswered("  ")], CallModel()),
        ([HI, ModelAnswered(None), ModelAnswered("")], Finish("empty", "")),
        ([HI, ModelAnswered(None), ASKED, done(A), done(B), ModelAnswered(None)], CallModel()),
        ([HI, ASKED, CallsAsked(("b",), "may I?")], Park((B,), "may I?")),
        ([HI, ASKED, CallsAsked(("b",), "may I?"), CallsDecided(("b",), True)], RunTools((A, B))),
        ([HI, ASKED, CallsAsked(("b",), "may I?"), CallsDecided(("b",), False, note="no")], Refuse((B,), "no")),
        ([HI, ASKED, CallsAsked(("b",), "may I?"), CallsDecided(("b",), True), CallsBegun(("a",))], Report((A,))),
    ],
)
def test_the_log_alone_decides_what_happens_next(log, action):
    found = next_action(log)
    if isinstance(found, Finish) and found.reason == "empty":
        found = Finish("empty", "")
    assert found == action
    if not isinstance(action, Idle):
        progress = Progress()
        for entry in log:
            progress.read(entry)
        assert progress.has_round_for_message() == (next_action([*log, UserSaid("and")]) == CallModel())


def test_a_turn_ends_with_a_notice_after_its_last_round_but_never_drops_a_call_or_an_answer():
    limits = Limits(rounds=1)
    assert next_action([HI, ASKED], limits) == RunTools((A, B))
    assert next_action([HI, ASKED, done(A), done(B)], limits) == Finish("max_rounds", limits.rounds_notice)
    assert next_action([HI, ASKED, done(A), done(B), HI], limits) == Finish("max_rounds", limits.rounds_notice)
    assert next_action([HI, ModelAnswered("yes")], limits) == Finish("answer", "yes")
    assert "after 1 round," in limits.rounds_notice
    assert "after 2 rounds," in Limits(rounds=2).rounds_notice
