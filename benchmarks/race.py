"""Measures Everloop and other agent runtimes in one run, each in an environment of its own: `make race`.

All talk to the same fake model on this machine, take turns in each round, and must give the right answer each time. A
turn has three rounds with one call each, so four model calls. `--setup` installs the runtimes that are missing, by name
and pinned version (`peers/requirements`), into the folder `.peers`; without it nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop.testing.openai_server import FakeOpenAI, Seen

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "peers"
VENVS = HERE.parent / ".peers"
DOCS = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- race:begin -->\n", "<!-- race:end -->"
OURS = ("raw", "everloop")  # in the environment of this program
OTHERS = tuple(sorted(path.stem for path in (DRIVERS / "requirements").glob("*.txt")))
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONWARNINGS": "ignore",
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "false",
    "NO_COLOR": "1",
}


@dataclass
class Sizes:
    """How much is measured."""

    rounds: int
    turns: int
    sessions: int
    messages: int
    timeout: float


@dataclass
class Result:
    """What was measured of one runtime."""

    versions: str = ""
    failed: str = ""  # why nothing was measured
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    after_kill: str = ""

    def median(self, name: str) -> float | None:
        found = self.figures.get(name)
        return statistics.median(found) if found else None


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ environments


def python_of(peer: str) -> Path:
    return Path(sys.executable) if peer in OURS else VENVS / peer / "bin" / "python"


def is_installed(peer: str) -> bool:
    return peer in OURS or (VENVS / peer / "installed").exists()  # it is made last


def set_up(peers: list[str]) -> None:
    """Install the runtimes that are missing. One that cannot be installed is named in the table."""
    for peer in peers:
        if is_installed(peer):
            continue
        progress(f"installing {peer} …")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENVS / peer)], check=True)
        pins = str(DRIVERS / "requirements" / f"{peer}.txt")
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "-r", pins]
        if subprocess.run([str(python_of(peer)), *install], check=False).returncode == 0:
            (VENVS / peer / "installed").touch()


# ------------------------------------------------------------------------------------------------ one driver


class Failed(Exception):
    """A driver gave no result."""


class Driver:
    """Runs the driver of one runtime, in a process and a home folder of its own."""

    def __init__(self, peer: str, model: FakeOpenAI, timeout: float) -> None:
        self._peer = peer
        self._model = model
        self._timeout = timeout

    async def run(self, scenario: str, script: str = "", folder: str = "", *numbers: int) -> dict[str, Any]:
        """The driver's result."""
        self._model.requests.clear()
        process = await self.start(scenario, script, folder, *numbers)
        try:
            out, err = await asyncio.wait_for(process.communicate(), self._timeout)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise Failed(f"no result after {self._timeout:g} s") from None
        lines = out.decode(errors="replace").strip().splitlines()
        if process.returncode or not lines:
            why = err.decode(errors="replace").strip().splitlines()
            raise Failed(why[-1] if why else f"it ended with {process.returncode}")
        return dict(json.loads(lines[-1]))

    async def start(self, scenario: str, script: str, folder: str, *numbers: int) -> asyncio.subprocess.Process:
        command = [str(python_of(self._peer)), str(DRIVERS / f"drive_{self._peer}.py"), scenario]
        if scenario != "info":
            command += [self._model.base_url, script, folder, *map(str, numbers)]
        kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
        place = {"HOME": folder, "EVERLOOP_HOME": folder} if folder else {}
        return await asyncio.create_subprocess_exec(
            *command, env=kept | QUIET | place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )


async def start_up(driver: Driver, model: FakeOpenAI) -> dict[str, float]:
    """Milliseconds from the start of the process to its first request."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        await driver.run("once", "tools-0x0", folder)
        return {"start_ms": (model.requests[0].time - started) * 1e3}


async def kill(driver: Driver, model: FakeOpenAI) -> str:
    """What is left of a turn after `kill -9` while the model works on its third round."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model.requests.clear()
        process = await driver.start("killed", "tools-3x1-d300", folder)
        ended = asyncio.ensure_future(process.communicate())
        try:
            async with asyncio.timeout(120):
                while not any(seen.marker == "k1" and seen.round == 2 for seen in model.requests):
                    if ended.done():
                        raise Failed("it ended before it could be killed")
                    await asyncio.sleep(0.01)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await ended
        try:
            await driver.run("resumed", "tools-3x1", folder)
            refused = ""
        except Failed:
            refused = "; its next turn fails"
        return after_kill(model.requests) + refused


def after_kill(requests: list[Seen]) -> str:
    """Read from the requests of the next process what it still knows of the turn."""
    with_it = [seen for seen in requests if "mark:k1" in json.dumps((seen.body or {}).get("messages"))]
    if not with_it:
        return "its message is lost"
    messages = (with_it[0].body or {})["messages"]
    results = sum(1 for one in messages if one.get("role") == "tool" and "k1/" in json.dumps(one.get("content")))
    goes_on = any(seen.marker == "k1" and seen.round == 2 for seen in requests)
    return f"message kept, {results} of 2 results, {'continues' if goes_on else 'not finished'}"


# ------------------------------------------------------------------------------------------------ the race


async def race(peers: list[str], sizes: Sizes) -> dict[str, Result]:
    results = {peer: Result() for peer in peers}
    async with FakeOpenAI() as model:
        drivers = {peer: Driver(peer, model, sizes.timeout) for peer in peers}
        keeps: set[str] = set()
        for peer, result in results.items():
            if not is_installed(peer):
                result.failed = "not installed"
                continue
            try:
                info = await drivers[peer].run("info")
            except Failed as error:
                result.failed = f"cannot be started: {error}"
                continue
            result.versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
            if info["keeps"]:
                keeps.add(peer)
        running = [peer for peer in peers if not results[peer].failed]
        for number in range(sizes.rounds):
            for peer in running:
                progress(f"round {number + 1}: {peer}")
                await _measure(drivers[peer], model, results[peer], sizes)
        for peer in running:
            progress(f"kill -9: {peer}")
            try:
                results[peer].after_kill = await kill(drivers[peer], model) if peer in keeps else "keeps nothing"
            except (Failed, TimeoutError) as error:
                results[peer].after_kill = f"not measured ({error})"
    return results


async def _measure(driver: Driver, model: FakeOpenAI, result: Result, sizes: Sizes) -> None:
    async def scenario(name: str, script: str, *numbers: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return await driver.run(name, script, folder, *numbers)

    measured = (
        ("start", start_up(driver, model)),
        ("turn", scenario("turn", "tools-3x1", sizes.turns)),
        ("at_once", scenario("at_once", "tools-3x1-d200", sizes.sessions)),
        ("history", scenario("history", "tools-3x1", 3, sizes.messages)),
    )
    for name, work in measured:
        try:
            for figure, value in (await work).items():
                result.figures[f"{name}.{figure}"].append(value)
        except Failed as error:
            progress(f"  {name}: {error}")


# ------------------------------------------------------------------------------------------------ the table


def table(results: dict[str, Result], sizes: Sizes) -> str:
    base = results["raw"].median("turn.relative") if "raw" in results else None
    lines = [
        f"Measured on {time.strftime('%Y-%m-%d')} with Python {platform.python_version()} on {os.cpu_count()} cores "
        f"(load {os.getloadavg()[0]:.1f}); medians of {sizes.rounds} rounds.",
        "",
        f"| runtime | CPU of a turn | against the bare loop | its time, p50 | {sizes.sessions} sessions at once, model "
        f"takes 200 ms (ideal 0.8 s) | start to first request | CPU of a turn after {sizes.messages:,} messages | "
        "`kill -9` in round 3 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = {peer: result for peer, result in results.items() if not result.failed}
    for peer, result in measured.items():
        ratio = result.median("turn.relative")
        cells = [
            {"raw": "bare aiohttp loop", "everloop": "**Everloop**"}.get(peer, peer.replace("_", "-")),
            _cell(result.median("turn.cpu_ms"), "{:.1f} ms"),
            _cell(ratio / base if ratio and base else None, "{:.1f}×"),
            _cell(result.median("turn.wall_ms"), "{:.1f} ms"),
            _cell(result.median("at_once.wall_s"), "{:.2f} s"),
            _cell(result.median("start.start_ms"), "{:.0f} ms"),
            _cell(result.median("history.cpu_ms"), "{:.0f} ms"),
            result.after_kill,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    versions = "; ".join(result.versions for peer, result in measured.items() if result.versions)
    lines += ["", f"Versions: {versions}."]
    if missing := [f"{peer.replace('_', '-')} ({one.failed})" for peer, one in results.items() if one.failed]:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def write(text: str, page: Path) -> None:
    """Put the table into its place on a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no place for the table, {BEGIN.strip()} and {END}")
    page.write_text(f"{before}{BEGIN}{text}{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(OTHERS), help="other runtimes, comma-separated; by default all")
    parser.add_argument("--setup", action="store_true", help="install those that are missing")
    parser.add_argument("--write", nargs="?", const=DOCS, type=Path, metavar="PAGE", help="write the table to a page")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--messages", type=int, default=5000, help="of the long history")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one driver")
    options = parser.parse_args()
    others = [peer for peer in options.peers.split(",") if peer]
    if unknown := set(others) - set(OTHERS):
        raise SystemExit(f"there is no driver for {', '.join(sorted(unknown))}: choose from {', '.join(OTHERS)}")
    if options.setup:
        set_up(others)
    sizes = Sizes(options.rounds, options.turns, options.sessions, options.messages, options.timeout)
    text = table(asyncio.run(race([*OURS, *others], sizes)), sizes)
    print(text, end="")
    if options.write is not None:
        write(text, options.write)


if __name__ == "__main__":
    main()
