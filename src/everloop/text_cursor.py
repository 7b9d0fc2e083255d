"""TextCursor: tracks how much of a streamed text a subscriber has been shown.

A text may be streamed several times: a provider retries, another worker takes over the turn, a client reconnects, a
local model is called again. Each of these is an attempt at the text of one round of a turn. Code that forwards a stream
to a subscriber asks a cursor which part of it is new.
"""

from __future__ import annotations

import zlib

import msgspec

TRAILING = ("", " ", "\n", "\n\n")  # trailing whitespace that a stream may have and the log omits


class Position(msgspec.Struct, frozen=True):
    """A subscriber's position: the number of characters of the round that began after log entry `seq`.

    The checksum tells whether they were the same characters: a round that runs again after a crash may differ. Without
    a checksum they are assumed to be.
    """

    seq: int
    chars: int
    sum: int | None = None

    @property
    def least(self) -> int:
        """Return the minimum length of the round: without a checksum it must at least cover what the subscriber has."""
        return self.chars if self.sum is None else 0

    def begins(self, text: str) -> bool:
        """Return whether the text begins with what the subscriber has."""
        return self.sum is None or self.sum == checksum(text[: self.chars])

    def is_all_of(self, text: str) -> bool:
        """Return whether the subscriber has exactly this text, apart from trailing whitespace."""
        return any(len(text + end) == self.chars and self.begins(text + end) for end in TRAILING)


def checksum(text: str, before: int = 0) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


class TextCursor:
    """Follows the text of one round through its attempts, and returns only what the subscriber has not seen.

    An attempt that repeats what was shown adds nothing until it goes beyond that. An attempt that differs invalidates
    what was shown: `feed` returns None, and `restart` returns the attempt's text so far, to be shown from the start.
    `seen` is the position of a subscriber that reconnects; its text is not known, only its length and checksum.
    """

    __slots__ = ("_parts", "_seen", "_shown", "attempt", "length")

    def __init__(self, seen: Position | None = None) -> None:
        self.attempt = ""  # id of the current attempt
        self.length = 0  # characters of the current attempt so far
        self._parts: list[str] = []
        self._shown = ""  # by earlier attempts, while the current one has not gone beyond it
        self._seen = seen

    @property
    def is_behind(self) -> bool:
        """Return whether the current attempt has not yet repeated everything that was shown."""
        return self.length < (self._seen.chars if self._seen is not None else len(self._shown))

    @property
    def text(self) -> str:
        """Return the text of the current attempt so far."""
        return "".join(self._parts)

    def begin(self, attempt: str = "") -> None:
        """Start another attempt at the first character."""
        if self._seen is None and len(now := self.text) > len(self._shown):
            self._shown = now
        self.attempt, self.length, self._parts = attempt, 0, []

    def feed(self, text: str) -> str | None:
        """Add the attempt's next text. Return the new part of it; None if the attempt differs from what was shown."""
        start, self.length = self.length, self.length + len(text)
        self._parts.append(text)
        if self._seen is not None:
            return self._compare(self._seen)
        if start >= len(self._shown):
            return text
        known = self._shown[start : self.length]
        return text[len(known) :] if text.startswith(known) else None

    def restart(self) -> str:
        """Discard what was shown before the current attempt, and return all of the attempt's text."""
        self._shown, self._seen = "", None
        return self.text

    def finish(self, text: str) -> str | None:
        """Take the whole text from the log and return the part that is left to show.

        None if the text differs from what was shown. The log may lack leading or trailing whitespace that was streamed.
        """
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
