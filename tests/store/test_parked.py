"""Turns that wait for an answer to a question."""

from __future__ import annotations

from typing import Any

import pytest

from everloop.errors import StaleLease
from everloop.log import Call, CallsAsked, CallsDecided, Entry, ModelAnswered, Noted, UserSaid
from everloop.store.base import Busy, Claim, Store, Waiting

from .steps import answer, begun, finish, log_of, message

ASKED: list[Entry] = [ModelAnswered(None, (Call("a", "exec"),)), CallsAsked(("a",), "may I?")]


async def parked(store: Store, worker: str, **options: Any) -> Claim:
    claim = await begun(store, worker)
    await store.park(claim, ASKED, [answer("may I?")], **options)
    return claim


async def test_a_parked_turn_is_left_alone_until_it_is_answered(opened, me, other):
    store = await opened()
    claim = await parked(store, me)
    assert await store.ready(other) == []
    with pytest.raises(Waiting):
        await store.begin("me", "test:1", other)
    assert [row.message.content for row in await store.take_outgoing(other)] == ["may I?"]
    again = await opened()
    decided = await again.decide("me", "test:1", True, "ann", "go on")
    assert decided == (claim.inbox[0], ASKED[1])
    assert await again.ready(other) == [("me", "test:1")]
    resumed = await again.begin("me", "test:1", other)
    assert resumed is not None
    assert resumed.turn == claim.turn
    assert resumed.entries == [UserSaid("hi", "user"), *ASKED, CallsDecided(("a",), True, "ann", "go on")]
    await finish(again, resumed)
    assert await again.ready(other) == []


async def test_a_message_after_a_parked_turn_is_kept_and_handled_after_it(store, me):
    await parked(store, me)
    with pytest.raises(Waiting) as waiting:
        await store.begin("me", "test:1", me, message("later"))
    assert (await store.incoming(waiting.value.accepted)).message.content == "later"
    assert await store.ready(me) == []
    await store.decide("me", "test:1", False)
    resumed = await store.begin("me", "test:1", me)
    assert resumed is not None
    assert (await finish(store, resumed)).more
    following = await store.begin("me", "test:1", me)
    assert following is not None
    assert following.message.content == "later"


async def test_a_question_is_answered_once_and_only_for_its_owner(store, me):
    await parked(store, me)
    assert await store.decide("you", "test:1", True) is None
    assert await store.decide("me", "test:2", True) is None
    assert await store.decide("me", "test:1", True) is not None
    assert await store.decide("me", "test:1", True) is None
    assert sum(isinstance(entry, CallsDecided) for entry in await log_of(store)) == 1


async def test_a_parked_turn_can_be_woken_without_an_answer(store, me):
    await parked(store, me)
    assert await store.decide("me", "test:1", None) is not None
    resumed = await store.begin("me", "test:1", me)
    assert resumed is not None
    assert resumed.entries[-1] == ASKED[1]


async def test_the_worker_that_parked_a_turn_cannot_write_to_it_after_the_answer(store, me):
    claim = await parked(store, me)
    await store.decide("me", "test:1", True)
    with pytest.raises(StaleLease):
        await store.append(claim, [ModelAnswered("late")])
    with pytest.raises(StaleLease):
        await store.park(claim, [])
    with pytest.raises(StaleLease):
        await store.post(claim, answer(), "k", me)


async def test_a_parked_turn_accepts_no_notes_and_counts_as_open(store, me):
    claim = await parked(store, me)
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.open_turn == claim.turn
    with pytest.raises(Busy):
        await store.note("me", "test:1", [Noted({"role": "user", "content": "x"})])


async def test_rows_are_over_when_done_or_when_their_turn_waits_for_approval(store, me, other):
    claim = await parked(store, me)
    waits = await store.accept(message("later"))
    runs = await begun(store, other, chat="2")
    rows = [*claim.inbox, waits.id, *runs.inbox]
    assert await store.over(rows) == claim.inbox
    await finish(store, runs)
    assert sorted(await store.over(rows)) == sorted([*claim.inbox, *runs.inbox])
    assert await store.over([waits.id, 10**9]) == []
    assert await store.over([]) == []
