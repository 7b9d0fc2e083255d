"""A fair queue for the model: sessions take turns, however many requests each has."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

from ..base import ProviderError

_REMEMBERED = 1_000  # sessions whose last turn is remembered


class FairQueue:
    """Runs at most `places` requests at once and lets `limit` more wait.

    The next request is that of the session with the fewest running requests; ties go to the session whose last turn is
    longest ago. So a session with ten requests does not hold up a session with one.
    """

    def __init__(self, places: int, limit: int) -> None:
        self._free = places
        self._limit = limit
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._working: Counter[str] = Counter()
        self._served: OrderedDict[str, int] = OrderedDict()  # session: when it had its last turn
        self._turns = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def enter(self, session: str) -> None:
        """Wait for a place. The caller gives it back with `leave`."""
        if self._free:
            self._free -= 1
            self._serve(session)
            return
        if (waiting := self.waiting) >= self._limit:
            raise ProviderError(
                f"the local model is busy: {waiting} requests are waiting for it; try again later",
                retryable=True,
                retry_after=5,
                status=429,
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(session)  # the place was granted at the same moment
            else:
                self._forget(session, place)
            raise

    def leave(self, session: str) -> None:
        """Give the place back; the next waiting request gets it."""
        self._working[session] -= 1
        if not self._working[session]:
            del self._working[session]
        while self._waiting:
            # Ties go to the request that has waited longest: a dictionary keeps that order.
            chosen = min(self._waiting, key=lambda other: (self._working[other], self._served.get(other, 0)))
            place = self._waiting[chosen][0]
            self._forget(chosen, place)
            if not place.done():  # else it was cancelled, and its waiter has not run yet
                self._serve(chosen)
                place.set_result(None)
                return
        self._free += 1

    def _serve(self, session: str) -> None:
        self._turns += 1
        self._working[session] += 1
        self._served[session] = self._turns
        self._served.move_to_end(session)
        if len(self._served) > _REMEMBERED:
            self._served.popitem(last=False)

    def _forget(self, session: str, place: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(session)
        if waiting and place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting[session]
