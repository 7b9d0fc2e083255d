"""Turns: how they begin, who may write to them, and how they end."""

from __future__ import annotations

import asyncio

import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.errors import StaleLease
from everloop.log import Call, CallEnded, CallsBegun, Cleared, Entry, ModelAnswered, TurnEnded, UserSaid
from everloop.store.base import Busy, Claim
from everloop.store.peers import retire

from .steps import answer, begun, finish, log_of, message


async def test_a_message_and_the_start_of_its_turn_are_one_write(store, me):
    claim = await begun(store, me, "hi")
    assert claim.turn
    assert claim.message is not None
    assert claim.message.content == "hi"
    assert claim.entries == [UserSaid("hi", "user")]
    assert not claim.resumed
    assert claim.accepted in claim.inbox
    assert await log_of(store) == [UserSaid("hi", "user")]
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.open_turn == claim.turn
    assert info.worker == me


async def test_waiting_messages_are_claimed_one_by_one_in_order(store, me):
    for n in range(3):
        await store.accept(message(f"waiting {n}"))
    claim: Claim | None = await begun(store, me, "last")
    seen: list[str] = []
    while claim is not None:
        assert claim.message is not None
        seen.append(claim.message.content)
        finished = await finish(store, claim)
        assert finished.more == (len(seen) < 4)
        claim = await store.begin("me", "test:1", me)
    assert seen == ["waiting 0", "waiting 1", "waiting 2", "last"]


async def test_without_work_there_is_no_claim_and_no_lease(store, me, other):
    assert await store.begin("me", "test:1", me) is None
    assert await store.session("me", "test:1") is None
    await finish(store, await begun(store, me))
    assert await store.begin("me", "test:1", me) is None
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.worker is None


async def test_a_message_with_attachments_begins_a_turn_whose_first_entry_the_loop_writes(store, me):
    claim = await begun(store, me, "look", media=["a.png"])
    assert claim.entries == []
    await store.append(claim, [UserSaid([{"type": "text", "text": "look"}], "user")])
    assert await log_of(store) == [UserSaid([{"type": "text", "text": "look"}], "user")]


async def test_a_session_of_a_living_worker_is_busy_and_the_message_waits_there(store, me, other):
    mine = await begun(store, me)
    with pytest.raises(Busy) as busy:
        await store.begin("me", "test:1", other, message("second"))
    assert busy.value.worker == me
    assert busy.value.accepted is not None
    assert (await finish(store, mine)).more
    claim = await store.begin("me", "test:1", other)
    assert claim is not None
    assert claim.inbox == [busy.value.accepted]


async def test_a_dead_workers_turn_is_taken_over_where_it_stood_and_comes_before_new_messages(store, me, other):
    mine = await begun(store, me, "first")
    asked = ModelAnswered(calls=(Call("a", "look", {"x": 1}),))
    await store.append(mine, [asked, CallsBegun(("a",))])
    retire(me)
    theirs = await begun(store, other, "second")
    assert theirs.resumed
    assert theirs.turn == mine.turn
    assert theirs.fence > mine.fence
    assert theirs.entries == [UserSaid("first", "user"), asked, CallsBegun(("a",))]
    assert theirs.message is not None
    assert theirs.message.content == "first"
    assert theirs.accepted not in theirs.inbox
    assert (await finish(store, theirs)).more


async def test_a_stale_worker_cannot_write(store, me, other):
    mine = await begun(store, me)
    retire(me)
    theirs = await store.begin("me", "test:1", other)
    assert theirs is not None
    before = await log_of(store)
    with pytest.raises(StaleLease):
        await store.append(mine, [ModelAnswered("stale")])
    with pytest.raises(StaleLease):
        await finish(store, mine, "stale", outgoing=[answer("stale")])
    await store.release(mine)
    assert await log_of(store) == before
    assert await store.take_outgoing(me) == []
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.worker == other
    await store.append(theirs, [ModelAnswered("mine")])


async def test_even_the_same_worker_is_stale_after_it_has_begun_again(store, me):
    first = await begun(store, me)
    second = await store.begin("me", "test:1", me)
    assert second is not None
    with pytest.raises(StaleLease):
        await store.append(first, [ModelAnswered("old")])
    await finish(store, second)


async def test_a_claim_is_stale_when_its_turn_is_over(store, me):
    claim = await begun(store, me)
    await finish(store, claim)
    await begun(store, me, "next")
    with pytest.raises(StaleLease):
        await finish(store, claim, "again")


async def test_entries_are_read_unchanged_and_in_order(store, me):
    claim = await begun(store, me)
    entries: list[Entry] = [
        ModelAnswered("é 😀", (Call("a", "t", {"deep": [1, {"x": None}]}, "why"),), "hm", "tool_calls", {"n": 3}, "m"),
        CallsBegun(("a",)),
        CallEnded("a", "t", "out", "error", 0.25),
        UserSaid([{"type": "text", "text": "more"}], "you"),
    ]
    writes = [store.append(claim, [entry]) for entry in entries]  # none of them is waited for first
    await asyncio.gather(*writes)
    await store.finish(claim, [TurnEnded("max_rounds", "enough")])
    assert await log_of(store) == [UserSaid("hi", "user"), *entries, TurnEnded("max_rounds", "enough")]
    logged = await store.read_log(claim.session)
    assert [one.seq for one in logged] == list(range(1, len(logged) + 1))
    assert {one.turn for one in logged} == {claim.turn}
    assert all(one.at > 0 for one in logged)
    assert [one.seq for one in await store.read_log(claim.session, 2, 4)] == [3, 4]
    assert await store.read_turn(claim.session, claim.first_seq) == logged


async def test_one_turn_is_read_alone(store, me):
    turns = []
    for n in range(5):
        claim = await begun(store, me, f"message {n}")
        await finish(store, claim, f"answer {n}")
        turns.append(claim)
    for n, claim in enumerate(turns):
        entries = [one.entry for one in await store.read_turn(claim.session, claim.first_seq)]
        assert entries[0] == UserSaid(f"message {n}", "user")
        assert entries[-1] == TurnEnded("answer", f"answer {n}")
        assert len(entries) == 3


async def test_a_steered_message_is_done_with_the_turn_that_took_it(store, me):
    claim = await begun(store, me)
    row = await store.accept(message("steered"))
    await store.append(claim, [UserSaid("steered", "user")], [row.id])
    assert (await store.incoming(row.id)).turn == claim.turn
    assert not (await store.incoming(row.id)).done
    late = await store.accept(message("later"))
    finished = await store.finish(claim, [UserSaid("later", "user"), TurnEnded("answer")], took=[late.id])
    assert not finished.more
    assert (await store.incoming(row.id)).done
    assert (await store.incoming(late.id)).done
    assert await store.begin("me", "test:1", me) is None


async def test_a_steered_message_belongs_to_its_turn_even_after_a_crash(store, me, other):
    claim = await begun(store, me)
    row = await store.accept(message("steered"))
    await store.append(claim, [UserSaid("steered", "user")], [row.id])
    retire(me)
    theirs = await store.begin("me", "test:1", other)
    assert theirs is not None
    assert row.id in theirs.inbox
    assert theirs.message is not None
    assert theirs.message.content == "hi"
    await finish(store, theirs)
    assert (await store.incoming(row.id)).done


async def test_a_turn_ends_with_all_its_consequences_or_with_none(store, me):
    claim = await begun(store, me)
    bad = OutboundMessage("test", "1", "x", metadata={"odd": object()})
    with pytest.raises(Exception, match="object"):
        await store.finish(claim, [TurnEnded("answer")], [answer(), bad])
    assert await log_of(store) == [UserSaid("hi", "user")]
    assert await store.take_outgoing(me) == []
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.open_turn == claim.turn


async def test_a_released_turn_stays_open_for_any_worker(store, me, other):
    claim = await begun(store, me)
    await store.release(claim)
    theirs = await store.begin("me", "test:1", other)
    assert theirs is not None
    assert theirs.resumed
    await begun(store, me, chat="2")
    await begun(store, me, chat="3")
    await begun(store, me, chat="4", owner="you")
    await store.release_all(me, "me")
    await store.release(theirs)
    assert sorted(await store.ready(other)) == [("me", f"test:{chat}") for chat in "123"]
    await store.release_all(me)
    assert sorted(await store.ready(other)) == [*(("me", f"test:{chat}") for chat in "123"), ("you", "test:4")]


async def test_a_command_waits_for_its_place_and_needs_no_turn(store, me):
    first = await begun(store, me)
    await store.accept(message("/new"), "command")
    await finish(store, first)
    claim = await store.begin("me", "test:1", me)
    assert claim is not None
    assert claim.command
    assert claim.entries == []
    await store.finish(claim, [Cleared()], [answer("new")])
    assert (await log_of(store))[-1] == Cleared()
    assert await store.begin("me", "test:1", me) is None
    second = await begun(store, me)
    assert second.history_from == second.first_seq - 1


async def test_an_interrupted_command_is_run_again(store, me, other):
    await store.accept(message("/new"), "command")
    assert await store.begin("me", "test:1", me) is not None
    retire(me)
    claim = await store.begin("me", "test:1", other)
    assert claim is not None
    assert claim.command


async def test_owners_never_meet(store, me):
    await begun(store, me, "mine")
    theirs = await begun(store, me, "theirs", owner="you")
    await finish(store, theirs)
    assert [info.owner for info in await store.sessions("you")] == ["you"]
    assert await store.session("nobody", "test:1") is None
    assert await log_of(store, owner="you") == [
        UserSaid("theirs", "user"), ModelAnswered("hello"), TurnEnded("answer", "hello"),
    ]  # fmt: skip
    assert [turn.owner for turn in await store.turns("you")] == ["you"]
    assert await store.turns("nobody") == []


async def test_a_conversation_began_with_its_first_entry_however_late_that_is_written(store):
    claim = await store.begin("me", "test:1", "w1", InboundMessage("test", "user", "1", "look", media=["a.png"]))
    assert claim is not None
    assert claim.entries == []
    await asyncio.sleep(0.05)
    await store.append(claim, [UserSaid("look")])
    await store.release(claim)
    again = await store.begin("me", "test:1", "w1")
    assert again is not None
    assert again.began == claim.began


async def test_a_message_whose_steering_write_failed_is_not_done_with_the_turn(store, me):
    claim = await begun(store, me)
    steered = await store.accept(InboundMessage("test", "u", "1", "second").addressed())
    claim.inbox.append(steered.id)  # as left by the write that was to put its text into the log
    assert (await store.finish(claim, [TurnEnded("cancelled", "Stopped.")])).more
    assert [row.message.content for row in await store.waiting("me", "test:1")] == ["second"]
