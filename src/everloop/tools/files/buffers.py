"""The files as an editor shows them, with changes that are not saved yet."""

from __future__ import annotations

import os
from typing import Protocol

from .documents import document_kind
from .images import image_kind
from .paths import check_kind, explained, reach, shipped
from .texts import HEAD, Form, form_of, is_binary

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
