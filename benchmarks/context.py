"""What it costs to build the request of a turn from disk, after 10, 1,000 and 10,000 turns.

`python benchmarks/context.py`, or a part of `make bench`.
Each session has the same ten turns at its end; what stood before them was compacted by the agent itself. An agent that
knows nothing of them is made for every sample, so that everything is read from the disk.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everloop import AgentLoop, Config, InboundMessage, LLMProvider, LLMResponse, MessageBus
from everloop.log import Call, CallEnded, Entry, ModelAnswered, TurnEnded, UserSaid
from everloop.store.base import Claim
from everloop.store.sqlite import SQLiteStore

SIZES = (10, 1_000, 10_000)
SHOWN = 10
FILLER = "the quick brown fox jumps over the lazy dog and looks at the harbour while the tide is out "


class Instant(LLMProvider):
    """Answers at once, and notes when it was asked and with how much."""

    default_model = "instant"

    def __init__(self) -> None:
        self.asked = 0.0
        self.cpu = 0.0
        self.messages = 0

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        if tools is not None:  # no summary
            messages.json_parts()
            self.asked, self.cpu, self.messages = time.perf_counter(), time.process_time(), len(messages)
        return LLMResponse("A summary: " + "they talked about foxes. " * 20)


def turn(number: int) -> Sequence[Entry]:
    call = Call(f"call_{number}", "exec", {"command": f"echo {number}"})
    return [
        UserSaid(f"question {number}: {FILLER * 3}?"),
        ModelAnswered(None, (call,)),
        CallEnded(call.id, "exec", FILLER * 6),
        ModelAnswered(f"answer {number}: {FILLER * 4}."),
        TurnEnded("answer"),
    ]


def agent(folder: Path, model: LLMProvider, store: Path) -> AgentLoop:
    return AgentLoop(MessageBus(), model, folder, config=Config(home=folder, window=64_000), store=store)


async def plant(folder: Path, turns: int) -> Path:
    """A store with one session of so many turns, compacted as the agent does it."""
    path = folder / f"{turns}.db"
    store = SQLiteStore(path)
    for first in range(0, turns, 500):
        entries = [entry for number in range(first, min(first + 500, turns)) for entry in turn(number)]
        await store.note("me", "bench:1", entries)
    info = await store.session("me", "bench:1")
    assert info is not None
    claim = Claim("me", info.id, info.key, 0, "", 0, info.entries + 1, info.entries + 1)
    claim.message = InboundMessage("bench", "user", "1", "")
    loop = agent(folder, Instant(), path)
    if turns > SHOWN:
        conversation = await loop._turns._histories.conversation(claim, "system")
        room = loop._compactor.room(loop._compactor.measure(), conversation, share=0.0)
        made = await loop._compactor.make(claim, conversation, room, kept_turns=SHOWN)
        assert made is not None
        assert made.turns == turns - SHOWN
        assert await store.compact("me", "bench:1", made)
    await store.close()
    await loop.close()
    return path


async def sample(folder: Path, path: Path) -> tuple[float, float, int]:
    """(wall ms, CPU ms, messages) from the user's message to the model's request, in an agent that has just begun."""
    model = Instant()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        copy = Path(shutil.copyfile(path, Path(place) / "copy.db"))
        async with agent(folder, model, copy) as loop:
            for number in range(3):
                await loop.process_direct("warm up", f"bench:other{number}")
            gc.collect()
            started, cpu = time.perf_counter(), time.process_time()
            await loop.process_direct("and now?", "bench:1")
            return (model.asked - started) * 1e3, (model.cpu - cpu) * 1e3, model.messages


async def measure(rounds: int, sizes: Sequence[int] = SIZES) -> dict[int, tuple[float, float]]:
    """The median (wall ms, CPU ms) by the number of turns on disk; all sizes take turns."""
    seen: dict[int, list[tuple[float, float, int]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {}
        for size in sizes:
            print(f"    planting {size:,} turns …", file=sys.stderr, flush=True)
            paths[size] = await plant(folder, size)
        for _ in range(rounds):
            for size, path in paths.items():
                seen[size].append(await sample(folder, path))
    shown = {size: samples[0][2] for size, samples in seen.items()}
    assert max(shown.values()) - min(shown.values()) <= 2, shown  # the summary and its reply
    return {size: tuple(map(statistics.median, list(zip(*samples, strict=True))[:2])) for size, samples in seen.items()}


if __name__ == "__main__":
    for turns, (wall, cpu) in asyncio.run(measure(15)).items():
        print(f"{turns:>6} turns on disk: {wall:.2f} ms, {cpu:.2f} ms CPU")
