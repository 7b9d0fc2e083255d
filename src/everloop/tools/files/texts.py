"""The form of a text file (encoding, byte-order mark, line endings), which edits preserve."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

HEAD = 65_536  # bytes that are enough to detect the form
BINARY_HEAD = 8_192  # bytes that are enough to detect a binary file
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass(slots=True, frozen=True)
class Form:
    """The form of one text file."""

    encoding: str = "utf-8"
    mark: bytes = b""
    newline: str = "\n"

    def decode(self, data: bytes) -> str:
        """Decode without the byte-order mark. Invalid bytes are kept and restored by `encode`."""
        return data.removeprefix(self.mark).decode(self.encoding, self._errors)

    def encode(self, text: str) -> bytes:
        return self.mark + text.encode(self.encoding, self._errors)

    @property
    def _errors(self) -> str:
        return "surrogateescape" if self.encoding == "utf-8" else "surrogatepass"

    def with_newlines(self, text: str) -> str:
        """Convert plain newlines to the line endings of this form."""
        return text if self.newline == "\n" else re.sub(r"(?<!\r)\n", self.newline, text)


def form_of(head: bytes) -> Form:
    """Detect the form of a file from its head. The line endings are those of most lines."""
    mark, encoding = next((known for known in _MARKS if head.startswith(known[0])), (b"", "utf-8"))
    text = head.removeprefix(mark).decode(encoding, "replace")
    windows = text.count("\r\n")
    return Form(encoding, mark, "\r\n" if windows > text.count("\n") - windows else "\n")


def is_binary(head: bytes) -> bool:
    """Return whether a file with this head is binary."""
    return b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
