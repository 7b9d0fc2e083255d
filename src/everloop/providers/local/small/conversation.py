"""What a small model is asked about: the turn that is being worked on, and what the conversation has shown so far.

It is read from the calls and their results alone, so the same conversation gives the same prompt, and nothing is known
that was not found by a call which the policy had allowed.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....tools.narrow import cut, entries, failed, lines_of, narrowed
from .words import EMPTY, is_file, paths_in, says, stems, words

Message = dict[str, Any]

LOOKED_AT = 4_000  # characters of a request by which it is judged: its beginning and its end, where it is longer
_CLOCK = "[It is now "


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn that is being worked on: what was asked, and the calls so far with their results.

    `file` is the file that is meant where the request names none: it stands behind the request then. `corrects` is
    whether the request corrects the change of the turn before, `goes_on` whether it only adds to that request.
    """

    request: str
    calls: tuple[tuple[str, dict[str, Any], str], ...] = ()
    file: str = ""
    corrects: bool = False
    goes_on: bool = False


def parted(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """The system prompt, and the rest."""
    system = [text_of(message) for message in messages if message.get("role") in ("system", "developer")]
    rest = [message for message in messages if message.get("role") not in ("system", "developer")]
    return "\n\n".join(system), rest


def last_request(conversation: Sequence[Message]) -> int:
    """Where the turn that is being worked on begins."""
    return max((at for at, message in enumerate(conversation) if message.get("role") == "user"), default=0)


def turn_of(messages: Sequence[Message]) -> Turn:
    request = without_clock(text_of(messages[0])) if messages and messages[0].get("role") == "user" else ""
    return Turn(cut(request, LOOKED_AT), tuple(calls_with_results(messages)))


def calls_with_results(messages: Sequence[Message]) -> list[tuple[str, dict[str, Any], str]]:
    """The calls in their order, each with its result, "" where there is none yet."""
    results = {message.get("tool_call_id"): text_of(message) for message in messages if message.get("role") == "tool"}
    return [
        (*named, results.get(call.get("id"), ""))
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


# ---------------------------------------------------------------------------------------------- the workspace


@dataclass(slots=True)
class Seen:
    """`files` are those that are known to be there, the one touched last at the end; `texts` what they say."""

    files: dict[str, None] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # copy: original
    folders: list[str] = field(default_factory=list)  # the one made or seen last at the end
    listed: bool = False
    last: str = ""  # the last call
    last_edit: str = ""  # what the last edit has put into a file

    @property
    def focus(self) -> str:
        """The file that was touched last and is still there."""
        return self.touched[-1] if self.touched else ""

    def has(self, path: str) -> bool:
        return posixpath.normpath(path) in self.files

    def touch(self, path: str) -> None:
        path = posixpath.normpath(path)
        self.files.setdefault(path)
        self.touched = [one for one in self.touched if one != path] + [path]

    def forget(self, path: str) -> None:
        path = posixpath.normpath(path)
        self.files.pop(path, None)
        self.texts.pop(path, None)
        self.touched = [one for one in self.touched if one != path]


def seen_in(conversation: Sequence[Message]) -> Seen:
    seen = Seen()
    for name, arguments, result in calls_with_results(conversation):
        if not failed(result) and isinstance(arguments.get("path", ""), str):
            _take(seen, name, arguments, result)
            seen.last = name
    return seen


def _take(seen: Seen, name: str, arguments: dict[str, Any], result: str) -> None:
    path = posixpath.normpath(arguments.get("path") or ".")
    text = str(arguments.get("text", ""))
    match name:
        case "list_dir":
            folders, files, _ = entries(result)
            seen.folders = [*(one for one in folders if one != "memory"), *seen.folders]
            for one in files:
                seen.files.setdefault(posixpath.normpath(posixpath.join(path, one)))
            seen.listed = seen.listed or path == "."
        case "read_file":
            seen.touch(path)
            seen.texts[path] = lines_of(name, result)
        case "write_file":
            seen.touch(path)
            seen.texts[path] = str(arguments.get("content", "")).splitlines()
        case "edit_file":
            seen.touch(path)
            old, new = str(arguments.get("old_text", "")), str(arguments.get("new_text", ""))
            seen.last_edit = new
            if path in seen.texts:
                seen.texts[path] = "\n".join(seen.texts[path]).replace(old, new).split("\n")
        case "append":
            seen.touch(path)
            seen.last_edit = text
            if path in seen.texts:
                seen.texts[path].append(text)
        case "remove_line":
            seen.touch(path)
            if path in seen.texts:
                seen.texts[path] = [line for line in seen.texts[path] if text not in line]
        case "count_lines":
            seen.touch(path)
        case "delete":
            seen.forget(path)
        case "move" | "copy":
            _carry(seen, name, path, str(arguments.get("to", "")))
        case "grep" | "find_files":
            for one in paths_in(result):
                if is_file(one):
                    seen.files.setdefault(posixpath.normpath(one))
        case "exec":
            command = str(arguments.get("command", ""))
            if made := re.match(r"mkdir (?:-p )?([\w./-]+)$", command):
                seen.folders.append(made[1].rstrip("/"))
            for one in paths_in(command):
                if seen.has(one) or (">" in command and is_file(one)):
                    seen.touch(one)


def _carry(seen: Seen, name: str, path: str, to: str) -> None:
    target = posixpath.normpath(to if is_file(to) else posixpath.join(to, posixpath.basename(path)))
    text = seen.texts.get(path)
    if name == "move":
        seen.forget(path)
    else:
        seen.touch(path)
        seen.copies[target] = path
    seen.touch(target)
    if text is not None:
        seen.texts[target] = list(text)


# ---------------------------------------------------------------------------------------------- what is meant


def described(request: str, seen: Seen) -> str:
    """The file whose name a request describes: `the old report` for report_old.txt; "" where none or no single one."""
    said = {_singular(word) for word in words(request)}
    scores: dict[str, tuple[float, float, int]] = {}
    for number, path in enumerate([*seen.files, *seen.touched]):
        parts = [_singular(word) for word in stems(path)]
        if hits := sum(part in said or (not part.isascii() and part in request) for part in parts):
            scores[path] = (hits, hits / len(parts), number)
    if says(request, "other") and len(scores) > 1:
        scores.pop(seen.focus, None)
    return max(scores, key=lambda path: scores[path]) if scores else ""


def meant(request: str, seen: Seen) -> str:
    """The file that a request is about though it names none: described, the other one, the copy, or the last one."""
    if says(request, "other") and (others := _others(seen)):
        return described(request, seen) if described(request, seen) in others else others[-1]
    if found := described(request, seen):
        return found
    copies = [copy for copy in seen.copies if seen.has(copy)]
    if copies and says(request, "copy"):
        return copies[-1]
    if copies and says(request, "original") and seen.has(seen.copies[copies[-1]]):
        return seen.copies[copies[-1]]
    return seen.focus


def _others(seen: Seen) -> list[str]:
    """Files beside the one touched last, those most like it last."""
    focus = set(stems(seen.focus)) if seen.focus else set()
    rest = [path for path in dict.fromkeys([*seen.files, *seen.touched]) if path != seen.focus]
    return sorted(rest, key=lambda path: (len(focus & set(stems(path))), path in seen.touched))


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and word.isascii() else word


def shares_words(request: str, lines: Iterable[str]) -> bool:
    """Whether a word of the request that says something stands in the lines."""
    said = {word for word in words(request) if word not in EMPTY and len(word) > 1}
    known = {word for line in lines for word in words(line)}
    return bool(said & known) or any(not word.isascii() and word in line for word in said for line in lines)


def texts_of(paths: Iterable[str], seen: Seen, limit: int) -> str:
    """What files are known to say, for the prompt."""
    parts = [f"{path} says now:\n" + "\n".join(seen.texts[path]) for path in paths if seen.texts.get(path)]
    return "\n\n".join(part[:limit] for part in parts)
