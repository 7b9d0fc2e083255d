"""What the benchmarks of many workers share: workers and a fake model as processes of this machine, and a load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.database import Counted, counted, memory_of, times_of
from tests.store.postgres.server import Server

from everloop.bus import InboundMessage
from everloop.config import Config
from everloop.config.sources import DSN
from everloop.store.base import Store
from everloop.store.location import store_at
from everloop.store.peers import WORK

LOAD_SECONDS = 90.0  # after which a load is given up


# ------------------------------------------------------------------------------------------------ processes


class Process:
    """One that was started here."""

    def __init__(self, made: asyncio.subprocess.Process, line: str) -> None:
        self.made = made
        self.line = line  # what it said when it was ready
        self.pid = made.pid

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        return sum(times_of(self.pid)[:2])

    def memory(self) -> int:
        """Bytes of memory that it holds by itself."""
        return memory_of(self.pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextlib.asynccontextmanager
async def running(*command: str, **env: str) -> AsyncIterator[Process]:
    """A program of ours, once it has said its first line."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    made = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=kept | env, cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert made.stdout is not None
    reading = None
    try:
        line = (await asyncio.wait_for(made.stdout.readline(), 60)).decode()
        if not line:
            raise SystemExit(f"{command[:3]} ended with {await made.wait()} and said nothing")
        reading = asyncio.create_task(_drain(made.stdout))
        yield Process(made, line)
    finally:
        await _end(made)
        if reading is not None:
            await reading


async def _drain(stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        if os.environ.get("BENCH_SAYS"):
            print(line.decode(), end="", file=sys.stderr)


async def _end(made: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        made.terminate()
    try:
        await asyncio.wait_for(made.wait(), 15)
    except TimeoutError:
        made.kill()
        await made.wait()


@contextlib.asynccontextmanager
async def fake_model() -> AsyncIterator[str]:
    """The base URL of a fake model server of its own."""
    async with running("-m", "everloop.testing.openai_server", "--port", "0") as process:
        yield process.line.strip().rstrip("/")


@contextlib.asynccontextmanager
async def workers(
    count: int, store: str, url: str, model: str, home: str, settings: str = ""
) -> AsyncIterator[list[Process]]:
    """So many `everloop worker` on one store; `settings` is the settings file of this home."""
    (Path(home) / "config.toml").write_text(settings)
    env = {
        "EVERLOOP_HOME": home,
        "EVERLOOP_BASE_URL": url,
        "EVERLOOP_MODEL": model,
        "EVERLOOP_API_KEY": "k",
        "EVERLOOP_STORE": store,
    }
    async with contextlib.AsyncExitStack() as stack:
        starting = [stack.enter_async_context(running("-m", "everloop", "worker", **env)) for _ in range(count)]
        made = [await one for one in starting]
        for one in made:
            if "is ready" not in one.line:
                raise SystemExit(one.line)
        yield made


# ------------------------------------------------------------------------------------------------ load


@dataclass(slots=True)
class Load:
    """What a number of messages cost, each of which was a turn."""

    turns: int
    per_second: float
    waits: list[float]  # seconds from each message on disk to its first model request
    worker_cpu: float  # seconds of all workers
    counted: Counted | None = None  # of PostgreSQL
    ends: list[float] = field(default_factory=list)  # seconds from each message on disk to the end of its turn

    def cost(self, seconds: float) -> str:
        """What one turn has of so many seconds."""
        return f"{seconds / self.turns * 1e3:.1f} ms"

    def wait(self, part: float) -> float:
        """Milliseconds that so large a part of the messages waited at most."""
        return part_of(self.waits, part)

    def end(self, part: float) -> float:
        """Milliseconds after which so large a part of the turns had ended."""
        return part_of(self.ends, part)


def part_of(seconds: list[float], part: float) -> float:
    return sorted(seconds)[int(part * (len(seconds) - 1))] * 1e3


async def feed(
    store: Store, marks: list[str], sessions: int, owners: int, rate: float, key: str = "c"
) -> dict[str, float]:
    """Put messages into the inbox as a channel does, all at once or `rate` a second; when each was on disk."""
    at: dict[str, float] = {}
    crowd = asyncio.Semaphore(32)

    async def one(number: int, mark: str) -> None:
        session = number % sessions
        owner = "me" if owners == 1 else f"owner{session % owners}"
        message = InboundMessage("bench", "user", f"{key}{session}", f"go mark:{mark}", owner=owner, id=mark)
        async with crowd:
            row = await store.accept(message.addressed())
            at[mark] = time.time()
            await store.wake(WORK, [row.session])

    waiting = []
    began = time.monotonic()
    for number, mark in enumerate(marks):
        if rate and (left := began + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(left)
        waiting.append(asyncio.create_task(one(number, mark)))
    await asyncio.gather(*waiting)
    return at


class Ground:
    """A store, a fake model and workers on them, ready for any number of loads."""

    def __init__(self, address: str, url: str, made: list[Process], server: Server | None) -> None:
        self.address, self.url, self.workers, self.server = address, url, made, server
        self.database = address.partition("?")[0].rpartition("/")[2]
        config = Config(store=DSN(address) if server is not None else Path(address))
        self.store = store_at(config.store, config)
        self._loads = 0

    async def load(self, turns: int, *, sessions: int = 0, owners: int = 1, rate: float = 0.0) -> Load:
        """Run so many turns; by default each has a session of its own."""
        self._loads += 1
        marks = [f"{self._loads}m{number}" for number in range(turns)]
        before, cpu = await self._counted(), sum(one.cpu() for one in self.workers)
        at = await feed(self.store, marks, sessions or turns, owners, rate)
        await self.all_done()
        spent = sum(one.cpu() for one in self.workers) - cpu
        took, ends = await self._took(marks)
        first = await self._first_requests()
        after = await self._counted()
        costs = after - before if after is not None and before is not None else None
        return Load(turns, turns / took, [first[mark] - at[mark] for mark in marks], spent, costs, ends)

    async def _counted(self) -> Counted | None:
        return None if self.server is None else await asyncio.to_thread(counted, self.server)

    async def all_done(self) -> None:
        """Until no message of ours is left; what was there before (`at` is 0) may stay."""
        give_up = time.monotonic() + LOAD_SECONDS
        while left := (await self.ask("SELECT count(*) FROM inbox WHERE state <> 'done' AND at > 0"))[0][0]:
            if time.monotonic() > give_up:
                raise SystemExit(f"{left} turns have not ended after {LOAD_SECONDS:.0f} seconds")
            await asyncio.sleep(0.05)

    async def _took(self, marks: list[str]) -> tuple[float, list[float]]:
        """Seconds from the first message to the end of the last turn, and for each of them, by the store's clock."""
        prefix = marks[0].partition("m")[0] + "m"
        rows = await self.ask(f"SELECT at, ended_at FROM inbox WHERE message_id LIKE '{prefix}%'")
        return max(end for _, end in rows) - min(at for at, _ in rows), [end - at for at, end in rows]

    async def _first_requests(self) -> dict[str, float]:
        return {mark: times[0] for mark, times in (await self.requests()).items()}

    async def requests(self) -> dict[str, list[float]]:
        """When the model was asked, by the message's mark."""
        import aiohttp

        found: dict[str, list[float]] = {}
        async with aiohttp.ClientSession() as http, http.get(self.url.removesuffix("/v1") + "/_log") as response:
            for seen in await response.json():
                found.setdefault(seen["marker"], []).append(seen["time"])
        return found

    async def say(self, mark: str) -> float:
        """Put one message into a session of its own; when it was on disk."""
        return (await feed(self.store, [mark], 1, 1, 0.0, f"of {mark}"))[mark]

    async def until_asked(self, mark: str, times: int) -> float:
        """When the model was asked for the so-manieth time on behalf of a message."""
        give_up = time.monotonic() + LOAD_SECONDS
        while len(seen := (await self.requests()).get(mark, ())) < times:
            if time.monotonic() > give_up:
                raise SystemExit(f"the model was asked {len(seen)} times for {mark}, not {times}")
            await asyncio.sleep(0.01)
        return seen[times - 1]

    async def one_answer(self, mark: str) -> None:
        """The message has been answered once, whoever had begun with it."""
        query = "SELECT count(*) FROM entry e JOIN inbox i ON i.session = e.session WHERE e.kind = 'end'"
        ((ends,),) = await self.ask(f"{query} AND i.message_id = '{mark}'")
        if ends != 1:
            raise SystemExit(f"{mark} was answered {ends} times")

    async def ask(self, query: str) -> list[Any]:
        """Ask the database by hand."""
        return await asyncio.to_thread(self._ask, query)

    def _ask(self, query: str) -> list[Any]:
        if self.server is not None:
            return self.server.sql(query, database=self.database)
        with contextlib.closing(sqlite3.connect(self.address, timeout=30)) as db:
            return db.execute(query).fetchall()


@contextlib.asynccontextmanager
async def ground(
    server: Server | None,
    count: int,
    model: str = "tools-0x0-d50",
    settings: str = "",
    pool: Callable[[str], str] | None = None,
) -> AsyncIterator[Ground]:
    """Workers on a fresh store: a database of this server, or an SQLite file. `pool` tells a pooler's address of it."""
    async with contextlib.AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        address = stack.enter_context(server.database()) if server is not None else f"{home}/everloop.db"
        if pool is not None:
            settings = f'store_pool = "{pool(address.partition("?")[0].rpartition("/")[2])}"\n{settings}'
        url = await stack.enter_async_context(fake_model())
        made = await stack.enter_async_context(workers(count, address, url, model, home, settings))
        field = Ground(address, url, made, server)
        try:
            yield field
        finally:
            await field.store.close()
