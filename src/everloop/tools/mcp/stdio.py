"""MCP servers that are programs: started, spoken to line by line over their standard input and output, and stopped.

The SDK's own transport reads lines of any length and logs each one that it cannot parse; this one has limits, and knows
why a program ended.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from ...config import McpServer
from ...text import one_line
from ...threads import in_thread
from .limits import MAX_MESSAGE, Unreachable

# consecutive lines that are not messages; a few are tolerated, since many programs print a greeting at startup
MAX_NOISE = 100
MAX_RATE = 2_000  # messages per second, over WINDOW seconds
WINDOW = 5.0
STOP_SECONDS = 1.0  # between closing the standard input, SIGTERM and SIGKILL
DRAIN_SECONDS = 0.5  # for the last output of a program that has ended
STDERR_BYTES = 4_000  # bytes of standard error that are kept
_CHUNK = 65_536
# Variables that a program may need to run, and that cannot contain a key of the runtime.
_INHERITED = {
    "HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ",
    "USER", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
}  # fmt: skip
# Runs in a fresh interpreter before the program: the kernel kills the program when the runtime dies, even by SIGKILL.
# The parent may have died before that was set up. Python ignores two signals, which the program would inherit.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execv(sys.argv[2], sys.argv[3:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class Program:
    """One run of a server's program. `ended` is set when it will produce nothing more, or when it is to end."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.ended = asyncio.Event()
        self.problem = ""  # its violation, if that is why it was stopped
        self._noise = b""  # the first line that was not a message
        self._noisy = 0  # number of consecutive such lines
        self._errors = b""

    @asynccontextmanager
    async def streams(
        self,
    ) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[Any]]]:
        """Yield the streams of messages from and to the program, which runs for as long as the context is open."""
        await self._start()
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        reading = asyncio.create_task(self._read(incoming))
        tasks = [reading, asyncio.create_task(self._write(outgoing)), asyncio.create_task(self._listen())]
        tasks.append(asyncio.create_task(self._watch(reading)))
        try:
            yield read, write
        finally:
            await self._stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (incoming, read, write, outgoing):
                stream.close()

    def describe_end(self) -> str:
        """Describe why the program ended: its violation or exit status, and its last output."""
        code = self._process.returncode
        if self.problem or not code:
            return (self.problem or "ended") + self.details()
        return (f"ended with status {code}" if code > 0 else f"was ended by signal {-code}") + self.details()

    def details(self) -> str:
        """Return the program's output in which a person would look for the reason."""
        said = ""
        if self._noise and not self.problem:
            said = f"; its standard output begins with {one_line(self._noise, 200)!r}"
        if words := one_line(b"\n".join(self._errors.strip().splitlines()[-3:]), 600):
            said += f"; its last words: {words}"
        return said

    async def _start(self) -> None:
        server = self.server
        environment = inherited(os.environ) | server.env
        found = await in_thread(shutil.which, server.command, path=environment.get("PATH"))
        if found is None:
            raise Unreachable(f"the program {server.command!r} was not found: install it or give its full path")
        argv = [found, *server.args]
        if sys.platform == "linux":
            argv = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), found, server.command, *server.args]
        # PR_SET_PDEATHSIG refers to the thread that started the program: this thread lives as long as its loop.
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: _Watched(loop),
                *argv,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise Unreachable(f"the program {server.command!r} could not be started: {reason}") from None
        self._transport, self._exited = transport, protocol.exited
        self._process = Process(transport, protocol, loop)

    async def _read(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        count, until = 0, 0.0
        try:
            async for line in self._lines():
                message = self._parse(line)
                if message is None:
                    continue
                count += 1
                if (now := asyncio.get_running_loop().time()) > until:
                    count, until = 0, now + WINDOW
                elif count > MAX_RATE * WINDOW:
                    raise _ProtocolViolation(f"floods: it sent more than {MAX_RATE} messages a second")
                await incoming.send(message)
        except _ProtocolViolation as error:
            self.problem = str(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the session is closed
        finally:
            incoming.close()
            self.ended.set()

    async def _lines(self) -> AsyncIterator[bytes]:
        stdout = self._process.stdout
        assert stdout is not None
        rest = bytearray()
        while chunk := await stdout.read(_CHUNK):
            first, *others = chunk.split(b"\n")
            rest += first
            for other in others:
                yield bytes(rest)
                rest = bytearray(other)
            if len(rest) > MAX_MESSAGE:
                raise _ProtocolViolation(f"sent a message of more than {MAX_MESSAGE >> 20} MB")
        yield bytes(rest)

    def _parse(self, line: bytes) -> SessionMessage | None:
        if not line.strip():
            return None
        try:
            message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            self._noise = self._noise or line[:1000]
            self._noisy += 1
            if self._noisy > MAX_NOISE:
                shown = one_line(self._noise, 200)
                raise _ProtocolViolation(
                    f"writes something other than MCP messages to its standard output: {shown!r}"
                ) from None
            return None
        self._noisy, self._noise = 0, b""
        return message

    async def _write(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(ConnectionError, anyio.ClosedResourceError):
            async for message in outgoing:
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()
        self.ended.set()  # it no longer reads, or the session is closed

    async def _listen(self) -> None:
        """Keep the last output on standard error. A program that writes a lot is throttled."""
        stderr = self._process.stderr
        assert stderr is not None
        while chunk := await stderr.read(_CHUNK):
            self._errors = (self._errors + chunk)[-STDERR_BYTES:]
            if len(chunk) > STDERR_BYTES:
                await asyncio.sleep(0.01)

    async def _watch(self, reading: asyncio.Task[None]) -> None:
        """Wait for the end of the program, but not for children that hold its standard output open."""
        await self._exited.wait()
        await asyncio.wait([reading], timeout=DRAIN_SECONDS)
        reading.cancel()

    async def _stop(self) -> None:
        """Stop the program as the protocol prescribes, then by signals that it cannot ignore, with its children."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not await self._gone():
            self._signal(signal.SIGTERM)
            await self._gone()
        self._signal(signal.SIGKILL)  # also for children of a program that has ended
        await self._gone()
        self._transport.close()

    async def _gone(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._exited.wait()
        return self._exited.is_set()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class _ProtocolViolation(Exception):
    """A violation by the program that ends the connection."""


class _Watched(SubprocessStreamProtocol):
    """Reports the end of the process; asyncio's own wait() also waits for its children to close the pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_CHUNK, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the runtime's environment that a server's program gets."""
    return {
        name: value
        for name, value in environment.items()
        if (name in _INHERITED or name.startswith("LC_")) and not value.startswith("()")
    }
