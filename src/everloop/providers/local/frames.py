"""The protocol between the engine and its child: a length in four bytes, then that many bytes of JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

HEAD = struct.Struct(">I")
MAX_FRAME = 1 << 28


def pack(value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":")).encode()
    return HEAD.pack(len(data)) + data


def length(head: bytes) -> int:
    """Return the number of bytes that follow."""
    (size,) = HEAD.unpack(head)
    if size > MAX_FRAME:
        raise ValueError("no frame is so long")
    return int(size)
