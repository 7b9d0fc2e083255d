"""Titles of sessions, their deletion, and the pruning of old requests; the same in both stores."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing

import pytest

from everloop.bus import InboundMessage, SubagentTask
from everloop.log import Cleared, Request, UserSaid
from everloop.store.base import Busy, Naming, Pruned, Store
from everloop.store.deletion import prune
from everloop.store.sqlite import SQLiteStore

from .steps import answer, begun, finish, log_of

DAY = 86_400.0


# ---------------------------------------------------------------------------------------------- titles


async def test_a_title_is_kept_in_the_store_and_a_model_never_replaces_one(opened, me):
    store, beside = await opened(), await opened()
    await finish(store, await begun(store, me))
    assert (await beside.session("me", "test:1")).title == ""
    assert await store.set_title("me", "test:1", "First", Naming("small", {"prompt_tokens": 7}))
    assert not await store.set_title("me", "test:1", "Second", Naming("other", {"prompt_tokens": 9, "cached": 1}))
    (info,) = await beside.sessions("me")
    assert (info.title, info.named_by, info.naming_usage) == ("First", "small", {"prompt_tokens": 16, "cached": 1})
    assert await beside.set_title("me", "test:1", "Mine")
    info = await store.session("me", "test:1")
    assert (info.title, info.named_by, info.naming_usage["prompt_tokens"]) == ("Mine", "", 16)
    assert not await store.set_title("me", "test:1", "Third", Naming("small", {}))
    assert await store.set_title("me", "test:1", "")
    assert (await store.session("me", "test:1")).title == ""
    assert not await store.set_title("you", "test:1", "Theirs")
    assert not await store.set_title("you", "test:1", "Theirs", Naming("small", {}))


async def test_a_new_conversation_drops_a_models_title_and_keeps_a_persons(store, me):
    for key, naming in (("test:model", Naming("small", {"prompt_tokens": 7})), ("test:person", None)):
        await store.note("me", key, [UserSaid("hi", "user")])
        await store.set_title("me", key, "Title", naming)
        await store.note("me", key, [Cleared()])
    model, person = await store.session("me", "test:model"), await store.session("me", "test:person")
    assert (model.title, model.named_by, model.naming_usage) == ("", "", {"prompt_tokens": 7})
    assert person.title == "Title"
    assert await store.set_title("me", "test:model", "Again", Naming("small", {}))


# ---------------------------------------------------------------------------------------------- archive


async def test_an_archived_session_comes_back_with_the_next_entry_or_when_restored(opened, me):
    store, beside = await opened(), await opened()
    await finish(store, await begun(store, me))
    assert not (await store.session("me", "test:1")).archived
    assert await store.set_archived("me", "test:1", True)
    assert (await beside.sessions("me"))[0].archived
    assert await store.set_title("me", "test:1", "Named meanwhile")
    assert (await beside.session("me", "test:1")).archived
    await finish(store, await begun(store, me, "again"))
    assert not (await beside.session("me", "test:1")).archived
    assert await store.set_archived("me", "test:1", True)
    assert await store.set_archived("me", "test:1", False)
    assert not (await beside.session("me", "test:1")).archived
    assert not await store.set_archived("you", "test:1", True)


# ---------------------------------------------------------------------------------------------- deletion


async def test_a_deleted_session_is_gone_with_all_its_data_and_no_other_is(opened, me):
    store = await opened()
    for chat in ("1", "2"):
        claim = await begun(store, me, f"the heron of {chat}", chat, id=f"m-{chat}")
        await finish(store, claim, "seen", outgoing=[answer()])
    await store.grant("me", "test:1", ["exec"])
    await store.set_title("me", "test:1", "Birds")
    assert len(await store.search("me", "heron")) == 2
    removed = await store.delete_session("me", "test:1")
    assert removed is not None
    assert (removed.keys, removed.entries, removed.turns, removed.messages) == (("test:1",), 3, 1, 2)
    for look in (store, await opened()):
        assert [info.key for info in await look.sessions("me")] == ["test:2"]
        assert await log_of(look) == []
        assert [found.session for found in await look.search("me", "heron")] == ["test:2"]
        assert await look.find("me", "m-1") is None
        assert await look.grants("me", "test:1") == frozenset()
        assert [turn.key for turn in await look.turns("me")] == ["test:2"]
        assert (await look.overview()).sessions == 1
    assert len(await store.take_outgoing(me)) == 1
    assert await store.delete_session("me", "test:1") is None
    assert await store.delete_session("you", "test:2") is None
    again = await begun(store, me, "anew", id="m-1")
    assert (again.next_seq, again.first_seq) == (2, 1)
    await finish(store, again)
    assert [found.session for found in await store.search("me", "anew")] == ["test:1"]
    assert (await store.session("me", "test:1")).title == ""


async def test_no_id_is_reused_after_a_deletion(store, me):
    """Other processes may know a session or a message by its id."""
    for n in range(3):
        claim = await begun(store, me, chat=str(n))
        ended = await finish(store, claim, outgoing=[answer()])
        last = (claim.session, claim.inbox[0], ended.outbox[0])
        await store.sent(ended.outbox)
    for n in (1, 2):
        await store.delete_session("me", f"test:{n}")
    claim = await begun(store, me, chat="new")
    ended = await finish(store, claim, outgoing=[answer()])
    assert (claim.session, claim.inbox[0], ended.outbox[0]) > last
    assert min(claim.session - last[0], claim.inbox[0] - last[1], ended.outbox[0] - last[2]) >= 1
    assert (await store.overview()).sessions == 2
    await store.sent(ended.outbox)
    assert await store.delete_session("me", "test:0") is not None
    assert await store.delete_session("me", "test:new") is not None
    assert (await store.overview()).sessions == 0
    assert await store.take_outgoing(me) == []
    assert await store.ready(me) == []


async def test_a_session_with_a_running_turn_is_not_deleted_and_a_waiting_one_is(store, me, other):
    claim = await begun(store, me)
    with pytest.raises(Busy):
        await store.delete_session("me", "test:1")
    assert len(await log_of(store)) == 1
    await store.release(claim)
    assert await store.delete_session("me", "test:1") is not None
    assert await store.ready(other) == []
    with pytest.raises(Exception, match="taken over"):
        await store.append(claim, [UserSaid("late", "user")])
    assert await store.session("me", "test:1") is None


async def test_a_session_whose_message_is_being_sent_is_not_deleted(store, me):
    ended = await finish(store, await begun(store, me), outgoing=[answer()], sender=me)
    with pytest.raises(Busy):
        await store.delete_session("me", "test:1")
    await store.sent(ended.outbox)
    assert await store.delete_session("me", "test:1") is not None


def task(id: str, parent: str) -> InboundMessage:
    return InboundMessage("sub", "agent", id, "do it", session=f"sub:{id}", cause=SubagentTask(parent=parent))


async def test_a_sessions_sub_agents_are_deleted_with_it(store, me, other):
    await finish(store, await begun(store, me))
    for id, parent in (("a", "test:1"), ("b", "sub:a"), ("c", "test:2")):
        claim = await store.begin("me", f"sub:{id}", me, task(id, parent))
        assert claim is not None
        await finish(store, claim)
    running = await store.begin("me", "sub:b", other, task("b", "sub:a"))
    assert running is not None
    with pytest.raises(Busy):
        await store.delete_session("me", "test:1")
    await finish(store, running)
    removed = await store.delete_session("me", "test:1")
    assert removed is not None
    assert removed.keys == ("test:1", "sub:a", "sub:b")
    assert [info.key for info in await store.sessions("me")] == ["sub:c"]


async def test_entries_shared_between_a_fork_and_a_deleted_session_are_still_found(store, me):
    await finish(store, await begun(store, me, "the heron"))
    await store.fork("me", "test:1", None, "test:fork")
    assert [found.session for found in await store.search("me", "heron")] == ["test:1"]
    await store.delete_session("me", "test:1")
    assert [found.session for found in await store.search("me", "heron")] == ["test:fork"]


async def test_the_search_index_forgets_the_words_of_a_deleted_session(tmp_path, me):
    store = SQLiteStore(tmp_path / "store.db")
    await finish(store, await begun(store, me, "a heron and a stork", "gone"), "Both are birds.")
    await finish(store, await begun(store, me, "the stork", "kept"))
    assert len(await store.search("me", "stork")) == 2
    await store.delete_session("me", "test:gone")
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        for word, count in (("heron", 0), ("birds", 0), ("stork", 1)):
            assert db.execute("SELECT count(*) FROM search WHERE search MATCH ?", (word,)).fetchone() == (count,)
        db.execute("INSERT INTO search (search) VALUES ('integrity-check')")
        assert db.execute("SELECT count(*) FROM search_entry").fetchone() == (2,)


async def test_the_bytes_of_a_deleted_session_are_not_in_the_file(tmp_path, me):
    store = SQLiteStore(tmp_path / "store.db")
    await finish(store, await begun(store, me, "canary-4711 " * 400, "gone"))
    await finish(store, await begun(store, me, "kept-0815", "kept"))
    await store.set_title("me", "test:gone", "canary-4711")
    await store.delete_session("me", "test:gone")
    await store.close()
    data = b"".join(path.read_bytes() for path in tmp_path.glob("store.db*"))
    assert b"kept-0815" in data
    assert b"canary-4711" not in data


# ---------------------------------------------------------------------------------------------- old requests


async def requested(store: Store, worker: str, id: str, *, kept: bool = False, owner: str = "me") -> None:
    asked = InboundMessage("api", "client", id, "hi", session=f"api:{id}", owner=owner, request=Request(kept=kept))
    claim = await store.begin(owner, f"api:{id}", worker, asked)
    assert claim is not None
    await finish(store, claim)


async def everything(store: Store, before: float) -> tuple[list[str], int]:
    """Prune to the end; return the removed keys, and the number of steps."""
    keys, steps, position = [], 0, 0
    while True:
        step: Pruned = await store.prune_requests(before, position)
        keys += [key for _, key in step.removed]
        steps += 1
        if step.position is None:
            return keys, steps
        assert step.position > position
        position = step.position


async def test_only_old_requests_without_a_session_are_pruned(store, me, other):
    await finish(store, await begun(store, me))  # a chat
    await requested(store, me, "kept", kept=True)
    await requested(store, me, "mine")
    await requested(store, me, "theirs", owner="you")
    for id, parent in (("a", "api:mine"), ("b", "test:1")):
        claim = await store.begin("me", f"sub:{id}", me, task(id, parent))
        assert claim is not None
        await finish(store, claim)
    asked = InboundMessage("api", "client", "open", "hi", session="api:open", request=Request())
    running = await store.begin("me", "api:open", other, asked)
    assert running is not None
    assert (await everything(store, time.time() - DAY))[0] == []
    removed, _ = await everything(store, time.time() + DAY)
    removed += (await everything(store, time.time() + DAY))[0]  # sub-agents of a request after it
    assert sorted(removed) == ["api:mine", "api:theirs", "sub:a"]
    assert sorted(info.key for info in await store.sessions("me")) == ["api:kept", "api:open", "sub:b", "test:1"]
    assert await store.sessions("you") == []
    await finish(store, running)
    assert (await everything(store, time.time() + DAY))[0] == ["api:open"]


async def test_requests_are_pruned_in_small_steps_in_the_background_by_the_clock(store, me, monkeypatch):
    monkeypatch.setattr("everloop.store.deletion.STEP_DELETIONS", 3)
    for n in range(8):
        await requested(store, me, f"r{n}")
    now = time.time()
    clock = iter([now + 29 * DAY, now + 31 * DAY])
    pauses: list[float] = []
    gone: list[list[str]] = []
    left: list[int] = []

    class Over(Exception):
        pass

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        left.append(len(await store.sessions("me")))
        if seconds > 60 and len([one for one in pauses if one > 60]) == 3:
            raise Over

    async def forget(removed: Sequence[tuple[str, str]]) -> None:
        gone.append([key for _, key in removed])

    with pytest.raises(Over):
        await prune(store, 30 * DAY, forget, clock=lambda: next(clock), sleep=sleep)
    assert left[:2] == [8, 8]  # before the first look, and after it: nothing was old enough
    assert left[-1] == 0
    assert [len(keys) for keys in gone] == [3, 3, 2]
    assert 5 in left  # other writes fit between two steps
    assert 2 in left
