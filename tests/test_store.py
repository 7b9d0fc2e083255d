"""What every store promises. The suite knows only the port: a new store is one more line in STORES."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.errors import StaleLease, StoreError
from everloop.log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Entry,
    ModelAnswered,
    Noted,
    TurnEnded,
    UserSaid,
)
from everloop.store.base import Busy, Claim, Store, Timer, Waiting, new_turn_id
from everloop.store.workers import new_worker, retire


async def sqlite(folder: Path) -> Store:
    from everloop.store.sqlite import SQLiteStore

    return SQLiteStore(folder / "store.db")


STORES: dict[str, Callable[[Path], Awaitable[Store]]] = {"sqlite": sqlite}


@pytest.fixture(params=STORES)
async def opened(request, tmp_path) -> AsyncIterator[Callable[[], Awaitable[Store]]]:
    """Opens the same store, as often as it is asked to."""
    stores: list[Store] = []

    async def open_store() -> Store:
        stores.append(await STORES[request.param](tmp_path))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.close()


@pytest.fixture
async def store(opened) -> Store:
    return await opened()


@pytest.fixture
def workers() -> Any:
    made = [new_worker() for _ in range(3)]
    yield made
    for worker in made:
        retire(worker)


@pytest.fixture
def me(workers) -> str:
    return workers[0]


@pytest.fixture
def other(workers) -> str:
    return workers[1]


def message(text: str = "hi", chat: str = "1", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", chat, text, **options).addressed()


def answer(text: str = "hello") -> OutboundMessage:
    return OutboundMessage("test", "1", text, metadata={"thread": 7})


async def begun(store: Store, worker: str, text: str = "hi", chat: str = "1", **options: Any) -> Claim:
    claim = await store.begin(options.get("owner", "me"), f"test:{chat}", worker, message(text, chat, **options))
    assert claim is not None
    return claim


async def finish(store: Store, claim: Claim, text: str = "hello", **options: Any) -> Any:
    return await store.finish(claim, [ModelAnswered(text), TurnEnded("answer", text)], **options)


async def log_of(store: Store, key: str = "test:1", owner: str = "me") -> list[Entry]:
    info = await store.session(owner, key)
    return [one.entry for one in await store.read_log(info.id)] if info else []


# ---------------------------------------------------------------------------------------------- inbox


async def test_what_was_accepted_is_there_for_another_process(opened, me):
    store = await opened()
    said = message("hé 😀", media=["a.png"], metadata={"n": [1, {"x": None}]}, id="m1")
    row = await store.accept(said)
    assert not row.done
    assert row.turn is None
    again = await (await opened()).incoming(row.id)
    assert again.message == said
    assert again.kind == "message"
    assert not again.done


async def test_a_message_id_is_taken_once_an_owner(store, me):
    first = await store.accept(message(id="m1"))
    assert (await store.accept(message("other text", id="m1"))).id == first.id
    assert (await store.accept(message(id="m1", chat="2"))).id == first.id
    assert (await store.accept(message(id="m1", owner="you"))).id != first.id
    assert (await store.accept(message())).id != (await store.accept(message())).id


async def test_a_message_id_is_still_known_when_it_was_answered(store, me):
    claim = await begun(store, me, id="m1")
    await finish(store, claim)
    row = await store.accept(message(id="m1"))
    assert row.done
    assert row.turn == claim.turn
    assert await store.begin("me", "test:1", me, message(id="m1")) is None


async def test_a_session_is_ready_while_something_waits_in_it(store, me):
    assert await store.ready(me) == []
    await store.accept(message())
    await store.accept(message(chat="2", owner="you"))
    assert sorted(await store.ready(me)) == [("me", "test:1"), ("you", "test:2")]
    claim = await store.begin("me", "test:1", me)
    assert claim is not None
    await finish(store, claim)
    assert await store.ready(me) == [("you", "test:2")]


async def test_a_session_of_a_living_worker_is_not_ready_for_others_and_one_of_a_dead_worker_is(store, me, other):
    await begun(store, me)
    assert await store.ready(other) == []
    assert await store.ready(me) == [("me", "test:1")]
    retire(me)
    assert await store.ready(other) == [("me", "test:1")]


async def test_an_urgent_message_waits_for_no_turn_and_is_answered_once(store, me, other):
    await begun(store, me)
    row = await store.accept(message("/stop"), "urgent")
    assert [one.id for one in await store.urgent(me)] == [row.id]
    assert await store.urgent(other) == []
    assert len(await store.answer(row, [answer("Stopped.")])) == 1
    assert await store.answer(row, [answer("Stopped.")]) == []
    assert await store.urgent(me) == []
    assert [out.message.content for out in await store.take_outgoing(other)] == ["Stopped."]


async def test_an_urgent_message_that_never_was_a_row_is_answered_and_known(store, me):
    assert len(await store.answer(message("/help", id="h1"), [answer()])) == 1
    assert await store.answer(message("/help", id="h1"), [answer()]) == []
    assert await store.ready(me) == []
    assert await store.begin("me", "test:1", me) is None


# ---------------------------------------------------------------------------------------------- turns


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


async def test_nothing_to_do_is_no_claim_and_no_lease(store, me, other):
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


async def test_a_session_in_living_hands_is_busy_and_the_message_waits_there(store, me, other):
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


async def test_a_stale_worker_can_write_nothing(store, me, other):
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


async def test_the_same_worker_too_is_stale_once_it_has_begun_again(store, me):
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


async def test_entries_come_back_as_they_were_and_in_order(store, me):
    claim = await begun(store, me)
    entries: list[Entry] = [
        ModelAnswered("é 😀", (Call("a", "t", {"deep": [1, {"x": None}]}, "why"),), "hm", "tool_calls", {"n": 3}, "m"),
        CallsBegun(("a",)),
        CallEnded("a", "t", "out", "error", 0.25),
        UserSaid([{"type": "text", "text": "more"}], "you"),
    ]
    writes = [store.append(claim, [entry]) for entry in entries]  # not one of them is waited for first
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


async def test_a_steered_message_belongs_to_its_turn_after_a_crash_too(store, me, other):
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


async def test_a_turn_ends_with_all_it_leaves_behind_or_with_nothing(store, me):
    claim = await begun(store, me)
    bad = OutboundMessage("test", "1", "x", metadata={"odd": object()})
    with pytest.raises(Exception, match="object"):
        await store.finish(claim, [TurnEnded("answer")], [answer(), bad])
    assert await log_of(store) == [UserSaid("hi", "user")]
    assert await store.take_outgoing(me) == []
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.open_turn == claim.turn


async def test_a_released_turn_stays_open_for_anybody(store, me, other):
    claim = await begun(store, me)
    await store.release(claim)
    theirs = await store.begin("me", "test:1", other)
    assert theirs is not None
    assert theirs.resumed
    await begun(store, me, chat="2")
    await begun(store, me, chat="3")
    await store.release_all(me)
    assert sorted(await store.ready(me)) == [("me", "test:2"), ("me", "test:3")]


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


async def test_a_command_that_was_cut_off_is_run_again(store, me, other):
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


# ---------------------------------------------------------------------------------------------- parked turns

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


async def test_a_message_behind_a_parked_turn_is_kept_and_comes_after_it(store, me):
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


async def test_whoever_parked_a_turn_cannot_write_to_it_after_the_answer(store, me):
    claim = await parked(store, me)
    await store.decide("me", "test:1", True)
    with pytest.raises(StaleLease):
        await store.append(claim, [ModelAnswered("late")])
    with pytest.raises(StaleLease):
        await store.park(claim, [])
    with pytest.raises(StaleLease):
        await store.post(claim, answer(), "k", me)


async def test_a_parked_turn_takes_no_notes_and_counts_as_open(store, me):
    claim = await parked(store, me)
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.open_turn == claim.turn
    with pytest.raises(Busy):
        await store.note("me", "test:1", [Noted({"role": "user", "content": "x"})])


async def test_a_message_of_a_running_turn_is_posted_once_for_each_key(store, me):
    claim = await begun(store, me)
    first = await store.post(claim, answer("one"), "t/a", None)
    assert first is not None
    assert await store.post(claim, answer("one"), "t/a", None) is None
    assert await store.post(claim, answer("two"), "t/b", None) is not None
    assert [row.message.content for row in await store.take_outgoing(me)] == ["one", "two"]
    await store.sent([first])
    assert await store.post(claim, answer("one"), "t/a", None) is None


# ---------------------------------------------------------------------------------------------- outbox


async def test_an_answer_is_in_the_outbox_until_it_was_sent(opened, me, other):
    store = await opened()
    finished = await finish(store, await begun(store, me), outgoing=[answer("a"), answer("b")])
    taken = await store.take_outgoing(me)
    assert [out.message for out in taken] == [answer("a"), answer("b")]
    assert [out.id for out in taken] == finished.outbox
    assert await store.take_outgoing(other) == []
    await store.sent([taken[0].id])
    retire(me)
    again = await (await opened()).take_outgoing(other)
    assert [(out.message.content, out.message.repeat) for out in again] == [("b", True)]
    await store.sent([again[0].id])
    retire(other)
    assert await store.take_outgoing(new_worker()) == []


async def test_an_answer_that_its_worker_sends_right_away_is_only_repeated_when_the_worker_dies(store, me, other):
    await finish(store, await begun(store, me), outgoing=[answer()], sender=me)
    assert await store.take_outgoing(other) == []
    assert await store.take_outgoing(me) == []
    retire(me)
    assert [out.message.repeat for out in await store.take_outgoing(other)] == [True]


async def test_the_outbox_is_taken_in_parts_oldest_first(store, me):
    await finish(store, await begun(store, me), outgoing=[answer(str(n)) for n in range(5)])
    assert [out.message.content for out in await store.take_outgoing(me, 2)] == ["0", "1"]
    assert [out.message.content for out in await store.take_outgoing(me, 9)] == ["2", "3", "4"]


# ---------------------------------------------------------------------------------------------- reading


def test_turn_ids_are_in_order_of_time_however_fast_they_are_made():
    ids = [new_turn_id() for _ in range(5000)]
    assert ids == sorted(set(ids))
    assert len({len(id) for id in ids}) == 1


async def test_turns_are_listed_newest_first_with_how_they_ended(store, me):
    claims = []
    for n in range(8):
        claims.append(await begun(store, me, chat=str(n % 2)))
        if n < 7:
            await store.finish(claims[-1], [TurnEnded("error")])
    turns = await store.turns("me")
    assert [turn.id for turn in turns] == [claim.turn for claim in reversed(claims)]
    assert (turns[0].reason, turns[0].ended_at) == (None, None)
    assert turns[1].reason == "error"
    assert [turn.key for turn in await store.turns("me", session=claims[0].session)] == ["test:0"] * 4
    assert [turn.id for turn in await store.turns("me", prefix=claims[3].turn)] == [claims[3].turn]
    assert await store.turns("me", prefix="%") == []
    assert len(await store.turns("me", limit=3)) == 3


async def test_sessions_are_listed_last_used_first(store, me):
    for chat in ("1", "2", "3", "1"):
        await finish(store, await begun(store, me, chat=chat))
        await asyncio.sleep(0.002)
    infos = await store.sessions("me")
    assert [info.key for info in infos] == ["test:1", "test:3", "test:2"]
    assert [info.entries for info in infos] == [6, 3, 3]
    assert len(await store.sessions("me", limit=2)) == 2


# ---------------------------------------------------------------------------------------------- from outside a turn


async def test_entries_can_be_noted_between_turns_and_not_during_one(store, me):
    noted = Noted({"role": "user", "content": "x"})
    assert await store.note("me", "test:1", [noted]) == 1
    claim = await begun(store, me)
    with pytest.raises(Busy):
        await store.note("me", "test:1", [noted])
    await store.release(claim)
    with pytest.raises(Busy):
        await store.note("me", "test:1", [noted])
    again = await store.begin("me", "test:1", me)
    assert again is not None
    await finish(store, again)
    await store.note("me", "test:1", [Cleared(), noted])
    info = await store.session("me", "test:1")
    assert info is not None
    assert (info.entries, info.history_from) == (6, 5)


async def test_a_session_can_be_forked_at_any_entry(store, me):
    claim = await begun(store, me)
    asked = ModelAnswered(calls=(Call("a", "look"),))
    await store.append(claim, [asked])
    await store.append(claim, [CallEnded("a", "look", "ok")])
    await finish(store, claim)
    await finish(store, await begun(store, me, "second"))
    whole = await log_of(store)
    for until in range(1, len(whole) + 1):
        made = await store.fork("me", "test:1", until, f"fork:{until}")
        assert await log_of(store, f"fork:{until}") == whole[:until]
        assert (made.open_turn is None) == isinstance(whole[until - 1], TurnEnded)
    assert await log_of(store) == whole
    everything = await store.fork("me", "test:1", None, "fork:all")
    assert everything.entries == len(whole)
    forked = await store.begin("me", "fork:2", me)
    assert forked is not None
    assert forked.resumed
    assert forked.entries == [UserSaid("hi", "user"), asked]
    assert forked.message is None or not forked.message.reply  # nobody is told what a copy says
    await finish(store, forked)


async def test_a_fork_that_makes_no_sense_says_so(store, me):
    await finish(store, await begun(store, me))
    with pytest.raises(StoreError, match="no session"):
        await store.fork("me", "test:9", None, "fork:1")
    with pytest.raises(StoreError, match="no session"):
        await store.fork("you", "test:1", None, "fork:1")
    with pytest.raises(StoreError, match="no entry 99"):
        await store.fork("me", "test:1", 99, "fork:1")
    with pytest.raises(StoreError, match="no entry 0"):
        await store.fork("me", "test:1", 0, "fork:1")
    with pytest.raises(StoreError, match="exists already"):
        await store.fork("me", "test:1", None, "test:1")
    assert await store.session("me", "fork:1") is None


# ---------------------------------------------------------------------------------------------- timers


async def test_timers_are_kept_changed_and_taken_away(store):
    await store.set_timer(Timer("me", "a", 20.0, {"x": 1}))
    await store.set_timer(Timer("me", "b", 10.0, {}))
    await store.set_timer(Timer("you", "a", 15.0, {}))
    assert [(timer.owner, timer.id) for timer in await store.timers()] == [("me", "b"), ("you", "a"), ("me", "a")]
    await store.set_timer(Timer("me", "a", 5.0, {"x": 2}))
    assert await store.timers("me") == [Timer("me", "a", 5.0, {"x": 2}), Timer("me", "b", 10.0, {})]
    assert await store.cancel_timer("me", "a")
    assert not await store.cancel_timer("me", "a")
    assert [timer.id for timer in await store.timers("you")] == ["a"]


async def test_a_timer_fires_once_however_many_workers_try(opened, me):
    stores = [await opened() for _ in range(3)]
    timer = Timer("me", "a", 10.0, {})
    await stores[0].set_timer(timer)
    said = message("tick", id="cron:a:10")
    fired = await asyncio.gather(*(store.fire_timer(timer, said, 20.0) for store in stores for _ in range(3)))
    assert fired.count(True) == 1
    assert [one.due_at for one in await stores[0].timers()] == [20.0]
    assert await stores[0].fire_timer(Timer("me", "a", 20.0, {}), message("tock"), None)
    assert await stores[0].timers() == []
    claim = await stores[1].begin("me", "test:1", me)
    assert claim is not None
    assert (await finish(stores[1], claim)).more  # tick, and tock behind it


# ---------------------------------------------------------------------------------------------- workers


async def test_workers_are_known_while_they_live(store, me, other):
    await store.join(me, "/run/me")
    await store.join(other, "/run/other")
    assert dict(await store.workers()) == {me: "/run/me", other: "/run/other"}
    retire(other)
    assert dict(await store.workers()) == {me: "/run/me"}
    await store.leave(me)
    assert await store.workers() == []


async def test_a_worker_of_a_process_that_ended_is_dead(store, me):
    code = "from everloop.store.workers import new_worker; print(new_worker())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    gone = done.stdout.strip()
    claim = await store.begin("me", "test:1", gone, message())
    assert claim is not None
    assert await store.ready(me) == [("me", "test:1")]


# ---------------------------------------------------------------------------------------------- many at once


async def test_two_workers_never_hold_one_session(opened, workers):
    stores = [await opened() for _ in range(3)]
    held = most = 0
    answered: list[str] = []
    for n in range(12):
        await stores[0].accept(message(str(n)))

    async def work(store: Store, worker: str) -> None:
        nonlocal held, most
        while len(answered) < 12:
            try:
                claim = await store.begin("me", "test:1", worker)
            except Busy:
                await asyncio.sleep(0.001)
                continue
            if claim is None:
                continue
            held += 1
            most = max(most, held)
            assert claim.message is not None
            answered.append(claim.message.content)
            await store.append(claim, [ModelAnswered("x")])
            held -= 1
            await finish(store, claim)

    async with asyncio.timeout(20):
        await asyncio.gather(*(work(store, worker) for store, worker in zip(stores, workers, strict=True)))
    assert most == 1
    assert answered == [str(n) for n in range(12)]


async def test_a_store_that_was_closed_can_be_used_again(store, me):
    await finish(store, await begun(store, me))
    await store.close()
    await store.close()
    assert len(await log_of(store)) == 3
    await begun(store, me)


async def test_what_was_handed_over_before_the_store_was_closed_is_on_disk(opened, me):
    store = await opened()
    claim = await begun(store, me)
    writes = [store.append(claim, [UserSaid(str(n))]) for n in range(50)]
    await store.close()
    await asyncio.gather(*writes)
    assert len(await log_of(await opened())) == 51
