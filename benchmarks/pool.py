"""What a pooler in transaction mode saves and costs: connections of many processes, and turns a second."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from benchmarks.cluster import ground, running
from benchmarks.tables import head, say
from tests.store.postgres.pgbouncer import pgbouncer
from tests.store.postgres.server import Server

POOL_SIZE = 32
AT_ONCE = 10  # processes that start at the same time
CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND backend_type = 'client backend'"
# A process with a heartbeat that has used all of its threads.
PROGRAM = """
import asyncio, sys
from everloop.bus import InboundMessage
from everloop.store.peers import new_worker
from everloop.store.postgres.store import PostgresStore
async def main():
    store, name = PostgresStore(sys.argv[1], pool=sys.argv[2] or None), new_worker()
    await store.peer(name, lambda _: None).join()
    said = (InboundMessage("bench", "user", f"{name}-{n}", "x").addressed() for n in range(40))
    await asyncio.gather(*map(store.accept, said))
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def server_connections(server: Server, count: int, pooled: bool = False) -> int:
    """The connections that so many processes have to one database, once each has written and listens."""
    async with contextlib.AsyncExitStack() as stack:
        address = stack.enter_context(server.database())
        name = address.partition("@/")[2].partition("?")[0]
        pool = stack.enter_context(pgbouncer(server.folder, POOL_SIZE)).dsn(name) if pooled else ""
        path = os.pathsep.join(filter(None, sys.path))
        for _ in range(0, count, AT_ONCE):
            starting = (running("-c", PROGRAM, address, pool, PYTHONPATH=path) for _ in range(min(AT_ONCE, count)))
            await asyncio.gather(*map(stack.enter_async_context, starting))
        rows = await asyncio.to_thread(server.sql, CONNECTED.format(name))
        return int(rows[0][0])


async def pool(server: Server, short: bool) -> None:
    head("processes", "connections without a pooler", f"through PgBouncer, pool of {POOL_SIZE}")
    for count in (5,) if short else (10, 30):
        without = await server_connections(server, count)
        say(str(count), str(without), str(await server_connections(server, count, pooled=True)))
    if not short:
        say("100", "900 by the rule of nine each", str(await server_connections(server, 100, pooled=True)))
    head("4 workers", "turns a second", "CPU of workers a turn", "CPU of PostgreSQL a turn")
    turns = 150 if short else 1000
    with pgbouncer(server.folder, POOL_SIZE) as pooler:
        for name in ("direct", "through PgBouncer") * (1 if short else 2):
            async with ground(server, 4, pool=None if name == "direct" else pooler.dsn) as field:
                await field.load(50)
                load = await field.load(turns)
                assert load.counted is not None
                say(name, f"{load.per_second:.0f}", load.cost(load.worker_cpu), load.cost(load.counted.cpu))
