"""Measures Everloop against a hand-written aiohttp loop, in one run: `make bench`.

Both sides take turns, so that a busy neighbour slows down both; a figure is the median of the ratios of each round.
Everything runs on this machine. `--server URL` uses a fake model server that already runs (it must take the model name
as its script, as `python -m everloop.testing.openai_server` does).
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVER = str(HERE / "driver.py")
BARE = """
import asyncio, aiohttp
async def main():
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with http.post("URL/chat/completions", json=body) as response:
            print((await response.json())["choices"][0]["message"]["content"])
asyncio.run(main())
"""
ANSWER = json.dumps(
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]}
).encode()


@dataclass
class Figure:
    """One line of the table."""

    what: str
    ours: str
    base: str
    ratio: float
    bound: float
    unit: str = "×"

    @property
    def ok(self) -> bool:
        return self.ratio <= self.bound


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def drive(side: str, scenario: str, server: str, *numbers: int) -> dict[str, float]:
    command = [sys.executable, DRIVER, side, scenario, server, *map(str, numbers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), check=True, timeout=600)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    return kept | more


def compare(
    rounds: int,
    field: str,
    ours: Callable[[], dict[str, float]],
    base: Callable[[], dict[str, float]],
    compared: str = "",
) -> tuple[float, float, float]:
    """(ours, base, ratio), each the median over the rounds; the ratio may be of another field, `compared`."""
    pairs = [(base(), ours()) for _ in range(rounds)]
    ratio = statistics.median(our[compared or field] / its[compared or field] for its, our in pairs)
    return statistics.median(our[field] for _, our in pairs), statistics.median(its[field] for its, _ in pairs), ratio


# ------------------------------------------------------------------------------------------------ the figures


def turn_cpu(server: str, rounds: int, side: str = "everloop") -> Figure:
    ours, base, ratio = compare(
        rounds,
        "cpu_ms",
        lambda: drive(side, "turn", server, 150),
        lambda: drive("raw", "turn", server, 150),
        "relative",
    )
    what = {
        "everloop": "CPU of a durable 3-round turn",
        "effects": "CPU of a durable 3-round turn, calls with effects",
        "written": "CPU of the bare loop with the writes of a durable turn",
    }[side]
    return Figure(what, f"{ours:.2f} ms", f"{base:.2f} ms", ratio, 2.5 if side == "effects" else 2.0)


def turn_wall(server: str, rounds: int) -> Figure:
    ours, base, ratio = compare(
        rounds, "wall_ms", lambda: drive("everloop", "turn", server, 150), lambda: drive("raw", "turn", server, 150)
    )
    return Figure("the same turn, p50 of its time", f"{ours:.2f} ms", f"{base:.2f} ms", ratio, 2.2)


def sessions_at_once(server: str, rounds: int) -> Figure:
    ours, base, ratio = compare(
        rounds,
        "wall_s",
        lambda: drive("everloop", "at_once", server, 200),
        lambda: drive("raw", "at_once", server, 200),
    )
    return Figure("200 sessions at once, model takes 200 ms", f"{ours:.2f} s", f"{base:.2f} s", ratio, 1.3)


def long_history(server: str, rounds: int) -> Figure:
    """A turn after 5,000 messages against one after 10, less what sending the further bytes costs by itself."""
    ratios, shorts, longs = [], [], []
    for _ in range(rounds):
        short = drive("everloop", "history", server, 60, 10)["cpu_ms"]
        long = drive("everloop", "history", server, 60, 5000)["cpu_ms"]
        few = drive("bytes", "history", server, 60, 10)["cpu_ms"]
        many = drive("bytes", "history", server, 60, 5000)["cpu_ms"]
        shorts.append(short)
        longs.append(long - (many - few))
        ratios.append((long - (many - few)) / short)
    ours, base = statistics.median(longs), statistics.median(shorts)
    what = "a turn after 5,000 messages against one after 10, beyond the bytes"
    return Figure(what, f"{ours:.2f} ms", f"{base:.2f} ms", statistics.median(ratios), 1.3)


def time_to_first_token(server: str, rounds: int) -> Figure:
    pairs = [
        (drive("raw", "first_token", server, 40), drive("everloop", "first_token", server, 40)) for _ in range(rounds)
    ]
    base = statistics.median(raw["first_text_ms"] for raw, _ in pairs)
    added = statistics.median(our["first_text_ms"] - raw["first_text_ms"] for raw, our in pairs)
    return Figure("first token through the loop, added", f"{base + added:.2f} ms", f"{base:.2f} ms", added, 2.0, " ms")


def start_to_request(rounds: int) -> Figure:
    ours, base, ratio = asyncio.run(_start_to_request(max(rounds, 5)))
    return Figure("process start to first request, `everloop run`", f"{ours:.0f} ms", f"{base:.0f} ms", ratio, 1.5)


async def _start_to_request(rounds: int) -> tuple[float, float, float]:
    arrived: list[float] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        arrived.append(time.perf_counter())
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        header = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
        writer.write(header + ANSWER)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def once(command: list[str], home: str) -> float:
        arrived.clear()
        env = environment(EVERLOOP_HOME=home, EVERLOOP_BASE_URL=url, EVERLOOP_MODEL="m", EVERLOOP_API_KEY="k")
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        if process.returncode or out.strip() != b"hello":
            raise SystemExit(f"{command[:3]} said {out!r} and ended with {process.returncode}")
        return (arrived[0] - started) * 1e3

    ours, base = [], []
    with tempfile.TemporaryDirectory() as home:
        for _ in range(rounds + 1):
            base.append(await once([sys.executable, "-c", BARE.replace("URL", url)], home))
            ours.append(await once([sys.executable, "-m", "everloop", "run", "hi"], home))
    server.close()
    ours, base = ours[1:], base[1:]  # the first of each fills the file cache
    return (
        statistics.median(ours),
        statistics.median(base),
        statistics.median(o / b for o, b in zip(ours, base, strict=True)),
    )


def cpu_of(rounds: int, *command: str) -> float:
    """CPU milliseconds of a command, the median."""
    costs = []
    for _ in range(rounds):
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise SystemExit(f"{command} failed")
        costs.append((usage.ru_utime + usage.ru_stime) * 1e3)
    return statistics.median(costs)


def import_cpu(rounds: int) -> Figure:
    base, ours = cpu_of(4 * rounds, "-c", ""), cpu_of(4 * rounds, "-c", "import everloop")
    return Figure("`import everloop`, over bare Python", f"{ours:.0f} ms", f"{base:.0f} ms", ours - base, 25, " ms")


def help_cpu(rounds: int) -> Figure:
    base, ours = cpu_of(4 * rounds, "-c", ""), cpu_of(4 * rounds, "-m", "everloop", "--help")
    return Figure("`everloop --help`, over bare Python", f"{ours:.0f} ms", f"{base:.0f} ms", ours - base, 100, " ms")


def sandboxed(rounds: int, place: int) -> Figure:
    row = import_module("sandbox").rows(6 * rounds)[place]
    return Figure(row.what, row.ours, row.base, row.figure, row.bound, row.unit)


def at_terminal(rounds: int, place: int) -> Figure:
    row = import_module("terminal").rows(rounds)[place]
    return Figure(row.what, row.ours, row.base, row.figure, row.bound, row.unit)


def grep_delay(rounds: int) -> Figure:
    busy, quiet, seconds = import_module("grep").delay(rounds)
    what = f"longest wait for a token while another session greps 100,000 files ({seconds:.1f} s), added"
    return Figure(what, f"{busy:.0f} ms", f"{quiet:.0f} ms", busy - quiet, 50, " ms")


def context_from_disk(rounds: int, turns: int) -> Figure:
    measured = asyncio.run(import_module("context").measure(6 * rounds, (10, turns)))
    (base, _), (ours, _) = measured[10], measured[turns]
    what = f"a turn's request built from disk after {turns:,} turns, against 10"
    return Figure(what, f"{ours:.2f} ms", f"{base:.2f} ms", ours / base, 1.3)


def served(rounds: int, figure: str, *names: str) -> Figure:
    row = asyncio.run(getattr(import_module("serving"), figure)(500 if figure == "crowd" else rounds, *names))
    return Figure(row.what, row.ours, row.base, row.figure, row.bound, row.unit)


def many(rounds: int, figure: str, *options: bool) -> Figure:
    row = asyncio.run(getattr(import_module("workers"), figure)(rounds, *options))
    return Figure(row.what, row.ours, row.base, row.figure, row.bound, row.unit)


def chats(rounds: int, figure: str) -> Figure:
    row = asyncio.run(getattr(import_module("channels"), figure)(rounds))
    return Figure(row.what, row.ours, row.base, row.figure, row.bound, row.unit)


# ------------------------------------------------------------------------------------------------ the run


@contextlib.contextmanager
def fake_server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/")
        return
    command = [sys.executable, "-m", "everloop.testing.openai_server", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().rstrip("/")
    finally:
        process.terminate()
        process.wait()


def measure(server: str, rounds: int, only: str) -> Iterator[Figure]:
    """Measure the figures, each when it is asked for."""
    figures: list[tuple[str, Callable[[], Figure]]] = [
        ("turn", lambda: turn_cpu(server, rounds)),
        ("turn_effects", lambda: turn_cpu(server, rounds, "effects")),
        ("turn_least", lambda: turn_cpu(server, rounds, "written")),
        ("turn_wall", lambda: turn_wall(server, rounds)),
        ("at_once", lambda: sessions_at_once(server, rounds)),
        ("start", lambda: start_to_request(rounds)),
        ("history", lambda: long_history(server, rounds)),
        ("first_token", lambda: time_to_first_token(server, rounds)),
        ("import", lambda: import_cpu(rounds)),
        ("help", lambda: help_cpu(rounds)),
        ("chat_start", lambda: at_terminal(rounds, 0)),
        ("chat_key", lambda: at_terminal(rounds, 1)),
        ("exec", lambda: sandboxed(rounds, 0)),
        ("exec_git", lambda: sandboxed(rounds, 1)),
        ("parallel", lambda: sandboxed(rounds, 2)),
        ("grep", lambda: grep_delay(rounds)),
        ("context_1000", lambda: context_from_disk(rounds, 1_000)),
        ("context_10000", lambda: context_from_disk(rounds, 10_000)),
        ("served_first", lambda: served(rounds, "first_token")),
        *(
            (f"{row}_{api}", partial(served, rounds, figure, api))
            for api in ("responses", "messages", "ollama")
            for row, figure in (("first", "first_of"), ("answer", "against_chat"))
        ),
        ("served_chunks", lambda: served(rounds, "sse")),
        ("served_crowd", lambda: served(rounds, "crowd")),
        ("served_body", lambda: served(rounds, "large_body")),
        ("workers_first", lambda: many(rounds, "first_request")),
        ("workers_more", lambda: many(rounds, "more_workers")),
        ("workers_turns", lambda: many(rounds, "turns_a_second")),
        ("workers_cpu", lambda: many(rounds, "turn_cpu", False)),
        ("database_cpu", lambda: many(rounds, "turn_cpu", True)),
        ("awaited_cpu", lambda: many(rounds, "awaited", False)),
        ("awaited_database_cpu", lambda: many(rounds, "awaited", True)),
        ("database_least", lambda: many(rounds, "database_least")),
        ("workers_death", lambda: many(rounds, "death")),
        ("workers_notify", lambda: many(rounds, "notify")),
        ("workers_pool", lambda: many(rounds, "pooled")),
        ("workers_pool_turns", lambda: many(rounds, "pooled_turns")),
        ("workers_pool_paced", lambda: many(rounds, "pooled_pace", False)),
        ("workers_pool_turn", lambda: many(rounds, "pooled_pace", True)),
        ("channel_memory", lambda: chats(1, "memory")),
        ("channel_cpu", lambda: chats(1, "processor")),
        ("channel_message", lambda: chats(rounds, "message")),
    ]
    for name, figure in figures:
        if only in ("", name):
            progress(f"measuring {name} …")
            yield figure()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each pair is measured")
    parser.add_argument("--only", default="", help="one figure, such as turn, start, history or exec")
    parser.add_argument("--server", help="base URL of a fake model server to use")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound is missed")
    options = parser.parse_args()
    compileall.compile_dir(HERE.parent / "src", quiet=1)  # as an installed package is
    print("| what | Everloop | against | measured | bound |")
    print("|---|---|---|---|---|", flush=True)
    missed = False
    with fake_server(options.server) as server:
        for figure in measure(server, options.rounds, options.only):
            mark = "" if figure.ok else " **missed**"
            measured, bound = f"{figure.ratio:.2f}{figure.unit}", f"≤ {figure.bound:g}{figure.unit}"
            print(f"| {figure.what} | {figure.ours} | {figure.base} | {measured}{mark} | {bound} |", flush=True)
            missed |= not figure.ok
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
