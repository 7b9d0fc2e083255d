"""How much a search through 100,000 files delays the tokens of another session: `python benchmarks/grep.py`.

Two sessions of one process: one is told an answer word by word, the other greps. What counts is the longest wait for a
word while the search runs, less the longest without one.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path

from everloop import AgentLoop, MessageBus, events
from everloop.testing import ScriptedProvider, call

FILES = 100_000
FOLDERS = 200
WORD_SECONDS = 0.005


def plant(folder: Path, files: int) -> None:
    """A workspace of small files, one of which has what is searched for."""
    for number in range(FOLDERS):
        (folder / f"part{number}").mkdir()
    for number in range(files):
        text = f"file {number}\nsome words that nobody looks for\n"
        (folder / f"part{number % FOLDERS}" / f"{number}.txt").write_text(text)
    (folder / "part7" / "needle.txt").write_text("a needle in the hay\n")


async def longest_wait(folder: Path, search: bool) -> tuple[float, float]:
    """(longest wait for a word in ms, seconds that the search took)."""
    times: list[float] = []
    model = ScriptedProvider([_script], repeat_last=True, token_delay=WORD_SECONDS)
    searched = asyncio.Event()
    took = 0.0

    def on_text(event: events.Event) -> None:
        if isinstance(event, events.Text):
            times.append(time.perf_counter())

    store = folder.parent / "store.db"
    async with AgentLoop(MessageBus(), model, folder, restrict_to_workspace=True, store=store) as agent:

        async def talk() -> None:
            while not searched.is_set():
                await agent.process_direct("talk", "bench:talk", on_event=on_text)

        async def find() -> None:
            nonlocal took
            await asyncio.sleep(0.2)
            started = time.perf_counter()
            if search:
                assert "needle.txt" in await agent.process_direct("find", "bench:find")
            else:
                await asyncio.sleep(1.0)
            took = time.perf_counter() - started
            searched.set()

        await asyncio.gather(talk(), find())
    turns = [b - a for a, b in itertools.pairwise(times)]
    return max(turns) * 1e3, took


def _script(messages: list[dict[str, object]], tools: object) -> object:
    if messages[-1]["content"] == "find":
        return call("grep", pattern="needle")
    if messages[-1]["role"] == "tool":
        return str(messages[-1]["content"])
    return "word " * 100


def delay(rounds: int, files: int = FILES) -> tuple[float, float, float]:
    """(longest wait with a search, without one, seconds of a search): the worst and the best of some rounds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "workspace"
        folder.mkdir()
        plant(folder, files)
        quiet = [asyncio.run(longest_wait(folder, False)) for _ in range(rounds)]
        busy = [asyncio.run(longest_wait(folder, True)) for _ in range(rounds)]
    return max(wait for wait, _ in busy), min(wait for wait, _ in quiet), min(took for _, took in busy)


if __name__ == "__main__":
    with_search, without, seconds = delay(3, int(sys.argv[1]) if len(sys.argv) > 1 else FILES)
    print(
        f"longest wait for a word: {with_search:.1f} ms while grep runs ({seconds:.2f} s), {without:.1f} ms otherwise"
    )
