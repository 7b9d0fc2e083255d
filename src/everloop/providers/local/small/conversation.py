"""The conversation around a request: the current turn, the view of the workspace, and references to files.

All of it is derived from the messages, so the same conversation gives the same prompt, and contains nothing of the
workspace that no permitted call has read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....tools.simple_tools import simplify_call, truncate
from ....tools.workspace_view import Call, WorkspaceView, view_of
from .language import Request, content_words, name_words, words

Message = dict[str, Any]

MAX_CLASSIFIED = 4_000  # characters at the beginning and end of a request that decide what it needs
RECENT_TURNS = 2  # after these turns, a request no longer refers to the file touched last
_CLOCK = "[It is now "


@dataclass(frozen=True)
class Turn:
    """The current turn: the user's text, the calls so far, and the messages of the whole conversation.

    `file` is the file that the request refers to without naming it; `corrects` is true if it corrects the last change,
    `continues` if it only adds to the previous request.
    """

    text: Request
    calls: tuple[Call, ...] = ()
    file: str = ""
    corrects: bool = False
    continues: bool = False
    system: str = ""
    messages: Sequence[Message] = ()
    start: int = 0  # the index of the turn's first message

    @property
    def request(self) -> Request:
        """The user's text, with the name of the file that it refers to."""
        return Request(f"{self.text} ({self.file})") if self.file else self.text

    @property
    def called(self) -> list[str]:
        """The names of the tools called so far."""
        return [call.tool for call in self.calls]

    @cached_property
    def workspace_before(self) -> WorkspaceView:
        """The view of the workspace before this turn."""
        return view_of(calls_with_results(self.messages[: self.start]))

    @cached_property
    def workspace(self) -> WorkspaceView:
        return view_of(calls_with_results(self.messages))

    @cached_property
    def has_recent_file(self) -> bool:
        """Whether a file was touched in the last turns, to which the request may refer."""
        starts = [at for at, message in enumerate(self.messages[: self.start]) if message.get("role") == "user"]
        recent = self.messages[starts[-RECENT_TURNS] if len(starts) >= RECENT_TURNS else 0 : self.start]
        return bool(view_of(calls_with_results(recent)).touched)


def current_turn(messages: Sequence[Message]) -> Turn:
    system = [text_of(message) for message in messages if message.get("role") in ("system", "developer")]
    rest = [message for message in messages if message.get("role") not in ("system", "developer")]
    start = max((at for at, message in enumerate(rest) if message.get("role") == "user"), default=0)
    text = without_clock(text_of(rest[start])) if rest and rest[start].get("role") == "user" else ""
    calls = tuple(calls_with_results(rest[start:]))
    return Turn(Request(truncate(text, MAX_CLASSIFIED)), calls, system="\n\n".join(system), messages=rest, start=start)


def calls_with_results(messages: Sequence[Message]) -> list[Call]:
    """Return the calls in order, each with its result, or "" if there is none yet."""
    results = {message.get("tool_call_id"): text_of(message) for message in messages if message.get("role") == "tool"}
    return [
        Call(*parsed, results.get(call.get("id"), ""))
        for message in messages
        for call, parsed in zip(message.get("tool_calls") or (), calls_of(message), strict=True)
    ]


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a message; commands that simple tools stand for become calls of those tools."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            arguments = {}
        found.append(simplify_call(str(function.get("name")), arguments if isinstance(arguments, dict) else {}))
    return found


def without_clock(text: str) -> str:
    """Return a message without the time at its end, which a small model takes for part of the request."""
    before, found, time = text.rpartition(_CLOCK)
    return before.rstrip("\n") if found and time.rstrip().partition("]")[1:] == ("]", "") else text


def text_of(message: Message) -> str:
    """Return the text of a message, without its pictures."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
    return content if isinstance(content, str) else ""


# ---------------------------------------------------------------------------------------------- references to files


def described_file(request: Request, paths: Iterable[str]) -> str:
    """Return the path whose words occur in a request (`the old report` for report_old.txt), or ""."""
    request_words = {_singular(word) for word in words(request)}
    scores: dict[str, tuple[float, float, int]] = {}
    for number, path in enumerate(paths):
        parts = [_singular(word) for word in name_words(path)]
        if hits := sum(part in request_words or (not part.isascii() and part in request) for part in parts):
            scores[path] = (hits, hits / len(parts), number)
    return max(scores, key=lambda path: scores[path], default="")


def referenced_file(request: Request, workspace: WorkspaceView) -> str:
    """Return the file that a request refers to without naming it: described, the other, the copy, or the last one."""
    files, candidates = [*workspace.files, *workspace.touched], [workspace.focus]
    if request.matches("other"):  # the file whose name is most similar to that of the last one
        focus = set(name_words(workspace.focus))
        others = (path for path in files if path != workspace.focus)
        candidates = sorted(others, key=lambda path: len(focus & set(name_words(path))))
    elif request.matches("copy"):
        candidates = [path for path in workspace.copies if workspace.has(path)]
    elif request.matches("original"):
        candidates = [path for path in workspace.copies.values() if workspace.has(path)]
    found = described_file(request, candidates if len(candidates) > 1 else files)
    return found or (candidates or [workspace.focus])[-1]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and word.isascii() else word


def shares_words(request: Request, lines: Iterable[str]) -> bool:
    """Return whether a content word of a request occurs in the lines."""
    wanted = {word for word in content_words(request) if len(word) > 1}
    known = {word for line in lines for word in words(line)}
    return bool(wanted & known) or any(not word.isascii() and word in line for word in wanted for line in lines)
