"""What of an answer was said and what was thought, as it is shown and as it is in the end."""

from __future__ import annotations

from ..base import ToolCallRequest
from .shapes import Piece, Reading


class Telling:
    """Collects the parts of an answer in order."""

    def __init__(self) -> None:
        self.spoken = False  # something was said that is more than space
        self.inline = False  # something stands before on the same line
        self.recent = ""  # the end of what was said
        self._pieces: list[Piece] = []  # to be shown
        self._said: list[str] = []
        self._thoughts: list[str] = []  # each whole
        self._thinking: list[str] | None = None  # the one that is open
        self._tag = ""  # that opened it, if a tag did

    def say(self, text: str) -> None:
        if not text:
            return
        line = text.rfind("\n")
        self.inline = bool(text[line + 1 :].strip()) or (line < 0 and self.inline)
        self.recent = (self.recent + text[-400:])[-400:]
        self._said.append(text)
        shown = text.lstrip() if self._thoughts and not self.spoken else text
        self.spoken = self.spoken or not text.isspace()
        if shown:
            self._pieces.append(Piece(shown))

    def begin_thought(self, tag: str = "") -> None:
        self._thinking, self._tag = [], tag

    def think(self, text: str) -> None:
        if text and self._thinking is not None:
            self._thinking.append(text)
            self._pieces.append(Piece(text, True))

    def end_thought(self) -> None:
        self._thoughts.append("".join(self._thinking or ()))
        self._thinking = None

    def unfinished(self) -> str:
        """The thought that a tag has opened and nothing has ended."""
        return "".join(self._thinking) if self._thinking and self._tag else ""

    def shorten(self, thought: str) -> None:
        """The thought that is open was only this, and it is over."""
        self._thinking = [thought]
        self.end_thought()

    def all_was_thought(self) -> None:
        """What was said until now was a thought that no tag had opened."""
        self._thoughts.append("".join(self._said))
        self._said, self.spoken, self.inline, self.recent = [], False, False, ""

    def take(self) -> list[Piece]:
        """What is to be shown since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def whole(self, calls: list[ToolCallRequest]) -> Reading:
        """The answer, once it is over."""
        if self._thinking is not None and self.spoken and self._tag:
            # Nothing ends it, and there is an answer before it: then it is no thought but a word.
            self.say(self._tag + "".join(self._thinking))
        elif self._thinking is not None:
            self.end_thought()
        content = "".join(self._said)
        if self._thoughts:
            content = content.strip()
        elif calls:
            content = content.rstrip()
        reasoning = "\n\n".join(filter(None, (thought.strip() for thought in self._thoughts)))
        return Reading(content, calls, reasoning, self.take())
