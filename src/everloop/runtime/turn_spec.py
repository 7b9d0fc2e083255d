"""What a turn works with where it is not the agent's own: a sub-agent's tools, limits, prompt and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..actions import Limits
from ..bus import InboundMessage
from ..engine import Turn
from ..log import TurnEnded
from ..tools.registry import ToolRegistry

TIME_IS_UP = "I stopped because my time was up. The work so far is kept."


def _as_it_is(standing: str) -> str:
    return standing


def _nothing(ended: TurnEnded, untrusted: bool) -> Sequence[InboundMessage]:
    return ()


@dataclass(slots=True, frozen=True)
class Brief:
    """The terms of one turn."""

    tools: ToolRegistry
    limits: Limits
    model: str | None = None
    system: Callable[[str], str] = _as_it_is  # the system prompt, from the one that the agent has
    dated: bool = True  # the day is told at the end of the system prompt
    ends_at: float | None = None  # when its time is up
    options: Mapping[str, Any] = field(default_factory=dict)  # of each model call
    # What follows from the turn's end, written with it; told whether the turn had read something from outside.
    follow: Callable[[TurnEnded, bool], Sequence[InboundMessage]] = _nothing


@contextmanager
def deadline(turn: Turn, ends_at: float | None) -> Iterator[None]:
    """Stop the turn when its time is up, whatever it is doing."""
    if ends_at is None:
        yield
        return
    left = max(ends_at - time.time(), 0.0)
    timer = asyncio.get_running_loop().call_later(left, turn.stop, "timeout", TIME_IS_UP)
    try:
        yield
    finally:
        timer.cancel()
