"""Activities: what an executor reports to its caller during a run, in order and complete."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from .. import events
from ..events import ToolEnded, ToolStarted

__all__ = ["Activities", "Activity", "ActivityError", "OnActivity", "ThoughtChunk", "ToolEnded", "ToolStarted"]

log = logging.getLogger(__name__)
DRAIN_SECONDS = 5.0  # grace period for a slow callback to catch up once the run is over

Context = Literal[
    "inputs", "model", "tool", "unlisted_tool", "output", "max_turns", "timeout", "aborted", "error", "grace"
]


@dataclass(slots=True, frozen=True)
class ThoughtChunk:
    """A piece of the model's reasoning, as it arrives."""

    text: str


@dataclass(slots=True, frozen=True)
class ActivityError:
    """Something that went wrong or ended the run early; `context` says where."""

    message: str
    context: Context


Activity = ThoughtChunk | ToolStarted | ToolEnded | ActivityError
OnActivity = Callable[[Activity], Awaitable[None] | None]


class Activities:
    """Calls `on_activity`, which may be async. An error in it is logged and does not affect the run."""

    def __init__(self, on_activity: OnActivity | None, tools: Collection[str] = ()) -> None:
        """`tools` are the tools that the definition lists."""
        self._on_activity = on_activity
        self._tools = tools
        self._waiting: asyncio.Queue[Awaitable[Any] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.model_error = ""  # the last model error that was reported
        self.errors = 0  # number of errors reported

    @property
    def emit(self) -> events.Emit | None:
        """Takes the events of the run's turns; None without a callback, so that nothing is streamed."""
        return None if self._on_activity is None else self._event

    def error(self, message: str, context: Context) -> None:
        self.errors += 1
        self._tell(ActivityError(message, context))

    async def close(self) -> None:
        """Wait until an async callback has received everything, or has had enough time for it."""
        if self._task is None:
            return
        self._waiting.put_nowait(None)
        _, late = await asyncio.wait([self._task], timeout=DRAIN_SECONDS)
        if late:
            log.warning("on_activity is too slow: the activities that it has not received yet are dropped")
            self._task.cancel()
            await asyncio.wait([self._task], timeout=1.0)
        while not self._waiting.empty():
            if inspect.iscoroutine(left := self._waiting.get_nowait()):
                left.close()

    def _event(self, event: events.Event) -> None:
        match event:
            case events.Reasoning(text):
                self._tell(ThoughtChunk(text))
            case ToolStarted(name=name):
                self._tell(event)
                if name not in self._tools:
                    called = f'the model called "{name}", which the definition does not list'
                    self._tell(ActivityError(called, "unlisted_tool"))
            case ToolEnded():
                self._tell(event)
            case events.Error(message):
                self.model_error = message
                self.error(message, "model")

    def _tell(self, activity: Activity) -> None:
        if self._on_activity is None:
            return
        try:
            told = self._on_activity(activity)
        except Exception:
            log.exception("on_activity failed")
            return
        if inspect.isawaitable(told):  # one at a time, in order
            self._waiting.put_nowait(told)
            self._task = self._task or asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        task = asyncio.current_task()
        while (told := await self._waiting.get()) is not None:
            try:
                await told
            except (Exception, asyncio.CancelledError):
                if task is not None and task.cancelling():
                    raise
                log.exception("on_activity failed")
