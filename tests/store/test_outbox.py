"""The outbox by channel, and its rows that cannot be decoded; with both stores."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from everloop.bus import OutboundMessage
from everloop.runtime.durable_bus import DurableBus

from .steps import begun, finish

SOON = 20.0


async def change(store: Any, sql: str) -> None:
    """Change rows as a damaged disk or another program would."""

    def work(db: Any) -> None:
        db.execute(sql)

    await (store.writer.submit(work) if hasattr(store, "writer") else store.connections.submit("writes", work))


async def say(store: Any, worker: str, *texts: str, channel: str = "test", chat: str = "1") -> None:
    claim = await begun(store, worker, chat=chat)
    await finish(store, claim, outgoing=[OutboundMessage(channel, chat, text) for text in texts])


async def taken(store: Any, worker: str, **options: Any) -> list[str]:
    return [row.message.content for row in await store.take_outgoing(worker, **options)]


async def test_only_messages_of_the_requested_channels_are_taken(store, me, other):
    await say(store, me, "one", channel="slack", chat="1")
    await say(store, me, "two", channel="telegram", chat="2")
    await say(store, me, "three", channel="slack", chat="3")
    assert await taken(store, me, channels=["matrix"]) == []
    assert await taken(store, me, limit=1, channels=["telegram"]) == ["two"]
    assert await taken(store, other, channels=["slack", "telegram"]) == ["one", "three"]


async def test_many_messages_of_another_channel_hide_none(store, me, other):
    await say(store, me, *map(str, range(30)), channel="slack")
    await say(store, me, "here", channel="telegram", chat="2")
    assert await taken(store, other, limit=2, channels=["telegram"]) == ["here"]


async def test_rows_of_an_older_version_are_taken_by_channel_too(store, me, other):
    await say(store, me, "one", channel="slack", chat="1")
    await say(store, me, "two", channel="telegram", chat="2")
    await change(store, "UPDATE outbox SET channel = NULL, chat_id = NULL")
    assert await taken(store, other, channels=["telegram"]) == ["two"]
    assert await taken(store, other, chat=("slack", "1")) == ["one"]


async def test_two_buses_on_one_store_get_only_their_own_channel(opened, me):
    stores = [await opened(), await opened()]
    buses = {name: DurableBus(store, channel=name) for name, store in zip(("slack", "telegram"), stores, strict=True)}
    waiting = {name: asyncio.create_task(bus.consume_outbound()) for name, bus in buses.items()}
    try:
        for n, channel in enumerate(("telegram", "telegram", "slack")):
            await say(stores[0], me, f"{channel} {n}", channel=channel, chat=str(n))
        buses["slack"].more_outgoing()
        buses["telegram"].more_outgoing()
        first = {name: await asyncio.wait_for(task, SOON) for name, task in waiting.items()}
        assert {name: message.content for name, message in first.items()} == {
            "slack": "slack 2",
            "telegram": "telegram 0",
        }
        second = await asyncio.wait_for(buses["telegram"].consume_outbound(), SOON)
        assert second.content == "telegram 1"
        for name, message in first.items():
            await buses[name].sent(message)
        await buses["telegram"].sent(second)
        assert (await stores[0].overview()).unsent == 0
    finally:
        for task in waiting.values():
            task.cancel()
        for bus in buses.values():
            await bus.close()


@pytest.mark.parametrize("addressed", [True, False])
async def test_a_row_that_cannot_be_decoded_is_set_aside_and_the_others_go_out(store, me, other, caplog, addressed):
    await say(store, me, "one", "two", "three", "four")
    (first, *_) = await store.take_outgoing(other, 1)
    await store.sent([first.id])
    await change(store, "UPDATE outbox SET data = '{\"channel\":\"te' WHERE data LIKE '%two%'")
    if not addressed:
        await change(store, "UPDATE outbox SET channel = NULL, chat_id = NULL")
    with caplog.at_level(logging.WARNING):
        assert await taken(store, me, limit=1, channels=["test"]) == ["three"]
        assert await taken(store, me) == ["four"]
        assert await taken(store, me) == []
    warned = [record.getMessage() for record in caplog.records if "cannot be decoded" in record.getMessage()]
    assert len(warned) == 1
    seen = await store.overview()
    assert (seen.unsent, seen.damaged) == (2, 1)


async def test_a_repaired_row_is_sent(store, me, other):
    await say(store, me, "one")
    await change(store, "UPDATE outbox SET data = 'no'")
    assert await taken(store, me) == []
    repaired = '{"channel":"test","chat_id":"1","content":"back"}'
    await change(store, f"UPDATE outbox SET damaged = NULL, data = '{repaired}'")
    assert await taken(store, other) == ["back"]
