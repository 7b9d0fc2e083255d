"""Text files: their form (encoding, byte-order mark, line endings), which edits keep, and an editor's unsaved text."""

from __future__ import annotations

import codecs
import os
import re
from typing import Protocol

import msgspec

from .documents import document_kind
from .images import image_kind
from .paths import check_kind, explained, reach, shipped

HEAD = 65_536  # bytes that are enough to detect the form
BINARY_HEAD = 8_192  # bytes that are enough to detect a binary file
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class Form(msgspec.Struct, frozen=True):
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


MAX_BUFFER_BYTES = 8 * 1024 * 1024  # larger files are read from the disk


class Buffers(Protocol):
    """An editor's files. The tools call it with real paths that the running call may access."""

    async def read(self, real: str, *, to_write: bool = False) -> str | None:
        """Return the text of a file; None where the file on disk counts. With `to_write`, the editor can write it."""
        ...

    async def write(self, real: str, text: str) -> bool:
        """Have the editor write a file. False where it does not write this one; ToolError if it fails to."""
        ...


def text_place(path: str) -> tuple[str, Form] | None:
    """Return the real path and the form of a text file that the running call may read; None for one of another kind,
    of the program itself, or too large for an editor."""
    with explained(path), reach().open(path) as opened:
        info = os.fstat(opened.descriptor)
        check_kind(info, path)
        head = os.pread(opened.descriptor, HEAD, 0)
        other = is_binary(head) or image_kind(head) or document_kind(head, path)
        if other or info.st_size > MAX_BUFFER_BYTES or shipped(opened.real):
            return None
        return opened.real, form_of(head)
