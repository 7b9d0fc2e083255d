"""Output for a person: styled if the terminal allows it, and free of control characters that could manipulate it.

`Output` writes text, `Renderer` the events of a running turn.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, TextIO

import msgspec

from .. import events
from ..log import error_in, split_exit_status
from ..text import one_line, printable

Style = Literal["", "dim", "bold", "good", "bad"]
NOTICEABLE = 0.1  # seconds of a turn without a model call that are worth a line
CODES: dict[Style, str] = {"": "", "dim": "2", "bold": "1", "good": "32", "bad": "31"}

# Text from a model, a tool or a web page must not move the cursor, set the title or paste: each control character is
# shown as its picture, and marks that change the direction of writing as a replacement character.
_HARMLESS: dict[int, int | str | None] = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_HARMLESS |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_HARMLESS |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)), "�")
_HARMLESS |= {0x0D: None, 0x7F: "␡", 0x2028: "\n", 0x2029: "\n"}
_UNESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def as_json(value: Any) -> str:
    """Return JSON on one line, with every character escaped that a terminal would act on."""
    text = json.dumps(value, ensure_ascii=not _is_utf8(sys.stdout))
    return text if text.isprintable() else _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _is_utf8(stream: TextIO | None) -> bool:
    """Return whether the stream can write every character. Others write "?", which a program cannot undo."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-") in ("utf-8", "utf8")


def short_arguments(arguments: dict[str, Any], width: int = 70) -> str:
    """Return a call's arguments in short: path="a.txt", limit=5."""
    parts = [f"{name}={one_line(as_json(value), 40)}" for name, value in list(arguments.items())[:8]]
    return one_line(", ".join(parts), width)


def short_result(content: str, width: int = 100) -> str:
    """Return a tool's result on one line; for an error, its message."""
    return one_line(error_in(content) or content, width)


def mark_of(tool: str, status: str, content: str) -> str:
    """Return ✓ for a call that succeeded, else ✗. A command with a non-zero exit status failed, though its call
    succeeded.
    """
    failed = status != "ok" or (tool == "exec" and split_exit_status(content)[1] not in (None, 0))
    return "✗" if failed else "✓"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, with their cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def minute(at: float | None) -> str:
    """Return a local time to the minute; "" for none."""
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Output:
    """Writes text, whole lines or parts of one, and tracks whether the cursor is at the start of a line."""

    def __init__(self, stream: TextIO, colour: bool | None = None) -> None:
        self.colour = wants_colour(stream) if colour is None else colour
        self.failed: OSError | None = None  # the error that ended the output
        self._stream = stream
        self._at_start = True

    def put(self, text: str, style: Style = "") -> None:
        """Continue the current line."""
        if text := printable(text):
            self._write(text, style)
            self._at_start = text.endswith("\n")

    def answer(self, text: str) -> None:
        """Continue an answer, which is Markdown. Here it stays as it was written."""
        self.put(text)

    def fresh(self) -> None:
        """Begin a new line unless at the start of one."""
        if not self._at_start:
            self.put("\n")

    def line(self, text: str = "", style: Style = "") -> None:
        """Write a line of its own."""
        self.fresh()
        self.line_end(text, style)

    def line_end(self, text: str, style: Style = "") -> None:
        """Write the rest of the current line."""
        self.put(text, style)
        self.put("\n")

    async def print(self) -> None:
        """Show everything written so far. Here it is shown already."""

    def painted(self, text: str, style: Style) -> str:
        return f"\x1b[{CODES[style]}m{text}\x1b[0m" if style and self.colour else text

    def _write(self, text: str, style: Style) -> None:
        try:
            self._stream.write(self.painted(text, style))
            self._stream.flush()
        except OSError as error:
            self.failed = error
            raise


class Running(msgspec.Struct):
    """A running tool call."""

    text: str
    since: float


class Renderer:
    """Writes the events of a session's turns.

    Without `text` the answer is left out, because it goes elsewhere. With `live` the caller redraws running calls, so
    only their ends are written.
    """

    def __init__(self, output: Output, *, text: bool = True, live: bool = False, summary: bool = True) -> None:
        self.output = output
        self.ended: events.TurnEnded | None = None  # the latest turn that ended
        self.asked = False  # the latest turn waits for an approval
        self.running: dict[str, Running] = {}
        self.busy_since: float | None = None
        self._text = text
        self._live = live
        self._summary = summary
        self._shown = False  # part of the current answer is on the screen
        self._reasoning = False
        self._tokens: dict[str, int] = {}

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.TurnStarted():
                self._start(event)
            case events.Text():
                self._answer(event.text)
            case events.Reasoning():
                self._think(event.text)
            case events.Restarted():
                self._shown = self._reasoning = False
                self.output.line(f"↻ the answer starts again: {one_line(event.reason, 160)}", "bad")
            case events.ToolStarted():
                self._start_call(event)
            case events.ToolProgress():
                if event.call in self.running:
                    self.output.line(f"  │ {one_line(event.text)}", "dim")
            case events.ToolEnded():
                self._end_call(event)
            case events.Asked():
                self._ask(event)
            case events.Usage():
                for name, count in event.tokens.items():
                    self._tokens[name] = self._tokens.get(name, 0) + count
            case events.Steered():
                self._shown = False
                self.output.line(f"→ passed to the running turn: {one_line(event.text)}", "dim")
            case events.Compacting():
                self.output.line(f"… the conversation is long: summarising {event.turns} earlier turns", "dim")
            case events.Compacted():
                self.output.line(f"… about {event.before:,} tokens of conversation are now {event.after:,}", "dim")
            case events.Error():
                pass  # the turn's end says the same
            case events.TurnEnded():
                self._end(event)

    def _start(self, event: events.TurnStarted) -> None:
        self.busy_since = time.monotonic()
        self.asked = False
        self._tokens = {}
        self._shown = self._reasoning = False
        if event.resumed:
            self._tell_resumed()

    def _tell_resumed(self) -> None:
        self.output.line("Continuing an interrupted turn.", "bold")

    def _answer(self, text: str) -> None:
        if not self._text:
            return
        if self._reasoning:
            self._reasoning = False
            self.output.fresh()
        self._shown = True
        self.output.answer(text)

    def _think(self, text: str) -> None:
        if not self._text:
            return
        if not self._reasoning:
            self.output.fresh()
        self._reasoning = True
        self.output.put(text, "dim")

    def _start_call(self, event: events.ToolStarted) -> None:
        self._shown = self._reasoning = False
        self.output.fresh()
        call = f"{event.name}({short_arguments(event.arguments)})"
        self.running[event.call] = Running(call, time.monotonic())
        if not self._live:
            self.output.line(f"• {call}", "dim")

    def _end_call(self, event: events.ToolEnded) -> None:
        known = self.running.pop(event.call, None)
        mark = mark_of(event.name, event.status, event.content)
        what = known.text if known is not None and self._live else event.name
        self.output.fresh()
        self.output.put(mark, "good" if mark == "✓" else "bad")
        status = "" if event.status in ("ok", "error") else f"{event.status}: "
        self.output.line_end(f" {what}  {event.seconds:.1f} s  {status}{short_result(event.content, 80)}", "dim")

    def _ask(self, event: events.Asked) -> None:
        self.running.clear()
        self.asked = True
        self.busy_since = None
        self.output.fresh()
        self.output.line(event.question, "bold")

    def _end(self, event: events.TurnEnded) -> None:
        self.ended = event
        self.running.clear()
        self.output.fresh()
        if self._text and event.reason == "answer" and not self._shown:
            self.output.answer(event.text)
            self.output.fresh()
        elif self._text and event.reason != "answer":
            self.output.line(event.text, "bad")
        if self._summary and self.busy_since is not None:
            seconds, counted = time.monotonic() - self.busy_since, self._counted()
            if counted or seconds >= NOTICEABLE:  # a reminder takes no time and no tokens
                self.output.line(f"— {seconds:.1f} s{counted}", "dim")
        self.busy_since = None

    def _counted(self) -> str:
        read, written = self._tokens.get("prompt_tokens", 0), self._tokens.get("completion_tokens", 0)
        return f" · {tokens_in_words(read, self._tokens.get('cached_tokens', 0), written)}" if read or written else ""


def tokens_in_words(read: int, cached: int, written: int) -> str:
    """Return usage such as "1,200 tokens read (900 cached), 80 written."."""
    share = f" ({cached:,} cached)" if cached else ""
    return f"{read:,} tokens read{share}, {written:,} written"
