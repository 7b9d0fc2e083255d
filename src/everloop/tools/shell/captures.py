"""Capture the output of a command within limits, while it runs."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from ...text import clean
from ...threads import in_thread
from ..registry import output_place

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
