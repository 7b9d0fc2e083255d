"""What a watcher of a running turn is told. Events are for watching; the log is the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, frozen=True)
class TurnStarted:
    turn: str
    resumed: bool = False  # the turn was cut off by a crash and goes on now


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
    """The answer shown so far in this round was lost with its connection and begins again."""

    reason: str


@dataclass(slots=True, frozen=True)
class ToolStarted:
    call: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True, frozen=True)
class ToolProgress:
    """Something a tool says while it runs."""

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
    """The turn waits for a person's word on these calls; the question shows exactly what would run."""

    turn: str
    calls: tuple[str, ...]
    question: str


@dataclass(slots=True, frozen=True)
class Usage:
    """Tokens of one model call, as the provider counted them."""

    tokens: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Steered:
    """A message was handed to the running turn."""

    text: str


@dataclass(slots=True, frozen=True)
class Compacting:
    """The conversation does not fit the model's window; its older part is being summarised."""

    turns: int


@dataclass(slots=True, frozen=True)
class Compacted:
    """The conversation is shown to the model in fewer words from here on: tokens of a request, about."""

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
Show = Callable[[int, Event], None]  # told the log's last entry before the event's round, and the event
