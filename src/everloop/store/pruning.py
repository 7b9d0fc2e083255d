"""Prunes old API requests in the background, in small steps, so that no turn waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from ..errors import StoreError
from .base import Store

log = logging.getLogger(__name__)
FIRST_SECONDS = 120.0  # after the start of a process, which has other things to do
EVERY_SECONDS = 3600.0
PAUSE_SECONDS = 0.5  # between two steps


async def prune(
    store: Store,
    keep_seconds: float,
    forget: Callable[[Sequence[tuple[str, str]]], Awaitable[None]],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Remove requests without a session that are older than this, again and again. `forget` gets (owner, key) of those
    that were removed, for what is kept of them outside of the store."""
    await sleep(FIRST_SECONDS)
    while True:
        before, position, count = clock() - keep_seconds, 0, 0
        try:
            while True:
                step = await store.prune_requests(before, position)
                if step.removed:
                    await forget(step.removed)
                    count += len(step.removed)
                if step.position is None:
                    break
                position = step.position
                await sleep(PAUSE_SECONDS)
        except StoreError as error:
            log.warning("old requests are pruned later: %s", error)
        if count:
            log.info("removed %d API requests from before %s", count, time.strftime("%Y-%m-%d", time.gmtime(before)))
        await sleep(EVERY_SECONDS)
