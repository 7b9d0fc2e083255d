"""Output for a person: styled where the terminal allows it, and free of control characters that could drive it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any, Literal, TextIO

from ..text import one_line, printable

Style = Literal["", "dim", "bold", "good", "bad"]
CODES: dict[Style, str] = {"": "", "dim": "2", "bold": "1", "good": "32", "bad": "31"}

# Text from a model, a tool or a web page must not move the cursor, set the title or paste: each control character is
# shown as its picture, and marks that change the direction of writing as a replacement character.
_HARMLESS: dict[int, int | str | None] = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_HARMLESS |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_HARMLESS |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)), "�")
_HARMLESS |= {0x0D: None, 0x7F: "␡", 0x2028: "\n", 0x2029: "\n"}
# How the result of a failed command ends: its exit status, and our notes after it.
_FAILED_COMMAND = re.compile(r"^\[exit status [1-9][^\]\n]*\](\n\[[^\n]*\])*\s*\Z", re.M)
_UNESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def as_json(value: Any) -> str:
    """JSON on one line, with every character escaped that a terminal would act on."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def short_arguments(arguments: dict[str, Any], width: int = 70) -> str:
    """A call's arguments in short: path="a.txt", limit=5."""
    parts = [f"{name}={one_line(as_json(value), 40)}" for name, value in list(arguments.items())[:8]]
    return one_line(", ".join(parts), width)


def short_result(content: str, width: int = 100) -> str:
    """A tool's result on one line; of an error its message."""
    if content.startswith('{"status":"error","message":'):
        with contextlib.suppress(ValueError):  # the tool's own text, which only looks like an error
            content = str(json.loads(content)["message"])
    return one_line(content, width)


def mark_of(tool: str, status: str, content: str) -> str:
    """✓ for a call that succeeded, else ✗. A command with a non-zero exit status failed, though its call succeeded."""
    failed = status != "ok" or (tool == "exec" and _FAILED_COMMAND.search(content) is not None)
    return "✗" if failed else "✓"


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
