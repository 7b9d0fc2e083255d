"""`spawn`: starts a sub-agent."""

from __future__ import annotations

import math
from typing import Any, Protocol

from ..bus import PULLED
from .base import Output, Plan, Tool, ToolError
from .context import current_call

PARAMETERS = {
    "type": "object",
    "properties": {
        "task": {
            "type": "string",
            "minLength": 1,
            "description": "What to do, with all that must be known for it: the sub-agent sees nothing else.",
        },
        "agent": {
            "type": "string",
            "description": "investigator (reads code), researcher (reads the web), or one of agents/.",
        },
        "wait": {"type": "boolean", "description": "Wait for the result, instead of being told later."},
        "tokens": {"type": "integer", "minimum": 1, "description": "The most tokens that it may use."},
    },
    "required": ["task"],
}


class Starts(Protocol):
    """Starts sub-agents and waits for their results."""

    waits: bool

    async def start(self, task: str, agent: str, report: bool, tokens: int = 0) -> str: ...

    async def output(self, id: str, owner: str) -> Output: ...


class SpawnTool(Tool):
    """Starts a sub-agent, exactly once per call even if a crash interrupts the call."""

    name = "spawn"
    description = (
        "Give a task to a sub-agent that works beside you, with its own tools and without seeing this conversation. "
        "You are told its result by a later message; with wait, it is the result of this call. Good for work that "
        "takes long or reads much, and for several independent pieces at once."
    )
    parameters = PARAMETERS
    replay = "safe"  # the same call starts the same sub-agent
    timeout = math.inf  # a sub-agent has a time limit of its own

    def __init__(self, starts: Starts) -> None:
        self._starts = starts

    async def execute(self, task: str, agent: str = "", wait: bool = False, tokens: int = 0) -> str | Output:
        wait = wait or self._starts.waits or current_call().channel in PULLED  # API clients receive no later messages
        id = await self._starts.start(task, agent, not wait, tokens)
        if not wait:
            return f"The sub-agent {id} is at work. Its result comes as a later message; do not wait for it."
        return await self._starts.output(id, current_call().owner)

    def plan(self, arguments: dict[str, Any]) -> Plan:
        if not arguments["task"].strip():
            raise ToolError("There is no task.")
        return Plan(shown=f"spawn {arguments.get('agent') or 'a sub-agent'}:\n{arguments['task']}")
