"""The time that a run may take: a deadline that can be waited for, and that stands still while a person is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadline:
    """So many seconds from now, not counting pauses."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._now = now
        self._since = now()  # when it was last set going
        self._used = 0.0  # seconds before that
        self._pauses = 0
        self._changed = asyncio.Event()

    @property
    def remaining(self) -> float:
        running = 0.0 if self._pauses else self._now() - self._since
        return self.seconds - self._used - running

    @property
    def expired(self) -> bool:
        return self.remaining <= 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of this block does not count; blocks may overlap."""
        if not self._pauses:
            self._used += self._now() - self._since
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._since = self._now()
            self._changed.set()

    async def passed(self) -> None:
        """Wait until the time is up, however often it stands still."""
        while not self.expired:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if self._pauses else self.remaining):
                    await self._changed.wait()
            except TimeoutError:
                continue
