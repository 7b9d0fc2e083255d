"""A program whose agent has sub-agents, scheduled work and a small window, and that is killed on purpose.

Its model decides from the messages alone, so that a repeated request gets the same answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everloop import AgentLoop, CronService, LLMProvider, LLMResponse, MessageBus, ToolCallRequest, tool
from everloop.config import Config
from everloop.cron import schedules  # noqa: F401 - the forge has it ready for its children
from everloop.cron import service as cron
from everloop.goals import files  # noqa: F401 - and this
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.tools.context import current_call

from ..runtime.chat import said
from . import family_bugs
from .programs import Idle, Reading, die, kill_at, note, until_idle

COUNTER = """---
name: counter
description: Counts things.
inputs: {type: object, properties: {what: {type: string}}, required: [what]}
tools: [count]
query: Count the ${what}.
output_schema: {type: object, properties: {count: {type: integer}}, required: [count]}
---
You count ${what}.
"""
APPLES, BEANS = "Count the apples", "Count the beans."  # the tasks of the sub-agents, one of which has a definition
JOB = "water the beans"
LONG = "All work and no play makes a long line. "  # about 10 tokens
FOUND = LONG * 150
TICKS = 3  # runs of a job that fires every minute before it is removed
ADDED = re.compile(r"Added job (\w+)")
START = 1_900_000_020.0
SPEED = 100  # of the clock for jobs, which continues across a crash


class Kin(LLMProvider):
    """The model of the agent, of its sub-agents and of its summaries; each request leaves a line."""

    default_model = "kin"

    def __init__(self, folder: Path, die_at_summary: bool = False) -> None:
        self._folder = folder
        self._die_at_summary = die_at_summary

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> LLMResponse:
        summary = "You write summaries" in messages[0]["content"]
        note(self._folder, "summaries" if summary else "requests", messages=list(messages))
        if summary and self._die_at_summary:
            die()
        return LLMResponse("SUMMARY of what was") if summary else reply(messages)


def reply(messages: Sequence[dict[str, Any]]) -> LLMResponse:
    """Return the next response for these messages."""
    asked = next(n for n in range(len(messages) - 1, -1, -1) if messages[n]["role"] == "user")
    text, last = said(messages, asked), said(messages)
    rounds = sum(message["role"] == "assistant" for message in messages[asked:])
    match text.split()[0], rounds:
        case "family", 0:  # the second word names the sub-agent it waits for
            return _calls(
                text,
                rounds,
                ("cron", {"action": "add", "message": JOB, "at": "in 1 second"}),
                ("spawn", {"task": APPLES, "wait": text.endswith("apples")}),
                ("spawn", {"task": "beans", "agent": "counter", "wait": text.endswith("beans")}),
            )
        case (("count:apples" | "Count"), 0):
            return _calls(text, rounds, ("count", {"what": text.split()[-1].strip(".")}))
        case "Your", 0:  # the result is requested
            return LLMResponse("seven")
        case "That", 0:  # once more
            return LLMResponse('{"count": 7}')
        case "ticks", 0:
            return _calls(text, rounds, ("cron", {"action": "add", "message": "tick", "every": "1m"}))
        case "tick", 0 if sum(said(messages, n) == text for n in range(len(messages))) == TICKS:
            added = next(found for message in messages if (found := ADDED.search(str(message["content"]))))
            return _calls(text, rounds, ("cron", {"action": "remove", "id": added[1]}))
        case "dig", 0 | 1:
            return _calls(text, rounds, ("dig", {"where": f"{text}/{rounds}"}))
    return LLMResponse(f"heard: {last[:300]}")


def _calls(text: str, round: int, *calls: tuple[str, dict[str, Any]]) -> LLMResponse:
    place = f"{text[:20]}_{round}"
    return LLMResponse(None, [ToolCallRequest(f"{place}_{n}", *call) for n, call in enumerate(calls)])


def make_tools(folder: Path) -> list[Any]:
    """Tools that must not be repeated; each run leaves a line."""

    @tool
    async def count(what: str) -> str:
        """Count things."""
        note(folder, "runs", tool="count", key=current_call().idempotency_key)
        return f"there are 40 {what}"

    @tool
    async def dig(where: str) -> str:
        """Bring up much."""
        note(folder, "runs", tool="dig", key=current_call().idempotency_key)
        return f"from {where}: {FOUND}"

    return [count, dig]


class Steps:
    """A clock that advances one minute per completed message, so that no slot is missed."""

    def __init__(self, folder: Path) -> None:
        self._store = Reading(folder)

    def __call__(self) -> float:
        done = self._store.rows("SELECT 1 FROM inbox WHERE state = 'done'")
        return START + 60.0 * len(done)


class Quiet(Idle):
    """Return whether everything is answered and sent, including earlier messages, and no job is pending."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._before = len(self.store.rows("SELECT 1 FROM inbox"))

    def __call__(self, messages: int) -> bool:
        messages += self._before
        if not super().__call__(messages):
            return False
        if not self.store.exists:
            return True
        # A turn that ended or a job that fired may have added work after the first check.
        return self.store.rows("SELECT count(*) FROM timer") == [(0,)] and super().__call__(messages)


async def family(
    folder: str,
    born: float,
    steps: bool = False,
    bus: str = "memory",
    messages: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    die_at: tuple[int, str] | None = None,
    die_at_summary: bool = False,
    plant: str = "",
) -> None:
    """Publish the messages, process everything that results, and end when no work is left."""
    here = Path(folder)
    family_bugs.plant(plant)
    store = SQLiteStore(here / "store.db")
    queue = DurableBus(store) if bus == "durable" else MessageBus()
    cron.POLL_SECONDS = 0.01  # for a clock that is fast
    clock = Steps(here) if steps else lambda: born + SPEED * (time.time() - born)
    jobs = CronService(store, clock=clock)
    config = Config(home=here / "home", **settings or {})
    loop = AgentLoop(queue, Kin(here, die_at_summary), here, store=store, config=config, cron_service=jobs)
    for name in loop.tools.names:
        if name not in ("spawn", "cron"):
            loop.tools.unregister(name)
    for one in make_tools(here):
        loop.tools.register(one)
    quiet = Quiet(here)
    if die_at is not None:
        kill_at(store, *die_at)
    await until_idle(here, loop, queue, messages or [], lambda: quiet(len(messages or ())))
