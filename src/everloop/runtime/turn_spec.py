"""TurnSpec: what one turn works with. A sub-agent or an API request has tools, limits and a prompt of its own."""

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


def _unchanged(prompt: str) -> str:
    return prompt


def _nothing(ended: TurnEnded, untrusted: bool) -> Sequence[InboundMessage]:
    return ()


@dataclass(slots=True, frozen=True)
class TurnSpec:
    """The settings of one turn."""

    tools: ToolRegistry
    limits: Limits
    model: str | None = None
    system: Callable[[str], str] = _unchanged  # makes the system prompt from the agent's own
    dated: bool = True  # the system prompt ends with the date
    ends_at: float | None = None  # when its time is up
    options: Mapping[str, Any] = field(default_factory=dict)  # of each model call
    # Messages that follow from the turn's end and are written with it; told whether it has read something from outside.
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
