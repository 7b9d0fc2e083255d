"""A warm process that forks `everloop` commands for the tests.

A fresh interpreter spends a third of a second on imports before a command does anything; a fork of one that has done
them takes a few milliseconds. Each fork is a process with its own environment, folder, files, signals and exit status.
Tests of the start itself run the interpreter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import traceback
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from typing import Any, NoReturn

from .places import ROOT

AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")  # read when an interpreter starts, and never again
MAX_REQUEST = 200_000  # bytes per request
USED = (
    "everloop.providers.openai",
    "everloop.providers.retry",
    "everloop.providers.text_calls",
    "everloop.runtime.agent",
    "everloop.server.app",
    "everloop.store.postgres.store",
    "everloop.store.sqlite",
    "yaml",
)


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether a command's environment contains nothing that must be set before its interpreter starts."""
    return sys.platform == "linux" and _of_the_start(env) == _of_the_start(os.environ)


def _of_the_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START)}


async def fork(
    *arguments: str,
    env: Mapping[str, str],
    stdin: int | None,
    stdout: int | None,
    stderr: int | None,
    terminal: bool = False,
) -> Process:
    """Start `everloop` as a process; with `terminal`, its standard input is its controlling terminal."""
    ours: list[int | None] = []
    theirs: list[int] = []
    for number, given in enumerate((stdin, stdout, stderr)):
        if given == PIPE:
            reading, writing = os.pipe()
            ours.append(reading if number else writing)
            theirs.append(writing if number else reading)
        else:
            ours.append(None)
            theirs.append(os.open(os.devnull, os.O_RDWR) if given == DEVNULL else os.dup(given or number))
    request = {"arguments": arguments, "env": dict(env), "cwd": os.getcwd(), "terminal": terminal}
    try:
        pid = _ask(request, theirs)
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    return await Process(pid).connected(*ours)


class Process:
    """A forked command, with the part of asyncio's `Process` that the tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._status: int | None = None
        self._end = os.pidfd_open(pid)  # readable once the process has ended
        self._loop.add_reader(self._end, self._look)

    async def connected(self, stdin: int | None, stdout: int | None, stderr: int | None) -> Process:
        if stdin is not None:
            transport, protocol = await self._loop.connect_write_pipe(
                lambda: asyncio.streams.FlowControlMixin(self._loop), os.fdopen(stdin, "wb", 0)
            )
            self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
        self.stdout, self.stderr = self._reader(stdout), self._reader(stderr)
        return self

    def _reader(self, descriptor: int | None) -> asyncio.StreamReader | None:
        if descriptor is None:
            return None
        reader = asyncio.StreamReader(loop=self._loop)

        def read() -> None:
            if data := os.read(descriptor, 65536):
                reader.feed_data(data)
                return
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            reader.feed_eof()

        self._loop.add_reader(descriptor, read)
        return reader

    @property
    def returncode(self) -> int | None:
        self._look()
        return self._status

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    async def communicate(self, input: bytes | None = None) -> tuple[bytes, bytes]:
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.stdin.write(input or b"")
                await self.stdin.drain()
            self.stdin.close()
        out, err = await asyncio.gather(*(one.read() if one else _nothing() for one in (self.stdout, self.stderr)))
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self) -> None:
        if self._status is None and select.select([self._end], [], [], 0)[0]:
            self._status = os.waitstatus_to_exitcode(_ask({"ended": self.pid}))
            self._loop.remove_reader(self._end)
            os.close(self._end)
            if self.stdin is not None:
                self.stdin.close()
            self._ended.set()


async def _nothing() -> bytes:
    return b""


@functools.cache
def _warm() -> socket.socket:
    """The connection of this test process to its warm process, which ends when the connection is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours


def _ask(request: dict[str, Any], descriptors: list[int] | None = None) -> int:
    connection = _warm()
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors or [])
    return int(connection.recv(100))


# ---------------------------------------------------------------------------------------------- the warm process


def main() -> int:
    """Fork the requested commands until the connection is closed; in the fork, become the command."""
    from .unflushed import leave_out_flushes

    connection = socket.socket(fileno=int(sys.argv[1]))
    commands = [f"everloop.cli.{found.name}" for found in pkgutil.iter_modules([str(ROOT / "src/everloop/cli")])]
    for name in (*commands, *USED):
        with contextlib.suppress(ImportError):  # an optimisation only
            importlib.import_module(name)
    leave_out_flushes()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
        if not data:
            return 0
        request = json.loads(data)
        if "ended" in request:
            connection.send(str(os.waitpid(request["ended"], 0)[1]).encode())
            continue
        if (pid := os.fork()) == 0:
            connection.close()
            _become(descriptors, **request)
            _end(_run())
        connection.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _become(descriptors: list[int], arguments: list[str], env: dict[str, str], cwd: str, terminal: bool) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for name, number, mode, buffering in (("stdin", 0, "r", -1), ("stdout", 1, "w", -1), ("stderr", 2, "w", 1)):
        old = getattr(sys, name)  # it has the settings, but not for its current connections
        new = open(number, mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.argv = [str(ROOT / "src/everloop/__main__.py"), *arguments]
    sys.path.remove(str(ROOT))


def _run() -> int:
    from everloop.cli.main import main as command

    try:
        return command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1


def _end(status: int) -> NoReturn:
    """End like an interpreter, but without tearing down all modules: that would copy the shared memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
