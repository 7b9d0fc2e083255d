"""Convert attachments for a model: pictures to images, other files to their paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..sandbox.reach import READ, OutOfReach, Reach
from ..text import clean
from ..tools.children import Child
from ..tools.files.images import EDGE, Picture, Refused, printable, view
from ..tools.files.paths import size

MAX_PICTURES = 20  # per message
MAX_BYTES = 20_000_000  # of all pictures of a message: model APIs accept requests of about 30 MB
_DATA_URL = re.compile(r"data:(image/[\w.+-]{1,40})(?:;[\w=-]{1,40})*;base64,", re.I)

__all__ = ["Picture", "Refused", "picture", "user_content", "without_pictures"]


def picture(
    path: str,
    *,
    limit: int = 10_000_000,
    edge: int = EDGE,
    reach: Reach | None = None,
    child: Child | None = None,
) -> Picture | Refused:
    """Read a local file as a picture, scaled down if necessary. Blocks: call it in a thread.

    Stopping `child` ends the process that scales the picture.
    """
    try:
        with _opened(path, reach) as descriptor:
            return view(child or Child(), descriptor, path, limit, edge)
    except (OSError, OutOfReach, ValueError):  # an impossible path is a ValueError
        return Refused("")


def user_content(
    text: str, media: Sequence[str] = (), reach: Reach | None = None, child: Child | None = None
) -> str | list[dict[str, Any]]:
    """Return the text, preceded by its pictures if it has any; other files are named by their paths. Blocks."""
    child = child or Child()
    parts: list[dict[str, Any]] = []
    lines = [text] if text else []
    room = MAX_BYTES
    for path in media:
        found = picture(path, reach=reach, child=child)
        if isinstance(found, Picture) and (len(parts) == MAX_PICTURES or len(found.data) > room):
            found = Refused(
                f"a message has room for {MAX_PICTURES} pictures of {size(MAX_BYTES)} in all: send it alone"
            )
        match found:
            case Picture():
                room -= len(found.data)
                parts.append({"type": "image_url", "image_url": {"url": found.url}})
            case Refused(""):
                lines.append(f"[attachment: {printable(path)}]")
            case Refused(reason):
                lines.append(f"[picture {printable(path)}: {reason}]")
    text = clean("\n".join(lines))
    if not parts:
        return text
    return [*parts, {"type": "text", "text": text}] if text else parts  # some APIs reject an empty part


def without_pictures(content: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content for a model without vision: each picture becomes a line of text. Same parts, same bytes."""
    parts = [_described(part) if part.get("type") == "image_url" else part for part in content]
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(str(part.get("text", "")) for part in parts)
    return parts


def _described(part: dict[str, Any]) -> dict[str, Any]:
    shown = part.get("image_url")
    url = str(shown.get("url", "")) if isinstance(shown, dict) else str(shown or "")
    if data := _DATA_URL.match(url):
        what = f"{data[1].lower()}, {size((len(url) - data.end()) * 3 // 4 - url[-2:].count('='))}"
    else:
        what = printable(url[:300]) or "without an address"
    note = "Say so if it matters; the user can choose a model with vision."
    return {"type": "text", "text": f"[a picture is here that this model cannot see: {what}. {note}]"}


@contextmanager
def _opened(path: str, reach: Reach | None) -> Iterator[int]:
    """Open the file for reading, without waiting for the writer of a pipe."""
    if reach is not None:
        with reach.open(path) as opened:
            yield opened.descriptor
        return
    descriptor = os.open(path, READ)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
