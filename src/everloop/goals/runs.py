"""One run of an executor: what belongs to it, what ends it, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ..actions import Limits
from ..engine import Turn
from ..log import Entry, ModelAnswered, TurnEnded
from ..messages import Conversation
from .activities import Activities, Context
from .clock import Deadline
from .ports import MemoryLog
from .window import GoalWindow

TerminateReason = Literal["goal", "max_turns", "timeout", "aborted", "error"]
Limit = Literal["timeout", "aborted"]
STOPPED: dict[Limit, str] = {"timeout": "(The time limit was reached.)", "aborted": "(The run was aborted.)"}


@dataclass(slots=True, frozen=True)
class OutputObject:
    """What came of a run. `result` is text, or JSON that fits the output schema; None if there is none."""

    result: Any
    terminate_reason: TerminateReason
    turns: int = 0  # answers of the model while it worked
    duration: float = 0.0  # seconds
    usage: dict[str, int] = field(default_factory=dict)  # tokens of all model calls, as the provider counted them
    recovered: bool = False  # the result comes from the grace turn: the best that could be given, not the goal
    recovered_from: str | None = None  # the limit that cut the work short
    error: str | None = None  # what went wrong, in one line
    log: tuple[Entry, ...] = field(default=(), repr=False)  # all that happened


class WorkLimits(Limits):
    """The limits of the work, with words for a conversation in which nobody can say “go on”."""

    @property
    def rounds_notice(self) -> str:
        return f"(The limit of {self.rounds} turns was reached.)"


@dataclass(slots=True)
class Run:
    """All that belongs to one run."""

    id: str
    inputs: dict[str, Any]
    clock: Deadline
    signal: asyncio.Event | None
    activities: Activities
    conversation: Conversation
    window: GoalWindow
    log: MemoryLog = field(default_factory=MemoryLog)

    def due(self) -> Limit | None:
        """What should stop the run now; the engine has looked at the number of turns before."""
        if self.clock.expired:
            return "timeout"
        return "aborted" if self.signal is not None and self.signal.is_set() else None


@dataclass(slots=True, frozen=True)
class Outcome:
    reason: TerminateReason
    result: Any = None
    error: str | None = None
    told: Context | None = None  # as what the watcher must hear of it, where it has not yet


@asynccontextmanager
async def stopping(turn: Turn, run: Run) -> AsyncIterator[None]:
    """Stop the turn the moment its time is up or the signal is set, whatever it is doing."""

    async def watch() -> None:
        waits = [asyncio.create_task(run.clock.passed())]
        if run.signal is not None:
            waits.append(asyncio.create_task(run.signal.wait()))  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if (due := run.due()) is not None:
                turn.stop(due, STOPPED[due])
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])


def cut_short(ended: TurnEnded) -> Outcome | None:
    """What a turn's end means for the run; None where the model ended it by itself."""
    match ended.reason:
        case "answer" | "empty":
            return None
        case "max_rounds":
            return Outcome("max_turns", error="the limit of turns was reached", told="max_turns")
        case "timeout":
            return Outcome("timeout", error="the time limit was reached", told="timeout")
        case "aborted":
            return Outcome("aborted", error="the run was aborted", told="aborted")
        case "error":  # the watcher has heard it when it happened
            return Outcome("error", error=ended.error or ended.text)
        case _:
            return Outcome("error", error=ended.text, told="error")


def turns_of(entries: Sequence[Entry]) -> int:
    """How often the model answered while it worked: up to where the first turn ended."""
    count = 0
    for entry in entries:
        if isinstance(entry, TurnEnded):
            break
        count += isinstance(entry, ModelAnswered) and entry.finish_reason != "cancelled"
    return count


def usage_of(entries: Sequence[Entry]) -> dict[str, int]:
    """The tokens of all answers together."""
    total: dict[str, int] = {}
    for entry in entries:
        for name, count in entry.usage.items() if isinstance(entry, ModelAnswered) else ():
            total[name] = total.get(name, 0) + count
    return total
