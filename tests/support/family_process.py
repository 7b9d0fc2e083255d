"""A process with a sub-agent of a sub-agent, until it is killed: `-m tests.support.family_process STORE BUS`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from everloop import AgentLoop, Config, MessageBus
from everloop.runtime.durable_bus import DurableBus
from everloop.runtime.subagents import ParentTurn
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider


async def slow(messages: Any, tools: Any) -> str:
    print("asked", flush=True)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
    return "NEVER"


async def main(path: Path, kind: str) -> None:
    store = SQLiteStore(path)
    bus: Any = DurableBus(store) if kind == "durable" else MessageBus()
    model = ScriptedProvider([slow], repeat_last=True)
    agent = AgentLoop(bus, model, path.parent, config=Config(home=path.parent / "home"), store=store)
    running = asyncio.create_task(agent.run())
    id = await agent.subagents.spawn("slow", ParentTurn(channel="test", chat_id="1"))
    await agent.subagents.spawn("slower", ParentTurn(channel="test", chat_id="1", session=f"sub:{id}", depth=1))
    await running


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
