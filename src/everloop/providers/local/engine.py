"""The engine of the local model: one process for all sessions, started on first use and restarted if it dies."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...threads import in_thread
from ..base import ProviderError
from .llama import Loading
from .machine import cores
from .memory import check_memory
from .process import MISSING, SILENCE_SECONDS, ModelProcess, OnDelta
from .queue import FairQueue

WINDOW = 8_192
SLOTS = 2
WAITING = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """Which model to run, and how much of the machine it may use.

    `weights` is the model's file, or a function that finds it and may block. `window` is the length of one conversation
    in tokens, `slots` the number of concurrent conversations, `waiting` the number of requests that may queue; with
    `threads` 0, one thread runs per core. `states` is the folder of saved states, if any. A busy model without output
    for `silence` seconds is considered hung.
    """

    weights: Path | Callable[[], Path]
    window: int = WINDOW
    slots: int = SLOTS
    waiting: int = WAITING
    threads: int = 0
    states: Path | None = None
    silence: float = SILENCE_SECONDS


class Engine:
    """Answers requests in llama.cpp's format. Nothing runs before the first request or `start`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._queue = FairQueue(settings.slots, settings.waiting)
        self._child: ModelProcess | None = None
        self._starting: asyncio.Task[ModelProcess] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the child while it runs."""
        return None if self._child is None or self._child.dead else self._child.pid

    @property
    def loading(self) -> bool:
        """Whether the model is being loaded."""
        return self._starting is not None

    async def start(self) -> None:
        """Load the model now. Raises a one-line error if it cannot be loaded."""
        self._settle()
        await self._running()

    async def complete(
        self, request: dict[str, Any], on_delta: OnDelta | None = None, *, session: str = ""
    ) -> dict[str, Any]:
        """Answer a request with `messages` or a `prompt`; parts of the answer go to `on_delta` as they arrive.

        `stable` in the request is the number of messages (or characters of the prompt) at its beginning that do not
        change. Sessions take turns. When cancelled, the model stops at its next token.
        """
        self._settle()
        await self._queue.enter(session)
        try:
            child = await self._running()
            work = child.begin(request, on_delta)
        except BaseException:
            self._queue.leave(session)
            raise
        # The slot is free once the child is done, which may be after the caller was cancelled.
        work.ended.add_done_callback(lambda _: self._queue.leave(session))
        try:
            return await asyncio.shield(work.ended)
        except asyncio.CancelledError:
            child.cancel(work)
            raise

    async def close(self) -> None:
        """End the child. Requests in progress fail."""
        self._settle()
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._child is not None:
            await self._child.close()

    def _settle(self) -> None:
        """Reset the engine after its event loop, and with it the child, has ended."""
        if self._loop is not None and self._loop.is_closed():
            self._child = self._starting = None
            self._queue = FairQueue(self.settings.slots, self.settings.waiting)
        self._loop = asyncio.get_running_loop()

    async def _running(self) -> ModelProcess:
        """Return the child, starting it if there is none. Concurrent callers share one start."""
        if self._closed:
            raise ProviderError("the local model was closed")
        if self._child is not None and not self._child.dead:
            return self._child
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
            self._starting.add_done_callback(self._has_started)
        return await asyncio.shield(self._starting)

    async def _started(self) -> ModelProcess:
        if self._child is not None:
            await self._child.close(at_once=True)
        loading = await in_thread(_prepared, self.settings)
        self._child = await ModelProcess.start(loading, self.settings.silence)
        return self._child

    def _has_started(self, task: asyncio.Task[ModelProcess]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have gone


def installed() -> bool:
    """Return whether llama.cpp can be imported."""
    return importlib.util.find_spec("xllamacpp") is not None


def _prepared(settings: Settings) -> Loading:
    """Return the child's settings, after checking that the model can be loaded."""
    if not installed():
        raise ProviderError(MISSING)
    weights = settings.weights() if callable(settings.weights) else settings.weights
    check_memory(weights, settings.window, settings.slots)
    return Loading(
        str(weights.absolute()),
        settings.window,
        settings.slots,
        settings.threads or cores(),
        str(settings.states.absolute()) if settings.states else "",
    )
