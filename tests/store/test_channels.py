"""What channels keep in the store: leases by name, parts of messages, dead letters and state; with both stores."""

from __future__ import annotations

import asyncio

from everloop import InboundMessage, OutboundMessage
from everloop.store.base import SentPart, Store
from everloop.store.peers import retire


async def answered(store: Store, *texts: str, channel: str = "test") -> None:
    question = InboundMessage(channel, "user", "one", "/help")
    await store.answer(question, [OutboundMessage(channel, "one", text) for text in texts])


async def test_a_lease_has_one_holder_until_it_is_released_or_its_holder_dies(store, me, other, workers):
    assert await store.hold("channel:a", me)
    assert await store.hold("channel:a", me)
    assert not await store.hold("channel:a", other)
    assert await store.hold("channel:b", other)
    assert await store.holders() == {"channel:a": me, "channel:b": other}
    await store.unhold("channel:a", other)  # not its own
    assert not await store.hold("channel:a", other)
    await store.unhold("channel:a", me)
    assert await store.hold("channel:a", other)
    retire(other)
    assert await store.hold("channel:a", workers[2])
    assert await store.holders() == {"channel:a": workers[2]}


async def test_accepted_parts_are_known_to_the_next_worker(store, me, other):
    await answered(store, "a long text")
    (row,) = await store.take_outgoing(me, channels=["test"])
    assert (await store.deliveries([row.id]))[row.id].parts == ()
    assert await store.mark_parts(row.id, me, [SentPart("7", 4)])
    assert not await store.mark_parts(row.id, other, [SentPart("8", 5)])
    retire(me)
    (again,) = await store.take_outgoing(other, channels=["test"])
    assert again.message.repeat
    assert (await store.deliveries([row.id]))[row.id].parts == (SentPart("7", 4),)
    assert not await store.mark_parts(row.id, me, [SentPart("9", 6)])
    assert await store.mark_parts(row.id, other, [SentPart("7", 4), SentPart("8", 11)], sent=True)
    assert await store.take_outgoing(me, channels=["test"]) == []


async def test_a_row_that_was_held_back_is_no_repeat_for_the_next_worker(store, me, other):
    await answered(store, "first", "second")
    first, second = await store.take_outgoing(me, channels=["test"])
    await store.hold_back([second.id], me)
    retire(me)
    again = await store.take_outgoing(other, channels=["test"])
    assert [(row.id, row.message.repeat) for row in again] == [(first.id, True), (second.id, False)]


async def test_rows_that_are_released_can_be_taken_by_the_next_worker(store, me, other):
    await answered(store, "hello")
    await answered(store, "elsewhere", channel="another")
    assert len(await store.take_outgoing(me)) == 2
    await store.release_outgoing(me, "test")
    (row,) = await store.take_outgoing(other)
    assert (row.message.content, row.message.repeat) == ("hello", True)


async def test_a_dead_letter_is_not_sent_before_it_is_revived(store, me, other):
    await answered(store, "hello")
    (row,) = await store.take_outgoing(me, channels=["test"])
    await store.mark_parts(row.id, me, [SentPart("7", 2)])
    assert not await store.bury(row.id, other, "not mine")
    assert await store.bury(row.id, me, "the chat is gone")
    retire(me)
    assert await store.take_outgoing(other, channels=["test"]) == []
    (dead,) = await store.dead_letters()
    assert (dead.id, dead.channel, dead.chat_id, dead.reason, dead.content) == (
        row.id,
        "test",
        "one",
        "the chat is gone",
        "hello",
    )
    assert await store.dead_letters("another") == []
    assert await store.revive([row.id, 999]) == [row.id]
    assert await store.dead_letters("test") == []
    (again,) = await store.take_outgoing(other, channels=["test"])
    assert (again.id, again.message.repeat) == (row.id, False)
    assert (await store.deliveries([row.id]))[row.id].parts == (SentPart("7", 2),)


async def test_a_channel_keeps_values_by_key(store):
    await store.set_channel_state("a", "cursor", "1")
    await store.set_channel_state("a", "cursor", "2")
    await store.set_channel_state("b", "cursor", "3")
    assert await store.channel_state("a") == {"cursor": "2"}
    await store.set_channel_state("a", "cursor", None)
    assert await store.channel_state("a") == {}


async def test_several_channel_values_are_written_at_once_if_one_value_is_as_expected(store):
    first = [("a:keys", "epoch", "1"), ("a:keys", "account", "x"), ("a:group", "session", "y")]
    assert await store.write_channel_state(first, ("a:keys", "epoch", None))
    assert not await store.write_channel_state([("a:keys", "account", "late")], ("a:keys", "epoch", None))
    assert not await store.write_channel_state([("a:keys", "account", "late")], ("a:keys", "epoch", "0"))
    changes = [("a:keys", "account", "z"), ("a:group", "session", None)]
    assert await store.write_channel_state(changes, ("a:keys", "epoch", "1"))
    assert await store.channel_state("a:keys") == {"epoch": "1", "account": "z"}
    assert await store.channel_state("a:group") == {}


async def test_of_two_processes_that_write_a_first_value_at_once_one_succeeds(opened):
    first, second = await opened(), await opened()
    for number in range(20):
        place = ("a:keys", f"key {number}", None)
        rows = [[("a:keys", f"key {number}", name), ("a:who", f"key {number}", name)] for name in ("one", "two")]
        written = await asyncio.gather(
            first.write_channel_state(rows[0], place), second.write_channel_state(rows[1], place)
        )
        assert sorted(written) == [False, True]
        winner = {"one", "two"} - {("one", "two")[written.index(False)]}
        for space in ("a:keys", "a:who"):
            assert {(await first.channel_state(space))[f"key {number}"]} == winner
