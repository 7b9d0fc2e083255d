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
        "inputs": {"type": "object", "description": "The inputs of the agent by name, where it has several."},
        "wait": {"type": "boolean", "description": "Wait for the result, instead of being told later."},
        "tokens": {"type": "integer", "minimum": 1, "description": "The most tokens that it may use."},
    },
}


class Starts(Protocol):
    """Starts sub-agents and waits for their results."""

    waits: bool

    async def start(self, task: str, agent: str, report: bool, tokens: int, inputs: dict[str, Any]) -> str: ...

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

    def __init__(self, starts: Starts, agents: str = "") -> None:
        """`agents` tells the model the agents of the workspace."""
        self._starts = starts
        self.agents = agents
        self.description = f"{type(self).description}\n\n{agents}" if agents else type(self).description

    async def execute(
        self,
        task: str = "",
        agent: str = "",
        inputs: dict[str, Any] | None = None,
        wait: bool = False,
        tokens: int = 0,
    ) -> str | Output:
        wait = wait or self._starts.waits or current_call().channel in PULLED  # which receive no later messages
        id = await self._starts.start(task, agent, not wait, tokens, inputs or {})
        if not wait:
            return f"The sub-agent {id} is at work. Its result comes as a later message; do not wait for it."
        return await self._starts.output(id, current_call().owner)

    def plan(self, arguments: dict[str, Any]) -> Plan:
        task, agent, inputs = arguments.get("task", ""), arguments.get("agent", ""), arguments.get("inputs") or {}
        if not task.strip() and not (agent and inputs):
            raise ToolError("There is no task.")
        if inputs and not agent:
            raise ToolError("Only an agent with a name has inputs: name it, or put everything into the task.")
        given = "\n".join([task, *(f"{name}: {value}" for name, value in inputs.items())]).strip()
        return Plan(shown=f"spawn {agent or 'a sub-agent'}:\n{given}")
