"""The counters of a process. Counting costs a few additions at the end of a turn."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence

from .._version import __version__
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
from ..store.base import Claim
from .metrics_text import OTHER, Counter, Histogram, heading, sample

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
        self.taken = Counter("everloop_messages_taken_total", "Messages that turns of this process took.")
        self.taken_over = Counter("everloop_turns_taken_over_total", "Interrupted turns that this process resumed.")
        self.stale = Counter("everloop_stale_writes_total", "Writes refused because another worker holds the session.")
        self.model_calls = Counter("everloop_model_calls_total", "Answers of the model.")
        self.model_seconds = Histogram(
            "everloop_model_call_seconds", "Seconds until the model had answered, including retries.", ANSWER_SECONDS
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
            "Messages of chat networks, by what became of them.",
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
