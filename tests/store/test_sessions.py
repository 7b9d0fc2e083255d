"""Lists of sessions and turns, and writes to them from outside a turn."""

from __future__ import annotations

import asyncio

import pytest

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.log import Call, CallEnded, Cleared, Compacted, ModelAnswered, Noted, TurnEnded, UserSaid
from everloop.store.base import Busy, new_turn_id
from everloop.store.peers import new_worker

from .steps import begun, finish, log_of

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
    assert forked.message is None or not forked.message.reply  # what a copy says is announced to no one
    await finish(store, forked)


async def test_a_meaningless_fork_is_refused_with_the_reason(store, me):
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


async def test_a_compaction_based_on_entries_no_longer_shown_is_not_written(store):
    await store.note("me", "test:1", [Noted({"role": "user", "content": str(n)}) for n in range(6)])
    assert await store.compact("me", "test:1", Compacted(2, "first"))
    info = await store.session("me", "test:1")
    assert info is not None
    assert info.compacted == 7
    assert not await store.compact("me", "test:1", Compacted(4, "made beside it"))
    assert await store.compact("me", "test:1", Compacted(4, "second", follows=7))
    await store.note("me", "test:1", [Cleared()])
    assert not await store.compact("me", "test:1", Compacted(5, "of what was left", follows=0))
    assert not await store.compact("me", "test:2", Compacted(1, "of nothing"))
    logged = await store.read_log(info.id)
    assert [one.entry.summary for one in logged if isinstance(one.entry, Compacted)] == ["first", "second"]


async def test_a_busy_session_is_not_compacted_beside_its_turn(store):
    claim = await store.begin("me", "test:1", new_worker(), InboundMessage("test", "user", "1", "go"))
    assert claim is not None
    assert not await store.compact("me", "test:1", Compacted(0, "now"))
