"""What a job queue would cost as the dispatcher: Procrastinate on the same PostgreSQL, used as its documentation says.

A job stands for a turn: deferred in the transaction that also inserts a row, with the session as its lock. It only
notes when it began and sleeps as long as a model would take, so its cost is that of the dispatching alone.

    pip install --target /tmp/peer procrastinate
    PYTHONPATH=/tmp/peer .venv/bin/python benchmarks/peer_procrastinate.py [--short]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import LOAD_SECONDS, Load, Process, ground, running
from benchmarks.database import Counted, counted, postgres, statements
from benchmarks.tables import head, say
from benchmarks.workers import restarted, taken_over
from tests.store.postgres.server import Server

CONCURRENCY = 50
TURN = 0.05  # seconds that a job takes, as the fake model does
TIGHT = (1.0, 3.0)  # a heartbeat each second, and three without one are a death
DEFAULT = (10.0, 30.0)
SCHEMA = "CREATE TABLE said (id bigint GENERATED ALWAYS AS IDENTITY, session text NOT NULL, content text NOT NULL)"


# ------------------------------------------------------------------------------------------------ the worker


def made(dsn: str, notes: str, heartbeat: tuple[float, float] = DEFAULT) -> Any:
    """The application: one task, and the rescue of stalled jobs that its documentation proposes."""
    import procrastinate  # type: ignore[import-not-found,unused-ignore]

    logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it warns of an application in a main module
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    file = Path(notes).open("a", buffering=1)  # noqa: SIM115 (for as long as the process lives)

    @app.task(name="turn", queue="turns")
    async def turn(mark: str, seconds: float) -> None:
        began = time.time()
        print(mark, began, file=file)
        while (left := began + seconds - time.time()) > 0:  # in steps, so that a woken one is seen to go on
            await asyncio.sleep(min(left, 0.2))
            if seconds > 1:
                print(f"{mark}.step", time.time(), file=file)

    async def rescue(timestamp: int) -> None:
        for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=heartbeat[1]):
            await app.job_manager.retry_job(job)

    if heartbeat == TIGHT:  # its documentation looks every ten minutes; this is each second
        task = app.task(name="rescue", queueing_lock="rescue", queue="turns")(rescue)
        app.periodic(cron="* * * * * *")(task)
    return app


async def work(dsn: str, notes: str, heartbeat: tuple[float, float]) -> None:
    app = made(dsn, notes, heartbeat)
    async with app.open_async():
        print("ready", flush=True)
        await app.run_worker_async(
            queues=["turns"],
            concurrency=CONCURRENCY,
            update_heartbeat_interval=heartbeat[0],
            stalled_worker_timeout=heartbeat[1],
        )


# ------------------------------------------------------------------------------------------------ the ground


class Queue:
    """A database with its tables, workers on it, and an application that defers."""

    def __init__(self, server: Server, dsn: str, app: Any, workers: list[Process], notes: Path) -> None:
        self.server, self.dsn, self.app, self.workers = server, dsn, app, workers
        self.database = dsn.partition("?")[0].rpartition("/")[2]
        self._notes = notes
        self._loads = 0

    def noted(self) -> list[tuple[str, float]]:
        lines = [line.split() for line in self._notes.read_text().splitlines()]
        return [(mark, float(at)) for mark, at in (line for line in lines if len(line) == 2)]

    def starts(self, mark: str) -> list[float]:
        return [at for found, at in self.noted() if found == mark]

    async def defer(self, mark: str, lock: str, seconds: float = TURN) -> float:
        """Insert a row and defer its job in one transaction; when that was committed."""
        async with self.app.connector.pool.connection() as connection, connection.transaction():
            await connection.execute("INSERT INTO said (session, content) VALUES (%s, %s)", (lock, mark))
            task = self.app.configure_task("turn", queue="turns", lock=lock, connection=connection)
            await task.defer_async(mark=mark, seconds=seconds)
        return time.time()

    async def until_started(self, mark: str, times: int = 1, patience: float = 90.0) -> float | None:
        """When it was started for the so-manieth time."""
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up:
            if len(found := await asyncio.to_thread(self.starts, mark)) >= times:
                return found[times - 1]
            await asyncio.sleep(0.02)
        return None

    async def load(self, jobs: int, locks: int, rate: float = 0.0, seconds: float = TURN) -> Load:
        self._loads += 1
        marks = [f"{self._loads}m{number}" for number in range(jobs)]
        crowd, at = asyncio.Semaphore(8), {}  # 8 connections, as our store has
        before, cpu = await self._counted(), sum(one.cpu() for one in self.workers)

        async def one(number: int, mark: str) -> None:
            async with crowd:
                at[mark] = await self.defer(mark, f"s{number % locks}", seconds)

        began, tasks = time.time(), []
        for number, mark in enumerate(marks):
            if rate and (left := began + number / rate - time.time()) > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(one(number, mark)))
        await asyncio.gather(*tasks)
        await self._all_done()
        ended = time.time()
        spent = sum(one.cpu() for one in self.workers) - cpu
        first = dict(reversed(self.noted()))
        done = await self._counted() - before
        return Load(jobs, jobs / (ended - began), [first[mark] - at[mark] for mark in marks], spent, done)

    async def _counted(self) -> Counted:
        return await asyncio.to_thread(counted, self.server)

    async def _all_done(self) -> None:
        query = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing') AND task_name = 'turn'"
        give_up = time.monotonic() + LOAD_SECONDS
        while left := (await asyncio.to_thread(self.server.sql, query, database=self.database))[0][0]:
            if time.monotonic() > give_up:
                raise SystemExit(f"{left} jobs have not ended after {LOAD_SECONDS:.0f} seconds")
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def queue(server: Server, count: int, heartbeat: tuple[float, float] = DEFAULT) -> AsyncIterator[Queue]:
    async with contextlib.AsyncExitStack() as stack:
        dsn = stack.enter_context(server.database())
        notes = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "notes"
        notes.touch()
        app = made(dsn, str(notes))
        await stack.enter_async_context(app.open_async())
        await app.schema_manager.apply_schema_async()
        await asyncio.to_thread(server.sql, SCHEMA, database=dsn.partition("?")[0].rpartition("/")[2])
        times = [str(seconds) for seconds in heartbeat]
        workers = [
            await stack.enter_async_context(running(__file__, "--worker", dsn, str(notes), *times))
            for _ in range(count)
        ]
        made_queue = Queue(server, dsn, app, workers, notes)
        for one in workers:
            if "ready" not in one.line:
                raise SystemExit(one.line)
        await asyncio.sleep(1)
        yield made_queue


# ------------------------------------------------------------------------------------------------ figures


def paced(load: Load) -> str:
    assert load.counted is not None
    return (
        f"{load.wait(0.5):.0f} and {load.wait(0.95):.0f} ms; CPU: worker {load.cost(load.worker_cpu)}, PostgreSQL "
        f"{load.cost(load.counted.cpu)}; {load.counted.writes / load.turns:.1f} writing transactions"
    )


def at_once(load: Load) -> str:
    assert load.counted is not None
    cpu = f"CPU: worker {load.cost(load.worker_cpu)}, PostgreSQL {load.cost(load.counted.cpu)}"
    return f"{load.per_second:.0f}/s; {cpu}; {load.counted.wal / load.turns:,.0f} bytes of log"


async def loads(server: Server, counts: tuple[int, ...], jobs: int) -> None:
    """Jobs and turns as they come and at once."""
    for count in counts:
        names = (
            f"{count} workers, 20 a second: commit to start (ours: to the model's request), p50 and p95",
            f"{count} workers, {jobs:,} over 100 sessions at once",
            f"{count} workers: statements, and of them looks for work",
        )
        for name, its, ours in zip(
            names, await of_jobs(server, count, jobs), await of_turns(server, count, jobs), strict=True
        ):
            say(name, its, ours)


async def of_jobs(server: Server, count: int, jobs: int) -> tuple[str, str, str]:
    async with queue(server, count) as peer:
        await peer.load(20, 20)
        slow, fast = await peer.load(jobs // 10, jobs // 10, rate=20), await peer.load(jobs, 100, seconds=0.0)
        with statements(server) as found:
            await peer.load(20, 20, rate=5)
        return paced(slow), at_once(fast), counts_of(found, "fetch_job")


async def of_turns(server: Server, count: int, turns: int) -> tuple[str, str, str]:
    async with ground(server, count) as field:
        await field.load(20)
        slow = await field.load(turns // 10, rate=20)
        with statements(server) as found:
            await field.load(20, rate=5)
    async with ground(server, count, "tools-0x0") as field:
        await field.load(20)
        fast = await field.load(turns, sessions=100)
    return paced(slow), at_once(fast), counts_of(found, "EXCEPT SELECT session FROM inbox")


def counts_of(found: list[str], look: str) -> str:
    return f"{len(found) / 20:.0f}, {sum(look in one for one in found) / 20:.1f}"


async def killed(server: Server, heartbeat: tuple[float, float]) -> str:
    """From the SIGKILL of a worker to the second start of its job, found by whoever asks for stalled jobs."""
    async with queue(server, 1, heartbeat) as field:
        await field.defer("victim", "s", 30.0)
        await field.until_started("victim")
        notes = str(field._notes)
        times = [str(seconds) for seconds in heartbeat]
        async with running(__file__, "--worker", field.dsn, notes, *times):
            await asyncio.sleep(1.5)
            field.workers[0].signal(signal.SIGKILL)
            at = time.time()
            if heartbeat != TIGHT:
                await rescued(field)
            again = await field.until_started("victim", 2)
            return "never" if again is None else f"{again - at:.1f} s"


async def rescued(field: Queue) -> None:
    """Ask for stalled jobs once a second, where its documentation does so every ten minutes."""
    for _ in range(60):
        if stalled := list(await field.app.job_manager.get_stalled_jobs()):
            for job in stalled:
                await field.app.job_manager.retry_job(job)
            return
        await asyncio.sleep(1)


async def frozen(server: Server) -> str:
    """A worker is frozen past the time after which it counts as stalled, and woken while its job runs elsewhere."""
    async with queue(server, 1, TIGHT) as field:
        await field.defer("frozen", "s", 14.0)
        await field.until_started("frozen")
        times = [str(seconds) for seconds in TIGHT]
        async with running(__file__, "--worker", field.dsn, str(field._notes), *times):
            await asyncio.sleep(1)
            field.workers[0].signal(signal.SIGSTOP)
            again = await field.until_started("frozen", 2, 30)
            field.workers[0].signal(signal.SIGCONT)
            if again is None:
                return "not taken over within 30 s"
            woken = time.time()
            await asyncio.sleep(4)
            steps = [at for mark, at in field.noted() if mark == "frozen.step" and woken < at < woken + 3]
            both = len(steps) > 1.5 * 3 / 0.2
            await asyncio.sleep(12)
            query = "SELECT status::text, attempts FROM procrastinate_jobs WHERE task_name = 'turn'"
            rows = await asyncio.to_thread(server.sql, query, database=field.database)
            how = "both run side by side" if both else "only one goes on"
            return f"{how} ({len(steps)} steps in 3 s); at the end {rows}"


async def after_restart(server: Server) -> str:
    """PostgreSQL is restarted under a worker; a job that is deferred afterwards."""
    async with queue(server, 1) as field:
        await field.defer("before", "s")
        await field.until_started("before")
        await asyncio.to_thread(server.restart)
        await asyncio.sleep(1)
        at = 0.0
        for _ in range(20):
            with contextlib.suppress(Exception):  # the pool hands out its broken connections first
                at = await field.defer("after", "t")
                break
        again = await field.until_started("after", 1, 40)
        ended = field.workers[0].made.returncode
        state = "the worker goes on" if ended is None else f"the worker has ended with {ended}"
        after = "never started" if again is None else f"started after {again - at:.1f} s"
        return f"{after}; {state}"


async def main(short: bool) -> None:
    if importlib.util.find_spec("procrastinate") is None:
        raise SystemExit("procrastinate is not installed here: the first lines of this file say how")
    head("", "Procrastinate, a job that does nothing", "Everloop, a whole turn")
    with postgres() as server:
        await loads(server, (1, 2) if short else (1, 2, 4), 200 if short else 1000)
        (ours,) = await taken_over(server, signal.SIGKILL, 1)
        tight = await killed(server, TIGHT)
        say("SIGKILL, until it is started again (a heartbeat each second, dead after 3)", tight, f"{ours:.2f} s")
        (ours,) = await taken_over(server, signal.SIGSTOP, 1, TIGHT[1])
        say(
            "SIGSTOP past that time, then SIGCONT",
            await frozen(server),
            f"taken over after {ours:.1f} s, answered once",
        )
        say("PostgreSQL restarted: what comes then", await after_restart(server), f"{await restarted(server):.1f} s")
        if not short:
            say("SIGKILL, by the defaults, asked for stalled jobs each second", await killed(server, DEFAULT), "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        dsn, notes, *times = sys.argv[2:]
        asyncio.run(work(dsn, notes, (float(times[0]), float(times[1]))))
    else:
        asyncio.run(main("--short" in sys.argv))
