"""A request body in parts that are encoded already, sent without being joined."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import Payload
from aiohttp.abc import AbstractStreamWriter

SMALL = 1 << 16  # bytes up to which one write of the whole is cheaper than several


class PartsPayload(Payload):
    """Writes its parts one after another. A long history is never copied: only sending it costs anything."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(parts, content_type="application/json")
        self._parts = parts
        self._size = sum(map(len, parts))

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        for part in self._parts:  # the length is the one given in the header, so nothing is to be cut
            await writer.write(part)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._parts).decode(encoding, errors)


def payload(parts: Sequence[bytes]) -> bytes | PartsPayload:
    """What to give aiohttp as the data of a request; neighbours that are small are joined."""
    joined: list[bytes] = []
    small: list[bytes] = []
    for part in parts:
        if len(part) > SMALL:
            joined += [b"".join(small), part]
            small = []
        else:
            small.append(part)
    last = b"".join(small)
    return PartsPayload([*joined, last]) if joined else last
