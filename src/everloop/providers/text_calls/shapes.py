"""What is read out of a model's text: pieces to show, calls as they were written, and the whole reading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..base import ToolCallRequest

MAX_CALLS = 512


@dataclass(slots=True, frozen=True)
class Piece:
    """A part of an answer that may be shown now."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class Reading:
    """A whole answer: what it says, what it calls, what was thought, and what is still to be shown."""

    content: str
    calls: list[ToolCallRequest] = field(default_factory=list)
    reasoning: str = ""
    pieces: list[Piece] = field(default_factory=list)


@dataclass(slots=True)
class Written:
    """A call as a dialect wrote it; `problem` says why its arguments cannot be known."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: list[Any] = field(default_factory=list)
    problem: str = ""


@dataclass(slots=True)
class Block:
    """A stretch of text that holds calls: where it ends, and what stands in it."""

    end: int
    calls: list[ToolCallRequest]
    source: str  # without what is around it: by this it is known whether it was copied


CUT_OFF = "the answer ended before the call was complete; make the whole call again"
UNREADABLE = "the arguments are not valid JSON; make the whole call again, with its arguments as one JSON object"
