"""Prepare pictures for a model: detect the kind by content and the size by the header, and scale large ones down.

Nothing is decoded in this process: a picture may be crafted to attack its decoder, so a child process with limited
memory and time does it.
"""

from __future__ import annotations

import base64
import os
import re
import stat

import msgspec

from ..base import Output, ToolError
from ..children import Child
from . import documents, extract
from .paths import MAX_FILE_BYTES, size

MAX_IMAGE_BYTES = 3_750_000  # some model APIs accept 5 MB, and base64 adds a third
EDGE = 2_048  # pixels: models scale larger pictures down themselves
MAX_EDGE = 8_000  # model APIs refuse larger pictures
MAX_PIXELS = 250_000_000  # larger pictures are not even scaled down
MAX_SEGMENTS = 10_000  # of a JPEG, before its size
INSTALL = 'pip install "everloop[images]"'
_SHOWN = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}  # accepted by model APIs
_MARKS = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
_BRANDS = {b"heic": "HEIF", b"heix": "HEIF", b"mif1": "HEIF", b"msf1": "HEIF", b"avif": "AVIF", b"avis": "AVIF"}
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Picture(msgspec.Struct, frozen=True):
    """A picture that is ready to be sent."""

    mime: str
    data: bytes
    name: str
    note: str = ""  # how it was changed

    @property
    def url(self) -> str:
        """The whole picture as a data URL."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"


class Refused(msgspec.Struct, frozen=True):
    """Why a file cannot be shown, and what to do; "" for a file that is not a picture."""

    reason: str


def image_kind(head: bytes) -> str | None:
    """Detect the kind of a picture from its head; None if it is not one."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12])
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS and head[6:10] == bytes(4):
        return "BMP"
    return next((kind for mark, kind in _MARKS.items() if head.startswith(mark)), None)


def printable(path: str) -> str:
    """Replace control characters in a file name, which may come from outside."""
    return _CONTROLS.sub("?", path)


def view(child: Child, descriptor: int, path: str, limit: int, edge: int = EDGE) -> Picture | Refused:
    """Return an open file as a picture, scaled down if it is too large, or why it cannot be shown."""
    info, name = os.fstat(descriptor), printable(os.path.basename(path))
    kind = image_kind(os.pread(descriptor, 32, 0)) if stat.S_ISREG(info.st_mode) else None
    if kind is None:
        return Refused("")
    if info.st_size > MAX_FILE_BYTES:
        return Refused(f"it has {size(info.st_size)}, the limit is {size(MAX_FILE_BYTES)}: send a smaller copy")
    if kind not in _SHOWN:
        made = _scaled_down(child, descriptor, kind, limit, edge, name)
        return made if isinstance(made, Picture) else Refused("")
    data = os.pread(descriptor, MAX_FILE_BYTES, 0)
    width, height = _sides(data, kind)
    if not width or not height or not _is_whole(data, kind):
        return Refused("it is damaged or incomplete: send it again")
    pixels = f"{width} x {height} pixels"
    if width * height > MAX_PIXELS:
        return Refused(f"it has {pixels}, too many to scale down: send a smaller copy")
    if max(width, height) <= edge and len(data) <= min(limit, MAX_IMAGE_BYTES) and b"NETSCAPE2.0" not in data[:1_024]:
        return Picture(_SHOWN[kind], data, name)
    made = _scaled_down(child, descriptor, kind, limit, edge, name, f"scaled down from {pixels}")
    if made is None:
        if max(width, height) <= MAX_EDGE and len(data) <= limit:
            return Picture(_SHOWN[kind], data, name)
        made = Refused(f"it has {pixels} and {size(len(data))}, too much. To scale it down: {INSTALL}")
    return made


def _scaled_down(
    child: Child, descriptor: int, kind: str, limit: int, edge: int, name: str, note: str = ""
) -> Picture | Refused | None:
    """Return a scaled-down copy without metadata; None if the required package is not installed."""
    ended = documents.extracted(child, descriptor, kind, min(limit, MAX_IMAGE_BYTES), edge)
    if ended.status == extract.MISSING:
        return None
    mime, newline, data = ended.output.partition(b"\n")
    if ended.late or ended.cut or ended.status not in (0, extract.UNREADABLE):
        return Refused("scaling it down takes too much memory or time: send a smaller copy")
    if ended.status == extract.UNREADABLE or not newline:
        return Refused("it is damaged: send it again")
    return Picture(mime.decode(), data, name, note)


def read_image(child: Child, descriptor: int, path: str) -> Output:
    """Return a picture of the workspace as a tool result."""
    match view(child, descriptor, path, MAX_IMAGE_BYTES):
        case Picture() as picture:
            note = f", {picture.note}" if picture.note else ""
            text = f"{path}: {picture.mime}, {size(len(picture.data))}{note}. The image follows."
            return Output(text, images=(picture.url,))
        case Refused(""):
            raise ToolError(f"{path} is an image of a kind that models cannot see. To convert it: {INSTALL}.")
        case Refused(reason):
            raise ToolError(f"{path} cannot be shown: {reason}.")


def _sides(data: bytes, kind: str) -> tuple[int, int]:
    """Return width and height from the header; zeros if it is invalid."""
    match kind:
        case "PNG" if data[12:16] == b"IHDR":
            return _number(data[16:20], "big"), _number(data[20:24], "big")
        case "GIF":
            return _number(data[6:8]), _number(data[8:10])
        case "JPEG":
            return _sides_of_jpeg(data)
        case "WEBP":
            return _sides_of_webp(data)
    return 0, 0


def _sides_of_jpeg(data: bytes) -> tuple[int, int]:
    """Read the first frame header; skip what precedes it (colour profiles, thumbnails)."""
    place = 2
    for _ in range(MAX_SEGMENTS):
        if data[place : place + 1] != b"\xff" or place + 9 > len(data):
            return 0, 0
        marker = data[place + 1]
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:  # fillers, and markers without a body
            place += 1 if marker == 0xFF else 2
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return _number(data[place + 7 : place + 9], "big"), _number(data[place + 5 : place + 7], "big")
        else:
            place += 2 + _number(data[place + 2 : place + 4], "big")
    return 0, 0


def _sides_of_webp(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8X":
            return _number(data[24:27]) + 1, _number(data[27:30]) + 1
        case b"VP8L" if data[20:21] == b"\x2f":
            bits = _number(data[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            return _number(data[26:28]) & 0x3FFF, _number(data[28:30]) & 0x3FFF
    return 0, 0


def _is_whole(data: bytes, kind: str) -> bool:
    """Return whether the end is there. Model APIs refuse a truncated picture, also in all later turns."""
    match kind:
        case "PNG":
            return b"IEND" in data[-65_536:] or b"IEND" in data
        case "JPEG":
            return b"\xff\xd9" in data
        case "WEBP":
            return _number(data[4:8]) + 8 <= len(data) + 1  # the final padding byte may be missing
    return True


def _number(data: bytes, order: str = "little") -> int:
    return int.from_bytes(data, "big" if order == "big" else "little")
