"""What a command costs in the sandbox, and whether calls of one round really run side by side.

`python benchmarks/sandbox.py` prints the rows by itself; `rows()` gives them to the table of `make bench`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import Row

from everloop import AgentLoop, MessageBus, events, tool
from everloop.testing import ScriptedProvider, call
from everloop.tools.context import CallContext, current
from everloop.tools.shell.shell import ShellSettings, shell_tools


def context(folder: str) -> CallContext:
    return CallContext("me", "s", "t", "c", "cli", "d", Path(folder), True, "k", lambda text: None)


async def plain(folder: str) -> float:
    """Milliseconds of `true` by a shell, without any sandbox."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", "true", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    )
    await process.communicate()
    return (time.perf_counter() - began) * 1e3


async def exec_cost(rounds: int, *, steering: bool = False) -> Row:
    """`true` by the tool against a plain subprocess, taking turns so that a busy neighbour slows down both."""
    with tempfile.TemporaryDirectory() as folder:
        if steering:  # files that are mounted read-only, and looked at before the command begins
            os.makedirs(f"{folder}/.git/hooks")
            os.makedirs(f"{folder}/skills")
        run, _ = shell_tools(ShellSettings())
        current.set(context(folder))
        await run.execute(command="true")  # finds out which wall works here
        pairs = []
        for _ in range(rounds):
            base = await plain(folder)
            began = time.perf_counter()
            await run.execute(command="true")
            pairs.append((base, (time.perf_counter() - began) * 1e3))
    ours, base = (statistics.median(pair[side] for pair in pairs) for side in (1, 0))
    added = statistics.median(one - other for other, one in pairs)
    what = "`exec` of `true` in the sandbox, over a plain subprocess" + (", in a git workspace" if steering else "")
    return Row(what, f"{ours:.1f} ms", f"{base:.1f} ms", added, 25, " ms")


async def side_by_side(rounds: int) -> Row:
    """Eight calls of one round that sleep 100 ms each, through the whole loop: from the first start to the last end."""

    @tool
    async def pause() -> str:
        """Sleep."""
        await asyncio.sleep(0.1)
        return "done"

    times: list[float] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.ToolStarted | events.ToolEnded):
            times.append(time.perf_counter())

    walls = []
    with tempfile.TemporaryDirectory() as folder:
        script = [step for _ in range(rounds) for step in ([call("pause") for _ in range(8)], "done")]
        async with AgentLoop(MessageBus(), ScriptedProvider(script), folder, store=f"{folder}/bench.db") as agent:
            agent.tools.register(pause)
            for _ in range(rounds):
                times.clear()
                await agent.process_direct("sleep", on_event=watch)
                walls.append((times[-1] - times[0]) * 1e3)
    wall = statistics.median(walls)
    return Row("8 tool calls that sleep 100 ms, in one round", f"{wall:.0f} ms", "100 ms", wall, 150, " ms")


async def measured(rounds: int) -> list[Row]:
    return [await exec_cost(rounds), await exec_cost(rounds, steering=True), await side_by_side(3)]


def rows(rounds: int = 30) -> list[Row]:
    return asyncio.run(measured(rounds))


if __name__ == "__main__":
    for row in rows():
        verdict = "ok" if row.ok else "TOO MUCH"
        print(f"{row.what}: {row.ours} against {row.base}, {row.figure:.1f}{row.unit} (bound {row.bound:g}) {verdict}")
