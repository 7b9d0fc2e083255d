"""What more workers bring and cost: `python benchmarks/workers.py [--short] [--only NAME]`, or a part of `make bench`.

Workers, a fake model that takes 50 ms, and a PostgreSQL with fsync on are all processes of this one machine, next to
SQLite in the same run. NAME is loads, takeover or streaming; or one of those that `--short` leaves out: statements,
queue, notices, holds, disk, growth and pool.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.awaited import awaited_cpu
from benchmarks.cluster import Ground, Load, ground
from benchmarks.database import counted, least_cpu, memory_of, postgres, statements, times_of
from benchmarks.notices import notices
from benchmarks.pool import POOL_SIZE, pool, server_connections
from benchmarks.streaming import streamed, streaming
from benchmarks.tables import Row, head, say
from tests.store.postgres.pgbouncer import pgbouncer
from tests.store.postgres.server import Server

LOADS = (
    "store, workers",
    "turns a second",
    "message to first model request at 20/s, p50",
    "p95",
    "CPU of workers a turn",
    "CPU of PostgreSQL a turn",
    "writing transactions a turn",
    "log bytes a turn",
)
GROWTH = (
    "workers",
    "owners",
    "sessions at work elsewhere",
    "turns a second at once",
    "p95 at 15/s",
    "CPU of workers a turn",
    "CPU of PostgreSQL a turn",
)
GROUNDS = ((1, 1, 0), (4, 1, 0), (8, 1, 0), (1, 50, 0), (4, 50, 0), (1, 1, 1000), (4, 1, 1000))
SHORT = ("loads", "takeover", "streaming")
SAYS, CALLS = "tools-0x0-d50", "tools-3x1-flist_dir-d50"  # the model answers at once, or after three rounds of a call
LEASE = 3.0  # seconds, instead of 15, where a lease is waited for


# ------------------------------------------------------------------------------------------------ turns


async def one_load(server: Server | None, count: int, paced: int, burst: int, model: str = SAYS) -> tuple[Load, Load]:
    """The costs of turns that come 20 a second, and of as many as can be."""
    async with ground(server, count, model) as field:
        await field.load(20)
        return await field.load(paced, rate=20), await field.load(burst)


async def loads(server: Server, short: bool) -> None:
    """Turns a second, waits and CPU with 1, 2 and 4 workers."""
    paced, burst = (40, 150) if short else (400, 1000)
    head(*LOADS)
    grounds: list[tuple[Server | None, int, str]] = [
        (None, 1, SAYS), (None, 2, SAYS), (server, 1, SAYS), (server, 2, SAYS), (server, 4, SAYS), (server, 1, CALLS)
    ]  # fmt: skip
    for where, count, model in [grounds[one] for one in (0, 2, 3, 4)] if short else grounds:
        slow, fast = await one_load(where, count, paced, burst, model)
        costs = ["–"] * 3
        if slow.counted is not None:
            done = slow.counted
            costs = [slow.cost(done.cpu), f"{done.writes / paced:.1f}", f"{done.wal / paced:,.0f}"]
        name = f"{'PostgreSQL' if where is not None else 'SQLite'}, {count}{', 3 tool calls' if model == CALLS else ''}"
        say(name, f"{fast.per_second:.0f}", f"{slow.wait(0.5):.0f} ms", f"{slow.wait(0.95):.0f} ms",
            slow.cost(slow.worker_cpu), *costs)  # fmt: skip


async def said(server: Server, short: bool) -> None:
    """The statements of a turn, as the server's own log has them."""
    head("workers", "statements a turn", "of them looks for work", "begins that found another's", "notices")
    for count in (2,) if short else (1, 2, 4, 8):
        async with ground(server, count) as field:
            await field.load(10)
            with statements(server) as found:
                await field.load(30, rate=10)
            looks = sum("everloop_ready(" in one for one in found)
            begins = sum("everloop_begin(" in one or "FOR NO KEY UPDATE" in one for one in found)
            notices = sum("pg_notify" in one or "everloop_direct(" in one for one in found)
            say(str(count), *(f"{number / 30:.1f}" for number in (len(found), looks, begins - 30, notices)))


async def queue(server: Server, short: bool) -> None:
    """Many messages over 100 sessions at once, and a model that takes no time: as the peer's jobs over 100 locks."""
    turns = 200 if short else 1000
    head("workers", f"turns a second, {turns:,} over 100 sessions", "CPU of workers a turn", "CPU of PostgreSQL a turn")
    for count in (2,) if short else (1, 2, 4):
        async with ground(server, count, "tools-0x0") as field:
            await field.load(20)
            load = await field.load(turns, sessions=100)
            assert load.counted is not None
            costs = (load.cost(load.worker_cpu), load.cost(load.counted.cpu))
            say(str(count), f"{load.per_second:.0f}", *costs)


async def growth(server: Server, short: bool) -> None:
    """What a turn costs with more workers, more owners, and turns that others are at work on."""
    head(*GROWTH)
    for count, owners, elsewhere in GROUNDS[:2] if short else GROUNDS:
        async with ground(server, count) as field:
            await field.load(max(20, owners), owners=owners)
            if elsewhere:
                await field.ask(HELD_WORKER)
                await field.ask(HELD.format(count=elsewhere))
            slow = await field.load(100, owners=owners, rate=15)
            fast = await field.load(300, owners=owners)
            assert slow.counted is not None
            say(str(count), str(owners), f"{elsewhere:,}", f"{fast.per_second:.0f}", f"{slow.wait(0.95):.0f} ms",
                slow.cost(slow.worker_cpu), slow.cost(slow.counted.cpu))  # fmt: skip


HELD_WORKER = "INSERT INTO worker (id, at) VALUES ('ffffffffffff.1.1.1.1', 9e12) RETURNING 1"  # of another machine
HELD = """WITH s AS (
        INSERT INTO session (owner, key, worker, fence, created_at, updated_at)
        SELECT 'me', 'held' || n, 'ffffffffffff.1.1.1.1', 1, 0, 0 FROM generate_series(1, {count}) AS n RETURNING id)
    INSERT INTO inbox (owner, session, kind, state, data, at, turn, first_seq, opened)
    SELECT 'me', id, 'message', 'taken', '{{}}', 0, 't' || id, 1, true FROM s RETURNING 1"""


# ------------------------------------------------------------------------------------------------ taking over


async def taken_over(server: Server | None, how: int, times: int, lease: float = 15.0) -> list[float]:
    """Seconds from the signal to a worker until another asks the model for its turn. One signal each."""
    found = []
    settings = f"[worker]\nlease_seconds = {lease}\n"
    async with ground(server, times + 1, "tools-0x0-d1000", settings) as field:
        for number in range(times):
            mark = f"9m{number}"
            sent = asyncio.create_task(field.say(mark))
            await field.until_asked(mark, 1)
            await sent
            (holder,) = await field.ask("SELECT worker FROM session WHERE worker IS NOT NULL")
            victim = next(one for one in field.workers if one.pid == int(holder[0].split(".")[2]))
            victim.signal(how)
            at = time.time()
            found.append(await field.until_asked(mark, 2) - at)
            if how == signal.SIGSTOP:  # woken while its turn runs elsewhere: what it wants to write is refused
                victim.signal(signal.SIGCONT)
            await field.all_done()
            await field.one_answer(mark)
            field.workers.remove(victim)
    return found


async def takeover(server: Server, short: bool) -> None:
    times = 1 if short else 5
    head("taken over after", "median", "longest")
    grounds: list[tuple[str, Server | None, int, float]] = [
        ("SIGKILL on the same machine, PostgreSQL", server, signal.SIGKILL, 15.0),
        ("SIGKILL, SQLite", None, signal.SIGKILL, 15.0),
        (f"SIGSTOP, known by its lease of {LEASE:g} s only", server, signal.SIGSTOP, LEASE),
    ]
    for name, where, how, lease in grounds[::2] if short else grounds:
        seconds = await taken_over(where, how, times, lease)
        say(name, *both(seconds))
    if short:
        return
    seconds = [await restarted(server) for _ in range(times)]
    say("a restart of PostgreSQL: the next message, from its acceptance to the model", *both(seconds))


def both(seconds: list[float]) -> list[str]:
    return [f"{statistics.median(seconds) * 1e3:,.0f} ms", f"{max(seconds) * 1e3:,.0f} ms"]


async def restarted(server: Server) -> float:
    """Seconds from a message that was accepted after a restart to its model request."""
    async with ground(server, 1, "tools-0x0") as field:
        await field.load(5)
        await asyncio.to_thread(server.restart)
        at = await field.say("9m0")
        return await field.until_asked("9m0", 1) - at


# ------------------------------------------------------------------------------------------------ disk


async def disk(server: Server, short: bool) -> None:
    """What a turn leaves in the database: a message, an answer of a few words, a session for every ten turns."""
    turns = 500 if short else 2000
    async with ground(server, 1, "tools-0x0") as field:
        await field.load(100, sessions=10)
        before = await sizes(field)
        await field.load(turns, sessions=turns // 10)
        after = await sizes(field)
    head("table", "bytes on disk a turn, with its indexes")
    for table, size in after.items():
        if size > before[table]:
            say(table, f"{(size - before[table]) / turns:,.0f}")
    say("all", f"{sum(after[table] - before[table] for table in after) / turns:,.0f}")


async def sizes(field: Ground) -> dict[str, int]:
    rows = await field.ask(
        "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r' AND relnamespace = "
        "'public'::regnamespace ORDER BY relname"
    )
    return dict(rows)


# ------------------------------------------------------------------------------------------------ what one holds


async def holds(server: Server, short: bool) -> None:
    """Memory and connections of a worker, idle and with turns that wait for the model; and what idling costs."""
    turns, idle = (200, 5) if short else (1000, 60)
    async with ground(server, 1, "tools-0x0-d15000") as field:
        (one,) = field.workers
        before, cpu, empty = counted(server), one.cpu(), one.memory()
        await asyncio.sleep(idle)
        spent, database = one.cpu() - cpu, (counted(server) - before).cpu
        quiet = await connections(field)
        load = asyncio.create_task(field.load(turns))
        await field.until_asked(f"1m{turns - 1}", 1)
        full, backends = one.memory(), await connections(field)
        load.cancel()
        one.signal(signal.SIGKILL)  # it would wait for the model
        memory = statistics.median([memory_of(pid) for pid in backends])
    head("a worker", "measured")
    say("memory of its own, idle", f"{empty / 1048576:.0f} MiB")
    say(f"memory of a turn that waits for the model, of {turns:,} at once", f"{(full - empty) / turns / 1024:.0f} KiB")
    say("connections, idle and at work (the benchmark has its own 9 then)", f"{len(quiet)} and {len(backends)}")
    say("memory of a connection in PostgreSQL", f"{memory / 1048576:.1f} MiB")
    say("CPU of idling an hour, and of PostgreSQL's", f"{spent / idle * 3600:.1f} s and {database / idle * 3600:.1f} s")


async def connections(field: Ground) -> list[int]:
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{field.database}' AND pid <> pg_backend_pid()"
    return [pid for (pid,) in await field.ask(query)]


# ------------------------------------------------------------------------------------------------ for `make bench`


async def first_request(rounds: int) -> Row:
    """From a message on disk to its model request, PostgreSQL with two workers against SQLite with one."""
    with postgres() as server:
        base, _ = await one_load(None, 1, 30 * rounds, 1)
        ours, _ = await one_load(server, 2, 30 * rounds, 1)
    now, was = ours.wait(0.95), base.wait(0.95)
    what = "message to first model request, p95: PostgreSQL and 2 workers against SQLite, added"
    return Row(what, f"{now:.0f} ms", f"{was:.0f} ms", now - was, 50, " ms")


async def more_workers(rounds: int) -> Row:
    """CPU of workers and PostgreSQL a turn, four workers against one."""
    with postgres() as server:
        alone, _ = await one_load(server, 1, 30 * rounds, 1)
        many, _ = await one_load(server, 4, 30 * rounds, 1)
    costs = []
    for load in (many, alone):
        assert load.counted is not None
        costs.append((load.worker_cpu + load.counted.cpu) / load.turns * 1e3)
    what = "CPU of a turn beside idle workers: 4 workers against 1, including PostgreSQL"
    return Row(what, f"{costs[0]:.1f} ms", f"{costs[1]:.1f} ms", costs[0] / costs[1], 4)


async def turn_cpu(rounds: int, of_server: bool) -> Row:
    """CPU of a turn of one answer that a chat's message asked for, of its worker or of PostgreSQL, connected directly;
    against the worker's with SQLite."""
    with postgres() as server:
        ours, _ = await one_load(server, 1, 30 * rounds, 1)
        base, _ = await one_load(None, 1, 30 * rounds, 1)
    assert ours.counted is not None
    spent = ours.counted.cpu if of_server else ours.worker_cpu
    what = f"CPU of a turn of one answer, PostgreSQL: {'the database' if of_server else 'the worker'} (against SQLite)"
    figure, bound = spent / ours.turns * 1e3, 1.5 if of_server else 2.5
    return Row(what, f"{figure:.1f} ms", base.cost(base.worker_cpu), figure, bound, " ms")


async def awaited(rounds: int, of_server: bool) -> Row:
    """CPU of a turn of one answer that a program awaits, in the program or in PostgreSQL, against the other."""
    program, database = await asyncio.to_thread(awaited_cpu, 60 * rounds)
    mine, other = (database, program) if of_server else (program, database)
    what = "the database (against the program)" if of_server else "the program (against the database)"
    return Row(
        f"CPU of an awaited turn of one answer, PostgreSQL: {what}",
        f"{mine * 1e3:.1f} ms",
        f"{other * 1e3:.1f} ms",
        mine * 1e3,
        1.5 if of_server else 2.5,
        " ms",
    )


async def database_least(rounds: int) -> Row:
    """CPU of PostgreSQL for the bare statements of such a turn, against the whole turn."""
    with postgres() as server:
        ours, _ = await one_load(server, 1, 30 * rounds, 1)
        least = await asyncio.to_thread(least_cpu, server, 30 * rounds)
    assert ours.counted is not None
    what = "CPU of PostgreSQL for the statements of a turn on one row each (against the whole turn)"
    return Row(what, f"{least * 1e3:.1f} ms", f"{ours.counted.cpu / ours.turns * 1e3:.1f} ms", least * 1e3, 1.5, " ms")


async def turns_a_second(rounds: int) -> Row:
    """As many turns as can be over PostgreSQL, with one worker, two and four."""
    rates: dict[int, float] = {}
    with postgres() as server:
        for count in (1, 2, 4):
            async with ground(server, count, SAYS) as field:
                await field.load(20)
                rates[count] = statistics.median([(await field.load(100)).per_second for _ in range(rounds)])
    what = f"turns a second over PostgreSQL: 1 worker against 4 (2 workers: {rates[2]:.0f}/s), all on these cores"
    return Row(what, f"{rates[4]:.0f}/s", f"{rates[1]:.0f}/s", rates[1] / rates[4], 1.25)


async def death(rounds: int) -> Row:
    """From the SIGKILL of a worker to the next model request of its turn."""
    with postgres() as server:
        ours = statistics.median(await taken_over(server, signal.SIGKILL, rounds)) * 1e3
        base = statistics.median(await taken_over(None, signal.SIGKILL, rounds)) * 1e3
    what = "a turn continues in another worker after SIGKILL, PostgreSQL (against SQLite)"
    return Row(what, f"{ours:.0f} ms", f"{base:.0f} ms", ours, 1000, " ms")


async def notify(rounds: int) -> Row:
    """A token's way through NOTIFY against the same in one process."""
    with postgres() as server:
        base = statistics.median((await streamed(server, False, rounds)).ways) * 1e3
        ours = statistics.median((await streamed(server, True, rounds)).ways) * 1e3
    what = "a token's path from a worker through PostgreSQL to the client, added"
    return Row(what, f"{ours:.1f} ms", f"{base:.1f} ms", ours - base, 60, " ms")


async def pooled(rounds: int) -> Row:
    """Connections to PostgreSQL of 100 processes through a pooler, against those without."""
    with postgres() as server:
        ours, base = await server_connections(server, 100, pooled=True), await server_connections(server, 10)
    what = "connections to PostgreSQL of 100 processes through PgBouncer (against 10 processes without)"
    return Row(what, f"{ours}", f"{base}", ours, 132, "")


@dataclass(slots=True)
class Pooled:
    """The same loads direct and through a pooler, in turn."""

    pairs: list[tuple[Load, Load]]
    pooler_cpu: float  # seconds of CPU a turn

    def medians(self, of: Callable[[Load], float]) -> tuple[float, float]:
        base, ours = (statistics.median(map(of, loads)) for loads in zip(*self.pairs, strict=True))
        return base, ours

    def ratio(self, of: Callable[[Load], float]) -> float:
        """The median of the ratios of the pairs, through the pooler to direct."""
        return statistics.median(of(through) / of(direct) for direct, through in self.pairs)


async def pool_loads(pairs: int, turns: int, part: float = 0.0) -> Pooled:
    """As many turns as can be; or with `part`, messages that come at this part of that rate."""
    found = []
    with postgres() as server, pgbouncer(server.folder, POOL_SIZE) as pooler:
        async with ground(server, 4) as direct, ground(server, 4, pool=pooler.dsn) as through:
            for field in (direct, through):
                await field.load(50)
            most = [(await direct.load(200)).per_second for _ in range(3)] if part else []
            rate = part * statistics.median(most) if most else 0.0
            spent = 0.0
            for number in range(pairs):
                before = sum(times_of(pooler.pid)[:2])
                order = (direct, through) if number % 2 else (through, direct)
                loads = [await field.load(turns, rate=rate) for field in order]
                found.append((loads[0], loads[1]) if number % 2 else (loads[1], loads[0]))
                spent += sum(times_of(pooler.pid)[:2]) - before
    return Pooled(found, spent / pairs / turns)


async def pooled_turns(rounds: int) -> Row:
    """Turns a second through a pooler against direct connections, with all cores at work."""
    done = await pool_loads(2 * rounds + 1, 200)
    base, ours = done.medians(lambda load: load.per_second)
    ratio = 1 / done.ratio(lambda load: load.per_second)
    what = f"turns a second through PgBouncer on cores that are full (it takes {done.pooler_cpu * 1e3:.2f} ms a turn)"
    return Row(what, f"{ours:.0f}/s", f"{base:.0f}/s", ratio, 1.05)


async def pooled_pace(rounds: int, of_turn: bool) -> Row:
    """At half of the rate that these cores can do without a pooler: turns a second, or how long one takes."""
    done = await pool_loads(rounds, 300, 0.5)
    if of_turn:
        (base, ours), late = done.medians(lambda load: load.end(0.5)), done.medians(lambda load: load.end(0.95))
        what = f"a turn through PgBouncer at half of that rate, p50 (p95: {late[1]:.0f} against {late[0]:.0f} ms)"
        return Row(what, f"{ours:.1f} ms", f"{base:.1f} ms", done.ratio(lambda load: load.end(0.5)), 1.05)
    base, ours = done.medians(lambda load: load.per_second)
    what = f"turns a second through PgBouncer at half of that rate (it takes {done.pooler_cpu * 1e3:.2f} ms a turn)"
    return Row(what, f"{ours:.0f}/s", f"{base:.0f}/s", 1 / done.ratio(lambda load: load.per_second), 1.05)


PARTS = {
    "loads": loads,
    "statements": said,
    "queue": queue,
    "takeover": takeover,
    "streaming": streaming,
    "notices": notices,
    "disk": disk,
    "holds": holds,
    "growth": growth,
    "pool": pool,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="in less than a minute, and less exact")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    with postgres() as server:
        for name, part in PARTS.items():
            if options.only == name or (options.only is None and (name in SHORT or not options.short)):
                await part(server, options.short)


if __name__ == "__main__":
    asyncio.run(main())
