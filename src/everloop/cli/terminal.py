"""The chat at a terminal: the prompt stays at the bottom, and output scrolls above it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.patch_stdout import patch_stdout

from .. import events
from ..commands import answer_of, command_of
from ..config import Config
from ..errors import EverloopError
from ..log import TurnEnded, UserSaid
from ..runtime.agent import AgentLoop
from ..runtime.chat_commands import STOPPED
from ..store.base import Busy
from ..text import clean, one_line
from ..threads import in_thread
from .cards import CardRenderer
from .common import (
    LEAVE,
    OWNER,
    chat_of,
    left_behind,
    make_agent,
    seen_ending,
    show_messages,
    show_undelivered,
)
from .live_output import STYLES, Background, LiveOutput
from .local_commands import help_text, local_command, unknown_command
from .prompt import ChatCompleter, WorkspaceFiles, attachments, chat_history, completes_while_typing, editing_keys

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TICK = 0.1  # seconds between two frames of the spinner
MIN_REDRAW = 0.03  # seconds between two redraws, however quickly words come
NO_QUERIES = "PROMPT_TOOLKIT_NO_CPR"  # set to 1 for a terminal that answers no queries
TWICE = 2.0  # seconds within which a second Ctrl-C leaves


async def terminal_chat(config: Config, key: str, greeting: str) -> int:
    """Chat until the user leaves. A turn that runs then is kept and continues at the next start."""
    async with make_agent(config) as agent:
        # A store that cannot be used is an error before the first prompt.
        others = await left_behind(agent.store, key)
        history = await in_thread(chat_history, config.home)
        with patch_stdout(raw=True):
            await Chat(agent, history, key, "\n".join(filter(None, (greeting, others)))).run()
    return 0


class BackgroundReply:
    """Takes the terminal's reply about its background colour out of what is typed."""

    QUERY = "\x1b]11;?\x1b\\"

    def __init__(self, parser: Vt100Parser, tell: Callable[[Background], None]) -> None:
        self._parser = parser
        self._tell = tell
        self._held = ""

    def feed(self, data: str) -> None:
        data, self._held = self._held + data, ""
        if found := _REPLY.search(data):
            red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
            self._tell("light" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "dark")
            data = data[: found.start()] + data[found.end() :]
        elif (start := data.find("\x1b]11;")) >= 0 and len(data) - start < 40:  # the rest is on its way
            data, self._held = data[:start], data[start:]
        self._parser.feed(data)

    def flush(self) -> None:
        self._parser.flush()


_REPLY = re.compile(r"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)(?:/[0-9a-fA-F]+)?(?:\x07|\x1b\\)")


class Chat:
    """One user in one session."""

    def __init__(self, agent: AgentLoop, history: History, key: str, greeting: str) -> None:
        self._agent = agent
        self._key = key
        self._output = LiveOutput(lambda: self._session.app)
        self._view = CardRenderer(self._output, agent.workspace)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = 0  # messages without an answer
        self._left_at = 0.0
        self._told_to_leave = False
        self._session: PromptSession[str] = PromptSession(
            self._message,
            key_bindings=merge_key_bindings([editing_keys(), self._keys()]),
            erase_when_done=True,
            multiline=True,
            prompt_continuation="  ",
            history=history,
            completer=ChatCompleter(WorkspaceFiles(agent.workspace), {}),
            complete_in_thread=True,
            complete_while_typing=completes_while_typing,
        )
        self._session.app.min_redraw_interval = MIN_REDRAW
        if self._output.colour and isinstance(self._session.input, Vt100Input) and os.environ.get(NO_QUERIES) != "1":
            parser = BackgroundReply(self._session.input.vt100_parser, self._output.set_background)
            self._session.input.vt100_parser = parser  # type: ignore[assignment]
            self._session.app.after_render += self._ask_background
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
            line = await self._session.prompt_async()
        except EOFError:
            return False
        except KeyboardInterrupt:
            if time.monotonic() - self._left_at < TWICE:
                return False
            self._left_at = time.monotonic()
            self._output.line("Ctrl-C again, or Ctrl-D, leaves.", "dim")
            return True
        if line.strip() in LEAVE:
            return False
        if line.strip():
            self._output.line(f"> {line.rstrip()}".replace("\n", "\n  "), "bold")
            self._take(line)
        return True

    def _take(self, line: str) -> None:
        """Act on a line: a command of the terminal or of the shell, an answer to a question, or a message."""
        if (local := local_command(line)) is not None:
            self._run_local(*local)
        elif line.startswith("!") and line[1:].strip():
            self._start(self._run_shell(line[1:].strip()))
        elif (refusal := unknown_command(line)) is not None:
            self._output.line(refusal, "bad")
        else:
            text = line.strip()
            if self._view.asked and command_of(text) is None and answer_of(text) is None:
                text = f"/deny {text}"  # the question is answered by a sentence: not so, but otherwise
            self._start(self._load())
            self._start(self._say(text))

    async def _run_shell(self, command: str) -> None:
        """Run a command of the user in the sandbox, and keep it and its output in the conversation."""
        self._asked += 1
        try:
            result = await self._agent.tools.execute("exec", {"command": command})
            self._view.show_command(command, result)
            text = f"I ran this command myself: {command}\nIt printed:\n{result}"
            said = UserSaid(clean(text), "user", untrusted=True)
            await self._agent.store.note(OWNER, self._key, [said, TurnEnded("answer")])
        except Busy:
            self._output.line("The agent is busy and does not see this output: run it again when it is done.", "dim")
        except EverloopError as error:
            self._output.line(f"everloop: {error}", "bad")
        finally:
            self._asked -= 1

    def _run_local(self, name: str, words: str) -> None:
        match name:
            case "show":
                self._show(words)

    def _show(self, words: str) -> None:
        """Show a tool call in full: the one with this number, or the latest."""
        number = words.lstrip("#")
        if number and not number.isdecimal():
            self._output.line(f"/show takes the number of a tool call, like /show 3, not {one_line(words, 40)}", "bad")
        elif not self._view.show(int(number) if number else None):
            what = f"no tool call #{number}" if number else "no tool call yet"
            self._output.line(f"There is {what}.", "dim")

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

        @keys.add("c-o")
        def _(event: KeyPressEvent) -> None:
            """Show the latest tool call in full."""
            self._show("")

        return keys

    def _ask_background(self, app: Application[str]) -> None:
        """Once the prompt is on the screen, ask the terminal for its background; the reply comes as if typed."""
        app.after_render -= self._ask_background
        app.output.write_raw(BackgroundReply.QUERY)
        app.output.flush()

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

    async def _load(self) -> None:
        """Load what renders the answer while the model works on it."""
        if self._output.colour:
            await self._output.load()
            self._redraw()

    async def _resume(self) -> None:
        """Resume the turn that an earlier process left, and repeat its open question."""
        await self._agent.resume(self._key)
        if not self._view.asked and (question := await self._agent.question(self._key)):
            self._view.ask(question)

    async def _say(self, line: str) -> None:
        self._asked += 1
        try:
            channel, chat_id = chat_of(self._key)
            files = await in_thread(attachments, line, self._agent.workspace) if "@" in line else []
            with seen_ending(self._agent, self._key) as seen:
                text = await self._agent.process_direct(line, self._key, channel, chat_id, media=files, attended=True)
        except EverloopError as error:
            self._output.line(f"everloop: {error}", "bad")
            return
        finally:
            self._asked -= 1
        if text == STOPPED:
            return  # the turn's end reports it
        if text not in seen:  # a command, or a turn in another process
            said = help_text() if command_of(line) == "help" else text
            self._output.line(said, "dim" if command_of(line) else "")
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
        """The text at the bottom: what is being written, the running calls, and the prompt."""
        look = STYLES if self._output.colour else dict.fromkeys(STYLES, "")
        size = self._session.app.output.get_size()
        parts = [*self._output.live(size.rows)]
        picture = SPINNER[int(time.monotonic() / TICK) % len(SPINNER)]
        for style, line in self._view.live(picture, size.columns):
            parts.append((look[style], f"{line}\n"))
        if self._view.busy_since is not None and not self._view.running:
            doing = getattr(self._agent.provider, "doing", "")  # any object with `chat` is a provider
            seconds = time.monotonic() - self._view.busy_since
            what = f"{picture} {f'{doing} ' if doing else ''}{seconds:.1f} s · /stop or Ctrl-C stops"
            parts.append((look["dim"], f"{what[: size.columns - 1]}\n"))
        return [*parts, (look["bold"], "> ")]
