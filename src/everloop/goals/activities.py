"""What a watcher of an executor is told while it runs, in order and complete."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from .. import events
from ..events import ToolEnded, ToolStarted

__all__ = ["Activities", "Activity", "ActivityError", "OnActivity", "ThoughtChunk", "ToolEnded", "ToolStarted"]

log = logging.getLogger(__name__)
LAST_SECONDS = 5.0  # that a slow watcher has for what is left when the run is over

Context = Literal[
    "inputs", "model", "tool", "unlisted_tool", "output", "max_turns", "timeout", "aborted", "error", "grace"
]


@dataclass(slots=True, frozen=True)
class ThoughtChunk:
    """A piece of what the model thinks, as it comes."""

    text: str


@dataclass(slots=True, frozen=True)
class ActivityError:
    """Something that went wrong, or that ended the run early; `context` says in what."""

    message: str
    context: Context


Activity = ThoughtChunk | ToolStarted | ToolEnded | ActivityError
OnActivity = Callable[[Activity], Awaitable[None] | None]


class Activities:
    """Tells one watcher, a function that is async or not. What it does wrong is no fault of the run."""

    def __init__(self, on_activity: OnActivity | None) -> None:
        self._on_activity = on_activity
        self._waiting: asyncio.Queue[Awaitable[Any] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def emit(self) -> events.Emit | None:
        """Takes the events of a turn; None when nobody watches, and then nothing is streamed."""
        return None if self._on_activity is None else self._event

    def error(self, message: str, context: Context) -> None:
        self._tell(ActivityError(message, context))

    async def close(self) -> None:
        """Wait until an async watcher has heard everything, or has had time enough for it."""
        if self._task is None:
            return
        self._waiting.put_nowait(None)
        _, late = await asyncio.wait([self._task], timeout=LAST_SECONDS)
        if late:
            log.warning("the watcher of an executor is too slow: what it has not heard yet is dropped")
            self._task.cancel()
            await asyncio.wait([self._task], timeout=1.0)
        while not self._waiting.empty():
            if inspect.iscoroutine(left := self._waiting.get_nowait()):
                left.close()

    def _event(self, event: events.Event) -> None:
        match event:
            case events.Reasoning(text):
                self._tell(ThoughtChunk(text))
            case ToolStarted() | ToolEnded():
                self._tell(event)
            case events.Error(message):
                self._tell(ActivityError(message, "model"))

    def _tell(self, activity: Activity) -> None:
        if self._on_activity is None:
            return
        try:
            told = self._on_activity(activity)
        except Exception:
            log.exception("the watcher of an executor failed")
            return
        if inspect.isawaitable(told):  # the next one begins when this one is through
            self._waiting.put_nowait(told)
            self._task = self._task or asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        task = asyncio.current_task()
        while (told := await self._waiting.get()) is not None:
            try:
                await told
            except (Exception, asyncio.CancelledError):
                if task is not None and task.cancelling():
                    raise
                log.exception("the watcher of an executor failed")
