"""A running command: start it in its sandbox, capture its output within limits, and end it with all its processes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from ...sandbox.bubblewrap import misplaced
from ...sandbox.launch import Launch
from ...sandbox.resources import memory_in_use
from ...text import clean
from ...threads import in_thread
from ..base import ToolError
from ..registry import output_place

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
# For output that is still in the pipe when the command ends: a slow disk may delay it. On Linux no process is left that
# could hold the pipe open; elsewhere one may be.
_DRAIN_SECONDS = 10.0 if sys.platform == "linux" else 0.5
_END_SECONDS = 10.0
_HOLD_SECONDS = 0.2
_CHUNK = 256 * 1024
_MEMORY_SECONDS = 0.2  # between two measurements of a command's memory
_PAUSE = 0.002  # do not spend a whole CPU on output that is discarded

Listener = Callable[[bytes], Awaitable[bool]]  # consumes output; returns True if reading may slow down


class Process:
    """One running command. Call `end` in any case after `start`, whatever happens."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.ReadTransport | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self.over_memory = ""  # its memory use, if it was stopped for exceeding the limit

    @property
    def returncode(self) -> int | None:
        """The exit status; 128 + the signal number if it was killed; None while it runs."""
        code = self._process.returncode if self._process is not None else None
        return 128 - code if code is not None and code < 0 else code

    async def start(self, listener: Listener, *, stdin: bool = False) -> None:
        """Start the command. Standard input is empty unless `stdin`; both output streams go to the listener."""
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        reader = asyncio.StreamReader(_CHUNK)
        try:
            self._output, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
            )
            self._starting = asyncio.create_task(self._spawn(writing, stdin))
        except BaseException:
            os.close(writing)
            raise
        try:
            # If cancelled here, the process may be running already: `end` waits for it and kills it.
            self._process = await asyncio.shield(self._starting)
        except OSError as error:
            await self.end()
            if error.errno == errno.E2BIG:
                raise ToolError("The command is too long: write it to a file and run that.") from None
            raise ToolError(f"The command could not be started: {error.strerror or error}.") from None
        self._launch.started()
        self._reading = asyncio.create_task(self._listen(reader, listener))
        if self._launch.gate is not None:
            await self._open_gate()
        if self._launch.memory is not None:
            self._measuring = asyncio.create_task(self._measure(self._launch.memory))

    async def _measure(self, limit: int) -> None:
        """Stop the command when its processes use more memory in total than allowed."""
        assert self._process is not None
        pid, namespaced = self._process.pid, self._launch.backend == "bubblewrap"
        while self._process.returncode is None:
            await asyncio.sleep(_MEMORY_SECONDS)
            used, count = await in_thread(memory_in_use, pid, limit, namespaced=namespaced)
            if used > limit and self._process.returncode is None:
                self.over_memory = f"{used >> 20} MB in {count} processes"
                await in_thread(self._kill)
                return

    async def _spawn(self, writing: int, stdin: bool) -> asyncio.subprocess.Process:
        try:
            # On the event loop's thread: bwrap dies with the thread that started it.
            return await asyncio.create_subprocess_exec(
                *self._launch.arguments,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                env=self._launch.environment,
                cwd=self._launch.folder,
                pass_fds=self._launch.passed,
                start_new_session=True,
            )
        finally:
            os.close(writing)

    async def wait(self) -> None:
        """Wait for the end of the command and its output. A process that keeps the pipe open does not delay this."""
        assert self._process is not None
        await self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_DRAIN_SECONDS)

    async def write(self, data: bytes) -> None:
        """Write to the standard input; empty data closes it. Raises ToolError if it is closed."""
        stdin = self._process.stdin if self._process is not None else None
        if stdin is None or stdin.is_closing():
            raise ToolError("Its standard input is already closed.")
        try:
            if data:
                stdin.write(data)
                await stdin.drain()
            else:
                stdin.close()
        except (ConnectionError, RuntimeError):
            raise ToolError("It has ended or closed its standard input: poll it for its status.") from None

    async def end(self, grace: float | None = None) -> None:
        """Terminate the command and all its processes, first with SIGTERM. A cancellation does not interrupt this."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(GRACE_SECONDS if grace is None else grace))
        await asyncio.shield(self._ending)

    async def _end(self, grace: float) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])
            if not self._starting.cancelled() and self._starting.exception() is None:
                self._process = self._starting.result()
        if self._process is not None:
            if self._process.returncode is None and await in_thread(self._ask):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace)
            await in_thread(self._kill)
            try:
                await asyncio.wait_for(self._process.wait(), _END_SECONDS)
            except TimeoutError:
                self._process.kill()
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._measuring is not None:
            self._measuring.cancel()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_DRAIN_SECONDS)
            self._reading.cancel()
        if self._output is not None:
            self._output.close()
        self._launch.close()
        await in_thread(self._launch.clean_up)

    def _ask(self) -> bool:
        """Send SIGTERM to the command; return whether it could be delivered."""
        assert self._process is not None
        group = self._process.pid
        try:
            if self._launch.control is not None:
                os.write(self._launch.control, b"T")
                return True
            if self._launch.backend == "bubblewrap":  # the sandbox's first process leads a group, once it is set up
                (group,) = _children(self._process.pid)
                if os.getpgid(group) != group or not _children(group):
                    return False  # the command has not started, and bwrap ignores the signal
            os.killpg(group, signal.SIGTERM)
        except (OSError, ValueError):
            return False
        return True

    def _kill(self) -> None:
        """Kill the command at once. The launcher does it itself; bwrap's PID namespace dies with bwrap."""
        assert self._process is not None
        if self._launch.control is not None:
            self._launch.close()
        elif self._process.returncode is None:
            _kill_with_children(self._process.pid)
        if self._launch.backend == "off" and self._launch.control is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _open_gate(self) -> None:
        """Let the command start if the mounts of its sandbox are correct."""
        problem = await in_thread(self._look)
        if problem is not None:
            await self.end(0)
            raise ToolError(f"The sandbox was not set up correctly ({problem}), so nothing was run. Try again.")
        gate, self._launch.gate = self._launch.gate, None
        if gate is not None:
            os.close(gate)

    def _look(self) -> str | None:
        """Return what is wrong with the waiting sandbox, or None."""
        assert self._process is not None
        assert self._launch.ready is not None
        assert self._launch.world is not None
        if not os.read(self._launch.ready, 1):
            return None  # bwrap has failed; its output says why
        try:
            (child,) = _children(self._process.pid)
            with open(f"/proc/{child}/mountinfo") as file:
                path = misplaced(file.read(), self._launch.world)
        except (OSError, ValueError):
            return "it ended"
        return None if path is None else f"{path} was changed meanwhile"

    async def _listen(self, reader: asyncio.StreamReader, listener: Listener) -> None:
        while data := await reader.read(_CHUNK):
            if await listener(data):
                await asyncio.sleep(_PAUSE)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _kill_with_children(pid: int) -> None:
    """Kill bwrap and its children. A sandbox dies with bwrap, but not while it is still being set up, so bwrap is
    stopped first and its children are killed before it."""
    with suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + _HOLD_SECONDS
        while _state(pid) not in "TtZX" and time.monotonic() < until:
            time.sleep(0.0005)
        for child in _children(pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """Return the state letter of a process."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][:1]


_WRITE_AT = 256 * 1024  # bytes that are buffered for one write
_PROGRESS_SECONDS = 0.25
_PROGRESS_LINES = 400
_PROGRESS_WIDTH = 300
# Escape sequences, and control characters other than tabs and newlines.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f]"
)


def readable(data: bytes) -> str:
    """Convert output to text: without control sequences, and without what carriage returns overwrote."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return clean(_CONTROL.sub("", text))


class Capture:
    """The head and tail of an output; a long one is also saved to a file, up to a limit."""

    def __init__(self, limit: int, saved_limit: int, folder: Path | None, name: str) -> None:
        self.total = 0
        self.place: Path | None = None
        self._limit = limit
        self._room = 2 * limit  # bytes at each end: more than is shown, as characters may need several
        self._saved_limit = saved_limit if folder is not None else 0
        self._folder = folder
        self._name = name
        self._head = bytearray()
        self._tail = bytearray()
        self._waiting = bytearray()  # buffered for the file
        self._saved = 0
        self._problem = ""

    async def feed(self, data: bytes) -> None:
        self.total += len(data)
        taken = max(self._room - len(self._head), 0)
        self._head += data[:taken]
        self._tail += data[taken:]
        if len(self._tail) > 4 * self._room:
            del self._tail[: -self._room]
        left = self._saved_limit - self._saved - len(self._waiting)
        self._waiting += data[: max(left, 0)]
        if len(self._waiting) >= _WRITE_AT:
            await self.save()

    @property
    def full(self) -> bool:
        """Return whether both limits are reached, so that only the tail still changes."""
        return self.total > self._saved_limit and self.total > self._room

    async def save(self) -> None:
        """Write the buffer to the file, once the output is longer than a result can show."""
        if self._waiting and self.total > self._limit and not self._problem:
            data, self._waiting = bytes(self._waiting), bytearray()
            self._saved += len(data)
            try:
                await in_thread(self._append, data)
            except OSError as error:
                self._problem = error.strerror or str(error)

    def _append(self, data: bytes) -> None:
        assert self._folder is not None
        flags = os.O_WRONLY | os.O_APPEND
        if self.place is None:
            self.place = output_place(self._folder, self._name)
            flags |= os.O_CREAT | os.O_TRUNC
        with open(os.open(self.place, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(data.replace(b"\0", b"?"))  # with a zero byte, read_file would take it for binary

    def text(self) -> str:
        """Return the whole output, or its head and tail with a note about the omitted middle."""
        if self.total <= len(self._head) + len(self._tail):
            whole = readable(bytes(self._head + self._tail))
            if len(whole) <= self._limit:
                return whole
            head = tail = whole
        else:
            head, tail = readable(bytes(self._head)), readable(bytes(self._tail[-self._room :]))
        half = self._limit // 2
        return f"{head[:half]}\n[… {self._note()} …]\n{tail[-half:]}"

    def _note(self) -> str:
        note = f"the middle is omitted, {self.total} bytes of output in total"
        if self._problem:
            return f"{note}, which could not be saved: {self._problem}"
        if self.place is None:
            return note
        part = "all" if self._saved >= self.total else f"the first {self._saved}"
        return f"{note}; read_file shows {part} of them: {self.place}"


class Fresh:
    """The output since the last poll; of a long one, the tail."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self._dropped = 0
        self.more = asyncio.Event()

    def feed(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._limit:
            self._dropped += len(self._data) - self._limit
            del self._data[: -self._limit]
        self.more.set()

    def take(self) -> str:
        data, self._data = bytes(self._data[-self._limit :]), bytearray()
        dropped, self._dropped = self._dropped, 0
        self.more.clear()
        note = f"[… {dropped} earlier bytes are omitted …]\n" if dropped else ""
        return note + readable(data)


class Ticker:
    """Report the last line of output as progress, at most a few times a second."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._line = b""
        self._left = _PROGRESS_LINES
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, data: bytes) -> None:
        end = data.rfind(b"\n")
        if end < 0 or not self._left:
            return
        begin = data.rfind(b"\n", 0, end) + 1
        if line := data[begin:end].strip():
            self._line = line[: 4 * _PROGRESS_WIDTH]
            if self._timer is None:
                wait = self._next - time.monotonic()
                if wait <= 0:
                    self._show()
                else:
                    self._timer = asyncio.get_running_loop().call_later(wait, self._show)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _show(self) -> None:
        self._timer = None
        self._left -= 1
        self._next = time.monotonic() + _PROGRESS_SECONDS
        self._progress(readable(self._line)[:_PROGRESS_WIDTH])
