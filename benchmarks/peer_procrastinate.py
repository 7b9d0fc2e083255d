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

from benchmarks.cluster import LOAD_SECONDS, Process, running
from benchmarks.database import Counted, counted, postgres, statements
from tests.postgres.server import Server

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

    async def load(self, jobs: int, locks: int, rate: float = 0.0, seconds: float = TURN) -> tuple[Any, ...]:
        """(jobs a second, the waits, CPU seconds of the workers, what the server did)."""
        marks = [f"{jobs}x{rate:.0f}m{number}" for number in range(jobs)]
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
        return jobs / (ended - began), sorted(first[mark] - at[mark] for mark in marks), spent, done

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


def say(what: str, figure: str) -> None:
    print(f"| {what} | {figure} |", flush=True)


async def loads(server: Server, counts: tuple[int, ...], jobs: int) -> None:
    for count in counts:
        async with queue(server, count) as field:
            await field.load(20, 20)
            _, waits, cpu, done = await field.load(jobs // 10, jobs // 10, rate=20)
            part = [waits[int(part * (len(waits) - 1))] * 1e3 for part in (0.5, 0.95)]
            say(
                f"{count} workers, 20 jobs a second: commit to start, p50 and p95",
                f"{part[0]:.0f} and {part[1]:.0f} ms; CPU a job: worker {cpu / len(waits) * 1e3:.1f} ms, server "
                f"{done.cpu / len(waits) * 1e3:.1f} ms; {done.writes / len(waits):.1f} writing transactions",
            )
            speed, waits, cpu, done = await field.load(jobs, 100, seconds=0.0)
            say(
                f"{count} workers, {jobs:,} jobs over 100 locks at once",
                f"{speed:.0f}/s; CPU a job: worker {cpu / jobs * 1e3:.1f} ms, server {done.cpu / jobs * 1e3:.1f} ms; "
                f"{done.writes / jobs:.1f} writing transactions, {done.wal / jobs:,.0f} bytes of log",
            )
            await said(field, count)


async def said(field: Queue, count: int) -> None:
    """The statements of a job, and how many of them only looked for one."""
    with statements(field.server) as found:
        for number in range(20):
            await field.defer(f"said{number}", f"q{number}")
            await asyncio.sleep(0.2)
        await asyncio.sleep(1)
    looks = sum("fetch_job" in one for one in found)
    say(f"{count} workers: statements a job, and of them looks for one", f"{len(found) / 20:.1f}, {looks / 20:.1f}")


async def killed(server: Server, heartbeat: tuple[float, float], what: str) -> None:
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
            say(f"SIGKILL, {what}: until the job is started again", "never" if again is None else f"{again - at:.1f} s")


async def rescued(field: Queue) -> None:
    """Ask for stalled jobs once a second, where its documentation does so every ten minutes."""
    for _ in range(60):
        if stalled := list(await field.app.job_manager.get_stalled_jobs()):
            for job in stalled:
                await field.app.job_manager.retry_job(job)
            return
        await asyncio.sleep(1)


async def frozen(server: Server) -> None:
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
                say("SIGSTOP past the stall time, then SIGCONT", "not taken over within 30 s")
                return
            woken = time.time()
            await asyncio.sleep(4)
            steps = [at for mark, at in field.noted() if mark == "frozen.step" and woken < at < woken + 3]
            both = len(steps) > 1.5 * 3 / 0.2
            await asyncio.sleep(12)
            query = "SELECT status::text, attempts FROM procrastinate_jobs WHERE task_name = 'turn'"
            rows = await asyncio.to_thread(server.sql, query, database=field.database)
            how = "both run side by side" if both else "only one goes on"
            say("SIGSTOP past the stall time, then SIGCONT", f"{how} ({len(steps)} steps in 3 s); at the end {rows}")


async def restarted(server: Server) -> None:
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
        say("PostgreSQL restarted: a job deferred afterwards", f"{after}; {state}")


async def main(short: bool) -> None:
    if importlib.util.find_spec("procrastinate") is None:
        raise SystemExit("procrastinate is not installed here: the first lines of this file say how")
    print("| Procrastinate | measured |\n|---|---|")
    with postgres() as server:
        await loads(server, (1, 2) if short else (1, 2, 4), 200 if short else 1000)
        await killed(server, TIGHT, "heartbeat 1 s, dead after 3 s, looked for each second")
        await frozen(server)
        await restarted(server)
        if not short:
            await killed(server, DEFAULT, "its defaults, asked for stalled jobs each second")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        dsn, notes, *times = sys.argv[2:]
        asyncio.run(work(dsn, notes, (float(times[0]), float(times[1]))))
    else:
        asyncio.run(main("--short" in sys.argv))
