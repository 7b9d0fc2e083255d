"""A session's next step, decided from its rows alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from everloop.bus import InboundMessage
from everloop.log import Call, CallsAsked, CallsDecided, ModelAnswered, TurnEnded, UserSaid, decode_entry, encode_entry
from everloop.store import claims
from everloop.store.base import Busy, Incoming, Waiting
from everloop.store.claims import Held, Open, Parked, Resume, SessionState, Take

IDLE = SessionState(False, 100.0, 7, None, 3, 0, 0, 50.0, None, 1, None, None, False)
SAID = InboundMessage("test", "user", "1", "hi").addressed()


def work(state: SessionState, message: InboundMessage | None = None, kind: Any = "message") -> tuple[Any, claims.Work]:
    """Return what a session does next, with or without a new message, which gets the inbox row 9."""
    claim, row = state.claim("me", "test:1"), None
    if message is not None:
        turn = state.new_turn(kind)
        row = Incoming(9, state.id, message, kind, False, turn, state.next_seq if turn else None)
        claims.note_accepted(claim, message, row, turn)
    return claim, claims.next_work(state, claim, row)


def test_a_message_to_an_idle_session_opens_a_turn_as_it_is_accepted():
    claim, next_work = work(IDLE, SAID)
    assert next_work == Open()
    assert (claim.turn != "", claim.inbox, claim.accepted, claim.fence) == (True, [9], 9, 4)
    assert work(IDLE)[1] is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"is_held": True, "holder": "w", "open_turn": "t", "is_parked": True}, Held("w", 9)),
        ({"is_parked": True, "open_turn": "t", "waiting": 4}, Parked(9)),
        ({"open_turn": "t", "waiting": 4}, Resume("t")),
        ({"waiting": 4}, Take(4)),
    ],
)
def test_earlier_work_comes_before_a_message(change, expected):
    claim, next_work = work(replace(IDLE, **change), SAID)
    assert next_work == expected
    assert (claim.turn, claim.accepted) == ("", 9)


def test_a_command_waits_for_its_place_and_an_urgent_message_opens_none():
    assert work(IDLE, SAID, "command")[1] == Take(9)
    assert work(IDLE, SAID, "urgent")[1] is None


def test_a_reply_is_urgent_only_while_there_is_a_question():
    assert claims.inbox_kind("reply", True) == "urgent"
    assert claims.inbox_kind("reply", False) == "message"
    assert claims.inbox_kind("command", True) == "command"


def test_the_caller_of_begin_is_told_why_it_gets_no_claim():
    with pytest.raises(Busy, match="w"):
        claims.begun(Held("w", 9))
    with pytest.raises(Waiting):
        claims.begun(Parked(9))
    assert claims.begun(None) is None


ASKED = CallsAsked(("a",), "may I?")
LOG = [
    (1, encode_entry(UserSaid("hi")), 10.0),
    (2, encode_entry(ModelAnswered(None, (Call("a", "exec"),))), 11.0),
    (3, encode_entry(ASKED), 12.0),
]


def test_an_answer_becomes_the_next_entry_of_the_parked_turn():
    decision = claims.decision(LOG, ("new", None, 13.0), True, "ann", "go on", False)
    assert decision is not None
    assert decision.rows is not None
    assert decision.rows.seqs == [4]
    assert decode_entry(decision.rows.data[0]) == CallsDecided(("a",), True, "ann", "go on")
    assert decision.asked == ASKED


@pytest.mark.parametrize("answer", [("new", None, 11.5), ("done", None, 13.0), ("new", 4, 13.0)])
def test_a_message_older_than_the_question_or_used_for_another_answers_nothing(answer):
    assert claims.decision(LOG, answer, True, "", "", False) is None


def test_a_turn_that_is_woken_to_be_stopped_gets_no_answer():
    assert claims.decision(LOG, None, None, "", "", False) == claims.Decision(ASKED)


def test_a_fork_asks_again_for_approved_calls_that_had_not_begun():
    allowed = (4, encode_entry(CallsDecided(("a",), True)), 13.0)
    rows = [(seq, "t", "x", data, at) for seq, data, at in (*LOG, allowed)]
    fork = claims.fork_of(rows, "me", "test:2")
    assert [row[0] for row in fork.rows] == [1, 2, 3]
    assert fork.message is not None
    assert fork.opens == (fork.rows[0][1], 1)


def test_a_fork_of_an_ended_turn_opens_none():
    ended = [
        (1, "t", "user", encode_entry(UserSaid("hi")), 1.0),
        (2, "t", "end", encode_entry(TurnEnded("answer")), 2.0),
    ]
    fork = claims.fork_of(ended, "me", "test:2")
    assert (fork.message, fork.opens, [row[1] for row in fork.rows]) == (None, None, ["t", "t"])
