"""Where commands write for a person: styles where the terminal has them, and nothing that could drive it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any, Literal, TextIO

from ..text import one_line, printable

Style = Literal["", "dim", "bold", "good", "bad"]
CODES: dict[Style, str] = {"": "", "dim": "2", "bold": "1", "good": "32", "bad": "31"}

# How a command that went wrong ends: its status, and remarks of ours after it.
_FAILED_COMMAND = re.compile(r"^\[exit status [1-9][^\]\n]*\](\n\[[^\n]*\])*\s*\Z", re.M)
_UNESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def as_json(value: Any) -> str:
    """JSON on one line, safe to show: what `json` leaves as it is and a terminal would act on is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def short_arguments(arguments: dict[str, Any], width: int = 70) -> str:
    """A call's arguments as a person reads them: path="a.txt", limit=5."""
    parts = [f"{name}={one_line(as_json(value), 40)}" for name, value in list(arguments.items())[:8]]
    return one_line(", ".join(parts), width)


def short_result(content: str, width: int = 100) -> str:
    """A tool's result on one line; of an error, what went wrong."""
    if content.startswith('{"status":"error","message":'):
        with contextlib.suppress(ValueError):  # the tool's own text, that only looks like one
            content = str(json.loads(content)["message"])
    return one_line(content, width)


def mark_of(tool: str, status: str, content: str) -> str:
    """✓ for a call that went well. A command that ran and failed did not, though the call as such is in order."""
    failed = status != "ok" or (tool == "exec" and _FAILED_COMMAND.search(content) is not None)
    return "✗" if failed else "✓"


def wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Paper:
    """Writes pieces of text, in lines or within one, and knows whether the cursor is at a line's start."""

    def __init__(self, stream: TextIO, colour: bool | None = None) -> None:
        self.colour = wants_colour(stream) if colour is None else colour
        self.failed: OSError | None = None  # why nothing more can be written
        self._stream = stream
        self._at_start = True

    def put(self, text: str, style: Style = "") -> None:
        """Go on in the current line."""
        if text := printable(text):
            self._write(text, style)
            self._at_start = text.endswith("\n")

    def fresh(self) -> None:
        """Begin a new line unless at the start of one."""
        if not self._at_start:
            self.put("\n")

    def line(self, text: str = "", style: Style = "") -> None:
        """A line of its own."""
        self.fresh()
        self.line_end(text, style)

    def line_end(self, text: str, style: Style = "") -> None:
        """The rest of the current line."""
        self.put(text, style)
        self.put("\n")

    async def print(self) -> None:
        """Put all that was written before a reader's eyes. Here it is already."""

    def painted(self, text: str, style: Style) -> str:
        return f"\x1b[{CODES[style]}m{text}\x1b[0m" if style and self.colour else text

    def _write(self, text: str, style: Style) -> None:
        try:
            self._stream.write(self.painted(text, style))
            self._stream.flush()
        except OSError as error:
            self.failed = error
            raise
