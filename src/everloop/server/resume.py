"""How far a client has got in a streamed answer, as the `id` of an event and the header of one who comes back."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import bad_request

HEADER = "Last-Event-ID"
ENDS = (" ", "\n", "\n\n")
_POSITION = re.compile(r"([0-9]{1,15})\.([0-9]{1,9})(?:\.([0-9a-f]{8}))?", re.ASCII)


@dataclass(slots=True, frozen=True)
class Position:
    """So many characters of the round that began after this entry of the log. The sum tells whether they were these: a
    round that is begun again after a crash may say something else."""

    seq: int
    chars: int
    sum: int | None = None

    @property
    def least(self) -> int:
        """How many characters the round must have, if it is known to be the same as it was for the client."""
        return self.chars if self.sum is None else 0

    def fits(self, text: str) -> bool:
        """Whether the round's text begins with what the client has."""
        return self.sum is None or self.sum == _sum(text[: self.chars])

    def ends(self, text: str) -> bool:
        """Whether the client has this text, and spaces after it that the log has not."""
        return any(len(text + end) == self.chars and self.fits(text + end) for end in ("", *ENDS))


class Place:
    """The position of a stream that is being written."""

    def __init__(self) -> None:
        self.seq = 0
        self.chars = 0
        self._sum = 0

    def add(self, seq: int, text: str) -> None:
        if seq != self.seq:
            self.restart()
            self.seq = seq
        self.chars += len(text)
        self._sum = _sum(text, self._sum)

    def restart(self) -> None:
        """The round's text begins again."""
        self.chars = self._sum = 0

    def line(self) -> bytes:
        """The line of an event after which a client is here; none where nothing of the log is shown, but a command."""
        return b"" if not self.seq else b"id: %d.%d.%08x\n" % (self.seq, self.chars, self._sum)


def position_of(headers: Mapping[str, str]) -> Position | None:
    """The position of a client that comes back, if it is one."""
    given = headers.get(HEADER)
    if given is None:
        return None
    found = _POSITION.fullmatch(given)
    if found is None:
        raise bad_request(f"{HEADER}: is no position of a stream; send the id of the last event that was read", HEADER)
    return Position(int(found[1]), int(found[2]), int(found[3], 16) if found[3] else None)


def _sum(text: str, before: int = 0) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)
