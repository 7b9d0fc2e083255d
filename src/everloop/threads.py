"""Work off the event loop: blocking functions on a pool of daemon threads, and background tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_IDLE_SECONDS = 10.0


class _Worker:
    """A thread and its job queue; it ends after a while without jobs."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A daemon thread, so that a function that hangs does not keep the process from exiting.
        threading.Thread(target=self._work, name="everloop-tool", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    _idle.remove(self)
                    return
                except ValueError:
                    continue  # it was claimed just now: a job is on its way
            job()
            del job  # it holds references to the arguments and the result


_idle: list[_Worker] = []


async def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run a blocking function in a thread, with the caller's context variables.

    Cancellation only stops waiting: a thread cannot be killed, so the function runs to its end and its result is
    discarded.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = copy_context()
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()

    def job() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as error:  # a future does not accept StopIteration
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            failure = error
        _idle.append(worker)
        try:
            loop.call_soon_threadsafe(_deliver, future, result, failure)
        except RuntimeError:
            return  # the loop is closed, so there is no caller left

    worker.jobs.put(job)
    return await future


def _deliver(future: asyncio.Future[T], result: T, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


log = logging.getLogger(__name__)


class BackgroundTasks:
    """Background tasks that nothing awaits. Their errors are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self, seconds: float) -> None:
        """Wait for the running tasks, and cancel those that take longer than this."""
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=seconds)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s", error)
