"""Hands pages to the program that reads them, and ends it when it takes too long."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass

from ..base import ToolError
from ..children import Child, beside_child
from ..files.documents import PYTHON, read_document
from . import markdown

SECONDS = 12.0  # for a page; then half of that for a simpler reading of it
_MAX_ANSWER = 4 * markdown.MAX_TEXT + 100_000  # bytes


@dataclass(slots=True, frozen=True)
class Readable:
    """A page as it can be read."""

    title: str
    text: str  # Markdown
    cut: bool = False


async def read_html(body: bytes, url: str, charset: str = "", seconds: float = SECONDS) -> Readable:
    """The title and the text of a page; a ToolError if it cannot be read in time."""
    return await beside_child(_read_html, body, {"url": url, "charset": charset}, seconds)


async def read_pdf(body: bytes, name: str) -> Readable:
    """The text of a PDF."""
    return await beside_child(_read_pdf, body, name)


def _read_html(child: Child, body: bytes, asked: dict[str, str], seconds: float) -> Readable:
    for plain in (False, True):
        head = json.dumps({**asked, "plain": plain}).encode() + b"\n"
        with tempfile.TemporaryFile() as file:
            file.write(head + body)
            file.seek(0)
            command = [*PYTHON, markdown.__file__]
            ended = child.run(command, stdin=file.fileno(), most=_MAX_ANSWER, seconds=seconds / (1 + plain))
        if ended.status == markdown.MISSING:
            raise ToolError('Web pages cannot be read until a person runs: pip install "everloop[web]"')
        if ended.status == 0 and not ended.cut:
            return Readable(**json.loads(ended.output))
    raise ToolError(f"The page ({len(body)} bytes of HTML) is too much to read, or made to be: try another source.")


def _read_pdf(child: Child, body: bytes, name: str) -> Readable:
    with tempfile.TemporaryFile() as file:
        file.write(body)
        file.flush()
        return Readable("", read_document(child, file.fileno(), "pdf", name, outside=True).decode("utf-8", "replace"))
