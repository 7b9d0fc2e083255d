"""Wakes an event loop from the writer's thread, once for many results."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Waker(Generic[T]):
    """Hands items from another thread to `take` in the loop's thread.

    An eventfd of our own costs one system call a wake-up less than the loop's self-pipe, and a durable turn is
    mostly wake-ups.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._lock = threading.Lock()  # nobody writes to a number that is another file's by now
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else -1
        if self._fd >= 0:
            loop.add_reader(self._fd, self._woken)

    def hand(self, items: Iterable[T]) -> None:
        """From any thread. Nothing happens when the loop is gone: nobody waits any more."""
        self._items.extend(items)
        with self._lock:
            if self._loop.is_closed():
                return
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            else:
                self._loop.call_soon_threadsafe(self._take_all)

    def close(self) -> None:
        """In the loop's thread, once nobody hands anything over any more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self.forget()
        self._loop.call_soon(self._take_all)  # by the loop itself, never from inside a task

    def forget(self) -> None:
        """From any thread, once the loop is gone."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _woken(self) -> None:
        os.eventfd_read(self._fd)
        self._take_all()

    def _take_all(self) -> None:
        while self._items:
            self._take(self._items.popleft())


def forget_closed(wakers: dict[asyncio.AbstractEventLoop, Waker[T]]) -> None:
    """Let go of the loops that have ended: a program may run one after another."""
    for loop in [loop for loop in list(wakers) if loop.is_closed()]:
        if (waker := wakers.pop(loop, None)) is not None:
            waker.forget()
