"""Child processes for work that could hang or exhaust the machine: hostile patterns and documents, huge folders.

They get an open file or folder, a time and a size, an empty environment, and are killed when any is used up or the
turn is stopped.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from ..threads import in_thread

P = ParamSpec("P")
T = TypeVar("T")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
_MAX_ERRORS = 4_096
_NICENESS = 5  # a search may use a whole core, but must not slow down the event loop


class Ended(msgspec.Struct):
    """The output of a child process, and how it ended."""

    output: bytes
    errors: bytes
    status: int
    cut: bool = False  # the output exceeded its limit
    late: bool = False  # it exceeded its time limit


class Child:
    """Runs at most one process at a time, from a thread; it can be stopped from any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Kill the running process, and start no more."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str = "/",
        stdin: int | None = None,
        most: int,
        seconds: float,
        confine: Callable[[], None] | None = None,
    ) -> Ended:
        """Run a command in a folder, or with an open file as its input, until it ends or exceeds a limit.

        `confine` is called in a thread of its own that starts the process: what a thread takes from itself, its
        children lack as well.
        """
        if stdin is None:
            with open(os.devnull, "rb") as nothing:  # read-only: a confined process may not open it for writing
                return self.run(command, cwd=cwd, stdin=nothing.fileno(), most=most, seconds=seconds, confine=confine)
        options: dict[str, Any] = {
            "cwd": cwd,
            "stdin": stdin,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "env": _ENVIRONMENT,
            "start_new_session": True,  # a terminal interrupt is for the parent only
        }
        with _started(command, options, confine) as process:
            with self._lock:
                self._process = process
                if self._stopped:
                    process.kill()
            try:
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
                return _listen(process, most, time.monotonic() + seconds)
            finally:
                process.kill()
                process.wait()
                with self._lock:
                    self._process = None


async def beside_child(function: Callable[Concatenate[Child, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a thread with a child for it to use; cancellation kills the child."""
    child = Child()
    try:
        return await in_thread(function, child, *args, **kwargs)
    finally:
        child.stop()


def _started(
    command: Sequence[str], options: dict[str, Any], confine: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    if confine is None:
        return subprocess.Popen(command, **options)
    started: list[subprocess.Popen[bytes]] = []
    failed: list[BaseException] = []

    def start() -> None:
        try:
            confine()
            started.append(subprocess.Popen(command, **options))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=start, name="everloop-confined", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return started[0]


def _listen(process: subprocess.Popen[bytes], most: int, deadline: float) -> Ended:
    """Read the output of a child until it ends, exceeds its output limit, or exceeds its time limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    ended = Ended(b"", b"", 0)
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        while selector.get_map() and not ended.cut and not ended.late:
            for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                data = os.read(key.fd, 65_536)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            del errors[_MAX_ERRORS:]
            ended.cut = len(output) > most
            ended.late = time.monotonic() > deadline
    try:
        ended.status = process.wait(0 if ended.cut else max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        ended.late = not ended.cut
        process.kill()
        ended.status = process.wait()
    if ended.status in (-signal.SIGXCPU, -signal.SIGKILL):  # its CPU limit came before our time limit
        ended.late = not ended.cut
    ended.output, ended.errors = bytes(output[:most]), bytes(errors)
    return ended
