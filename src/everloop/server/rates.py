"""How many requests of an owner a minute takes, over all server processes of a store."""

from __future__ import annotations

import asyncio

from ..store.base import Store
from .errors import too_many_requests

NAME = "requests"
SECONDS = 60.0


class Rates:
    """Counts in the store, with one write for each request that is let in; without a limit nothing is written.

    An owner whose minute is full is remembered here until it is over, so that a flood costs the store nothing.
    """

    def __init__(self, store: Store, per_minute: int) -> None:
        self._store = store
        self._most = per_minute
        self._full: dict[str, float] = {}  # by owner, when there is room again

    async def check(self, owner: str) -> None:
        """Count a request, or refuse it in OpenAI's words."""
        if not self._most:
            return
        clock = asyncio.get_running_loop().time
        left = self._full.get(owner, 0.0) - clock()
        if left <= 0:
            self._full.pop(owner, None)
            left = await self._store.admit(owner, NAME, self._most, SECONDS)
        if left > 0:
            self._full[owner] = clock() + left
            raise too_many_requests(
                f"Rate limit reached: at most {self._most:,} requests a minute; try again in {left:.1f} s", left
            )
