"""Read the header of a GGUF file: the numbers that determine how much memory a model needs."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from .progress import WeightsError

_SIZES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 20  # bytes of a string; no model has longer ones
_MAX_KEYS = 10_000
_MAX_ITEMS = 4_096  # of an array that is kept, such as a number for each layer


def read_head(path: Path) -> dict[str, Any]:
    """Return the model's metadata without its vocabulary; raises a one-line error if this is not a GGUF file."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({error.strerror}): name a GGUF file") from None
    except (ValueError, struct.error, KeyError, MemoryError, RecursionError):
        raise WeightsError(f"{path} is not a GGUF file that can be read: pull it again, or name another") from None


def _read(file: BinaryIO) -> dict[str, Any]:
    if file.read(4) != b"GGUF":
        raise ValueError("no GGUF")
    version, _, keys = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3) or keys > _MAX_KEYS:
        raise ValueError("an unknown version")
    found: dict[str, Any] = {}
    for _ in range(keys):
        name = _text(file)
        if name.startswith("tokenizer."):  # the vocabulary is long, and everything needed here precedes it
            break
        found[name] = _value(file, *struct.unpack("<I", file.read(4)))
    return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if count > _MAX_ITEMS:
            raise ValueError("a long array")
        return [_value(file, inner) for _ in range(count)]
    shape = _SIZES[kind]
    return struct.unpack(shape, file.read(struct.calcsize(shape)))[0]


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _MAX_STRING:
        raise ValueError("a long text")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("the file ends")
    return data.decode("utf-8", "replace")
