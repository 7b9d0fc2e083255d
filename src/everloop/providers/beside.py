"""An event loop on a thread of its own, for a library that would hold up ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..tools.threads import in_thread

T = TypeVar("T")
GOODBYE = 2.0  # seconds for what still runs to end


class LoopBeside:
    """Runs coroutines beside the caller's event loop. The thread begins with the first and ends with `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine gives; who cancels the waiting cancels it too."""
        loop = self._loop or self._start()

        async def run() -> T:  # made in its own loop, so that what is never begun is never awaited
            return await make()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))

    async def stop(self) -> None:
        """Cancel what still runs and end the thread; it begins anew if it is used again."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            await in_thread(thread.join, GOODBYE)

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a library that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=GOODBYE))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
