"""What a small model is asked about: the turn that is being worked on, read from the messages of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .narrow import narrowed
from .results import cut

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
