"""AgentExecutor: takes one goal to its end with nobody there to answer questions, and hands back a result."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from .. import events
from ..actions import Limits
from ..config import Config
from ..context.models import model_info
from ..engine import Turn, run_turn
from ..log import Call, Entry, ModelAnswered, TurnEnded, UserSaid, in_words
from ..messages import Conversation, clean
from ..providers.base import Delta, LLMProvider, LLMResponse, StreamingProvider
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry, ToolResult
from .activities import Activities, Context, OnActivity
from .clock import Deadline
from .definitions import AgentDefinition
from .extraction import (
    RETRIES,
    extraction_message,
    grace_message,
    read_output,
    retry_message,
    system_prompt,
    work_message,
)
from .goal_ports import GoalModel, GoalTools, MemoryLog, RunCall
from .goal_tools import Surroundings, goal_registry
from .ports import Tools
from .templates import InputError, check_inputs

GRACE_SECONDS = 60.0  # at most; of a short time limit a tenth, but never less than the next
LEAST_GRACE_SECONDS = 6.0
APOLOGY = "Sorry, I encountered an error: "

TerminateReason = Literal["goal", "max_turns", "timeout", "aborted", "error"]
Limit = Literal["timeout", "aborted"]
STOPPED: dict[Limit, str] = {"timeout": "(The time limit was reached.)", "aborted": "(The run was aborted.)"}


@dataclass(slots=True, frozen=True)
class OutputObject:
    """What came of a run. `result` is text, or JSON that fits the output schema; None if there is none."""

    result: Any
    terminate_reason: TerminateReason
    turns: int = 0  # answers of the model while it worked
    duration: float = 0.0  # seconds
    usage: dict[str, int] = field(default_factory=dict)  # tokens of all model calls, as the provider counted them
    recovered: bool = False  # the result comes from the grace turn: the best that could be given, not the goal
    recovered_from: str | None = None  # the limit that cut the work short
    error: str | None = None  # what went wrong, in one line
    log: tuple[Entry, ...] = field(default=(), repr=False)  # all that happened


class WorkLimits(Limits):
    """The limits of the work, with words for a conversation in which nobody can say “go on”."""

    @property
    def rounds_notice(self) -> str:
        return f"(The limit of {self.rounds} turns was reached.)"


@dataclass(slots=True)
class _Run:
    """All that belongs to one run."""

    id: str
    inputs: dict[str, Any]
    clock: Deadline
    signal: asyncio.Event | None
    activities: Activities
    conversation: Conversation
    log: MemoryLog = field(default_factory=MemoryLog)

    def due(self) -> Limit | None:
        """What should stop the run now; the engine has looked at the number of turns before."""
        if self.clock.expired:
            return "timeout"
        return "aborted" if self.signal is not None and self.signal.is_set() else None


@dataclass(slots=True, frozen=True)
class _Outcome:
    reason: TerminateReason
    result: Any = None
    error: str | None = None
    told: Context | None = None  # as what the watcher must hear of it, where it has not yet


_current: ContextVar[_Run] = ContextVar("everloop_executor_run")


class AgentExecutor:
    """Runs a definition: works with tools until the model calls no more of them, then asks for the result.

    Make one with `await AgentExecutor.create(…)`. Runs of one executor may go on side by side. A subclass can change
    the steps: `call_model`, `process_function_calls`, `build_system_prompt` and `build_extraction_message`.
    """

    def __init__(
        self,
        definition: AgentDefinition,
        provider: LLMProvider,
        registry: ToolRegistry,
        policy: Policy,
        surroundings: Surroundings,
        *,
        model: str | None = None,
        on_activity: OnActivity | None = None,
        vision: str = "auto",
    ) -> None:
        self.definition = definition
        self.provider = provider
        self.tools = registry
        self.model = definition.model or model
        self._policy = policy
        self._surroundings = surroundings
        self._on_activity = on_activity
        self._vision = vision
        self._runs = 0

    @classmethod
    async def create(
        cls,
        definition: AgentDefinition,
        provider: LLMProvider | None = None,
        workspace: str | Path | None = None,
        tools: ToolRegistry | None = None,
        on_activity: OnActivity | None = None,
        config: Config | None = None,
        *,
        restrict_to_workspace: bool = True,
        model: str | None = None,
        brave_api_key: str | None = None,
        exec_config: Any = None,
    ) -> Self:
        """Check that the definition can run here; a DefinitionError says in one line why it cannot.

        `tools` is a registry of further tools that the definition may name, before those that are built in.
        """
        registry, policy, surroundings = await goal_registry(
            definition,
            provider,
            workspace,
            tools,
            config,
            restricted=restrict_to_workspace,
            brave_api_key=brave_api_key,
            exec_config=exec_config,
        )
        assert provider is not None
        vision = config.vision if isinstance(config, Config) else "auto"
        return cls(
            definition, provider, registry, policy, surroundings, model=model, on_activity=on_activity, vision=vision
        )

    # ------------------------------------------------------------------------------------------ the steps

    def build_system_prompt(self, inputs: Mapping[str, Any]) -> str:
        """The system prompt of a run with these inputs."""
        facts = [f"Workspace: {self._surroundings.workspace}"] if self.definition.tools else []
        return system_prompt(self.definition, inputs, "\n".join([*facts, f"It is now {in_words(time.time())}."]))

    def build_extraction_message(self) -> str:
        """The message that asks for the result, once the work has ended by itself."""
        return extraction_message(self.definition, self.inputs)

    async def call_model(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, emit: events.Emit | None = None
    ) -> LLMResponse:
        """Ask the model once; `tools` are the definitions that it is offered. With `emit` its answer is streamed."""
        if emit is None or not isinstance(self.provider, StreamingProvider):
            return await self.provider.chat(conversation, tools=tools, model=self.model)
        texts: list[str] = []
        async for item in self.provider.stream(conversation, tools=tools, model=self.model):
            if not isinstance(item, Delta):
                return item
            if item.restart:
                texts.clear()
                emit(events.Restarted(item.restart))
            if item.reasoning:
                emit(events.Reasoning(item.reasoning))
            if item.text:
                texts.append(item.text)
                emit(events.Text(item.text))
        return LLMResponse("".join(texts))

    async def process_function_calls(self, calls: Sequence[Call], run: RunCall) -> Sequence[ToolResult]:
        """Run calls of one answer that may start together, each by `run(call)`; a result for each, in order."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(run, call)) for call in calls]
        return [task.result() for task in tasks]

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of the run that this is called in, for a subclass's steps."""
        run = _current.get(None)
        return run.inputs if run is not None else {}

    @property
    def clock(self) -> Deadline:
        """The time of the run that this is called in: `with self.clock.paused():` while a person is asked."""
        return _current.get().clock

    # ------------------------------------------------------------------------------------------ a run

    async def run(self, inputs: Mapping[str, Any] | None = None, signal: asyncio.Event | None = None) -> OutputObject:
        """Take the goal to its end. Inputs that are missing or wrong are an InputError; whatever goes wrong later is
        told in the output. Setting `signal` ends the run at once."""
        started = time.monotonic()
        activities = Activities(self._on_activity)
        try:
            values = check_inputs(self.definition.name, self.definition.inputs, inputs, self.definition.prompts)
        except InputError as error:
            activities.error(str(error), "inputs")
            await activities.close()
            raise
        clock = Deadline(self.definition.max_time_minutes * 60)
        run = _Run(secrets.token_hex(8), values, clock, signal, activities, Conversation(blind=self._blind()))
        token = _current.set(run)
        self._runs += 1
        try:
            outcome, recovered = await self._pursue(run)
        finally:
            _current.reset(token)
            self._runs -= 1
            await self.tools.end_turn(run.id)
            if not self._runs:
                await self._surroundings.close()
            await activities.close()
        answers = [entry for entry in run.log.entries if isinstance(entry, ModelAnswered)]
        return OutputObject(
            outcome.result,
            outcome.reason,
            _turns(run.log.entries),
            round(time.monotonic() - started, 4),
            _total(answers),
            recovered,
            outcome.reason if recovered else None,
            outcome.error,
            tuple(run.log.entries),
        )

    async def _pursue(self, run: _Run) -> tuple[_Outcome, bool]:
        """Both phases, and the grace turn where a limit has cut one of them short."""
        system = await _awaited_text(self.build_system_prompt(run.inputs))
        run.conversation.append({"role": "system", "content": clean(system)})
        limits = WorkLimits(rounds=self.definition.max_turns)
        ended = await self._turn(run, work_message(self.definition, run.inputs), limits, self.tools)
        outcome = _cut_short(ended)
        if outcome is None:
            outcome = await self._extract(run)
        if outcome.told is not None:
            run.activities.error(outcome.error or "", outcome.told)
        if outcome.reason not in ("max_turns", "timeout"):
            return outcome, False
        result = await self._grace(run, outcome.reason)
        return _Outcome(outcome.reason, result, outcome.error), result is not None

    async def _extract(self, run: _Run) -> _Outcome:
        """Ask for the result until it fits, a few times."""
        message = await _awaited_text(self.build_extraction_message())
        problem = ""
        for _ in range(1 + RETRIES):
            ended = await self._turn(run, message, Limits(rounds=2, empty_answers=1), None)
            if ended.reason not in ("answer", "empty", "max_rounds", "repeating"):
                cut_short = _cut_short(ended)
                assert cut_short is not None
                return cut_short
            result, problem = read_output(self.definition, ended.text if ended.reason == "answer" else "")
            if not problem:
                return _Outcome("goal", result)
            run.activities.error(problem, "output")
            message = retry_message(problem)
        return _Outcome("error", error=f"no valid result after {1 + RETRIES} tries: {problem}")

    async def _grace(self, run: _Run, reason: TerminateReason) -> Any:
        """One short turn without tools for the best result that can still be given; None if there is none."""
        seconds = min(GRACE_SECONDS, max(LEAST_GRACE_SECONDS, run.clock.seconds / 10))
        run.clock = Deadline(seconds)
        message = grace_message(self.definition, reason, run.inputs)
        ended = await self._turn(run, message, Limits(rounds=1, empty_answers=1), None)
        if ended.reason != "answer":
            run.activities.error(f"the grace turn gave no result: {ended.text.removeprefix(APOLOGY)}", "grace")
            return None
        result, problem = read_output(self.definition, ended.text)
        if problem:
            run.activities.error(problem, "grace")
        return result

    async def _turn(self, run: _Run, message: str, limits: Limits, tools: ToolRegistry | None) -> TurnEnded:
        """One turn of the engine in the run's conversation; without tools, a call of any is answered with an error."""
        offered = tools if tools is not None else ToolRegistry()
        said = UserSaid(clean(message))
        run.log.entries.append(said)
        turn = Turn(run.id, [said], run.conversation, run.log, run.activities.emit)

        async def check() -> None:
            if (due := run.due()) is not None:
                turn.stop(due, STOPPED[due])
                await asyncio.sleep(0)  # where the stop takes effect

        model = GoalModel(self.call_model, offered.get_definitions() or None, check)
        context = self._surroundings.context(run.id, run.conversation, offered, self._policy)
        toolbox = GoalTools(
            offered,
            Tools(offered, self._policy, context, attended=False),
            self.process_function_calls,
            self._overrides("process_function_calls"),
            run.activities,
        )
        async with _stopping(turn, run):
            ended = await run_turn(turn, model, toolbox, limits)
        assert isinstance(ended, TurnEnded)
        return ended

    def _overrides(self, step: str) -> bool:
        return getattr(getattr(self, step), "__func__", None) is not getattr(AgentExecutor, step)

    def _blind(self) -> bool:
        """Whether the model cannot see pictures."""
        if self._vision != "auto":
            return self._vision == "no"
        default = getattr(self.provider, "get_default_model", str)()
        return model_info(self.model or default or "").vision is False


@asynccontextmanager
async def _stopping(turn: Turn, run: _Run) -> AsyncIterator[None]:
    """Stop the turn the moment its time is up or the signal is set, whatever it is doing."""

    async def watch() -> None:
        waits = [asyncio.create_task(run.clock.passed())]
        if run.signal is not None:
            waits.append(asyncio.create_task(run.signal.wait()))  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if (due := run.due()) is not None:
                turn.stop(due, STOPPED[due])
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])


def _cut_short(ended: TurnEnded) -> _Outcome | None:
    """What a turn's end means for the run; None where the model ended it by itself."""
    match ended.reason:
        case "answer" | "empty":
            return None
        case "max_rounds":
            return _Outcome("max_turns", error="the limit of turns was reached", told="max_turns")
        case "timeout":
            return _Outcome("timeout", error="the time limit was reached", told="timeout")
        case "aborted":
            return _Outcome("aborted", error="the run was aborted", told="aborted")
        case "error":  # the watcher has heard it when it happened
            return _Outcome("error", error=ended.text.removeprefix(APOLOGY))
        case _:
            return _Outcome("error", error=ended.text, told="error")


async def _awaited(run: RunCall, call: Call) -> ToolResult:
    return await run(call)


async def _awaited_text(text: Any) -> str:
    """What a step gave; one of a subclass may be async."""
    return str(await text if inspect.isawaitable(text) else text)


def _turns(entries: Sequence[Entry]) -> int:
    """How often the model answered while it worked: up to where the first turn ended."""
    count = 0
    for entry in entries:
        if isinstance(entry, TurnEnded):
            break
        count += isinstance(entry, ModelAnswered) and entry.finish_reason != "cancelled"
    return count


def _total(answers: Sequence[ModelAnswered]) -> dict[str, int]:
    total: dict[str, int] = {}
    for answer in answers:
        for name, count in answer.usage.items():
            total[name] = total.get(name, 0) + count
    return total
