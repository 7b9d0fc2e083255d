"""What streaming through NOTIFY adds: turns that run in a worker, watched by clients of a server process.

The model's tokens are the times at which they were sent, so the way of each one is known at the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import Process, running, workers
from benchmarks.database import counted
from benchmarks.tables import head, say
from tests.store.postgres.server import Server

STREAMS, TOKENS, PAUSE = 10, 50, 0.02
ALONE = 3  # streams one after another, for the first token


async def clock_model() -> None:
    """A model whose tokens are the times at which they were sent."""
    chunk = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":%s}]}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = re.search(rb"content-length: *(\d+)", await reader.readuntil(b"\r\n\r\n"), re.I)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for _ in range(TOKENS):
                    put(writer, chunk % json.dumps({"content": f" {time.time():.6f}"}))
                    await asyncio.sleep(PAUSE)
                put(writer, chunk.replace("}]}", ',"finish_reason":"stop"}]}') % "{}")
                put(writer, "[DONE]")
                writer.write(b"0\r\n\r\n")
        writer.close()

    def put(writer: asyncio.StreamWriter, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


@dataclass
class Streamed:
    """Seconds: to the first token of one client, each token's way with ten of them, and CPU of all our processes."""

    first: list[float]
    ways: list[float]
    cpu: float
    database: float

    @property
    def tokens(self) -> int:
        return len(self.ways)


async def stream(url: str, number: int) -> tuple[float, list[float]]:
    """(time to the first token, each one's time on the way) of one client."""
    import aiohttp

    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}
    ways: list[float] = []
    began = time.time()
    first = 0.0
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body, headers={"X-Session": f"s{number}"}) as response,
    ):
        async for line in response.content:
            now = time.time()
            if times := re.findall(rb'(?<=[" ])(\d{10}\.\d{6})', line):
                first = first or now - began
                ways += [now - float(at) for at in times]
    if len(ways) != TOKENS:
        raise SystemExit(f"a stream had {len(ways)} of {TOKENS} tokens")
    return first, ways


@contextlib.asynccontextmanager
async def streaming_ground(server: Server, apart: bool) -> AsyncIterator[tuple[str, list[Process]]]:
    """A server, and with `apart` a worker that all turns run in."""
    async with contextlib.AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        address = stack.enter_context(server.database())
        url = (await stack.enter_async_context(running(__file__))).line.strip()
        settings = f"[server]\nturns = {str(not apart).lower()}\n"
        made = await stack.enter_async_context(workers(int(apart), address, url, "m", home, settings))
        env = {
            "EVERLOOP_HOME": home,
            "EVERLOOP_BASE_URL": url,
            "EVERLOOP_MODEL": "m",
            "EVERLOOP_API_KEY": "k",
            "EVERLOOP_STORE": address,
        }
        front = await stack.enter_async_context(running("-m", "everloop", "serve", "--port", "0", **env))
        where = re.search(r"http://127\.0\.0\.1:\d+", front.line)
        if where is None:
            raise SystemExit(front.line)
        yield where[0], [*made, front]


async def streamed(server: Server, apart: bool, rounds: int) -> Streamed:
    async with streaming_ground(server, apart) as (url, processes):
        await stream(url, 0)
        first = [(await stream(url, -number))[0] for number in range(1, ALONE + 1)]
        before, cpu = counted(server), sum(one.cpu() for one in processes)
        ways: list[float] = []
        for number in range(rounds):
            done = await asyncio.gather(*(stream(url, 1 + number * STREAMS + one) for one in range(STREAMS)))
            ways += [way for _, some in done for way in some]
        spent = sum(one.cpu() for one in processes) - cpu
        return Streamed(first, ways, spent, (counted(server) - before).cpu)


async def streaming(server: Server, short: bool) -> None:
    head("turns run", "first token", "a token's way, median", "p95", "CPU a token", "CPU of PostgreSQL a token")
    for name, apart in (("in the server", False), ("in a worker, through NOTIFY", True)):
        done = await streamed(server, apart, 1 if short else 4)
        say(name, f"{statistics.median(done.first) * 1e3:.0f} ms", f"{statistics.median(done.ways) * 1e3:.1f} ms",
            f"{sorted(done.ways)[int(0.95 * done.tokens)] * 1e3:.1f} ms", f"{done.cpu / done.tokens * 1e6:.0f} µs",
            f"{done.database / done.tokens * 1e6:.0f} µs")  # fmt: skip


if __name__ == "__main__":
    asyncio.run(clock_model())
