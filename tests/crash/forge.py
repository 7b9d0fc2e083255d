"""A warm process that forks the programs to be killed.

Importing takes half a second, forking a few milliseconds, and each fork is a real process that dies of a real
SIGKILL. The forge itself never starts a thread or an event loop, so that forking it is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LATER = (  # what is imported on use
    "everloop.cli.serve",
    "everloop.providers.text_calls",
    "everloop.server.app",
    "psycopg",
    "sysconfig",
    "yaml",
    "zoneinfo",
)
MAX_SECONDS = 900.0  # seconds a program may run before it is ended with a trace


def _promise() -> Future[int]:
    """A future that a failing test cannot cancel, since the forge still reports to it and serves later tests."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True)
class Child:
    """A forked program. `ended` is its exit status, negative for a signal."""

    pid: Future[int] = field(default_factory=_promise)
    ended: Future[int] = field(default_factory=_promise)

    async def wait(self) -> int:
        return await asyncio.wrap_future(self.ended)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        pid = await asyncio.wrap_future(self.pid)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Forge:
    """The test's side: starts programs by name and is notified when they end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.forge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            bufsize=1,
        )
        self._children: dict[int, Child] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, program: str, **arguments: Any) -> Child:
        number = len(self._children)
        child = self._children[number] = Child()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, program, arguments]) + "\n")
        self._process.stdin.flush()
        return child

    async def run(self, program: str, **arguments: Any) -> int:
        """Start a program and wait for its end."""
        return await self.start(program, **arguments).wait()

    def close(self) -> None:
        """The forge kills what still runs and ends when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, what, value = json.loads(line)
            child = self._children[number]
            (child.pid if what == "pid" else child.ended).set_result(value)


def main() -> None:
    """Fork the programs requested on standard input; report pids and exit statuses on standard output."""
    from everloop.providers.endpoints import known_at

    from ..support.unflushed import leave_out_flushes
    from . import company, family, goals, programs

    known = vars(programs) | vars(family) | vars(company) | vars(goals)
    leave_out_flushes()
    for name in LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    known_at("http://127.0.0.1")  # creates the table that each provider reads
    gc.collect()
    gc.freeze()  # otherwise, each child copies the pages that its garbage collector visits
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    running: dict[int, int] = {}
    buffer = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == woken:
                continue
            if not data:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                number, program, arguments = json.loads(line)
                pid = _fork(known[program], arguments)
                running[pid] = number
                _tell(number, "pid", pid)
        _reap(running)


def _fork(program: Callable[..., Awaitable[None] | int], arguments: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        made = program(**arguments)
        if isinstance(made, int):
            status = made
        else:
            asyncio.run(made)  # type: ignore[arg-type]
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _tell(running.pop(pid), "ended", os.waitstatus_to_exitcode(status))


def _tell(number: int, what: str, value: int) -> None:
    os.write(1, json.dumps([number, what, value]).encode() + b"\n")


if __name__ == "__main__":
    main()
