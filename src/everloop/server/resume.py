"""Resumable streams: the `id` of each event, and the header of a client that reconnects."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..text_cursor import Position, checksum
from .errors import bad_request

__all__ = ["HEADER", "Place", "Position", "position_of"]

HEADER = "Last-Event-ID"
_POSITION = re.compile(r"([0-9]{1,15})\.([0-9]{1,9})(?:\.([0-9a-f]{8}))?", re.ASCII)


class Place:
    """The current position of a stream being written."""

    def __init__(self) -> None:
        self.seq = 0
        self.chars = 0
        self.sum = 0

    def resume(self, position: Position) -> None:
        """Resume at a client's position."""
        self.seq, self.chars, self.sum = position.seq, position.chars, position.sum or 0

    def add(self, seq: int, text: str) -> None:
        if seq != self.seq:
            self.restart()
            self.seq = seq
        self.chars += len(text)
        self.sum = checksum(text, self.sum)

    def restart(self) -> None:
        """Start the round's text over."""
        self.chars = self.sum = 0

    def line(self) -> bytes:
        """Return the `id` line of the next event. A command is not in the log, so its events have none."""
        return b"" if not self.seq else b"id: %d.%d.%08x\n" % (self.seq, self.chars, self.sum)


def position_of(headers: Mapping[str, str]) -> Position | None:
    """Return the position that a client resumes from, if any."""
    given = headers.get(HEADER)
    if given is None:
        return None
    found = _POSITION.fullmatch(given)
    if found is None:
        raise bad_request(
            f"{HEADER}: is not a position in a stream; send the id of the last event that was read", HEADER
        )
    return Position(int(found[1]), int(found[2]), int(found[3], 16) if found[3] else None)
