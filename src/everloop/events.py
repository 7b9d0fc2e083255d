"""Events of a running turn, for its subscribers. They are for display; the log is the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, frozen=True)
class TurnStarted:
    turn: str
    resumed: bool = False  # the turn was interrupted and continues now


@dataclass(slots=True, frozen=True)
class Text:
    """A piece of the answer, as the model writes it."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str


@dataclass(slots=True, frozen=True)
class Restarted:
    """The connection broke: the part of the round's answer that was shown is void, and the answer starts again."""

    reason: str


@dataclass(slots=True, frozen=True)
class ToolStarted:
    call: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True, frozen=True)
class ToolProgress:
    """A line of progress from a running tool."""

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
    """The turn waits for a person to approve or deny these calls; the question shows exactly what would run."""

    turn: str
    calls: tuple[str, ...]
    question: str


@dataclass(slots=True, frozen=True)
class Usage:
    """Tokens of one model call, as the provider counted them."""

    tokens: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Steered:
    """A message was passed to the running turn."""

    text: str


@dataclass(slots=True, frozen=True)
class Compacting:
    """The conversation does not fit the model's window; its older part is being summarised."""

    turns: int


@dataclass(slots=True, frozen=True)
class Compacted:
    """From here on the model is shown a shorter conversation; `before` and `after` estimate a request's tokens."""

    turns: int  # that were summarised
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
Show = Callable[[int, Event], None]  # gets the number of the last log entry before the event's round, and the event
