"""Incoming messages and outgoing answers."""

from __future__ import annotations

from everloop.bus import InboundMessage
from everloop.store.peers import new_worker, retire

from .steps import answer, begun, finish, message

# ---------------------------------------------------------------------------------------------- inbox


async def test_a_hidden_message_is_no_longer_found_and_only_its_owner_can_hide_it(opened):
    here, there = await opened(), await opened()
    await here.accept(InboundMessage("api", "x", "1", "hi", id="m1", owner="anna"))
    await here.accept(InboundMessage("api", "x", "1", "hi", id="m1", owner="berta"))
    assert await here.hide("anna", "m1")
    assert await there.find("anna", "m1") is None
    assert await there.find("berta", "m1") is not None
    assert not await there.hide("anna", "m1")
    assert not await there.hide("anna", "m2")


async def test_an_accepted_message_is_visible_to_another_process(opened, me):
    store = await opened()
    said = message("hé 😀", media=["a.png"], metadata={"n": [1, {"x": None}]}, id="m1")
    row = await store.accept(said)
    assert not row.done
    assert row.turn is None
    again = await (await opened()).incoming(row.id)
    assert again.message == said
    assert again.kind == "message"
    assert not again.done


async def test_a_message_id_is_accepted_once_per_owner(store, me):
    first = await store.accept(message(id="m1"))
    assert (await store.accept(message("other text", id="m1"))).id == first.id
    assert (await store.accept(message(id="m1", chat="2"))).id == first.id
    assert (await store.accept(message(id="m1", owner="you"))).id != first.id
    assert (await store.accept(message())).id != (await store.accept(message())).id


async def test_a_message_id_is_still_known_after_its_answer(store, me):
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


async def test_a_living_workers_session_is_not_ready_for_others_and_a_dead_workers_is(store, me, other):
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


async def test_an_urgent_message_without_a_row_is_answered_and_known(store, me):
    assert len(await store.answer(message("/help", id="h1"), [answer()])) == 1
    assert await store.answer(message("/help", id="h1"), [answer()]) == []
    assert await store.ready(me) == []
    assert await store.begin("me", "test:1", me) is None


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


async def test_an_answer_that_its_worker_sends_at_once_is_only_repeated_if_the_worker_dies(store, me, other):
    await finish(store, await begun(store, me), outgoing=[answer()], sender=me)
    assert await store.take_outgoing(other) == []
    assert await store.take_outgoing(me) == []
    retire(me)
    assert [out.message.repeat for out in await store.take_outgoing(other)] == [True]


async def test_the_outbox_is_read_in_parts_oldest_first(store, me):
    await finish(store, await begun(store, me), outgoing=[answer(str(n)) for n in range(5)])
    assert [out.message.content for out in await store.take_outgoing(me, 2)] == ["0", "1"]
    assert [out.message.content for out in await store.take_outgoing(me, 9)] == ["2", "3", "4"]


async def test_a_running_turns_message_is_posted_once_per_key(store, me):
    claim = await begun(store, me)
    first = await store.post(claim, answer("one"), "t/a", None)
    assert first is not None
    assert await store.post(claim, answer("one"), "t/a", None) is None
    assert await store.post(claim, answer("two"), "t/b", None) is not None
    assert [row.message.content for row in await store.take_outgoing(me)] == ["one", "two"]
    await store.sent([first])
    assert await store.post(claim, answer("one"), "t/a", None) is None
