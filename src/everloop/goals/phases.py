"""The state machine of an agent with a definition: work, then extraction of the result, or a grace turn after a limit.

`after` decides what follows a turn, from the turn's end alone. A running agent uses it to write its next message in the
transaction that ends the turn; a reader folds it over the log to learn the outcome. So a crash neither loses nor
repeats a phase. A sub-agent and a run of `AgentExecutor` differ only in where the result goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, cast

import msgspec

from ..actions import Limits
from ..bus import EXECUTOR, InboundMessage, SubagentTask
from ..context.prompt import PARTING
from ..log import Logged, Reason, TurnEnded
from ..runtime.turn_spec import TurnSpec
from ..tools.base import ToolError
from ..tools.registry import ToolRegistry, marked
from .definitions import MAX_TURNS, AgentDefinition
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
from .templates import InputError, check_inputs, check_names, fill

CHANNEL = "sub"
REPORT = '[The sub-agent "{label}" ({id}) {how}. This is its report, not a message from the user.]'
ADVICE = "[Continue with it: tell the user what matters in it, in your own words, unless it was only for you.]"
HOW = {
    "answer": "has finished",
    "max_rounds": "was cut short after its last round",
    "timeout": "was stopped when its time was up",
    "repeating": "gave up",
    "empty": "gave no answer",
    "budget": "was cut short by the budget",
    "error": "failed",
}
NO_RESULT = "It has no result."
STOPPED = frozenset({"cancelled", "replaced", "abandoned", "aborted"})
MIN_GRACE_SECONDS = 1.0
# seconds of overhead between two log entries that count as work, in addition to the duration of the step itself
BETWEEN_STEPS = 1.0

Limit = Literal["max_turns", "timeout"]
TerminateReason = Literal["goal", "max_turns", "timeout", "aborted", "error"]
Phase = Literal["work", "extract", "grace"]

# The definition's name for the limit that ended a turn, and its explanation in the outcome.
LIMITS: dict[str, Limit] = {"max_rounds": "max_turns", "timeout": "timeout"}
CUT = {"max_turns": "the limit of turns was reached", "timeout": "the time limit was reached"}
# Extraction turns that end like this count as one attempt at a result.
_TRIES = frozenset({"answer", "empty", "max_rounds", "repeating"})


# ---------------------------------------------------------------------------------------------- the states


class Step(msgspec.Struct, frozen=True):
    """What the agent does in a turn."""

    phase: Phase = "work"
    tries: int = 0  # attempts at a valid result
    cut: str = ""  # how the work ended, if a limit cut it short
    problem: str = ""  # why the last result is invalid


class Outcome(msgspec.Struct, frozen=True):
    """How the agent ended. `result` is text, or JSON that fits the output schema; None if there is none."""

    reason: TerminateReason
    result: Any = None
    error: str | None = None
    recovered: bool = False  # the result comes from the grace turn


def after(definition: AgentDefinition, step: Step, ended: TurnEnded) -> Step | Outcome:
    """Return what follows a turn that ended this way."""
    if step.phase == "grace":
        result = read_output(definition, ended.text)[0] if ended.reason == "answer" else None
        limit: Limit = LIMITS.get(step.cut, "timeout")
        return Outcome(limit, result, CUT[limit], recovered=result is not None)
    if step.phase == "work" and ended.reason in ("answer", "empty"):
        return Step("extract")
    if step.phase == "extract" and ended.reason in _TRIES:
        result, problem = read_output(definition, ended.text if ended.reason == "answer" else "")
        if not problem:
            return Outcome("goal", result)
        if step.tries < RETRIES:
            return Step("extract", step.tries + 1, problem=problem)
        return Outcome("error", error=f"no valid result after {1 + RETRIES} tries: {problem}")
    if ended.reason in LIMITS:
        return Step("grace", cut=ended.reason)
    if ended.reason in STOPPED:
        return Outcome("aborted", error="the run was aborted")
    return Outcome("error", error=ended.error or ended.text)


def outcome_of(definition: AgentDefinition, ends: Sequence[TurnEnded]) -> Outcome:
    """Return the outcome of an agent that has ended, from the ends of its turns."""
    step = Step()
    for ended in ends:
        following = after(definition, step, ended)
        if isinstance(following, Outcome):
            return following
        step = following
    if limit := LIMITS.get(step.cut):  # no time was left for the grace turn
        return Outcome(limit, error=CUT[limit])
    return Outcome("error", error="it ended before it was asked for its result")


def step_of(task: SubagentTask) -> Step:
    return Step(task.phase, task.tries, task.cut)


def definition_of(task: SubagentTask | None) -> AgentDefinition | None:
    """Return the definition of a task's agent, as it was when the agent started."""
    return AgentDefinition(**task.definition) if task is not None and task.definition is not None else None


def worked(logged: Sequence[Logged]) -> float:
    """Return the working time recorded in a log in seconds, excluding time in which no process ran it."""
    gaps = ((one.at - before.at, getattr(one.entry, "seconds", 0.0)) for before, one in pairwise(logged))
    return sum(max(0.0, min(gap, seconds + BETWEEN_STEPS)) for gap, seconds in gaps)


# ---------------------------------------------------------------------------------------------- turns and messages


def begin(definition: AgentDefinition, task: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the first message and the inputs of an agent that is spawned with a task, inputs or both.

    The task fills the input `task`, or the only input that is still missing.
    """
    schema = definition.inputs
    declared = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in given]
    missing = missing or [name for name in declared if name not in given and not given]
    place = "task" if "task" in declared else missing[0] if len(missing) == 1 else None
    if place in given:
        place = None
    inputs = {**given, **({place: task} if place is not None and task.strip() else {})}
    try:
        check_names(definition.name, schema, given)
        inputs = check_inputs(definition.name, schema, inputs, definition.prompts)
    except InputError as error:
        names = ", ".join(declared) or "none"
        raise ToolError(f"{error}. Its inputs are: {names}; give them in `inputs`.") from None
    if not inputs and not definition.query.strip():
        return task, inputs
    message = work_message(definition, inputs)
    return f"{message}\n\n{task}" if place is None and task.strip() else message, inputs


def turn_spec(
    message: InboundMessage,
    task: SubagentTask,
    definition: AgentDefinition,
    tools: ToolRegistry,
    ends_at: float | None,
) -> TurnSpec:
    """Return the spec of one of the agent's turns. It has tools only in the work phase."""
    works = task.phase == "work"
    rounds = min(definition.max_turns, MAX_TURNS if task.rounds is None else task.rounds)
    # During extraction the model may call a tool by mistake: it gets an error and one more round.
    limits = Limits(rounds=rounds) if works else Limits(rounds=2 if task.phase == "extract" else 1, empty_answers=1)
    initial = [{**said, "content": fill(said["content"], task.inputs)} for said in definition.initial_messages]
    return TurnSpec(
        tools=tools.only(lambda name: works and name in definition.tools),
        limits=limits,
        model=definition.model,
        system=lambda standing: system_prompt(definition, task.inputs, standing.split(PARTING)[0]),
        ends_at=ends_at,
        options=definition.options,
        before=tuple(initial) if works else (),
        follow=lambda ended, untrusted: follow(message, task, definition, ended, untrusted),
    )


def follow(
    message: InboundMessage, task: SubagentTask, definition: AgentDefinition, ended: TurnEnded, untrusted: bool
) -> Sequence[InboundMessage]:
    """Return the messages that follow a turn of an agent with a definition."""
    following = after(definition, step_of(task), ended)
    if isinstance(following, Outcome):
        return report(message, _as_end(following, task, ended), untrusted)
    later = msgspec.structs.replace(task, phase=following.phase, tries=following.tries, cut=following.cut)
    if following.phase == "extract":
        asked = retry_message(following.problem) if following.problem else extraction_message(definition, task.inputs)
        return [_next(message, asked, later)]
    if (task.latest or math.inf) - time.time() < MIN_GRACE_SECONDS:  # the parent agent has no time left either
        return report(message, TurnEnded(ended.reason, NO_RESULT), untrusted)
    seconds = grace_seconds(60 * definition.max_time_minutes)
    later = msgspec.structs.replace(later, seconds=seconds, ends_at=None)
    return [_next(message, grace_message(definition, LIMITS[following.cut], task.inputs), later)]


def report(message: InboundMessage, ended: TurnEnded, untrusted: bool) -> Sequence[InboundMessage]:
    """Return the report of how the sub-agent ended, for its parent agent; none if it was stopped."""
    task = message.task or SubagentTask()
    if ended.reason in STOPPED or not task.report or message.channel == EXECUTOR:
        return ()
    id = id_of(message)
    head = REPORT.format(label=task.label, id=id, how=HOW.get(ended.reason, "has ended"))
    text = ended.text.strip() or "(nothing)"
    content = "\n\n".join([head, marked(text, "sub-agent") if untrusted else text, ADVICE])
    told = InboundMessage(
        "system",
        f"{CHANNEL}:{id}",
        task.origin,
        content,
        id=f"report:{id}",
        owner=message.owner,
        session=task.parent or None,
        attended=task.attended,
        metadata={"subagent": id},
        untrusted=untrusted,
    )
    return [told.addressed()]


def id_of(message: InboundMessage) -> str:
    """Return the id of the agent that a message is for."""
    return (message.task.id if message.task is not None else "") or message.chat_id


def _as_end(outcome: Outcome, task: SubagentTask, ended: TurnEnded) -> TurnEnded:
    """Return the end to report."""
    if task.phase == "grace":
        return TurnEnded(cast(Reason, task.cut), ended.text if ended.reason == "answer" else NO_RESULT)
    if outcome.reason == "error" and ended.reason in _TRIES - {"repeating"}:
        return TurnEnded("error", outcome.error or "")
    return ended


def _next(message: InboundMessage, content: str, task: SubagentTask) -> InboundMessage:
    """Return the next message of the same agent."""
    return replace(message, content=content, id=f"spawn:{id_of(message)}:{task.phase}:{task.tries}", cause=task)
