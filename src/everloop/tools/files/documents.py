"""Extract the text of PDF, DOCX and XLSX files.

A child process with limited memory and time does it: a document may be crafted to attack its reader.
"""

from __future__ import annotations

import os
import sys

from ..base import ToolError
from ..children import Child, Ended
from . import extract

MAX_TEXT_BYTES = 4 * 1024 * 1024
SECONDS = 30.0
MEGABYTES = 768
PYTHON = (sys.executable, "-I")  # isolated from the working folder and the environment
_OFFICE = {".docx": "docx", ".docm": "docx", ".xlsx": "xlsx", ".xlsm": "xlsx"}


def document_kind(head: bytes, path: str) -> str | None:
    """Return the kind of a document from its head and name; None if it is not one."""
    if head.startswith(b"%PDF-"):
        return "pdf"
    return _OFFICE.get(os.path.splitext(path)[1].lower()) if head.startswith(b"PK\x03\x04") else None


def read_document(child: Child, descriptor: int, kind: str, path: str, outside: bool = False) -> bytes:
    """Return the text of an open document as UTF-8. Raises ToolError if it cannot be read.

    Errors about a document from `outside` are not quoted: they may contain its text.
    """
    ended = extracted(child, descriptor, kind, MAX_TEXT_BYTES)
    name = kind.upper()
    match ended.status:
        case _ if ended.late:
            raise ToolError(f"{path} took longer than {SECONDS:g} seconds to read: use another copy or another tool.")
        case 0:
            return ended.output
        case extract.MISSING:
            raise ToolError(f'{name} files need a package that is not installed: pip install "everloop[documents]".')
        case extract.UNREADABLE:
            said = ended.output.decode("utf-8", "replace").strip()
            reason = "it is damaged or of an unusual kind" if outside else said
            raise ToolError(f"{path} cannot be read as {name}: {reason}")
    raise ToolError(f"{path} needs too much memory or time to read: use another copy or another tool.")


def extracted(child: Child, descriptor: int, kind: str, most: int, edge: int = 0) -> Ended:
    """Run the extractor for an open file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    limits = (int(SECONDS), MEGABYTES << 20, most, edge)
    command = [*PYTHON, extract.__file__, kind, *map(str, limits)]
    return child.run(command, stdin=descriptor, most=most + 1_000, seconds=SECONDS)
