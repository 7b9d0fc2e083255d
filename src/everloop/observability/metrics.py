"""The metrics of a process and its store, as /metrics shows them: Prometheus's text format, version 0.0.4.

Counting costs a few additions at the end of a turn. The gauges of the store are shared by all its processes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence

from .._version import __version__
from ..errors import StoreError
from ..log import (
    CallEnded,
    CallsAsked,
    CallsDecided,
    Compacted,
    Entry,
    ModelAnswered,
    TurnEnded,
    UserSaid,
)
from ..store.base import Claim, Store
from ..store.overview import Overview

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 500  # per metric: bounds memory and scrapes, whatever becomes a label
OTHER = "other"


class Counter:
    """A monotonic counter per combination of labels."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, *values: str, amount: float = 1) -> None:
        if values not in self._values and len(self._values) >= MAX_SERIES:
            values = (OTHER,) * len(values)
        self._values[values] = self._values.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        yield from heading(self.name, self.help, self.kind)
        for values, number in sorted(self._values.items()):
            yield sample(self.name, number, dict(zip(self.labels, values, strict=True)))


class Histogram:
    """Counts observations in buckets with an upper bound."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield from heading(self.name, self.help, self.kind)
        so_far = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            so_far += count
            yield sample(f"{self.name}_bucket", so_far, {"le": format_number(bound)})
        yield sample(f"{self.name}_sum", self._sum)
        yield sample(f"{self.name}_count", so_far)


def heading(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {_escaped(help)}"
    yield f"# TYPE {name} {kind}"


def sample(name: str, value: float, labels: dict[str, str] | None = None) -> str:
    pairs = ",".join(f'{label}="{_escaped(text, quote=True)}"' for label, text in (labels or {}).items())
    return f"{name}{{{pairs}}} {format_number(value)}" if pairs else f"{name} {format_number(value)}"


def format_number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(text: str, *, quote: bool = False) -> str:
    """Escape text to a single line. Lone surrogates, which cannot be encoded, are written as escapes."""
    text = text.encode(errors="backslashreplace").decode().replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


ANSWER_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Kinds of tokens by their OpenAI names.
TOKENS = {
    "prompt_tokens": "input",
    "completion_tokens": "output",
    "cached_tokens": "cached",
    "reasoning_tokens": "reasoning",
}


class Meters:
    """The counters of one process, for all its agents. No label contains an owner, a session or any text."""

    def __init__(self) -> None:
        self._started = time.time()
        self.turns = Counter("everloop_turns_total", "Turns that ended in this process, by reason.", "reason")
        self.taken = Counter("everloop_messages_taken_total", "Messages taken up by turns of this process.")
        self.taken_over = Counter("everloop_turns_taken_over_total", "Interrupted turns that this process resumed.")
        self.stale = Counter("everloop_stale_writes_total", "Writes refused because another worker holds the session.")
        self.model_calls = Counter("everloop_model_calls_total", "Answers of the model.")
        self.model_seconds = Histogram(
            "everloop_model_call_seconds", "Duration of model calls in seconds, including retries.", ANSWER_SECONDS
        )
        self.first_token = Histogram(
            "everloop_model_first_token_seconds",
            "Seconds until the first token of a streamed answer.",
            FIRST_TOKEN_SECONDS,
        )
        self.tokens = Counter(
            "everloop_model_tokens_total",
            "Tokens as counted by the model's API; cached ones are part of input.",
            "kind",
        )
        self.tool_calls = Counter("everloop_tool_calls_total", "Tool calls that ended, by status.", "tool", "status")
        self.channels = Counter(
            "everloop_channel_messages_total",
            "Messages of chat networks, by outcome.",
            "channel",
            "outcome",
        )
        self.requests = Counter(
            "everloop_http_requests_total",
            "HTTP requests; 499 is a client that disconnected before its response.",
            "route",
            "status",
        )

    def ran(self, claim: Claim, entries: Sequence[Entry], tools: Container[str]) -> None:
        """Count what a turn did since it was claimed, whether or not it has ended.

        `entries` are those of the whole turn, of which `claim.entries` existed before. `tools` are the registered
        names: a name made up by a model or a client must not become a label.
        """
        first, last = (entries[0] if entries else None), (claim.entries[-1] if claim.entries else None)
        if not claim.resumed:
            self.taken.add()
        elif not isinstance(last, CallsAsked | CallsDecided):  # parked turns were waiting for approval, not interrupted
            self.taken_over.add()
        request = first.request if isinstance(first, UserSaid) else None
        clients = request.client_tools if request is not None else frozenset()
        for entry in entries[len(claim.entries) :]:
            match entry:
                case ModelAnswered():
                    self._answered(entry)
                case CallEnded() if entry.name not in clients:  # the client ran it
                    self.tool_calls.add(entry.name if entry.name in tools else OTHER, entry.status)
                case UserSaid():
                    self.taken.add()
                case Compacted():
                    self._count(entry.usage)
                case TurnEnded():
                    self.turns.add(entry.reason)

    def refused(self) -> None:
        """Count a write that was refused because another worker had taken over the session."""
        self.stale.add()

    def requested(self, route: str, status: int) -> None:
        """Count an HTTP request that ended."""
        self.requests.add(route, str(status))

    def lines(self) -> Iterator[str]:
        yield from heading("everloop_build_info", "The version of Everloop.", "gauge")
        yield sample("everloop_build_info", 1, {"version": __version__})
        yield from heading("process_start_time_seconds", "When the process started, in seconds since 1970.", "gauge")
        yield sample("process_start_time_seconds", self._started)
        yield from heading("process_cpu_seconds_total", "CPU time that the process has used, in seconds.", "counter")
        yield sample("process_cpu_seconds_total", time.process_time())
        for meter in vars(self).values():
            if isinstance(meter, Counter | Histogram):
                yield from meter.lines()

    def _answered(self, answer: ModelAnswered) -> None:
        self.model_calls.add()
        self.model_seconds.observe(answer.seconds)
        if answer.first_token:
            self.first_token.observe(answer.first_token)
        self._count(answer.usage)

    def _count(self, usage: dict[str, int]) -> None:
        for name, kind in TOKENS.items():
            if (count := usage.get(name, 0)) > 0:
                self.tokens.add(kind, amount=count)


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
        """Yield the standby wait, which the process itself knows: a query of the store might wait behind the writes."""
        name = "everloop_standby_wait_seconds"
        yield from heading(
            name, "How long there has been no synchronous standby, or a write has waited for it, in seconds.", "gauge"
        )
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
