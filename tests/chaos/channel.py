"""Sends messages to workers in other processes, and waits for their effects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everloop import InboundMessage
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import FakeOpenAI

from ..crash.forge import Forge
from ..crash.history import History, lines, read
from ..crash.programs import HOLD


async def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The tool `long` does not end in this block, however long its contents take."""
    (folder / HOLD).touch()
    try:
        yield
    finally:
        (folder / HOLD).unlink()


def started(folder: Path, runs: int = 1) -> Callable[[], bool]:
    return lambda: len([run for run in lines(folder / "runs") if run["what"] == "start"]) >= runs


async def publish(folder: Path, *messages: dict[str, Any]) -> None:
    """Publish as a channel in a process of its own does."""
    store = SQLiteStore(folder / "store.db")
    bus = DurableBus(store)
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
    await store.close()


async def finished(forge: Forge, folder: Path, model: FakeOpenAI) -> History:
    """Send the contents of the outbox, and read all of it."""
    assert await forge.run("agent", folder=str(folder), url=model.base_url, bus="durable") == 0
    return read(folder, model.requests)
