"""What chat networks cost: an idle account, and a message on its way to the model.

`python benchmarks/channels.py` prints a line for each network. The networks are those of the tests, fakes and real
servers; the accounts are in a process of their own. An idle account is what six of them take over one, which has loaded
the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import Row, head, say
from tests.channels.hooks import HookNetwork
from tests.channels.networks import NETWORKS
from tests.channels.says import found, until
from tests.channels.synapse import MatrixNetwork, synapse

from everloop import AgentLoop, LLMProvider, LLMResponse, MessageBus
from everloop.channels.base import make_channel
from everloop.channels.runner import ChannelRunner
from everloop.store.sqlite import SQLiteStore
from everloop.testing.channels import config_of, running

NAMES = (*NETWORKS, "matrix", "matrix, encrypted", "push")
FEW, MANY = 1, 6  # accounts
IDLE_SECONDS = 20.0
MESSAGES = 200
MAX_MIB, MAX_CPU, MAX_MS = 1.0, 0.1, 10.0  # the bounds


# ------------------------------------------------------------------------------------------------ idle accounts


async def accounts(tables: list[dict[str, Any]]) -> dict[str, float]:
    """Connect these accounts, leave them alone, and say what that took."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        store = SQLiteStore(Path(folder) / "store.db")
        for table in tables:
            config = config_of(table)
            made.append((config, *make_channel(config, store)))
        running = asyncio.create_task(ChannelRunner(store, made).run())
        for table in tables:
            await found(partial(works, store, table["name"]))
        await asyncio.sleep(1.0)
        before, began = cpu(), time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        used = (cpu() - before) / (time.perf_counter() - began)
        pages = await asyncio.to_thread(resident_pages)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return {"mib": pages * resource.getpagesize() / 2**20, "cpu": 100 * used}


async def works(store: SQLiteStore, name: str) -> bool:
    return '"error":""' in (await store.channel_state(name)).get("status", "")


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def idle(network: str, count: int) -> dict[str, float]:
    """The memory in MiB and the share of a CPU, in percent, of a process with so many accounts."""
    async with contextlib.AsyncExitStack() as stack:
        servers = synapse() if network.startswith("matrix") else contextlib.nullcontext()
        server = stack.enter_context(servers)
        tables = []
        for number in range(count):
            settings: dict[str, Any] = {"contact": "mailto:nobody@example.org"}
            if network in NETWORKS:
                settings = (await stack.enter_async_context(NETWORKS[network]().running())).settings
            elif server is not None:
                there = await stack.enter_async_context(MatrixNetwork(server).running())
                settings = {**there.settings, "encryption": network.endswith("encrypted")}
            tables.append({**settings, "name": f"account{number}", "network": network.partition(",")[0]})
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "accounts", json.dumps(tables), stdout=subprocess.PIPE, env=dict(os.environ)
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"the process with {count} accounts of {network} ended with {process.returncode}")
        measured: dict[str, float] = json.loads(said)
        return measured


_measured: dict[tuple[str, int], dict[str, float]] = {}  # two rows are of the same runs


async def over_one(network: str, rounds: int) -> dict[str, float]:
    """What one idle account takes, beside the library: the median of some rounds."""
    if (network, rounds) in _measured:
        return _measured[network, rounds]
    taken: dict[str, list[float]] = {"mib": [], "cpu": []}
    for _ in range(rounds):
        few, many = await idle(network, FEW), await idle(network, MANY)
        for name, values in taken.items():
            values.append((many[name] - few[name]) / (MANY - FEW))
    found = _measured[network, rounds] = {name: statistics.median(values) for name, values in taken.items()}
    return found


# ------------------------------------------------------------------------------------------------ a message


class Asked(LLMProvider):
    """Notes when it is asked."""

    default_model = "asked"

    def __init__(self) -> None:
        self.at: list[float] = []

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        self.at.append(time.perf_counter())
        return LLMResponse("ok")


async def to_the_model() -> tuple[float, float]:
    """Milliseconds from a message to the request to the model, p95: through a webhook, and called directly."""
    through, direct = Asked(), Asked()
    began: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with HookNetwork().running() as hook, running(hook.settings, Path(folder), through):
            for number in range(MESSAGES):
                began.append(time.perf_counter())
                await hook.say("1", f"message {number}")
                await until(partial(has_heard, hook, number + 1))
    ours = p95([1000 * (at - start) for start, at in zip(began, through.at, strict=True)])
    began.clear()
    with tempfile.TemporaryDirectory() as folder:
        async with AgentLoop(MessageBus(), direct, folder, store=Path(folder) / "store.db") as agent:
            for number in range(MESSAGES):
                began.append(time.perf_counter())
                await agent.process_direct(f"message {number}")
    return ours, p95([1000 * (at - start) for start, at in zip(began, direct.at, strict=True)])


def has_heard(hook: HookNetwork, count: int) -> bool:
    return len(hook.heard("1")) == count


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


# ------------------------------------------------------------------------------------------------ the rows


async def memory(rounds: int) -> Row:
    return worst({name: (await over_one(name, rounds))["mib"] for name in NAMES}, "memory", MAX_MIB, " MiB")


async def processor(rounds: int) -> Row:
    return worst({name: (await over_one(name, rounds))["cpu"] for name in NAMES}, "CPU", MAX_CPU, " %")


def worst(taken: dict[str, float], what: str, bound: float, unit: str) -> Row:
    name = max(taken, key=lambda one: taken[one])
    others = ", ".join(f"{other} {value:.2f}" for other, value in taken.items() if other != name)
    words = f"{what} of an idle chat account over its library ({name}; {others})"
    return Row(words, f"{taken[name]:.2f}{unit}", "none", max(taken[name], 0.0), bound, unit)


async def message(rounds: int) -> Row:
    pairs = [await to_the_model() for _ in range(rounds)]
    ours, base = (statistics.median(values) for values in zip(*pairs, strict=True))
    added = statistics.median(one - other for one, other in pairs)
    words = "message of a chat network to the model's request, p95 (against a direct call), added"
    return Row(words, f"{ours:.1f} ms", f"{base:.1f} ms", added, MAX_MS, " ms")


async def main() -> None:
    head("network", "memory of an idle account", "its CPU")
    for name in NAMES:
        taken = await over_one(name, 1)
        say(name, f"{taken['mib']:.2f} MiB", f"{taken['cpu']:.3f} %")
    row = await message(1)
    head("what", "through a channel", "called directly", "added")
    say(row.what, row.ours, row.base, f"{row.figure:.1f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["accounts"]:
        print(json.dumps(asyncio.run(accounts(json.loads(sys.argv[2])))))
    else:
        asyncio.run(main())
