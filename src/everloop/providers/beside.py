"""An event loop on a thread of its own, for a library that would hold up ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopBeside:
    """Runs coroutines beside the caller's event loop, whichever that is. The thread begins with the first of them and
    ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine gives; who cancels the waiting cancels it too."""

        async def run() -> T:  # the coroutine is made over there: one that never begins is never awaited
            return await make()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._started()))

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:  # callers may be on several threads
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon, so that a library that hangs does not keep the process from ending.
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return self._loop
