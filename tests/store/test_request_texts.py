"""Parts of model requests that are not in the log, and flush waits that no entry shows; in both stores."""

from __future__ import annotations

from everloop.bus import InboundMessage, SubagentTask
from everloop.store.base import RequestText, Store

from .steps import begun, finish


async def test_a_text_is_kept_once_and_only_its_owner_reads_it(opened):
    store, beside = await opened(), await opened()
    await store.keep_request_texts("me", "", {"a": "the prompt 🌱", "b": "[]"})
    await beside.keep_request_texts("me", "", {"a": "of another process", "c": "later"})
    assert await beside.request_texts("me", ["a", "b", "x"]) == {
        "a": RequestText("the prompt 🌱"),
        "b": RequestText("[]"),
    }
    assert await store.request_texts("me", ["c"]) == {"c": RequestText("later")}
    assert await store.request_texts("you", ["a", "b", "c"]) == {}
    await store.keep_request_texts("you", "", {"a": "theirs"})
    assert (await store.request_texts("you", ["a"]))["a"].data == "theirs"
    assert (await store.request_texts("me", ["a"]))["a"].data == "the prompt 🌱"


async def test_a_sessions_text_is_deleted_with_it_and_the_owners_own_remain(store: Store, me):
    await finish(store, await begun(store, me))
    await finish(store, await begun(store, me, chat="2"))
    task = SubagentTask(parent="test:1")
    await store.accept(InboundMessage("sub", "agent", "x", "do it", session="sub:x", cause=task))
    await store.keep_request_texts("me", "test:1", {"one": "the prompt of a task"})
    await store.keep_request_texts("me", "sub:x", {"of its agent": "its task"})
    await store.keep_request_texts("me", "test:2", {"two": "of another session"})
    await store.keep_request_texts("you", "test:1", {"one": "of another owner"})
    await store.keep_request_texts("me", "", {"all": "of every session"})
    hashes = ["one", "of its agent", "two", "all"]
    assert set(await store.request_texts("me", hashes)) == set(hashes)
    assert (await store.request_texts("me", ["one"]))["one"] == RequestText("the prompt of a task", "test:1")
    assert await store.delete_session("me", "test:1") is not None
    assert set(await store.request_texts("me", hashes)) == {"two", "all"}
    assert set(await store.request_texts("you", hashes)) == {"one"}


async def test_a_turns_waits_for_the_disk_are_summed(store: Store, me):
    claims = [await begun(store, me, chat=chat) for chat in ("1", "2")]
    for claim in claims:
        await finish(store, claim)
    await store.note_flushes({claims[0].inbox[0]: 0.25, claims[1].inbox[0]: 1.0, 10_000: 3.0})
    await store.note_flushes({claims[0].inbox[0]: 0.5})
    assert {turn.id: turn.flushed for turn in await store.turns("me")} == {claims[0].turn: 0.75, claims[1].turn: 1.0}
