"""What the server adds between a client and the model: `python benchmarks/serving.py`, or a part of `make bench`.

Four processes on one machine: a model server that streams prepared chunks, `everloop serve` before it, a bare aiohttp
server that relays the same chunks one by one, and this one with the clients. Both servers take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import Row

HEAD = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
ROLE, END = (
    HEAD + b'{"role":"assistant","content":""}}]}\n\n',
    HEAD + b'{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
)
TOKEN = HEAD + b'{"content":" token"}}]}\n\n'


@dataclass(frozen=True)
class Api:
    """How a client speaks to a server: what it sends, what a piece of text looks like, and the end of a stream."""

    path: bytes
    request: bytes
    piece: bytes
    end: bytes


SAID = b'"messages":[{"role":"user","content":"go"}]'
CHAT = Api(b"/v1/chat/completions", b'{"model":"%b","stream":true,' + SAID + b"}", b'"content":" token"', b"[DONE]")
APIS = {
    "responses": Api(
        b"/v1/responses",
        b'{"model":"%b","stream":true,"input":"go"}',
        b'"delta":" token"',
        b"event: response.completed",
    ),
    "messages": Api(
        b"/v1/messages",
        b'{"model":"%b","stream":true,"max_tokens":100000,' + SAID + b"}",
        b'"text":" token"',
        b"event: message_stop",
    ),
    "ollama": Api(b"/api/chat", b'{"model":"%b",' + SAID + b"}", b'"content":" token"', b'"done":true'),
}


# ------------------------------------------------------------------------------------------------ the model server


async def model_server() -> None:
    """Streams as many chunks as the model's name says: `n1000` at once, `n50-t20` one each 20 ms."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.I)
                body = await reader.readexactly(int(length[1])) if length else b""
                wish = re.search(rb'"model":"n(\d+)(?:-t(\d+))?"', body)
                count, pause = (int(wish[1]), int(wish[2] or 0) / 1000) if wish else (1, 0.0)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for data in [ROLE, *[TOKEN] * count] if pause else [ROLE, *[TOKEN * 20] * (count // 20)]:
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                    await (asyncio.sleep(pause) if pause else writer.drain())
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(END), END))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def relay(upstream: str) -> None:
    """A bare server of the same framework that passes on each chunk."""
    from aiohttp import ClientSession, TCPConnector, web

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with http.post(f"{upstream}/v1/chat/completions", data=body) as answer:
            await response.prepare(request)
            async for line in answer.content:
                if line != b"\n":
                    await response.write(line + b"\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", pass_on)
    async with ClientSession(connector=TCPConnector(limit=0)) as http:
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


# ------------------------------------------------------------------------------------------------ processes


@dataclass
class Process:
    pid: int
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def cpu(self) -> float:
        """Seconds of CPU it has used so far."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Bytes of memory that it holds by itself."""
        with open(f"/proc/{self.pid}/smaps_rollup") as file:
            return 1024 * sum(
                int(line.split()[1]) for line in file if line.startswith(("Private_", "Anonymous:")) and "Anon" in line
            )

    def handles(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.asynccontextmanager
async def running(*command: str, **env: str) -> AsyncIterator[Process]:
    """A server as a process of its own, once it says where it listens."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    made = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=kept | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert made.stdout is not None
    try:
        line = (await made.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found is None:
            raise SystemExit(line)
        yield Process(made.pid, found[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.terminate()
        await made.wait()


@contextlib.asynccontextmanager
async def all_servers(model: str) -> AsyncIterator[tuple[Process, Process, Process]]:
    """(model server, Everloop, relay); `model` is the name that Everloop asks the model server for."""
    with tempfile.TemporaryDirectory() as home:
        async with running(__file__, "--model-server") as source:
            ours = running(
                "-m", "everloop", "serve", "--port", "0",
                EVERLOOP_HOME=home, EVERLOOP_BASE_URL=f"{source.url}/v1", EVERLOOP_MODEL=model,
            )  # fmt: skip
            async with ours as everloop, running(__file__, "--relay", source.url) as bare:
                yield source, everloop, bare


# ------------------------------------------------------------------------------------------------ clients


async def stream(
    port: int, model: bytes, first: list[float] | None = None, headers: bytes = b"", api: Api = CHAT
) -> int:
    """Read one streamed answer to its end; how many chunks of text it had. `first` gets the seconds to the first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = api.request % model
    began = time.perf_counter()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\n%bContent-Length: %d\r\n\r\n%b" % (api.path, headers, len(body), body)
    )
    count, ended, rest = 0, False, b""
    while not ended and (data := await reader.read(1 << 18)):
        data = rest + data
        found = data.count(api.piece)
        if found and not count and first is not None:
            first.append(time.perf_counter() - began)
        count += found
        ended = api.end in data
        rest = data[1 - len(api.piece) :]  # not long enough to hold a whole one, which would be counted twice
    writer.close()
    if not ended:
        raise SystemExit(f"a stream from port {port} ended early, after {count} chunks")
    return count


async def throughput(server: Process, model: bytes, streams: int, at_once: int) -> tuple[float, float]:
    """(chunks a second, microseconds of the server's CPU a chunk)."""
    waiting = asyncio.Semaphore(at_once)

    async def one() -> int:
        async with waiting:
            return await stream(server.port, model)

    cpu, began = server.cpu(), time.perf_counter()
    chunks = sum(await asyncio.gather(*(one() for _ in range(streams))))
    return chunks / (time.perf_counter() - began), (server.cpu() - cpu) / chunks * 1e6


# ------------------------------------------------------------------------------------------------ figures


async def first_token(rounds: int, api: Api = CHAT) -> Row:
    """Time to the first token at one client, against asking the model server itself."""
    async with all_servers("n20-t2") as (source, everloop, _):
        ours: list[float] = []
        direct: list[float] = []
        for _ in range(20 * rounds):
            await stream(source.port, b"n20-t2", direct)
            await stream(everloop.port, b"n20-t2", ours, api=api)
    base, now = statistics.median(direct) * 1e3, statistics.median(ours) * 1e3
    what = "first token through the server at one client, added"
    if api is not CHAT:
        what = f"first token over {api.path.decode()} at one client, added"
    return Row(what, f"{now:.2f} ms", f"{base:.2f} ms", now - base, 5.0, " ms")


async def first_of(rounds: int, name: str) -> Row:
    """The same over another API."""
    return await first_token(rounds, APIS[name])


async def against_chat(rounds: int, name: str) -> Row:
    """The time of a streamed answer over another API, against chat completions of the same server."""
    api = APIS[name]
    times: tuple[list[float], list[float]] = ([], [])
    async with all_servers("n400") as (_, everloop, _):
        for _ in range(10 * rounds + 1):
            for one, taken in zip((CHAT, api), times, strict=True):
                began = time.perf_counter()
                await stream(everloop.port, b"n400", api=one)
                taken.append(time.perf_counter() - began)
    base, ours = (statistics.median(taken[1:]) * 1e3 for taken in times)  # the first of each warms up
    ratio = statistics.median(our / its for its, our in zip(times[0][1:], times[1][1:], strict=True))
    what = f"an answer of 400 chunks over {api.path.decode()}, against /v1/chat/completions"
    return Row(what, f"{ours:.2f} ms", f"{base:.2f} ms", ratio, 1.2)


async def sse(rounds: int) -> Row:
    """Chunks a second, against the bare relay. The figure is the relay's by ours: 1/0.7 is the bound."""
    async with all_servers("n2000") as (_, everloop, bare):
        await throughput(everloop, b"n2000", 8, 4)
        await throughput(bare, b"n2000", 8, 4)
        pairs = [
            (await throughput(bare, b"n2000", 40, 8), await throughput(everloop, b"n2000", 40, 8))
            for _ in range(rounds)
        ]
    ours, base = statistics.median(our[0] for _, our in pairs), statistics.median(its[0] for its, _ in pairs)
    ratio = statistics.median(its[0] / our[0] for its, our in pairs)
    cpu = statistics.median(our[1] / its[1] for its, our in pairs)
    what = f"streamed chunks per second, bare relay against the server (CPU per chunk: {cpu:.2f}× of the relay's)"
    return Row(what, f"{ours:,.0f}/s", f"{base:,.0f}/s", ratio, 1.43)


async def crowd(clients: int) -> Row:
    """Streaming clients at once, each with 50 tokens over a second: how many were dropped."""
    async with all_servers("n50-t20") as (source, everloop, _):
        first: list[float] = []
        began = time.perf_counter()
        done = await asyncio.gather(
            *(stream(everloop.port, b"n50-t20", first) for _ in range(clients)), return_exceptions=True
        )
        wall = time.perf_counter() - began
        again = time.perf_counter()
        await asyncio.gather(*(stream(source.port, b"n50-t20") for _ in range(clients)))
        direct = time.perf_counter() - again
    dropped = sum(1 for one in done if one != 50)
    what = f"{clients} streaming clients at once, dropped (p95 to the first token {_p95(first) * 1e3:.0f} ms)"
    return Row(what, f"{wall:.1f} s", f"{direct:.1f} s direct", dropped, 0, "")


# Sends the body in a file as often as a line comes in. In a process of its own: it would hold up the clients here.
SENDER = """
import http.client, sys
body = open(sys.argv[2], 'rb').read()
print('ready', flush=True)
for _ in sys.stdin:
    connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]))
    connection.request('POST', '/v1/chat/completions', body, {'Content-Type': 'application/json'})
    response = connection.getresponse()
    response.read()
    print(response.status, flush=True)
"""


def large(size: int) -> bytes:
    """A request of so many bytes: a long history in several languages."""
    text = 'Er sagte: "Wir prüfen das." Она ответила: «Хорошо».\n漢字かな交じり文, 50 % — naïve café\n' * 100
    message = {"role": "user", "content": text}
    count = size // len(json.dumps(message, ensure_ascii=False).encode())
    asked = {"model": "n20", "stream": True, "messages": [message] * count}
    return json.dumps(asked, ensure_ascii=False).encode()


async def waits(port: int, model: bytes) -> list[float]:
    """The seconds between the chunks of a streamed answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = CHAT.request % model
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    times: list[float] = []
    while data := await reader.read(1 << 18):
        if b"token" in data:
            times.append(time.perf_counter())
    writer.close()
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def large_body(rounds: int, megabytes: int = 10) -> Row:
    """The longest wait of a client for a chunk, which come every 5 ms, while another one sends a large body."""
    model = b"n300-t5"
    with tempfile.NamedTemporaryFile() as file:
        file.write(large(megabytes * 1_000_000))
        file.flush()
        async with all_servers(model.decode()) as (_, everloop, _):
            sender = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SENDER, str(everloop.port), file.name,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert sender.stdin is not None
            assert sender.stdout is not None
            await sender.stdout.readline()
            quiet, busy = [], []
            for number in range(rounds + 1):  # the first is for warming up
                alone = await waits(everloop.port, model)
                streaming = asyncio.create_task(waits(everloop.port, model))
                await asyncio.sleep(0.1)
                sender.stdin.write(b"\n")
                status = await sender.stdout.readline()
                if status.strip() != b"200":
                    raise SystemExit(f"a body of {megabytes} MB was answered with {status.decode()}")
                if number:
                    quiet.append(max(alone) * 1e3)
                    busy.append(max(await streaming) * 1e3)
                else:
                    await streaming
            sender.stdin.close()
            await sender.wait()
    ours, base = statistics.median(busy), statistics.median(quiet)
    what = f"longest wait for a chunk while another client sends {megabytes} MB, added"
    return Row(what, f"{ours:.0f} ms", f"{base:.0f} ms", ours - base, 50.0 * megabytes / 10, " ms")


def _p95(times: list[float]) -> float:
    return sorted(times)[int(0.95 * (len(times) - 1))]


async def memory() -> list[str]:
    """Memory of an idle connection and of a session, and whether a long run grows."""
    lines = []
    async with all_servers("n20") as (_, everloop, _):

        async def many(count: int, key: str = "") -> None:
            waiting = asyncio.Semaphore(16)

            async def one(number: int) -> None:
                async with waiting:
                    await stream(
                        everloop.port, b"n20", headers=f"X-Session: {key}{number}\r\n".encode() if key else b""
                    )

            await asyncio.gather(*(one(number) for number in range(count)))

        await many(300)
        before = everloop.memory()
        idle = [await asyncio.open_connection("127.0.0.1", everloop.port) for _ in range(500)]
        await asyncio.sleep(0.5)
        lines.append(f"an idle connection: {(everloop.memory() - before) / 500 / 1024:.1f} KiB")
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.5)
        before = everloop.memory()
        await many(1000, "kept")
        lines.append(f"a kept session of one turn: {(everloop.memory() - before) / 1000 / 1024:.1f} KiB")
        lines.append(await soak(everloop, many))
    return lines


async def soak(everloop: Process, many: Any) -> str:
    """An hour of one request a second, at once: memory and open files in tenths of the way."""
    sizes, handles = [], []
    for _ in range(10):
        await many(360)
        sizes.append(everloop.memory() / 1048576)
        handles.append(everloop.handles())
    return (
        f"3,600 requests, in tenths: {' '.join(f'{size:.1f}' for size in sizes)} MiB, "
        f"{min(handles)} to {max(handles)} open files"
    )


async def rows(rounds: int) -> list[Row]:
    others = [row for name in APIS for row in (await first_of(rounds, name), await against_chat(rounds, name))]
    bodies = [await large_body(rounds), await large_body(rounds, 20)]
    return [await first_token(rounds), *others, await sse(rounds), await crowd(500), *bodies]


async def main() -> None:
    print("| what | Everloop | against | measured | bound |\n|---|---|---|---|---|")
    for row in await rows(5):
        print(f"| {row.what} | {row.ours} | {row.base} | {row.figure:.2f}{row.unit} | ≤ {row.bound:g}{row.unit} |")
    for line in await memory():
        print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--model-server"]:
        asyncio.run(model_server())
    elif sys.argv[1:2] == ["--relay"]:
        asyncio.run(relay(sys.argv[2]))
    else:
        asyncio.run(main())
