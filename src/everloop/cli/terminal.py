"""The chat at a terminal: the prompt stays at the bottom, and output scrolls above it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import get_app_or_none
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.utils import get_cwidth

from .. import events
from ..commands import command_of
from ..config import Config
from ..errors import EverloopError
from ..runtime.agent import AgentLoop
from ..runtime.chat_commands import STOPPED
from .common import (
    LEAVE,
    chat_of,
    left_behind,
    make_agent,
    seen_ending,
    show_messages,
    show_undelivered,
    with_leaving,
)
from .output import Output, Style
from .render import Renderer

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TICK = 0.1  # seconds between two frames of the spinner
TWICE = 2.0  # seconds within which a second Ctrl-C leaves
LIVE_ROWS = 12  # of an unfinished line that are shown
STYLES: dict[Style, str] = {"": "", "dim": "ansibrightblack", "bold": "bold", "good": "ansigreen", "bad": "ansired"}


async def terminal_chat(config: Config, key: str, greeting: str) -> int:
    """Chat until the user leaves. A turn that runs then is kept and continues at the next start."""
    async with make_agent(config) as agent:
        # A store that cannot be used is an error before the first prompt.
        others = await left_behind(agent.store, key)
        with patch_stdout(raw=True):
            await Chat(agent, key, "\n".join(filter(None, (greeting, others)))).run()
    return 0


class LiveOutput(Output):
    """Prints finished lines above the prompt; the unfinished line is part of the prompt until it ends."""

    def __init__(self) -> None:
        super().__init__(sys.__stdout__ or sys.stdout)
        self.unfinished: list[tuple[Style, str]] = []
        self._finished: list[str] = []
        self._more = asyncio.Event()

    def _write(self, text: str, style: Style) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            pieces = [self.painted(piece, look) for look, piece in self.unfinished]
            self._finished.append("".join([*pieces, self.painted(line, style), "\n"]))
            self.unfinished.clear()
            self._more.set()
        if rest and self.unfinished and self.unfinished[-1][0] == style:
            self.unfinished[-1] = (style, self.unfinished[-1][1] + rest)
        elif rest:
            self.unfinished.append((style, rest))

    async def keep_printing(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self.print()

    async def print(self) -> None:
        """Print all finished lines above the prompt. The terminal stays in raw mode meanwhile: in cooked mode, which
        `run_in_terminal` would use, a key pressed at that moment is lost (Ctrl-D) or becomes a signal."""
        app = get_app_or_none()
        if app is not None and app.is_running:
            await app.renderer.wait_for_cpr_responses()  # so that the prompt's position is known when it is erased
        text, self._finished = "".join(self._finished), []
        if not text:
            return
        if app is not None and app.is_running:
            app.renderer.erase()
            app.invalidate()
        self._stream.write(text)
        self._stream.flush()


class Chat:
    """One user in one session."""

    def __init__(self, agent: AgentLoop, key: str, greeting: str) -> None:
        self._agent = agent
        self._key = key
        self._output = LiveOutput()
        self._view = Renderer(self._output, live=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = 0  # messages without an answer
        self._left_at = 0.0
        self._told_to_leave = False
        self._session: PromptSession[str] = PromptSession(
            self._message, key_bindings=self._keys(), erase_when_done=True
        )
        self._output.line(greeting, "dim")

    async def run(self) -> None:
        self._agent.watch(self._key, self._see)
        self._start(self._resume())
        await show_undelivered(self._agent, self._key, self._output)
        self._agent.serve_cron()
        messages = show_messages(self._agent.bus, self._output, self._key)
        helpers = [asyncio.create_task(work) for work in (self._output.keep_printing(), self._tick(), messages)]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):  # so that the terminal is restored
            loop.add_signal_handler(number, self._leave)
        try:
            with self._session.input.raw_mode():  # also between two prompts, so that no key is lost
                while not self._told_to_leave and await self._next_line():
                    pass
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            if self._view.busy_since is not None:
                self._output.line("The turn is kept and goes on when you come back.", "dim")
            self._output.fresh()
            await self._output.print()

    # ------------------------------------------------------------------------------------------ input

    async def _next_line(self) -> bool:
        """Read one line; return False when the user leaves."""
        try:
            line = (await self._session.prompt_async()).strip()
        except EOFError:
            return False
        except KeyboardInterrupt:
            if time.monotonic() - self._left_at < TWICE:
                return False
            self._left_at = time.monotonic()
            self._output.line("Ctrl-C again, or Ctrl-D, leaves.", "dim")
            return True
        if line in LEAVE:
            return False
        if line:
            self._output.line(f"> {line}", "bold")
            self._start(self._say(line))
        return True

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            """Stop the turn; without one clear the line; on an empty line leave."""
            if self._view.busy_since is not None or self._asked:
                self._start(self._say("/stop"))
            elif event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        return keys

    def _leave(self) -> None:
        """Handle a signal, which may come between two prompts, after the key that ends one, or twice."""
        self._told_to_leave = True
        app = self._session.app
        if app.is_running and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)

    # ------------------------------------------------------------------------------------------ the agent

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # a failing store, for example
            self._output.line(f"everloop: {error}", "bad")

    async def _resume(self) -> None:
        """Resume the turn that an earlier process left, and repeat its open question."""
        await self._agent.resume(self._key)
        if not self._view.asked and (question := await self._agent.question(self._key)):
            self._output.line(question, "bold")

    async def _say(self, line: str) -> None:
        self._asked += 1
        try:
            channel, chat_id = chat_of(self._key)
            with seen_ending(self._agent, self._key) as seen:
                text = await self._agent.process_direct(line, self._key, channel, chat_id, attended=True)
        except EverloopError as error:
            self._output.line(f"everloop: {error}", "bad")
            return
        finally:
            self._asked -= 1
        if text == STOPPED:
            return  # the turn's end reports it
        if text not in seen:  # a command, or a turn in another process
            self._output.line(with_leaving(line, text), "dim" if command_of(line) else "")
            await show_undelivered(self._agent, self._key, self._output, shown=text)

    def _see(self, event: events.Event) -> None:
        self._view(event)
        self._redraw()

    # ------------------------------------------------------------------------------------------ the screen

    def _redraw(self) -> None:
        self._session.app.invalidate()

    async def _tick(self) -> None:
        """Turn the spinner while something runs."""
        while True:
            await asyncio.sleep(TICK)
            if self._asked or self._view.busy_since is not None:
                self._redraw()

    def _message(self) -> StyleAndTextTuples:
        """The text at the bottom: the unfinished line, the running calls, and the prompt."""
        look = STYLES if self._output.colour else dict.fromkeys(STYLES, "")
        parts: StyleAndTextTuples = []
        width = self._session.app.output.get_size().columns
        for row in wrapped(self._output.unfinished, width, LIVE_ROWS):
            parts += [*((look[style], text) for style, text in row), ("", "\n")]
        now = time.monotonic()
        picture = SPINNER[int(now / TICK) % len(SPINNER)]
        for call in self._view.running.values():
            parts.append((look["dim"], f"{picture} {call.text}  {now - call.since:.1f} s"[: width - 1] + "\n"))
        if self._view.busy_since is not None and not self._view.running:
            doing = getattr(self._agent.provider, "doing", "")  # any object with `chat` is a provider
            what = f"{picture} {f'{doing} ' if doing else ''}{now - self._view.busy_since:.1f} s"
            parts.append((look["dim"], f"{what} · /stop or Ctrl-C stops\n"))
        return [*parts, (look["bold"], "> ")]


def wrapped(pieces: list[tuple[Style, str]], width: int, most: int) -> list[list[tuple[Style, str]]]:
    """The last rows of a line, wrapped to the width of the terminal."""
    rows: list[list[tuple[Style, str]]] = []
    room = 0
    step = width * most
    for style, text in pieces:
        # A redraw costs no more than a screenful, however long the line is.
        start = max(0, len(text) // step - 1) * step
        for character in text[start:].expandtabs(4):
            size = get_cwidth(character)
            if size > room or not rows:
                rows.append([])
                room = width
            rows[-1].append((style, character))
            room -= size
    return rows[-most:]
