"""Events for the subscribers of a running turn. They are for display only; the log is the source of truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, frozen=True)
class TurnStarted:
    turn: str
    resumed: bool = False  # the turn was interrupted by a crash and continues now


@dataclass(slots=True, frozen=True)
class Text:
    """A piece of the answer, as it streams."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(slots=True, frozen=True)
class Restarted:
    """The connection broke: the text streamed so far in this round is void, and the answer starts over."""

    reason: str


@dataclass(slots=True, frozen=True)
class ToolStarted:
    call: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True, frozen=True)
class ToolProgress:
    """Progress output of a running tool."""

    call: str
    text: str


@dataclass(slots=True, frozen=True)
class ToolEnded:
    call: str
    name: str
    content: str
    status: str  # ok, error, cancelled, timeout, aborted, interrupted, denied
    seconds: float


@dataclass(slots=True, frozen=True)
class Asked:
    """The turn waits for a person to approve these calls; the question shows exactly what would run."""

    turn: str
    calls: tuple[str, ...]
    question: str


@dataclass(slots=True, frozen=True)
class Usage:
    """Token counts of one model call, as reported by the provider."""

    tokens: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Steered:
    """A message was added to the running turn."""

    text: str


@dataclass(slots=True, frozen=True)
class Compacting:
    """The conversation exceeds the model's context window; its older part is being summarised."""

    turns: int


@dataclass(slots=True, frozen=True)
class Compacted:
    """The model sees a shorter conversation from here on. Sizes are approximate tokens of a request."""

    turns: int  # summarised turns
    before: int
    after: int


@dataclass(slots=True, frozen=True)
class Error:
    message: str


@dataclass(slots=True, frozen=True)
class TurnEnded:
    turn: str
    reason: str
    text: str


Event = (
    TurnStarted
    | Text
    | Reasoning
    | Restarted
    | ToolStarted
    | ToolProgress
    | ToolEnded
    | Asked
    | Usage
    | Steered
    | Compacting
    | Compacted
    | Error
    | TurnEnded
)
Emit = Callable[[Event], None]
# called with the seq of the log's last entry before the event's round, and the event
Show = Callable[[int, Event], None]
