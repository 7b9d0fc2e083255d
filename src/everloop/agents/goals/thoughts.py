"""Parts what a model thinks from what it answers, where it writes both into one text: `<think>…</think>`."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A tag in quotes or backticks is one that the text speaks of.
_OPEN = re.compile(r"(?<![`\"'\\])<(think|thinking)>", re.IGNORECASE)
_CLOSE = {name: re.compile(rf"</{name}>", re.IGNORECASE) for name in ("think", "thinking")}
# Some models begin in their thoughts, since the prompt has opened the tag for them.
_ONLY_CLOSED = re.compile(r"^[ \t]*</(?:think|thinking)>[ \t]*$", re.IGNORECASE | re.MULTILINE)
_TAGS = ("<think>", "<thinking>", "</think>", "</thinking>")

Piece = tuple[bool, str]  # (whether it is a thought, text)


def part_thoughts(text: str) -> tuple[str, str]:
    """(answer, thoughts) of a whole text."""
    if "think" not in text.lower():
        return text, ""
    thoughts: list[str] = []
    answer: list[str] = []
    at = 0
    closed, opened = _ONLY_CLOSED.search(text), _OPEN.search(text)
    if closed is not None and (opened is None or opened.start() > closed.start()):
        thoughts.append(text[: closed.start()])
        at = closed.end()
    while (opened := _OPEN.search(text, at)) is not None:
        end = _CLOSE[opened[1].lower()].search(text, opened.end())
        if end is None and (text[at : opened.start()].strip() or "".join(answer).strip()):
            break  # nothing ends it, and there is an answer before it: then it is no thought but a word
        answer.append(text[at : opened.start()])
        thoughts.append(text[opened.end() : end.start() if end else len(text)])
        at = end.end() if end else len(text)
    if not thoughts:
        return text, ""
    return "".join([*answer, text[at:]]).strip(), "\n\n".join(filter(None, (part.strip() for part in thoughts)))


class ThoughtStream:
    """The same for a text that comes in pieces, wherever they are cut. For watching: `part_thoughts` is the truth."""

    def __init__(self) -> None:
        self._held = ""  # may be the beginning of a tag
        self._before = ""  # the character in front of it
        self._inside = ""  # the tag that is open

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        while True:
            found = self._next_tag()
            if found is None:
                break
            yield from self._take(found.start() - len(self._before))
            self._inside = "" if self._inside else found[1].lower()
            self._held = self._held[found.end() - found.start() :]
            self._before = ">"
        yield from self._take(len(self._held) - self._tail())

    def rest(self) -> Iterator[Piece]:
        """What was held back, once the text is over."""
        yield from self._take(len(self._held))

    def _next_tag(self) -> re.Match[str] | None:
        pattern = _CLOSE[self._inside] if self._inside else _OPEN
        return pattern.search(self._before + self._held, len(self._before) if self._inside else 0)

    def _take(self, length: int) -> Iterator[Piece]:
        piece, self._held = self._held[:length], self._held[length:]
        if piece:
            self._before = piece[-1]
            yield bool(self._inside), piece

    def _tail(self) -> int:
        """How many characters at the end may be the beginning of a tag."""
        start = self._held.rfind("<")
        tail = self._held[start:].lower() if start >= 0 else ""
        return len(tail) if tail and any(tag.startswith(tail) for tag in _TAGS) else 0
