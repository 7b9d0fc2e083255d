"""A channel that stops waiting for the next answer, for example after a timeout, loses none of the later ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everloop import InboundMessage, OutboundMessage
from everloop.errors import StoreError
from everloop.runtime.durable_bus import DurableBus
from everloop.store.base import Store
from everloop.store.peers import SENDING

from .steps import away_once


class Held:
    """A call of the store that returns when the test says so."""

    def __init__(self, store: Store, name: str) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._call = getattr(store, name)
        setattr(store, name, self)

    async def __call__(self, *given: Any) -> Any:
        found = await self._call(*given)
        self.reached.set()
        await self.go.wait()
        return found


@pytest.fixture
async def bus(store: Store) -> AsyncIterator[DurableBus]:
    made = DurableBus(store)
    yield made
    await made.close()


async def answered(store: Store, text: str) -> None:
    await store.answer(InboundMessage("test", "user", "one", "/help"), [OutboundMessage("test", "one", text)])
    await store.wake(SENDING)


async def gone(bus: DurableBus, held: Held) -> None:
    """A consumer waits for the next answer, and leaves while the store is asked."""
    waiting = asyncio.create_task(bus.consume_outbound())
    await asyncio.wait_for(held.reached.wait(), 20)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    held.go.set()


async def hears_of_an_answer(store: Store, bus: DurableBus) -> None:
    """A consumer waits that has looked, and found nothing."""
    waiting = asyncio.create_task(bus.consume_outbound())
    looked = Held(store, "take_outgoing")
    looked.go.set()
    await asyncio.wait_for(looked.reached.wait(), 20)
    await answered(store, "hello")
    assert (await asyncio.wait_for(waiting, 20)).content == "hello"


async def test_a_message_taken_for_a_consumer_that_left_goes_to_the_next(store, bus):
    held = Held(store, "take_outgoing")
    await answered(store, "hello")
    await gone(bus, held)
    message = await asyncio.wait_for(bus.consume_outbound(), 20)
    assert (message.content, message.repeat) == ("hello", False)


async def test_a_message_about_to_be_handed_to_a_consumer_that_left_goes_to_the_next(store, bus):
    held = Held(store, "keep_outgoing")
    await answered(store, "hello")
    await gone(bus, held)
    message = await asyncio.wait_for(bus.consume_outbound(), 20)
    assert (message.content, message.repeat) == ("hello", False)


async def test_a_consumer_after_one_that_left_gets_notices_of_answers_too(store, bus):
    await gone(bus, Held(store, "join"))
    await hears_of_an_answer(store, bus)


async def test_a_consumer_after_an_outage_of_the_store_gets_notices_of_answers_too(store, bus, monkeypatch):
    away_once(store, "join", monkeypatch)
    with pytest.raises(StoreError):
        await bus.consume_outbound()
    await hears_of_an_answer(store, bus)
