"""Pictures made for tests, valid and invalid ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABpfZFQAAAAABJRU5ErkJggg=="
)


def drawn(form: str = "PNG", size: tuple[int, int] = (40, 20), mode: str = "RGB", **options: Any) -> bytes:
    """A picture whose left half is red and whose right half is blue."""
    picture = Image.new("RGB", size, "red")
    picture.paste("blue", (size[0] // 2, 0, *size))
    return saved(picture.convert(mode), form, **options)


def noise(form: str = "PNG", size: tuple[int, int] = (1_500, 1_200)) -> bytes:
    """Return a picture that does not compress."""
    return saved(Image.effect_noise(size, 90).convert("RGB"), form)


def saved(picture: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def opened(url: str) -> Image.Image:
    """Return the picture as a data URL."""
    head, _, data = url.partition(";base64,")
    assert head.startswith("data:image/")
    picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert picture.get_format_mimetype() == head.removeprefix("data:")
    picture.load()
    return picture


def colour(picture: Image.Image, left: int, top: int) -> str:
    """Return the name of the colour nearest to a pixel."""
    pixel = picture.convert("RGB").getpixel((left, top))
    assert isinstance(pixel, tuple)
    names = {
        "red": (255, 0, 0),
        "blue": (0, 0, 255),
        "white": (255, 255, 255),
        "grey": (128, 128, 128),
        "black": (0, 0, 0),
    }
    return min(names, key=lambda name: sum(abs(one - other) for one, other in zip(pixel, names[name], strict=True)))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int, *, whole: bool = False) -> bytes:
    """A PNG that claims so many pixels in few bytes; if complete, all of them are black."""
    packer = zlib.compressobj(9)
    row = bytes(1 + width * 3) if whole else b"the first bytes of a row"
    rows = b"".join(packer.compress(row) for _ in range(height if whole else 1)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
