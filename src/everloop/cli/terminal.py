"""The chat at a terminal: the prompt stays at the bottom, and output scrolls above it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app_session
from prompt_toolkit.filters import is_done
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.layout import ConditionalContainer, FormattedTextControl, HSplit, Window
from prompt_toolkit.patch_stdout import patch_stdout

from .. import events
from ..commands import answer_of, command_of
from ..config import Config
from ..config.redaction import Secrets
from ..errors import EverloopError
from ..log import TurnEnded, UserSaid
from ..runtime.agent import AgentLoop
from ..runtime.chat_commands import STOPPED
from ..store.base import Busy
from ..text import clean, counted, one_line, revealed
from ..threads import in_thread
from .cards import CardRenderer, diff_lines
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
from .export import FORMATS, Format, exported
from .live_output import STYLES, Background, LiveOutput
from .local_commands import help_text, local_command, unknown_command
from .prompt import (
    ChatCompleter,
    WorkspaceFiles,
    attachments,
    chat_history,
    completes_while_typing,
    editing_keys,
    missing_files,
)
from .session_list import TITLE, Listed, age, list_sessions, money
from .status import SessionStatus
from .turn_changes import ChangeTracker, SavedTurns

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TICK = 0.1  # seconds between two frames of the spinner
MIN_REDRAW = 0.03  # seconds between two redraws, however fast words arrive
NO_QUERIES = "PROMPT_TOOLKIT_NO_CPR"  # set to 1 for a terminal that answers no queries
MAX_SESSIONS = 30  # in the list
EXPORTS = (("md", "Markdown"), ("jsonl", "one JSON object per line"), ("html", "a page"))
IDLE_SECONDS = 2.0  # after a turn, before the session is named
KEEP_SECONDS = 5.0  # for messages to reach the disk when the chat ends
TWICE = 2.0  # seconds within which a second Ctrl-C leaves


class Reopen(NamedTuple):
    """The chat continues with another model or in another session."""

    config: Config
    key: str


async def terminal_chat(config: Config, key: str, greeting: str) -> int:
    """Chat until the user leaves. A running turn is kept and continues at the next start."""
    history = await in_thread(chat_history, config.home)
    reopen: Reopen | None = Reopen(config, key)
    with contextlib.ExitStack() as raw:
        while reopen is not None:
            async with make_agent(reopen.config) as agent:
                # An unusable store is an error before the first prompt.
                others = await left_behind(agent.store, reopen.key)
                status = SessionStatus(agent, reopen.config, reopen.key)
                await status.read()
                # Also between two prompts, and until the chat has opened again: no key is lost, and Enter stays Enter.
                raw.enter_context(get_app_session().input.raw_mode())
                with patch_stdout(raw=True):
                    said = "\n".join(filter(None, (greeting, status.continues, others)))
                    reopen = await Chat(agent, reopen.config, history, reopen.key, said, status).run()
                if reopen is None:
                    raw.close()
            greeting = f"Now with {reopen.config.model} in the session {reopen.key}." if reopen is not None else ""
    return 0


class BackgroundReply:
    """Removes the terminal's reply about its background colour from the typed text."""

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
        elif (start := data.find("\x1b]11;")) >= 0 and len(data) - start < 40:  # the rest is still to come
            data, self._held = data[:start], data[start:]
        self._parser.feed(data)

    def flush(self) -> None:
        self._parser.flush()


_REPLY = re.compile(r"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)(?:/[0-9a-fA-F]+)?(?:\x07|\x1b\\)")


class Chat:
    """One user in one session."""

    def __init__(
        self, agent: AgentLoop, config: Config, history: History, key: str, greeting: str, status: SessionStatus
    ) -> None:
        self._agent = agent
        self._config = config
        self._key = key
        self._status = status
        self._session: PromptSession[str] = PromptSession(
            self._message,
            key_bindings=merge_key_bindings([editing_keys(), self._keys()]),
            erase_when_done=True,
            multiline=True,
            prompt_continuation="  ",
            history=history,
            completer=ChatCompleter(
                WorkspaceFiles(agent.workspace),
                {"resume": self._session_choices, "model": self._model_choices, "export": lambda: EXPORTS},
            ),
            complete_in_thread=True,
            complete_while_typing=completes_while_typing,
        )
        self._output = LiveOutput(self._session.app)
        self._view = CardRenderer(self._output, agent.workspace, status)
        self._changes = ChangeTracker(agent.workspace, SavedTurns(config.home, agent.workspace, key))
        self._reopen: Reopen | None = None
        self._shell: asyncio.Task[Any] | None = None  # a command that the user runs
        self._sessions: list[Listed] = []  # for completion
        self._comparing: asyncio.Task[None] | None = None  # of the workspace, after a turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._naming: asyncio.Task[None] | None = None  # the call for a title
        self._asked = 0  # messages without an answer
        self._unsaved: list[str] = []  # messages that may not be on disk yet
        self._left_at = 0.0
        self._told_to_leave = False
        # Not a `bottom_toolbar`, which is shown only on terminals that report the cursor position.
        assert isinstance(self._session.layout.container, HSplit)
        toolbar = Window(FormattedTextControl(self._toolbar), height=1, dont_extend_height=True)
        self._session.layout.container.children.append(ConditionalContainer(toolbar, ~is_done))
        self._session.app.min_redraw_interval = MIN_REDRAW
        if self._output.colour and isinstance(self._session.input, Vt100Input) and os.environ.get(NO_QUERIES) != "1":
            parser = BackgroundReply(self._session.input.vt100_parser, self._output.set_background)
            self._session.input.vt100_parser = parser  # type: ignore[assignment]
            self._session.app.after_render += self._ask_background
        self._output.line(greeting, "dim")

    async def run(self) -> Reopen | None:
        """Chat until the user leaves, or wants another model or session."""
        self._agent.watch(self._key, self._see)
        self._start(self._resume())
        self._start(self._refresh_status())
        await show_undelivered(self._agent, self._key, self._output)
        self._agent.serve_cron()
        messages = show_messages(self._agent.bus, self._output, self._key)
        helpers = [asyncio.create_task(work) for work in (self._output.keep_printing(), self._tick(), messages)]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):  # so that the terminal is restored
            loop.add_signal_handler(number, self._leave)
        try:
            while not self._told_to_leave and await self._next_line():
                pass
        finally:
            await self._keep_messages()
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            if self._view.busy_since is not None:
                self._output.line("The turn is kept and continues when you come back.", "dim")
            self._output.fresh()
            await self._output.print()
        return self._reopen

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
            self._output.line("Press Ctrl-C again, or Ctrl-D, to leave.", "dim")
            return True
        if line.strip() in LEAVE:
            return False
        if line.strip():
            self._output.line(f"> {line.rstrip()}".replace("\n", "\n  "), "bold")
            self._take(line)
        return self._reopen is None

    def _take(self, line: str) -> None:
        """Handle a line: a command of the terminal or of the shell, an answer to a question, or a message."""
        if (local := local_command(line)) is not None:
            self._run_local(*local)
        elif line.startswith("!") and line[1:].strip():
            self._start(self._run_shell(line[1:].strip()))
        elif (refusal := unknown_command(line)) is not None:
            self._output.line(refusal, "bad")
        else:
            text = line.strip()
            if self._view.asked and command_of(text) is None and answer_of(text) is None:
                text = f"/deny {text}"  # a sentence answers the question: not like that, but differently
            self._unsaved.append(text)
            self._start(self._load())
            self._start(self._say(text))

    async def _run_shell(self, command: str) -> None:
        """Run a command of the user in the sandbox, and keep it and its output in the conversation."""
        self._asked += 1
        self._shell = asyncio.current_task()
        try:
            result = await self._agent.tools.execute("exec", {"command": command})
            self._view.show_command(command, result)
            text = f"I ran this command myself: {command}\nIt printed:\n{result}"
            said = UserSaid(clean(text), "user", untrusted=True)
            await self._agent.store.note(OWNER, self._key, [said, TurnEnded("answer")])
        except asyncio.CancelledError:
            self._output.line("Stopped.", "bad")
        except Busy:
            self._output.line("The agent is busy and does not see this output: run it again when it is done.", "dim")
        except EverloopError as error:
            self._output.line(f"everloop: {error}", "bad")
        finally:
            self._shell = None
            self._asked -= 1

    def _run_local(self, name: str, words: str) -> None:
        match name:
            case "show":
                self._show(words)
            case "model":
                self._switch_model(words)
            case "sessions":
                self._start(self._list_sessions())
            case "resume":
                self._switch_session(words)
            case "rename":
                self._start(self._rename(words))
            case "pair":
                self._start(self._pair(words))
            case "export":
                self._start(self._export(words))
            case "diff":
                self._start(self._diff())
            case "undo":
                self._start(self._undo())
            case "cost":
                self._output.line(self._status.cost_text(), "dim")
            case "context":
                self._output.line(self._status.context_text(), "dim")

    @property
    def _is_busy(self) -> bool:
        if self._view.busy_since is None and not self._asked:
            return False
        self._output.line("A turn is running: wait until it ends, or /stop it.", "bad")
        return True

    def _switch_model(self, name: str) -> None:
        """Switch to another model of the same provider, or report the current one."""
        if not name:
            self._output.line(f"The model is {self._config.model}. /model NAME changes it for this chat.", "dim")
        elif " " in name or not name.isprintable():
            self._output.line("A model's name has no spaces: /model NAME", "bad")
        elif not self._is_busy:
            self._reopen = Reopen(dataclasses.replace(self._config, model=name), self._key)

    def _switch_session(self, words: str) -> None:
        """Switch to another session: by its key, its number in the list, or words of its title."""
        if not words:
            self._output.line("Say which one: /resume KEY, a number of /sessions, or words of a title.", "bad")
            return
        found = [one for one in self._sessions if one.info.key == words]
        if not found and words.isdecimal():
            found = self._sessions[int(words) - 1 : int(words)] if int(words) else []
        if not found:
            found = [one for one in self._sessions if words.lower() in one.title.lower()]
        if len(found) != 1:
            what = "No session" if not found else f"{len(found)} sessions"
            self._output.line(f"{what} matches “{one_line(words, 60)}”: /sessions lists them.", "bad")
        elif not self._is_busy:
            self._reopen = Reopen(self._config, found[0].info.key)

    async def _rename(self, title: str) -> None:
        if not title:
            self._output.line("Give a title: /rename TITLE", "bad")
            return
        title = one_line(title, TITLE)
        if not await self._agent.store.set_title(OWNER, self._key, title):
            self._output.line("There is nothing to name yet: say something first.", "bad")
            return
        self._status.title = title
        self._output.line(f"This session is now “{self._status.title}”.", "dim")

    async def _pair(self, code: str) -> None:
        """Admit a person who was given this code by a channel."""
        if not code:
            self._output.line("Give the code: /pair CODE", "bad")
            return
        from ..channels.access import confirm_anywhere

        channels = {one.name: one for one in self._config.channels}
        try:
            self._output.line(await confirm_anywhere(self._agent.store, channels, code, False), "dim")
        except EverloopError as error:
            self._output.line(f"everloop: {error}", "bad")

    async def _export(self, words: str) -> None:
        """Write the session to a file, by default Markdown in the current folder."""
        form, _, name = words.partition(" ")
        if form not in ("", *FORMATS):
            self._output.line(f"/export takes md, jsonl or html, not {one_line(form, 30)}", "bad")
            return
        kind: Format = form or "md"  # type: ignore[assignment]
        info = await self._agent.store.session(OWNER, self._key)
        entries = await self._agent.store.read_log(info.id) if info is not None else []
        path = name.strip() or f"{self._key.replace(':', '-').replace('/', '-')}.{kind}"
        text = exported(entries, self._status.title or self._key, kind, Secrets(self._config).redact)
        try:
            written = await in_thread(_write_new, path, text)
        except OSError as error:
            self._output.line(f"{path} cannot be written: {error.strerror}", "bad")
            return
        self._output.line(f"Written to {written}; secrets are redacted.", "dim")

    async def _list_sessions(self) -> None:
        """List the sessions, and start typing the command that switches to one."""
        self._sessions = await list_sessions(self._agent.store, self._config, OWNER, MAX_SESSIONS)
        for line in session_lines(self._sessions, self._config, shutil.get_terminal_size().columns):
            self._output.line(line, "dim")
        buffer = self._session.default_buffer
        if not buffer.text:  # otherwise the user is already typing
            buffer.insert_text("/resume ")
            buffer.start_completion()

    async def _compared(self) -> None:
        """Wait until the last turn's changes are known."""
        if self._comparing is not None:
            await asyncio.wait([self._comparing])

    async def _diff(self) -> None:
        """Show what the last turn changed in the workspace."""
        await self._compared()
        if (turn := await self._changes.latest()) is None:
            self._output.line("No turn of this session has changed a file.", "dim")
            return
        for change in turn.changes:
            old, new = (state.content if state is not None else b"" for state in (change.before, change.after))
            self._output.line(change.path, "bold")
            if old is None or new is None or b"\0" in old + new:
                self._output.line("  too large or binary", "dim")
                continue
            for look, line in diff_lines(old.decode("utf-8", "replace"), new.decode("utf-8", "replace")):
                self._output.line(f"  {line}", look)

    async def _undo(self) -> None:
        """Undo what the last turn changed, and tell the agent."""
        if self._is_busy:
            return
        await self._compared()
        if (changes := await self._changes.latest()) is None:
            self._output.line("There is nothing to undo: no turn of this session has changed a file.", "dim")
            return
        done, kept = await self._changes.undo(changes)
        new = {change.path for change in changes.changes if change.before is None}
        for path in done:
            self._output.line(f"↶ {'removed' if path in new else 'restored'} {path}", "good")
        for problem in kept:
            self._output.line(f"✗ not undone: {problem}", "bad")
        if not changes.whole:
            self._output.line("Not all files could be compared: the workspace has too many.", "dim")
        if changes.ran_commands:
            self._output.line("What a command did outside the workspace's files cannot be undone.", "dim")
        if done:
            said = UserSaid(clean(f"I undid your last changes to these files: {', '.join(done)}"), "user")
            await self._agent.store.note(OWNER, self._key, [said, TurnEnded("answer")])

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
            """Stop the user's command or the turn; without one clear the line; on an empty line leave."""
            if self._shell is not None:
                self._shell.cancel()
            elif self._view.busy_since is not None or self._asked:
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
        """Once the prompt is on the screen, ask the terminal for its background; the reply arrives as if typed."""
        app.after_render -= self._ask_background
        app.output.write_raw(BackgroundReply.QUERY)
        app.output.flush()

    def _leave(self) -> None:
        """Handle a signal, which may arrive between two prompts, after the key that ends one, or twice."""
        self._told_to_leave = True
        app = self._session.app
        if app.is_running and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)

    # ------------------------------------------------------------------------------------------ the agent

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # a failing store, for example
            self._output.line(f"everloop: {error}", "bad")

    async def _load(self) -> None:
        """Load the renderer of the answer while the model works on it."""
        if self._output.colour:
            await self._output.load()
            self._redraw()

    async def _refresh_status(self) -> None:
        """Read what the status line and completion need."""
        await self._status.refresh()
        self._sessions = await list_sessions(self._agent.store, self._config, OWNER, MAX_SESSIONS)
        self._redraw()

    def _name_when_idle(self) -> None:
        """Let the model name the session once the user has read for a while."""

        async def name() -> None:
            await asyncio.sleep(IDLE_SECONDS)
            if not self._asked and await self._agent.name_session(self._key):
                await self._status.read()
                self._redraw()

        if self._naming is not None:
            self._naming.cancel()
        self._naming = self._start(name())

    def _session_choices(self) -> list[tuple[str, str]]:
        return [(one.info.key, f"{one.title or '(untitled)'} · {age(one.info.updated_at)}") for one in self._sessions]

    def _model_choices(self) -> list[tuple[str, str]]:
        from ..config.prices import shipped

        names = [self._config.model, *self._config.fallbacks, *shipped()]
        return [(name, "in use" if name == self._config.model else "") for name in dict.fromkeys(names)]

    async def _resume(self) -> None:
        """Resume the turn that an earlier process left, and repeat its open question."""
        await self._agent.resume(self._key)
        if not self._view.asked and (question := await self._agent.question(self._key)):
            self._view.ask(question)

    async def _say(self, line: str) -> None:
        self._asked += 1
        if self._naming is not None:
            self._naming.cancel()
        try:
            channel, chat_id = chat_of(self._key)
            files = await self._attached(line) if "@" in line else []
            if command_of(line) is None:
                await self._changes.begin()
            with seen_ending(self._agent, self._key) as seen:
                text = await self._agent.process_direct(
                    line, self._key, channel, chat_id, media=files, attended=True, on_event=partial(self._is_kept, line)
                )
        except EverloopError as error:
            self._output.line(f"everloop: {error}", "bad")
            return
        finally:
            self._asked -= 1
            self._is_kept(line)
        if text == STOPPED:
            return  # the turn's end reports it
        if text not in seen:  # a command, or a turn in another process
            said = help_text() if command_of(line) == "help" else text
            self._output.line(said, "dim" if command_of(line) else "")
            await show_undelivered(self._agent, self._key, self._output, shown=text)

    async def _attached(self, line: str) -> list[str]:
        """Return the files that a message attaches, and tell of those that do not exist."""
        place = self._agent.workspace
        if missing := await in_thread(missing_files, line, place):
            names = revealed(", ".join(f"@{path}" for path in missing))
            self._output.line(one_line(f"Not attached, no such file: {names}", 79), "dim")
        return await in_thread(attachments, line, place)

    def _is_kept(self, line: str, _: events.Event | None = None) -> None:
        """Note that a message is on disk: its turn has begun, or ended."""
        if line in self._unsaved:
            self._unsaved.remove(line)

    async def _keep_messages(self) -> None:
        """Wait until accepted messages are on disk: the chat may be told to end right after Enter."""
        give_up = time.monotonic() + KEEP_SECONDS
        while self._unsaved and time.monotonic() < give_up:
            for row in await self._agent.store.waiting(OWNER, self._key):
                self._is_kept(str(row.message.content))
            await asyncio.sleep(0.02)

    def _see(self, event: events.Event) -> None:
        self._view(event)
        self._changes.see(event)
        if isinstance(event, events.TurnEnded):
            self._comparing = self._start(self._changes.end())
            self._start(self._refresh_status())
            self._name_when_idle()
        elif self._naming is not None:  # a turn is running, and needs the model more than a title does
            self._naming.cancel()
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

    def _toolbar(self) -> StyleAndTextTuples:
        """Return the status line below the prompt."""
        look = STYLES["dim"] if self._output.colour else ""
        return [(look, self._status.line(self._session.app.output.get_size().columns))]

    def _message(self) -> StyleAndTextTuples:
        """Return the text at the bottom: unfinished output, the running calls, and the prompt."""
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


def session_lines(sessions: list[Listed], config: Config, columns: int) -> list[str]:
    """Return the sessions as lines: number, title, turns, age and key. A long title is cut so that a line fits."""
    lines = []
    for number, one in enumerate(sessions, 1):
        numbers = [age(one.info.updated_at)]
        if one.totals is not None:
            numbers.insert(0, counted(one.totals.turns, "turn"))
            numbers += [cost] if (cost := money(one.totals.cost(config))) else []
        rest = f"  {' · '.join(numbers)} · {one.info.key}"
        room = max(10, columns - len(rest) - 4)
        lines.append(f"{number:>2} {one_line(one.title or '(untitled)', room)}{rest}")
    return lines


def _write_new(name: str, text: str) -> Path:
    """Write a new file, for this user alone; return its path."""
    path = Path(name).expanduser().absolute()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path
