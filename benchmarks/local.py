"""Measures the local model: `python -m benchmarks.local --weights FILE`. A minute or two; a busy machine shows in it.

Each figure is of one run on this machine. The prompt has about as many tokens as the agent's own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from everloop.providers.local.engine import Engine, Settings

RULES = " ".join(f"Rule {n}: look at shelf {n * 13 % 101} before you answer." for n in range(70))
MESSAGES = [{"role": "system", "content": RULES}, {"role": "user", "content": "Where are the maps? Tell me at length."}]


class Turn:
    """One request, with the times of its tokens."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.times: list[float] = []
        self.answer: dict[str, Any] = {}

    def take(self, delta: dict[str, Any]) -> None:
        if "content" in delta:
            self.times.append(time.monotonic())

    @property
    def first(self) -> float:
        return self.times[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def read(self) -> int:
        """Tokens of the prompt that were not known already."""
        timings = self.answer["timings"]
        return int(timings["prompt_n"]) + int(timings.get("prefix_read", 0))


async def ask(engine: Engine, messages: list[dict[str, Any]], tokens: int, session: str = "") -> Turn:
    turn = Turn()
    request = {"messages": messages, "stable": 1, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    turn.answer = await engine.complete(request, turn.take, session=session)
    return turn


async def loaded(settings: Settings) -> tuple[Engine, float]:
    engine, before = Engine(settings), time.monotonic()
    await engine.start()
    return engine, time.monotonic() - before


async def heartbeat(delays: list[float]) -> None:
    """How late the event loop is, which is how late every other session's tokens are."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        delays.append(time.monotonic() - before - 0.01)


async def measure(weights: Path, window: int, states: Path) -> None:
    settings = Settings(weights, window=window, states=states)
    forget(weights)
    engine, seconds = await loaded(settings)
    show("load, nothing of the file in memory", f"{seconds:.1f} s")
    first = await ask(engine, MESSAGES, 40)
    show("first turn: prompt read", f"{first.read} tokens, first token after {first.first:.1f} s")
    answer = first.answer["choices"][0]["message"]
    more = [*MESSAGES, answer, {"role": "user", "content": "And the atlas?"}]
    delays: list[float] = []
    beating = asyncio.create_task(heartbeat(delays))
    second = await ask(engine, more, 40)
    show("second round: prompt read", f"{second.read} tokens, first token after {second.first:.1f} s")
    show("tokens a second, one session", f"{1 / statistics.median(second.gaps):.1f}")
    one, two = await asyncio.gather(ask(engine, more, 30, "one"), ask(engine, MESSAGES, 30, "two"))
    both = [1 / statistics.median(turn.gaps) for turn in (one, two)]
    show("tokens a second, two sessions", f"{both[0]:.1f} and {both[1]:.1f}")
    beating.cancel()
    late = statistics.quantiles(delays, n=100)
    show("delay of another session's tokens", f"median {late[49] * 1e3:.1f} ms, 99 % below {late[98] * 1e3:.1f} ms")
    show("memory (PSS)", f"{pss(engine.pid or 0):.0f} MB, the file among it")
    await engine.close()
    engine, seconds = await loaded(settings)
    show("load, the file in memory", f"{seconds:.1f} s")
    again = await ask(engine, MESSAGES, 5)
    show("first turn after a restart: prompt read", f"{again.read} tokens, first token after {again.first:.1f} s")
    await engine.close()


def forget(weights: Path) -> None:
    """Let the kernel drop the file from memory."""
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def show(what: str, figure: str) -> None:
    print(f"{what:<44} {figure}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures the local model.")
    parser.add_argument("--weights", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--window", type=int, default=4096)
    chosen = parser.parse_args()
    print(f"{chosen.weights.name}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="everloop-bench-") as folder:
        asyncio.run(measure(chosen.weights, chosen.window, Path(folder)))
