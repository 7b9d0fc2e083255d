"""What the drivers of all runtimes share: the scenarios, and their command line. Only the standard library is needed.

    python drive_NAME.py SCENARIO BASE_URL MODEL FOLDER [N] [SIZE]

A driver is a subclass of `Peer`. It imports its runtime in `start`, so that a cold start is measured with its imports,
and prints one line of JSON at the end. `race.py` runs all of them and hosts the model that they talk to.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

INSTRUCTIONS = "You are a benchmark agent. Use the tools, then answer."
FILLER = "the quick brown fox jumps over the lazy dog and looks at the harbour while the tide is out " * 2
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
WORK = [{"role": "user", "content": "some words of a message " * 5, "number": n, "part": n / 3} for n in range(40)]
WARM_UP = 10


async def echo(text: str) -> str:
    """Echo the text.

    Args:
        text: the text to echo
    """
    return "echo:" + text


def prompt(mark: str) -> str:
    return f"Please run the tools and answer. mark:{mark}"


def pair(number: int) -> tuple[str, str]:
    """A question and an answer of a made-up history."""
    return f"question {number}: {FILLER}?", f"answer {number}: {FILLER}."


class Peer:
    """One runtime with the tool `echo`. `keeps` says that it keeps sessions on disk."""

    packages: tuple[str, ...] = ()  # whose versions are told
    keeps = False

    def __init__(self, base_url: str, model: str, folder: str, stored: bool) -> None:
        self.base_url = base_url
        self.model = model
        self.folder = folder
        self.stored = stored  # sessions must be kept in the runtime's own store, or at least in memory

    async def start(self) -> None:
        """Import the runtime, and make what all sessions share."""

    async def turn(self, session: str, text: str) -> str:
        """Run a turn to its end; its answer."""
        raise NotImplementedError

    async def seed(self, session: str, messages: int) -> None:
        """Put a history of so many messages into a session."""
        raise NotImplementedError

    async def resume(self, session: str) -> None:
        """Go on with what a killed process has left, where the runtime can do that."""

    async def close(self) -> None:
        pass


def cpu() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def fixed_work() -> float:
    """CPU seconds of a piece of work that is always the same: a busy neighbour makes all work cost more."""
    started = time.thread_time()
    for _ in range(4):
        for message in json.loads(json.dumps(WORK)):
            message["content"].split()
    return time.thread_time() - started


def check(answer: object, mark: str) -> None:
    """A runtime cannot be fast by being wrong."""
    if f"done:{mark}" not in str(answer):
        raise SystemExit(f"wrong answer to {mark}: {str(answer)[:200]!r}")


async def once(peer: Peer, n: int, size: int) -> dict[str, float]:
    """One turn; when its first request comes is seen at the model."""
    check(await peer.turn("s", prompt("s")), "s")
    return {}


async def turns(peer: Peer, n: int, size: int) -> dict[str, float]:
    """CPU and wall milliseconds of a turn, each in a session of its own; `relative` is its CPU in pieces of work."""
    for i in range(WARM_UP):
        check(await peer.turn(f"w{i}", prompt(f"w{i}")), f"w{i}")
    gc.collect()
    used, wall, work = [], [], []
    for i in range(n):
        c, w = cpu(), time.perf_counter()
        answer = await peer.turn(f"t{i}", prompt(f"t{i}"))
        used.append(cpu() - c)
        wall.append(time.perf_counter() - w)
        work.append(fixed_work())
        check(answer, f"t{i}")
    return {
        "cpu_ms": statistics.median(used) * 1e3,
        "wall_ms": statistics.median(wall) * 1e3,
        "relative": statistics.median(used) / statistics.median(work),
    }


async def at_once(peer: Peer, n: int, size: int) -> dict[str, float]:
    """Wall and CPU seconds of n sessions at once, one turn each."""
    check(await peer.turn("w", prompt("w")), "w")
    c, w = cpu(), time.perf_counter()
    answers = await asyncio.gather(*(peer.turn(f"c{i}", prompt(f"c{i}")) for i in range(n)))
    wall, used = time.perf_counter() - w, cpu() - c
    for i, answer in enumerate(answers):
        check(answer, f"c{i}")
    return {"wall_s": wall, "cpu_s": used}


async def history(peer: Peer, n: int, size: int) -> dict[str, float]:
    """CPU milliseconds of a turn in a session that already has `size` messages."""
    for i in range(3):
        await peer.turn("warm", prompt(f"w{i}"))
    await peer.seed("long", size)
    check(await peer.turn("long", prompt("first")), "first")
    used, work = [], []
    for i in range(n):
        c = cpu()
        answer = await peer.turn("long", prompt(f"h{i}"))
        used.append(cpu() - c)
        work.append(fixed_work())
        check(answer, f"h{i}")
    return {"cpu_ms": statistics.median(used) * 1e3, "relative": statistics.median(used) / statistics.median(work)}


async def killed(peer: Peer, n: int, size: int) -> dict[str, float]:
    """A whole turn, and another one in which the process is killed from outside."""
    check(await peer.turn("crash", prompt("k0")), "k0")
    await peer.turn("crash", prompt("k1"))
    raise SystemExit("it was not killed")


async def resumed(peer: Peer, n: int, size: int) -> dict[str, float]:
    """After that, in a new process: another turn of the session. What is sent is seen at the model."""
    await peer.resume("crash")
    await peer.turn("crash", prompt("k2"))
    return {}


Scenario = Callable[[Peer, int, int], Awaitable[dict[str, float]]]
SCENARIOS: dict[str, Scenario] = {
    "once": once,
    "turn": turns,
    "at_once": at_once,
    "history": history,
    "killed": killed,
    "resumed": resumed,
}
STORED = ("history", "killed", "resumed")


def main(kind: type[Peer]) -> None:
    scenario, *rest = sys.argv[1:]
    if scenario == "info":
        versions = {name: importlib.metadata.version(name) for name in kind.packages}
        print(json.dumps({"versions": versions, "keeps": kind.keeps}))
        return
    base_url, model, folder, *numbers = rest
    n, size = (*map(int, numbers), 100, 0)[:2] if len(numbers) < 2 else (int(numbers[0]), int(numbers[1]))
    peer = kind(base_url, model, folder, scenario in STORED)
    print(json.dumps(asyncio.run(_run(peer, SCENARIOS[scenario], n, size))))


async def _run(peer: Peer, scenario: Scenario, n: int, size: int) -> dict[str, Any]:
    await peer.start()
    try:
        return await scenario(peer, n, size)
    finally:
        await peer.close()
