"""The prompt of the chat: multiple lines, history across restarts, completion of commands and files."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit.application.current import get_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from ..commands import COMMANDS
from ..text import printable
from .common import LEAVE
from .local_commands import LOCAL

HISTORY = "chat_history"  # in the home
MAX_FILES = 20_000  # per workspace that are listed
MAX_SHOWN = 30  # completions
FRESH_SECONDS = 5.0  # how long the list of files is reused
SKIPPED = frozenset({".git", ".hg", "node_modules", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".tox"})
_FILE_NAME = re.compile(r"[^\"'()=<>]*(?:/[^\"'()=<>]*|\.[A-Za-z]\w{0,4})")  # with a folder or an ending, and no code
FILE = re.compile(r"(?:^|(?<=\s))@(?:\"([^\"\n]*)\"?|(\S*))")
Choices = Callable[[], Iterable[tuple[str, str]]]  # (word, description)


def chat_history(home: Path) -> History:
    """What was typed in earlier chats; only in memory if the file cannot be written.

    Constructing it reads the file.
    """
    path = home / HISTORY
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError:
        return InMemoryHistory()
    return _ChatHistory(path)


class _ChatHistory(FileHistory):
    """Keeps every line except those that leave the chat, without waiting for the disk.

    It is read on construction, so that an arrow key finds the last line from the first prompt on.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._earlier = list(super().load_history_strings())

    def load_history_strings(self) -> Iterable[str]:
        return self._earlier

    def store_string(self, string: str) -> None:
        if string.strip() in LEAVE:
            return
        asyncio.get_running_loop().run_in_executor(None, super().store_string, string)


# ---------------------------------------------------------------------------------------------- completion


class WorkspaceFiles:
    """The paths of the workspace's files, for completion. They are read again when they are a few seconds old."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self._found: list[str] = []
        self._at = float("-inf")

    def matching(self, typed: str) -> list[str]:
        """Return the files whose paths contain the typed characters in this order, best match first."""
        if time.monotonic() - self._at > FRESH_SECONDS:
            self._found = list(self._walk())
            self._at = time.monotonic()
        scored = [(score, path) for path in self._found if (score := _score(typed.lower(), path)) is not None]
        return [path for _, path in sorted(scored)[:MAX_SHOWN]]

    def _walk(self) -> Iterator[str]:
        count = 0
        for folder, folders, files in os.walk(self._workspace):
            folders[:] = sorted(name for name in folders if name not in SKIPPED)
            for name in sorted(files):
                count += 1
                if count > MAX_FILES:
                    return
                yield os.path.relpath(os.path.join(folder, name), self._workspace)


def _score(typed: str, path: str) -> tuple[int, int, str] | None:
    """Return how well a path matches; None if it does not.

    Best is a name that starts with what was typed, then a path that contains it, then one that has the characters in
    order; shorter paths first.
    """
    low = path.lower()
    name = os.path.basename(low)
    if name.startswith(typed) or low.startswith(typed):
        return 0, len(path), path
    if typed in low:
        return 1, len(path), path
    letters = iter(low)
    return (2, len(path), path) if all(letter in letters for letter in typed) else None


class ChatCompleter(Completer):
    """Completes commands, their arguments, and files after an @."""

    def __init__(self, files: WorkspaceFiles, choices: dict[str, Choices]) -> None:
        self._files = files
        self._choices = choices  # by the command that they follow

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        command, space, words = text.partition(" ")
        if command.startswith("/") and not space:
            for name, meaning in sorted((*COMMANDS.items(), *LOCAL.items())):
                if name.startswith(command[1:].lower()):
                    yield Completion(f"/{name}", -len(command), display_meta=meaning)
        elif command[1:] in self._choices and command.startswith("/"):
            typed = words.strip().lower()
            for word, meaning in self._choices[command[1:]]():
                if typed in word.lower() or typed in meaning.lower():
                    yield Completion(word, -len(words), display_meta=printable(meaning))
        elif (found := _file_at_end(text)) is not None:
            for path in self._files.matching(found[1]):
                shown = f'@"{path}"' if " " in path else f"@{path}"
                yield Completion(shown, -len(found[0]), display=printable(path))


def _file_at_end(text: str) -> tuple[str, str] | None:
    """Return the @ and path at the end of a text: as typed, and the path alone."""
    for found in FILE.finditer(text):
        if found.end() == len(text):
            return found[0], found[1] if found[1] is not None else found[2]
    return None


@Condition
def completes_while_typing() -> bool:
    """Return whether the menu opens while typing: it does for commands and files."""
    text = get_app().current_buffer.document.text_before_cursor
    return (text.startswith("/") and "\n" not in text) or _file_at_end(text) is not None


def attachments(text: str, workspace: Path) -> list[str]:
    """Return the existing files that a message names with an @."""
    return [path for path in _named(text) if os.path.isfile(workspace / path)]


def missing_files(text: str, workspace: Path) -> list[str]:
    """Return what a message names with an @ that looks like a file of the workspace, and does not exist.

    A name alone, such as @anna or @property, may be anything.
    """
    return [path for path in _named(text) if _FILE_NAME.fullmatch(path) and not os.path.exists(workspace / path)]


def _named(text: str) -> list[str]:
    named = [found[1] if found[1] is not None else found[2].rstrip(",.;:!?)") for found in FILE.finditer(text)]
    return [path for path in dict.fromkeys(named) if path and "\0" not in path]


# ---------------------------------------------------------------------------------------------- keys


def editing_keys() -> KeyBindings:
    """Bind the keys: Enter sends; Alt-Enter, Ctrl-J and a backslash before Enter start a new line; Tab completes."""
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # and not searching

    @keys.add("tab", filter=typing)
    def _(event: KeyPressEvent) -> None:
        """Take the only completion, or choose the next one of several."""
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_next()
            return
        found = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
        if len(found) == 1:
            buffer.complete_state = None
            buffer.apply_completion(found[0])
        elif buffer.complete_state is not None:
            buffer.complete_next()
        else:
            buffer.start_completion(insert_common_part=True)

    @keys.add("escape", "enter", filter=typing)
    @keys.add("c-j", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _takes_completion(buffer):
            return
        if buffer.document.text_before_cursor.endswith("\\") and not buffer.document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
            return
        buffer.validate_and_handle()

    return keys


def _takes_completion(buffer: Buffer) -> bool:
    """Take the chosen completion; return whether typing may continue. A complete command is sent right away."""
    state = buffer.complete_state
    if state is None or state.current_completion is None:
        return False
    buffer.complete_state = None
    return not buffer.text.startswith("/")
