"""CPU of a turn of one answer that a program awaits, over PostgreSQL, 20 a second: a part of `make bench`.

The program is a process of its own (`python benchmarks/awaited.py DSN URL TURNS`): it reports when it is warm, runs the
turns on request, and prints its seconds of CPU.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RATE = 20.0
SESSIONS = 10


async def program(dsn: str, url: str, turns: int) -> None:
    from everloop import AgentLoop, MessageBus
    from everloop.providers.openai import OpenAIProvider
    from everloop.store.postgres.store import PostgresStore

    provider = OpenAIProvider(api_key="none", base_url=url, model="tools-0x0")
    with tempfile.TemporaryDirectory() as folder:
        store = PostgresStore(dsn)
        async with AgentLoop(MessageBus(), provider, folder, store=store, restrict_to_workspace=True) as agent:

            async def run(count: int) -> None:
                for number in range(count):
                    began = time.monotonic()
                    await agent.process_direct("hello", f"bench:{number % SESSIONS}")
                    await asyncio.sleep(max(0.0, 1 / RATE - (time.monotonic() - began)))

            await run(2 * SESSIONS)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            spent = time.process_time()
            await run(turns)
            print(time.process_time() - spent, flush=True)
            await asyncio.to_thread(sys.stdin.readline)


def awaited_cpu(turns: int) -> tuple[float, float]:
    """Return the seconds of CPU of an awaited turn: of the program, and of PostgreSQL."""
    from benchmarks.database import counted, postgres

    model = [sys.executable, "-m", "everloop.testing.openai_server", "--port", "0"]
    with (
        postgres() as server,
        server.database() as dsn,
        subprocess.Popen(model, stdout=subprocess.PIPE, text=True) as fake,
    ):
        assert fake.stdout is not None
        command = [sys.executable, __file__, dsn, fake.stdout.readline().strip(), str(turns)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                assert child.stdout.readline() == "ready\n"
                before = counted(server).cpu
                child.stdin.write("go\n")
                child.stdin.flush()
                ours = float(child.stdout.readline())
                database = counted(server).cpu - before
            finally:
                child.stdin.close()
                fake.terminate()
    return ours / turns, database / turns


if __name__ == "__main__":
    asyncio.run(program(sys.argv[1], sys.argv[2], int(sys.argv[3])))
