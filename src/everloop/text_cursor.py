"""TextCursor: what has a subscriber already been shown of a streamed text?

A text is streamed once or several times: a provider retries, another worker takes the turn over, a client reconnects, a
local model is asked again. Each of these is an attempt at the text of one round of a turn. Code that shows a
stream to a subscriber asks a cursor what of it is new.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

TRAILING = ("", " ", "\n", "\n\n")  # whitespace that a stream may end with and the log leaves out


@dataclass(slots=True, frozen=True)
class Position:
    """How far a subscriber is: so many characters of the round that began after this entry of the log.

    The checksum tells whether they were the same characters: a round that runs again after a crash may differ. Without
    one they are taken to be.
    """

    seq: int
    chars: int
    sum: int | None = None

    @property
    def least(self) -> int:
        """How many characters the round must have: without a checksum it has to be the subscriber's own."""
        return self.chars if self.sum is None else 0

    def begins(self, text: str) -> bool:
        """Whether the text begins with what the subscriber has."""
        return self.sum is None or self.sum == checksum(text[: self.chars])

    def is_all_of(self, text: str) -> bool:
        """Whether the subscriber has exactly this text, apart from whitespace at its end."""
        return any(len(text + end) == self.chars and self.begins(text + end) for end in TRAILING)


def checksum(text: str, before: int = 0) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


class TextCursor:
    """Follows the text of one round through its attempts, and returns only what its subscriber has not seen.

    An attempt that repeats what was shown adds nothing until it goes beyond it. One that says something else makes what
    was shown void: `feed` returns None, and `restart` returns the attempt's text so far, to be shown from the start.
    `seen` is the position of a subscriber that reconnects; its text is not known, only its length and checksum.
    """

    __slots__ = ("_parts", "_seen", "_shown", "attempt", "length")

    def __init__(self, seen: Position | None = None) -> None:
        self.attempt = ""  # the name of the running attempt
        self.length = 0  # characters of the running attempt so far
        self._parts: list[str] = []
        self._shown = ""  # by earlier attempts, where the running one has not gone beyond it
        self._seen = seen

    @property
    def is_behind(self) -> bool:
        """Whether the running attempt has not yet repeated all that was shown."""
        return self.length < (self._seen.chars if self._seen is not None else len(self._shown))

    @property
    def text(self) -> str:
        """The text of the running attempt so far."""
        return "".join(self._parts)

    def begin(self, attempt: str = "") -> None:
        """Start another attempt, at the first character."""
        if self._seen is None and len(now := self.text) > len(self._shown):
            self._shown = now
        self.attempt, self.length, self._parts = attempt, 0, []

    def feed(self, text: str) -> str | None:
        """Take the attempt's next text. Return what of it is new; None if the attempt differs from what was shown."""
        start, self.length = self.length, self.length + len(text)
        self._parts.append(text)
        if self._seen is not None:
            return self._compare(self._seen)
        if start >= len(self._shown):
            return text
        known = self._shown[start : self.length]
        return text[len(known) :] if text.startswith(known) else None

    def restart(self) -> str:
        """Forget what was shown before the running attempt. Return all that the attempt has said."""
        self._shown, self._seen = "", None
        return self.text

    def finish(self, text: str) -> str | None:
        """Take the whole text, as the log has it, and return what is left to show; None if it differs from what was
        shown. The log may lack whitespace that was streamed at either end."""
        shown = self._shown if self.is_behind else self.text
        for said in (shown, shown.lstrip(), shown.strip()):
            if text.startswith(said):
                return text[len(said) :]
        return None

    def _compare(self, seen: Position) -> str | None:
        if self.length < seen.chars:
            return ""
        whole = self.text
        if not seen.begins(whole):
            return None
        self._seen = None
        return whole[seen.chars :]
