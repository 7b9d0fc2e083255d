"""Wakes an event loop from the writer's thread, once for many results."""

from __future__ import annotations

import asyncio
import os
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
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else -1
        if self._fd >= 0:
            loop.add_reader(self._fd, self._woken)

    def hand(self, items: Iterable[T]) -> None:
        """From any thread. Nothing happens when the loop is gone: nobody waits any more."""
        self._items.extend(items)
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
            os.close(self._fd)
            self._fd = -1
        self._loop.call_soon(self._take_all)  # by the loop itself, never from inside a task

    def _woken(self) -> None:
        os.eventfd_read(self._fd)
        self._take_all()

    def _take_all(self) -> None:
        while self._items:
            self._take(self._items.popleft())
