"""Tool calls as cards: one line while a call runs, and a summary or all details once it has ended."""

from __future__ import annotations

import difflib
import os
import stat
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .. import events
from ..log import error_in, split_exit_status
from ..text import one_line, printable, revealed
from .output import Output, Renderer, Running, Style, mark_of, short_arguments, short_result
from .status import SessionStatus

SHOWN_LINES = 6  # of a command's output
SHOWN_BY_USER = 40  # of the output of a command that the user ran
SHOWN_DIFF = 24  # lines of a diff
LIVE_LINES = 3  # the latest lines of a running command
MAX_CARDS = 200  # kept, so that they can be shown in full
MAX_BYTES = 262_144  # of a file for which a diff is shown
# Here any sentence is an answer, unlike in other chats.
HOW_TO_ANSWER_HERE = (
    "Answer y (yes), n (no) or a (always in this session). Any other sentence means no, and tells me why."
)
Line = tuple[Style, str]


class Card(msgspec.Struct):
    """A tool call, and what it has done."""

    number: int
    name: str
    arguments: dict[str, Any]
    since: float
    before: str | None = None  # the file that it writes, as it was before; None if that is unknown
    latest: deque[str] = msgspec.field(default_factory=lambda: deque(maxlen=LIVE_LINES))
    ended: events.ToolEnded | None = None

    @property
    def title(self) -> str:
        match self.name, self.arguments:
            case "exec", {"command": str(command)}:
                return f"$ {one_line(revealed(command), 200)}"
            case "write_file" | "edit_file", {"path": str(path)}:
                return f"{self.name.removesuffix('_file')} {one_line(revealed(path), 200)}"
        return f"{revealed(self.name)}({short_arguments(self.arguments)})"

    def head(self) -> list[Line]:
        """Return the card's first line."""
        assert self.ended is not None
        mark = mark_of(self.name, self.ended.status, self.ended.content)
        look: Style = "good" if mark == "✓" else "bad"
        status = "" if self.ended.status in ("ok", "error") else self.ended.status
        if self.name == "exec" and (code := split_exit_status(self.ended.content)[1]) is not None:
            status = f"exit status {code}" if mark == "✗" else ""
        result = ": ".join(filter(None, (status, self._summary())))
        parts: list[Line] = [(look, mark), ("" if mark == "✓" else "bad", f" {self.title}")]
        parts.append(("dim", f"  {self.ended.seconds:.1f} s  {result}".rstrip()))
        parts.append(("dim", f"  #{self.number}"))
        return parts

    def _summary(self) -> str:
        assert self.ended is not None
        if self.name == "exec":
            return ""
        if self._is_written and (lines := self.diff()):
            added = sum(look == "good" for look, _ in lines)
            return f"+{added} −{sum(look == 'bad' for look, _ in lines)}"
        return short_result(self.ended.content, 80)

    @property
    def _is_written(self) -> bool:
        return self.ended is not None and self.ended.status == "ok" and self.name in ("write_file", "edit_file")

    def body(self, most: int = SHOWN_LINES) -> tuple[list[Line], int]:
        """Return the lines below the first one in short form, and how many were left out."""
        assert self.ended is not None
        if self._is_written:
            lines = self.diff()
            return lines[:SHOWN_DIFF], max(0, len(lines) - SHOWN_DIFF)
        if self.name == "exec":
            text, _ = split_exit_status(self.ended.content)
            if self.ended.status != "ok":
                text = short_result(text, 400)
            lines = [("dim", line) for line in text.splitlines()] if text != "(no output)" else []
            return lines[:most], max(0, len(lines) - most)
        return [], 0

    def diff(self) -> list[Line]:
        """Return what an edit or a write changed."""
        match self.name, self.arguments:
            case "edit_file", {"old_text": str(old), "new_text": str(new)}:
                return diff_lines(old, new, numbers=False)
            case "write_file", {"content": str(new)} if self.before is not None:
                return diff_lines(self.before, new)
        return []

    def full(self) -> list[Line]:
        """Return everything about the call."""
        lines: list[Line] = [("bold", f"#{self.number} {self.name}")]
        for name, value in self.arguments.items():
            text = value if isinstance(value, str) else repr(value)
            first, *others = text.splitlines() or [""]
            lines += [("", f"  {name}: {first}"), *(("", f"    {line}") for line in others)]
        if self._is_written:
            lines += [("dim", "  changed:"), *((look, f"  {line}") for look, line in self.diff())]
        if self.ended is not None:
            lines += [("dim", "  result:"), *(("", f"  {line}") for line in self.ended.content.splitlines())]
        return lines


def diff_lines(old: str, new: str, *, numbers: bool = True) -> list[Line]:
    """Return the lines that differ, with up to two lines of context."""
    before, after = old.splitlines(), new.splitlines()
    lines: list[Line] = []
    for line in list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]:
        if line.startswith("@@"):
            if numbers and lines:
                lines.append(("dim", "⋯"))
            continue
        look: Style = "good" if line[0] == "+" else "bad" if line[0] == "-" else "dim"
        lines.append((look, line))
    return lines


def read_before(path: Path) -> str | None:
    """Return the text of a small file; "" if there is none, None if it is not a text file of that size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            return None
        return os.read(descriptor, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return None
    finally:
        os.close(descriptor)


class CardRenderer(Renderer):
    """Renders the turns of the chat at a terminal, where running calls are redrawn and ended ones become cards."""

    def __init__(self, output: Output, workspace: Path, status: SessionStatus) -> None:
        super().__init__(output, live=True)
        self._status = status
        self.cards: deque[Card] = deque(maxlen=MAX_CARDS)
        self._workspace = workspace
        self._open: dict[str, Card] = {}
        self._count = 0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.ToolProgress):
            if (card := self._open.get(event.call)) is not None:
                card.latest.extend(line for line in printable(revealed(event.text)).splitlines() if line.strip())
            return
        super().__call__(event)
        if isinstance(event, events.TurnEnded | events.Asked):
            self._open.clear()

    def live(self, picture: str, width: int) -> list[Line]:
        """Return the running calls, one per line, each with its elapsed time and its latest progress."""
        now = time.monotonic()
        lines: list[Line] = []
        for card in self._open.values():
            seconds = f"  {now - card.since:.1f} s"
            lines.append(("dim", f"{picture} {one_line(card.title, max(8, width - len(seconds) - 3))}{seconds}"))
            lines += [("dim", one_line(f"  │ {line}", width - 1)) for line in card.latest]
        return lines

    def show_command(self, command: str, result: str) -> None:
        """Write the card of a command that the user ran."""
        self._count += 1
        card = Card(self._count, "exec", {"command": command}, time.monotonic())
        status = "ok" if error_in(result) is None else "error"
        card.ended = events.ToolEnded("", "exec", result, status, 0.0)
        self._finish(card, most=SHOWN_BY_USER)

    def ask(self, question: str) -> None:
        """Write a question: what would be written or run, with diff colours, and how to answer."""
        self.asked = True
        self.output.fresh()
        first, *others = f"{revealed(question)}\n\n{HOW_TO_ANSWER_HERE}".split("\n")
        self.output.line(first, "bold")
        for line in others:
            self.output.line(line, "good" if line.startswith("+") else "bad" if line.startswith("-") else "")

    def show(self, number: int | None = None) -> bool:
        """Write a card in full, by default the latest; return False if there is none with this number."""
        for card in reversed(self.cards):
            if number is None or card.number == number:
                for look, line in card.full():
                    self.output.line(revealed(line), look)
                return True
        return False

    def _tell_resumed(self) -> None:
        said = f" “{self._status.cut_off}”" if self._status.cut_off else ""
        self.output.line(f"Continuing an interrupted turn:{said}".removesuffix(":"), "bold")

    def _counted(self) -> str:
        cost = self._status.cost_of(self._tokens)
        return super()._counted() + (f" · {cost}" if cost else "")

    def _start_call(self, event: events.ToolStarted) -> None:
        self._shown = self._reasoning = False
        self.output.fresh()
        self._count += 1
        card = Card(self._count, event.name, event.arguments, time.monotonic())
        if event.name == "write_file" and isinstance(path := event.arguments.get("path"), str) and "\0" not in path:
            card.before = read_before(self._workspace / path)
        self._open[event.call] = card
        self.running[event.call] = Running(card.title, card.since)

    def _end_call(self, event: events.ToolEnded) -> None:
        self.running.pop(event.call, None)
        card = self._open.pop(event.call, None)
        if card is None:
            self._count += 1
            card = Card(self._count, event.name, {}, time.monotonic())
        card.ended = event
        self._finish(card)

    def _ask(self, event: events.Asked) -> None:
        self.running.clear()
        self.busy_since = None
        self.ask(event.question)

    def _finish(self, card: Card, most: int = SHOWN_LINES) -> None:
        self.cards.append(card)
        self.output.fresh()
        for look, text in card.head():
            self.output.put(text, look)
        self.output.line_end("")
        self._write_body(*card.body(most))

    def _write_body(self, lines: Sequence[Line], left_out: int) -> None:
        for look, line in lines:
            self.output.put("  │ ", "dim")
            self.output.line_end(revealed(line), look)
        if left_out:
            many = "1 more line" if left_out == 1 else f"{left_out} more lines"
            self.output.line(f"  │ … {many}: Ctrl-O shows all", "dim")
