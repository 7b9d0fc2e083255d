"""TextCursor: tracks how much of a streamed text a subscriber has been shown.

A text may be streamed more than once: a provider retries, another worker takes over the turn, a client reconnects, a
local model is called again. Each of these is an attempt at the text of one round of a turn. Code that streams to a
subscriber asks a cursor which part is new.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

TRAILING = ("", " ", "\n", "\n\n")  # whitespace that a stream may end with and the log leaves out


@dataclass(slots=True, frozen=True)
class Position:
    """How far a subscriber has read: a number of characters of the round that began after the log entry `seq`.

    The checksum shows whether they are the same characters: a round that runs again after a crash may differ. Without a
    checksum they are assumed to be the same.
    """

    seq: int
    chars: int
    sum: int | None = None

    @property
    def least(self) -> int:
        """The characters that the round must have: without a checksum, it must be at least as long as what was read."""
        return self.chars if self.sum is None else 0

    def begins(self, text: str) -> bool:
        """Whether the text begins with what the subscriber has read."""
        return self.sum is None or self.sum == checksum(text[: self.chars])

    def is_all_of(self, text: str) -> bool:
        """Whether the subscriber has read exactly this text, apart from whitespace at its end."""
        return any(len(text + end) == self.chars and self.begins(text + end) for end in TRAILING)


def checksum(text: str, before: int = 0) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


class TextCursor:
    """Follows the text of one round through its attempts, and returns only what the subscriber has not seen.

    An attempt that repeats what was shown adds nothing until it exceeds it. An attempt that differs makes what was
    shown void: `feed` returns None, and `restart` returns the text of the attempt, to be shown from the start. `seen`
    is the position of a subscriber that reconnects: of its text only the length and the checksum are known.
    """

    __slots__ = ("_parts", "_seen", "_shown", "attempt", "length")

    def __init__(self, seen: Position | None = None) -> None:
        self.attempt = ""  # the name of the current attempt
        self.length = 0  # characters of the current attempt
        self._parts: list[str] = []
        self._shown = ""  # by earlier attempts, until the current one exceeds it
        self._seen = seen

    @property
    def is_behind(self) -> bool:
        """Whether the current attempt has not yet repeated all that was shown."""
        return self.length < (self._seen.chars if self._seen is not None else len(self._shown))

    @property
    def text(self) -> str:
        """The text of the current attempt."""
        return "".join(self._parts)

    def begin(self, attempt: str = "") -> None:
        """Start another attempt, at the first character."""
        if self._seen is None and len(now := self.text) > len(self._shown):
            self._shown = now
        self.attempt, self.length, self._parts = attempt, 0, []

    def feed(self, text: str) -> str | None:
        """Add the attempt's next text. Return the part that is new; None if the attempt differs from what was shown."""
        start, self.length = self.length, self.length + len(text)
        self._parts.append(text)
        if self._seen is not None:
            return self._compare(self._seen)
        if start >= len(self._shown):
            return text
        known = self._shown[start : self.length]
        return text[len(known) :] if text.startswith(known) else None

    def restart(self) -> str:
        """Forget what was shown before the current attempt. Return the whole text of the attempt."""
        self._shown, self._seen = "", None
        return self.text

    def finish(self, text: str) -> str | None:
        """Take the whole text, as the log has it, and return what remains to be shown; None if it differs from what was
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
