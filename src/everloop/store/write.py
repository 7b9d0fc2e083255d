"""A write under way, as something to await."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Callback = Callable[[Any], object]


class Write(Generic[T]):
    """A future for writes, different from asyncio's in two ways.

    It cannot be cancelled: a task that is being cancelled hears of it when the write is done, so that what is on disk
    and what its writer knows never differ. And whoever waits goes on in the very callback that brings the result, not
    in the loop's next round: a durable turn waits eight times, and a round of the loop is dear.
    """

    __slots__ = ("_asyncio_future_blocking", "_callbacks", "_done", "_exception", "_loop", "_result")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False  # asyncio's mark of a future
        self._loop = loop
        self._callbacks: list[tuple[Callback, contextvars.Context | None]] = []
        self._done = False
        self._result: T | None = None
        self._exception: BaseException | None = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    __iter__ = __await__

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return False

    def cancel(self, msg: object = None) -> bool:
        return False

    def result(self) -> T:
        if not self._done:
            raise asyncio.InvalidStateError("the write is not done")
        if self._exception is not None:
            raise self._exception
        return self._result  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        if not self._done:
            raise asyncio.InvalidStateError("the write is not done")
        return self._exception

    def add_done_callback(self, callback: Callback, *, context: contextvars.Context | None = None) -> None:
        if self._done:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callback) -> int:
        before = len(self._callbacks)
        self._callbacks = [one for one in self._callbacks if one[0] != callback]
        return before - len(self._callbacks)

    def settle(self, result: T | None, exception: BaseException | None) -> None:
        """The write is done, or failed. Called by the loop itself, never from inside a task."""
        self._done, self._result, self._exception = True, result, exception
        callbacks, self._callbacks = self._callbacks, []
        for callback, context in callbacks:
            if context is None:
                callback(self)
            else:
                context.run(callback, self)
