"""The chat at a terminal against a bare prompt of prompt_toolkit: from the start of the process to the prompt, and from
a key to its echo."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import Row

BARE = """
from prompt_toolkit import PromptSession
PromptSession("READY> ", multiline=True).prompt()
"""
KEYS = "measured"
SECONDS = 60.0  # for a machine that is busy


@dataclass
class Screen:
    """A program at a pseudo-terminal, and what it has written."""

    descriptor: int
    started: float
    seen: bytes = field(default=b"")

    def until(self, condition: Callable[[bytes], bool], after: int = 0) -> float:
        """Read until what was written from a place on fits; return when it did."""
        give_up = time.perf_counter() + SECONDS
        while not condition(self.seen[after:]):
            if time.perf_counter() > give_up or not select.select([self.descriptor], [], [], SECONDS)[0]:
                raise SystemExit(f"the terminal never showed what was awaited: {self.seen[-300:]!r}")
            self.seen += os.read(self.descriptor, 65536)
        return time.perf_counter()


@contextlib.contextmanager
def terminal(command: Sequence[str], home: str) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    settings = {"EVERLOOP_HOME": home, "EVERLOOP_BASE_URL": "http://127.0.0.1:9/v1", "EVERLOOP_MODEL": "m"}
    env = {**os.environ, **settings, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Screen(ours, started)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _shows_prompt(written: bytes) -> bool:
    return b"READY>" in written or b">" in written.partition(b"shows the commands")[2]


def _holds(key: bytes, written: bytes) -> bool:
    return key in written


def _once(command: Sequence[str], home: str) -> tuple[float, float]:
    """Milliseconds from the start to the prompt, and from a key to its echo (the median of some)."""
    with terminal(command, home) as screen:
        started = screen.until(_shows_prompt) - screen.started
        waits = []
        for key in KEYS:
            time.sleep(0.05)  # so that nothing else is drawn at that moment
            place = len(screen.seen)
            typed = time.perf_counter()
            os.write(screen.descriptor, key.encode())
            waits.append(screen.until(partial(_holds, key.encode()), place) - typed)
        return started * 1e3, statistics.median(waits) * 1e3


def rows(rounds: int) -> tuple[Row, Row]:
    """Both figures; the two programs take turns."""
    ours, base = [], []
    with tempfile.TemporaryDirectory() as home:
        for _ in range(rounds + 1):
            base.append(_once(["-c", BARE], home))
            ours.append(_once(["-m", "everloop"], home))
    ours, base = ours[1:], base[1:]  # the first of each fills the file cache
    pairs = list(zip(ours, base, strict=True))
    start = statistics.median(our[0] / bare[0] for our, bare in pairs)
    echo = statistics.median(our[1] - bare[1] for our, bare in pairs)
    middle = [[statistics.median(one[place] for one in side) for place in (0, 1)] for side in (ours, base)]
    return (
        Row("chat: process start to the prompt", f"{middle[0][0]:.0f} ms", f"{middle[1][0]:.0f} ms", start, 2.5),
        Row("chat: a key to its echo, added", f"{middle[0][1]:.1f} ms", f"{middle[1][1]:.1f} ms", echo, 20, " ms"),
    )


if __name__ == "__main__":
    for row in rows(5):
        print(row)
