"""What a small model is asked about: the turn that is being worked on, and what the conversation has shown so far.

It is read from the calls and their results alone, so the same conversation gives the same prompt, and nothing is known
that was not found by a call which the policy had allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....tools.narrow import cut, narrowed
from ....tools.seen import Call, Seen, seen_in
from .words import EMPTY, says, stems, words

Message = dict[str, Any]

LOOKED_AT = 4_000  # characters of a request by which it is judged: its beginning and its end, where it is longer
RECENT = 2  # turns for which the file touched last is what a request is about
_CLOCK = "[It is now "


@dataclass(frozen=True)
class Turn:
    """The turn that is being worked on: what was said, the calls so far with their results, and what came before.

    `file` is the file that is meant where none is named: it stands behind the request then. `corrects` is whether the
    request corrects the change of the turn before, `goes_on` whether it only adds to that request.
    """

    said: str
    calls: tuple[Call, ...] = ()
    file: str = ""
    corrects: bool = False
    goes_on: bool = False
    system: str = ""
    conversation: Sequence[Message] = ()
    start: int = 0  # where in the conversation it begins

    @property
    def request(self) -> str:
        return f"{self.said} ({self.file})" if self.file else self.said

    @property
    def names(self) -> list[str]:
        """The tools that were called."""
        return [name for name, _, _ in self.calls]

    @cached_property
    def before(self) -> Seen:
        """What was seen of the workspace before this turn."""
        return seen_in(calls_with_results(self.conversation[: self.start]))

    @cached_property
    def there(self) -> Seen:
        return seen_in(calls_with_results(self.conversation))

    @cached_property
    def recent(self) -> bool:
        """Whether a file was touched in the last turns: it is what a request may be about."""
        asked = [at for at, message in enumerate(self.conversation[: self.start]) if message.get("role") == "user"]
        lately = self.conversation[asked[-RECENT] if len(asked) >= RECENT else 0 : self.start]
        return bool(seen_in(calls_with_results(lately)).touched)


def turn_of(messages: Sequence[Message]) -> Turn:
    system = [text_of(message) for message in messages if message.get("role") in ("system", "developer")]
    rest = [message for message in messages if message.get("role") not in ("system", "developer")]
    start = max((at for at, message in enumerate(rest) if message.get("role") == "user"), default=0)
    said = without_clock(text_of(rest[start])) if rest and rest[start].get("role") == "user" else ""
    calls = tuple(calls_with_results(rest[start:]))
    return Turn(cut(said, LOOKED_AT), calls, system="\n\n".join(system), conversation=rest, start=start)


def calls_with_results(messages: Sequence[Message]) -> list[Call]:
    """The calls in their order, each with its result, "" where there is none yet."""
    results = {message.get("tool_call_id"): text_of(message) for message in messages if message.get("role") == "tool"}
    return [
        Call(*named, results.get(call.get("id"), ""))
        for message in messages
        for call, named in zip(message.get("tool_calls") or (), calls_of(message), strict=True)
    ]


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            arguments = {}
        found.append(narrowed(str(function.get("name")), arguments if isinstance(arguments, dict) else {}))
    return found


def without_clock(text: str) -> str:
    """The words without the time that stands behind them: beside what was said, a small model takes it for what was
    asked; there is `date`."""
    words, found, time = text.rpartition(_CLOCK)
    return words.rstrip("\n") if found and time.rstrip().partition("]")[1:] == ("]", "") else text


def text_of(message: Message) -> str:
    """The words of a message; a picture is none."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
    return content if isinstance(content, str) else ""


# ---------------------------------------------------------------------------------------------- what is meant


def described(request: str, paths: Iterable[str]) -> str:
    """The path whose words a request has: `the old report` for report_old.txt; "" where it has those of none."""
    said = {_singular(word) for word in words(request)}
    scores: dict[str, tuple[float, float, int]] = {}
    for number, path in enumerate(paths):
        parts = [_singular(word) for word in stems(path)]
        if hits := sum(part in said or (not part.isascii() and part in request) for part in parts):
            scores[path] = (hits, hits / len(parts), number)
    return max(scores, key=lambda path: scores[path], default="")


def meant(request: str, seen: Seen) -> str:
    """The file that a request is about though it names none: described, the other one, the copy, or the last one."""
    files, kind = [*seen.files, *seen.touched], [seen.focus]
    if says(request, "other"):  # the one that is most like the last one
        like = set(stems(seen.focus))
        kind = sorted((path for path in files if path != seen.focus), key=lambda path: len(like & set(stems(path))))
    elif says(request, "copy"):
        kind = [path for path in seen.copies if seen.has(path)]
    elif says(request, "original"):
        kind = [path for path in seen.copies.values() if seen.has(path)]
    found = described(request, kind if len(kind) > 1 else files)
    return found or (kind or [seen.focus])[-1]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and word.isascii() else word


def shares_words(request: str, lines: Iterable[str]) -> bool:
    """Whether a word of the request that says something stands in the lines."""
    said = {word for word in words(request) if word not in EMPTY and len(word) > 1}
    known = {word for line in lines for word in words(line)}
    return bool(said & known) or any(not word.isascii() and word in line for word in said for line in lines)
