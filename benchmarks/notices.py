"""How many notices PostgreSQL passes on: they are put in order one commit at a time, whoever they are for.

pgbench says them as the store does, from eight connections, while other connections listen or do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psycopg
from benchmarks.database import counted
from benchmarks.tables import head, say
from tests.store.postgres.server import Server, programs

SAY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify('everloop', '{text}');\n"
SIZE = 1000  # bytes of a notice
FROM = 8  # connections


async def notices(server: Server, short: bool) -> None:
    seconds = 2 if short else 10
    head("connections that listen", "notices a second", "CPU of PostgreSQL a notice")
    for listeners in (0, 10) if short else (0, 10, 100):
        speed, cpu = await asyncio.to_thread(said, server, listeners, seconds)
        say(str(listeners), f"{speed:,.0f}", f"{cpu * 1e6:.0f} µs")


def said(server: Server, listeners: int, seconds: int) -> tuple[float, float]:
    """(notices a second, seconds of the server's CPU for each)."""
    with server.database() as dsn, listening(dsn, listeners), tempfile.NamedTemporaryFile("w") as script:
        script.write(SAY.format(text="x" * SIZE))
        script.flush()
        command = [str(programs() / "pgbench"), "-n", "-f", script.name, "-c", str(FROM), "-j", "1", "-T", str(seconds)]
        before = counted(server)
        done = subprocess.run([*command, dsn], capture_output=True, text=True, check=True, timeout=60)
        cpu = (counted(server) - before).cpu
    count = re.search(r"actually processed: (\d+)", done.stdout)
    speed = re.search(r"tps = ([\d.]+)", done.stdout)
    assert count is not None, done.stdout
    assert speed is not None, done.stdout
    return float(speed[1]), cpu / int(count[1])


@contextlib.contextmanager
def listening(dsn: str, count: int) -> Iterator[None]:
    """So many connections that hear and forget."""
    stop = threading.Event()

    def hear() -> None:
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(count)]
            for one in made:
                one.execute("LISTEN everloop")
            while not stop.wait(0.1):
                for one in made:
                    for _ in one.notifies(timeout=0):
                        pass

    thread = threading.Thread(target=hear)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
