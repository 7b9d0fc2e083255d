"""What a sub-agent does after each of its turns: give its result, be asked for it once more, report.

An agent with a definition works, and is then asked for its result; one that a limit cut short has one more turn for
what it has. Each step is a message that is written with the end of the turn before it, so a crash loses and doubles
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from ..actions import Limits
from ..bus import InboundMessage, SubagentTask
from ..context.prompt import PARTING
from ..log import Reason, TurnEnded
from ..runtime.turn_spec import TurnSpec
from ..tools.base import ToolError
from ..tools.registry import ToolRegistry, marked
from .definitions import MOST_TURNS, AgentDefinition
from .extraction import (
    RETRIES,
    extraction_message,
    grace_message,
    grace_seconds,
    read_output,
    retry_message,
    system_prompt,
    work_message,
)
from .templates import InputError, check_inputs

CHANNEL = "sub"
REPORT = '[The sub-agent "{label}" ({id}) {how}. This is its report, and no message of the user.]'
ADVICE = "[Go on with it: tell the user what matters in it, in your own words, unless it was only for you.]"
HOW = {
    "answer": "has finished",
    "max_rounds": "was cut short after its last round",
    "timeout": "was cut short when its time was up",
    "repeating": "gave up",
    "empty": "gave no answer",
    "budget": "was cut short by the budget",
    "error": "failed",
}
LIMITS = {"max_rounds": "max_turns", "timeout": "timeout"}  # that cut the work short, as definitions name them
SHORTEST_GRACE = 1.0  # seconds
NO_RESULT = "It has no result."
STOPPED = frozenset({"cancelled", "replaced", "abandoned"})


def begin(definition: AgentDefinition, task: str) -> tuple[str, dict[str, Any]]:
    """The first message of an agent that is given this task, and its inputs."""
    schema = definition.inputs
    declared = schema.get("properties", {})
    needed = [name for name in schema.get("required", ()) if name in declared] or list(declared)
    name = "task" if "task" in declared or len(needed) != 1 else needed[0]
    try:
        inputs = check_inputs(definition.name, schema, {name: task} if name in declared else {}, definition.prompts)
    except InputError as error:
        raise ToolError(f"{error}. This agent cannot be given a task in words: do it yourself.") from None
    message = work_message(definition, inputs) if inputs or definition.query.strip() else task
    return message, inputs


def definition_of(task: SubagentTask | None) -> AgentDefinition | None:
    """The definition of the agent that a task is for, as it was when the agent began."""
    return AgentDefinition(**task.definition) if task is not None and task.definition is not None else None


def turn_spec(
    message: InboundMessage, task: SubagentTask, definition: AgentDefinition, tools: ToolRegistry
) -> TurnSpec:
    """What one of its turns works with: only while it works, it has tools."""
    works = task.phase == "work"
    rounds = MOST_TURNS if task.rounds is None else task.rounds
    return TurnSpec(
        tools=tools.only(lambda name: works and name in definition.tools),
        limits=Limits(rounds=min(definition.max_turns, rounds) if works else 1),
        model=definition.model,
        system=lambda standing: system_prompt(definition, task.inputs, standing.split(PARTING)[0]),
        ends_at=task.ends_at,
        follow=lambda ended, untrusted: follow(message, task, definition, ended, untrusted),
    )


def follow(
    message: InboundMessage, task: SubagentTask, definition: AgentDefinition, ended: TurnEnded, untrusted: bool
) -> Sequence[InboundMessage]:
    """What comes after a turn of an agent with a definition."""
    match task.phase:
        case "work" if ended.reason == "answer":
            later = msgspec.structs.replace(task, phase="extract")
            return [_next(message, extraction_message(definition, task.inputs), later)]
        case "work" if (limit := LIMITS.get(ended.reason)) is not None:
            now, latest = time.time(), task.latest or math.inf
            if latest - now < SHORTEST_GRACE:  # the agent that started it has no time left either
                return report(message, TurnEnded(ended.reason, NO_RESULT), untrusted)
            ends_at = min(now + grace_seconds(60 * definition.max_time_minutes), latest)
            later = msgspec.structs.replace(task, phase="grace", cut=ended.reason, ends_at=ends_at)
            return [_next(message, grace_message(definition, limit, task.inputs), later)]
        case "extract" if ended.reason == "answer":
            _, problem = read_output(definition, ended.text)
            if problem and task.tries < RETRIES:
                later = msgspec.structs.replace(task, tries=task.tries + 1)
                return [_next(message, retry_message(problem), later)]
            return report(message, TurnEnded("error", problem) if problem else ended, untrusted)
        case "grace" if ended.reason not in STOPPED:
            text = ended.text if ended.reason == "answer" else NO_RESULT
            return report(message, TurnEnded(cast(Reason, task.cut), text), untrusted)
    return report(message, ended, untrusted)


def report(message: InboundMessage, ended: TurnEnded, untrusted: bool) -> Sequence[InboundMessage]:
    """The message that tells the agent which gave the task how it ended; none if it was stopped."""
    task = message.task or SubagentTask()
    if ended.reason in STOPPED or not task.report:
        return ()
    head = REPORT.format(label=task.label, id=message.chat_id, how=HOW.get(ended.reason, "has ended"))
    text = ended.text.strip() or "(nothing)"
    content = "\n\n".join([head, marked(text, "sub-agent") if untrusted else text, ADVICE])
    told = InboundMessage(
        "system",
        f"{CHANNEL}:{message.chat_id}",
        task.origin,
        content,
        id=f"report:{message.chat_id}",
        owner=message.owner,
        session=task.parent or None,
        attended=task.attended,
        metadata={"subagent": message.chat_id},
        untrusted=untrusted,
    )
    return [told.addressed()]


def _next(message: InboundMessage, content: str, task: SubagentTask) -> InboundMessage:
    """The next message of the same agent."""
    id = f"spawn:{message.chat_id}:{task.phase}:{task.tries}"
    return replace(message, content=content, id=id, cause=task)
