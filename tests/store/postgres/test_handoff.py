"""A process that ends hands off its turns at once, even those that did not end in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from everloop import InboundMessage
from everloop.config import Config
from everloop.runtime.agent import agent_of
from everloop.runtime.durable_bus import DurableBus
from everloop.runtime.owners import Owners
from everloop.store.postgres.store import PostgresStore
from everloop.testing import ScriptedProvider
from tests.runtime.chat import Gate

LONG = 600.0  # seconds: no turn is taken up because a lease has expired


async def test_a_turn_interrupted_by_the_end_of_its_process_is_taken_up_at_once(tmp_path: Path, database: str):
    stores = [PostgresStore(database, lease_seconds=LONG) for _ in range(2)]
    gate, later = Gate(), Gate("the answer")
    config = Config(home=tmp_path / "home", workspace=tmp_path)
    first, second = (
        Owners(config, store, ScriptedProvider([step]), agent_of)
        for store, step in zip(stores, (gate, later), strict=True)
    )
    running = asyncio.create_task(first.run())
    bus = DurableBus(stores[0])
    await bus.publish_inbound(InboundMessage("test", "user", "one", "go"))
    await asyncio.wait_for(gate.reached.wait(), 30)
    other = asyncio.create_task(second.run())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)  # it has left the others, and still has the turn
    await asyncio.sleep(0.5)  # by then no worker looks because another has joined or left
    await first.close()
    await asyncio.wait_for(later.reached.wait(), 30)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await second.close()
    await bus.close()
    for store in stores:
        await store.close()
