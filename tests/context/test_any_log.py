"""Any log, cut and compacted anywhere, is a conversation that the strictest model API accepts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.context.compaction import SUMMARY_REPLY, Plan, Room, conversation_of, plan
from everloop.log import CallEnded, Compacted, Logged, ModelAnswered, TurnEnded, UserSaid, text_of
from everloop.messages import Conversation
from everloop.testing import check_conversation

from .logs import cut_off, sessions

rooms = st.builds(
    lambda fixed, target, more: Room(fixed, target, target + more),
    st.integers(0, 500),
    st.integers(0, 20_000),
    st.integers(0, 20_000),
)
steps = st.lists(st.tuples(st.floats(0, 1), rooms, st.integers(0, 3)), min_size=1, max_size=4)


def compact(logged: list[Logged], before: Compacted | None, room: Room, kept: int) -> tuple[Plan, Compacted] | None:
    """Compact as the agent does: the visible entries, within the open turn."""
    after = before.until if before else 0
    last = logged[-1]
    under_way = last.turn is not None and not isinstance(last.entry, TurnEnded)
    first = next(one.seq for one in logged if one.turn == last.turn) if under_way else None
    made = plan(logged[after:], before, room, after=after, open_from=first, kept_turns=kept)
    if made is None:
        return None
    assert first is None or made.until < first
    assert made.until >= after
    places = {ended.id: f"/outputs/{ended.id}.txt" for ended in made.aside}
    return made, made.entry(before, 0, "what was" if made.gone else "", places)


@settings(max_examples=150)
@given(logged=sessions(), steps=steps)
def test_any_log_cut_and_compacted_anywhere_is_a_valid_request(logged, steps):
    before: Compacted | None = None
    for share, room, kept in steps:
        at = max(round(share * len(logged)), before.until if before else 1, 1)
        now = cut_off(logged, at)
        if (made := compact(now, before, room, kept)) is not None:
            before = made[1]
        conversation = conversation_of("system", before, now[before.until if before else 0 :])
        assert check_conversation(list(conversation), strict=True) == []
        nothing_is_lost(now, before, conversation)
        assert conversation.json() == conversation_of("system", before, now[before.until if before else 0 :]).json()


def nothing_is_lost(logged: list[Logged], before: Compacted | None, conversation: Conversation) -> None:
    """Check that every entry not replaced by the summary is present once and in order, and that taint is kept."""
    shown = [one for one in logged if before is None or one.seq > before.until]
    answers = [one.entry.content for one in shown if isinstance(one.entry, ModelAnswered) and one.entry.content]
    said = [text_of(one.entry.content).split("\n")[-1][-100:] for one in shown if isinstance(one.entry, UserSaid)]
    contents = [text_of(message["content"]) for message in conversation]
    assert in_order(answers, contents)
    assert in_order(said, contents)
    called = [call.id for one in shown if isinstance(one.entry, ModelAnswered) for call in one.entry.calls]
    assert [message["tool_call_id"] for message in conversation if message["role"] == "tool"] == called
    tainted = any(isinstance(one.entry, CallEnded) and one.entry.untrusted for one in logged)
    assert conversation.untrusted == tainted
    assert (SUMMARY_REPLY in contents) == bool(before and before.summary)


def in_order(wanted: list[str], contents: list[str]) -> bool:
    rest = iter(contents)
    return all(any(text in content for content in rest) for text in wanted)


@settings(max_examples=100)
@given(logged=sessions(), room=rooms, kept=st.integers(0, 3))
def test_a_plans_weight_equals_that_of_its_conversation(logged, room, kept):
    from everloop.context.window import weigh

    made = compact(logged, None, room, kept)
    if made is None:
        return
    entry = made[1]
    conversation = conversation_of("", entry, logged[entry.until :])
    without_summary = conversation[3:] if entry.summary else conversation[1:]
    weight = room.fixed + sum(map(weigh, without_summary))
    assert abs(made[0].units - weight) <= 0.02 * weight + 400 * len(entry.aside) + 100


@settings(max_examples=100)
@given(logged=sessions(), target=st.integers(0, 30_000))
def test_pointers_are_tried_before_summaries_and_the_newest_turns_stay(logged, target):
    made = plan(logged, None, Room(0, target, 10**9))
    if made is None:
        return
    turns = [one.turn for one in logged if isinstance(one.entry, TurnEnded)]
    kept = {one.turn for one in logged if one.seq > made.until and one.turn}
    assert set(turns[-1:]) <= kept
    if made.gone:  # only because replacing every long result by a pointer was not enough
        everything = plan(logged, None, Room(0, 10**9, 10**9))
        assert everything is None or everything.units > target
