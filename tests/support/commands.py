"""The real `everloop` as a process: over pipes, and at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import tty
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pyte

from everloop.testing.openai_server import FakeOpenAI
from tests.support.waiting import until as until

from . import warm

FRESH = COMMAND = (sys.executable, "-m", "everloop")
GREETING = "shows the commands"  # its end
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


@dataclass
class Done:
    """A process that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def environment(server: FakeOpenAI | None = None, **settings: str) -> dict[str, str]:
    """The test's own environment, with the fake as the endpoint."""
    found = {**os.environ, "EVERLOOP_MODEL": "scripted", **settings}
    if server is not None:
        found["EVERLOOP_BASE_URL"] = server.base_url
    return {name: value for name, value in found.items() if value}


async def start(*arguments: str, env: dict[str, str], stdin: int | None = asyncio.subprocess.PIPE) -> Any:
    pipe = asyncio.subprocess.PIPE
    if COMMAND == FRESH and warm.can_fork(env):
        return await warm.fork(*arguments, env=env, stdin=stdin, stdout=pipe, stderr=pipe)
    return await asyncio.create_subprocess_exec(*COMMAND, *arguments, env=env, stdin=stdin, stdout=pipe, stderr=pipe)


async def everloop(*arguments: str, server: FakeOpenAI | None = None, stdin: bytes = b"", **settings: str) -> Done:
    """Run a command to its end."""
    process = await start(*arguments, env=environment(server, **settings))
    return await finished(process, stdin)


async def finished(process: Any, stdin: bytes = b"") -> Done:
    try:
        async with asyncio.timeout(40):
            out, err = await process.communicate(stdin if process.stdin is not None else None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    done = Done(process.returncode, out.decode(), err.decode())
    assert "Traceback" not in done.err, done.err
    return done


class Terminal:
    """What a person at a terminal sees and types."""

    def __init__(self, process: Any, descriptor: int, columns: int, rows: int, by_lines: bool = False) -> None:
        self.process = process
        self._by_lines = by_lines  # the program leaves line editing to the terminal
        self.columns = columns
        self.raw = ""
        self._descriptor = descriptor
        self._unread = b""
        self._closed = False  # of the other side
        self._screen = pyte.Screen(columns, rows)
        self._drawing = pyte.Stream(self._screen)
        self._drawn = 0
        self._positions = 0  # queries for the cursor position that were answered
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    @property
    def text(self) -> str:
        """All output, without escape sequences."""
        return ESCAPES.sub("", self.raw)

    @property
    def lines(self) -> list[str]:
        """The screen as a terminal draws it, without the empty lines at its end."""
        self._draw()
        shown = [line.rstrip() for line in self._screen.display]
        return shown[: max((number for number, line in enumerate(shown, 1) if line), default=0)]

    def look_of(self, text: str) -> Any:
        """Return the first character of a text on the screen: a pyte character with `fg`, `bold` and so on."""
        self._draw()
        for number, line in enumerate(self._screen.display):
            if (place := line.find(text)) >= 0:
                return self._screen.buffer[number][place]
        raise AssertionError(f"{text!r} is not on the screen:\n" + "\n".join(self.lines))

    def character(self, row: int, column: int) -> Any:
        """Return the character at a position of the screen, and how it looks."""
        self._draw()
        return self._screen.buffer[row][column]

    def answer_positions(self) -> None:
        """Answer all new queries of the program for the cursor position."""
        self._draw()
        asked = self.raw.count("\x1b[6n")
        for _ in range(asked - self._positions):
            self.type(f"\x1b[{self._screen.cursor.y + 1};{self._screen.cursor.x + 1}R")
        self._positions = asked

    def _draw(self) -> None:
        new, self._drawn = self.raw[self._drawn :], len(self.raw)
        self._drawing.feed(new)

    async def shows(self, text: str) -> list[str]:
        """Wait until the screen shows a text, and return its lines."""
        try:
            await until(lambda: text in "\n".join(self.lines))
        except TimeoutError:
            raise AssertionError(f"{text!r} never came on the screen:\n" + "\n".join(self.lines)) from None
        return self.lines

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    @property
    def takes_keys(self) -> bool:
        """Whether a key goes to the program unchanged. In line mode, the terminal itself handles some keys."""
        return not termios.tcgetattr(self._descriptor)[3] & (termios.ICANON | termios.ISIG)

    async def ready(self) -> list[str]:
        """Wait for the prompt of the chat, and return the lines above it.

        The greeting appears before it, and a key typed then does not reach the program: the terminal would turn Enter
        into a line feed.
        """
        await self.sees(GREETING)
        await until(lambda: self._by_lines or (self.takes_keys and ">" in self.text))
        return self.lines

    async def sees(self, text: str, *, after: int = 0) -> int:
        """Wait for a text; return where it ends."""
        try:
            await until(lambda: self.text.find(text, after) >= 0)
        except TimeoutError:
            raise AssertionError(f"never saw {text!r} in {self.text[after:]!r}") from None
        return self.text.find(text, after) + len(text)

    async def ends(self) -> int:
        async with asyncio.timeout(30):
            status: int = await self.process.wait()
        await until(lambda: self._closed)  # its last output has been read by then
        assert "Traceback" not in self.text
        return status

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:
            data = b""
        if not data:
            self._closed = True
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._unread += data
        with contextlib.suppress(UnicodeDecodeError):
            self.raw += self._unread.decode()
            self._unread = b""

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


@contextlib.asynccontextmanager
async def terminal(
    *arguments: str,
    server: FakeOpenAI | None = None,
    columns: int = 100,
    rows: int = 40,
    raw: bool = False,
    **settings: str,
) -> AsyncIterator[Terminal]:
    """Everloop at a pseudo-terminal; with `raw`, an earlier program has left that in raw mode."""
    ours, theirs = pty.openpty()
    if raw:
        tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = environment(server, **{"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "", **settings})

    def own_terminal() -> None:  # so that it gets Ctrl-C as a signal if it does not read it as a key
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process: Any
    if COMMAND == FRESH and warm.can_fork(env):
        process = await warm.fork(*arguments, env=env, stdin=theirs, stdout=theirs, stderr=theirs, terminal=True)
    else:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, env=env, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own_terminal
        )
    os.close(theirs)
    seen = Terminal(process, ours, columns, rows, env.get("TERM") == "dumb")
    try:
        yield seen
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        seen.close()
