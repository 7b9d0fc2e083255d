"""The text of /metrics: counters of this process, and gauges of the store that all processes share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from ..errors import StoreError
from ..store.base import Overview, Store
from .metrics import Meters
from .metrics_text import heading, sample

log = logging.getLogger(__name__)
FRESH_SECONDS = 2.0  # how long the store's overview is reused
LOOK_SECONDS = 5.0  # less than a scraper's timeout, so that it gets the rest if the store does not respond

Gauge = tuple[str, str, Callable[[Overview], float]]
STORE: tuple[Gauge, ...] = (
    ("everloop_workers", "Live processes that take work.", lambda seen: seen.processes),
    (
        "everloop_worker_silent_seconds",
        "The longest time since a live worker's last heartbeat, in seconds.",
        lambda seen: max((worker.silent for worker in seen.workers), default=0.0),
    ),
    ("everloop_sessions", "Sessions; an estimate above ten thousand in PostgreSQL.", lambda seen: seen.sessions),
    ("everloop_sessions_held", "Sessions that a live worker holds.", lambda seen: seen.held),
    ("everloop_sessions_unheld", "Sessions with work that no live worker holds.", lambda seen: seen.unheld_count),
    ("everloop_sessions_stuck", "Sessions with work that no worker takes.", lambda seen: seen.stuck),
    ("everloop_messages_waiting", "Messages that no turn has taken yet.", lambda seen: seen.waiting),
    (
        "everloop_oldest_message_age_seconds",
        "How long the oldest of them has waited, in seconds.",
        lambda seen: seen.waiting_seconds,
    ),
    ("everloop_turns_open", "Turns that are running or were interrupted.", lambda seen: seen.open_turns),
    ("everloop_turns_parked", "Turns that wait for an approval.", lambda seen: seen.parked_turns),
    ("everloop_outbox_unsent", "Answers that are not sent yet.", lambda seen: seen.unsent),
    (
        "everloop_oldest_unsent_age_seconds",
        "How long the oldest of them has waited, in seconds.",
        lambda seen: seen.unsent_seconds,
    ),
)


class Page:
    """Renders the text. Requests within two seconds share one query of the store."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._store = store
        self._meters = meters
        self._relay = store.relay
        self._looking: asyncio.Task[Overview | None] | None = None
        self._seen: Overview | None = None
        self._fresh_until = 0.0

    async def text(self) -> bytes:
        seen = await self._overview()
        lines = *self._meters.lines(), *self._of_relay(), *self._of_standby(), *_of_store(seen)
        return "".join(f"{line}\n" for line in lines).encode()

    def _of_relay(self) -> Iterator[str]:
        name = "everloop_notify_batches_total"
        yield from heading(name, "Batches of events sent to other processes.", "counter")
        yield sample(name, self._relay.batches)

    def _of_standby(self) -> Iterator[str]:
        """Return the standby wait, which the process knows itself: a query of the store might wait behind the waiting
        writes."""
        name = "everloop_standby_wait_seconds"
        yield from heading(name, "How long a write has waited for a synchronous standby, in seconds.", "gauge")
        yield sample(name, self._store.standby_wait)

    async def _overview(self) -> Overview | None:
        """Return the store's overview; None if it is unavailable."""
        loop = asyncio.get_running_loop()
        if self._looking is None:
            if loop.time() < self._fresh_until:
                return self._seen
            self._looking = loop.create_task(self._look())
        # A client that disconnects must not cancel the query for others, and a slow query is not repeated.
        await asyncio.wait([looking := self._looking], timeout=LOOK_SECONDS)
        return looking.result() if looking.done() else None

    async def _look(self) -> Overview | None:
        try:
            self._seen = await self._store.overview()
        except StoreError as error:
            log.error("%s", error)
            self._seen = None
        finally:
            self._looking = None
            self._fresh_until = asyncio.get_running_loop().time() + FRESH_SECONDS
        return self._seen


def _of_store(seen: Overview | None) -> Iterator[str]:
    yield from heading(
        "everloop_store_up", "Whether the store answers; without it the gauges below are missing.", "gauge"
    )
    yield sample("everloop_store_up", int(seen is not None))
    if seen is None:
        return
    for name, help, value in STORE:
        yield from heading(name, help, "gauge")
        yield sample(name, value(seen))
