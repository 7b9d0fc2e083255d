"""AgentExecutor: takes one goal to its end with nobody there to answer questions, and hands back a result."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from .. import events
from ..actions import Limits
from ..config import Config
from ..context.pictures import without_pictures
from ..context.window import model_info
from ..engine import Turn, run_turn
from ..log import Call, TurnEnded, UserSaid, day_in_words
from ..messages import Conversation
from ..providers.base import LLMProvider, LLMResponse
from ..runtime.model_call import ModelCall
from ..runtime.tool_calls import Tools
from ..text import clean
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry, ToolResult
from .activities import Activities, OnActivity
from .clock import Deadline
from .definitions import AgentDefinition
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
from .ports import GoalModel, GoalTools, RunCall
from .runs import (
    STOPPED,
    Outcome,
    OutputObject,
    Run,
    TerminateReason,
    WorkLimits,
    cut_short,
    stopping,
    turns_of,
    usage_of,
)
from .templates import InputError, check_inputs
from .tools import Surroundings, goal_registry
from .window import GoalWindow

__all__ = ["AgentExecutor", "OutputObject"]

_current: ContextVar[Run] = ContextVar("everloop_executor_run")


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
        config: Config | None = None,
    ) -> None:
        self.definition = definition
        self.provider = provider
        self.tools = registry
        self.model = definition.model or model
        self._policy = policy
        self._surroundings = surroundings
        self._on_activity = on_activity
        self._vision = config.vision if config is not None else "auto"
        self._window = config.window if config is not None else 0
        self._text_calls = config.text_calls if config is not None else True
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
        return cls(
            definition, provider, registry, policy, surroundings, model=model, on_activity=on_activity, config=config
        )

    # ------------------------------------------------------------------------------------------ the steps

    def build_system_prompt(self, inputs: Mapping[str, Any]) -> str:
        """The system prompt of a run with these inputs."""
        facts = [f"Workspace: {self._surroundings.workspace}"] if self.definition.tools else []
        return system_prompt(self.definition, inputs, "\n".join([*facts, f"Today is {day_in_words(time.time())}."]))

    def build_extraction_message(self) -> str:
        """The message that asks for the result, once the work has ended by itself."""
        return extraction_message(self.definition, self.inputs)

    async def call_model(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, emit: events.Emit | None = None
    ) -> LLMResponse:
        """Ask the model once; `tools` are the definitions that it is offered. With `emit` its answer is streamed."""
        return await ModelCall(self.provider, self.model, text_calls=self._text_calls).ask(conversation, tools, emit)

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
        window = GoalWindow(self._model_name, self.tools, self._window)
        conversation = Conversation(blind=without_pictures if self._blind() else None)
        run = Run(secrets.token_hex(8), values, clock, signal, activities, conversation, window)
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
        return OutputObject(
            outcome.result,
            outcome.reason,
            turns_of(run.log.entries),
            round(time.monotonic() - started, 4),
            usage_of(run.log.entries),
            recovered,
            outcome.reason if recovered else None,
            outcome.error,
            tuple(run.log.entries),
        )

    async def _pursue(self, run: Run) -> tuple[Outcome, bool]:
        """Both phases, and the grace turn where a limit has cut one of them short."""
        system = await _awaited_text(self.build_system_prompt(run.inputs))
        run.conversation.append({"role": "system", "content": clean(system)})
        limits = WorkLimits(rounds=self.definition.max_turns)
        ended = await self._turn(run, work_message(self.definition, run.inputs), limits, self.tools)
        outcome = cut_short(ended)
        if outcome is None:
            outcome = await self._extract(run)
        if outcome.told is not None:
            run.activities.error(outcome.error or "", outcome.told)
        if outcome.reason not in ("max_turns", "timeout"):
            return outcome, False
        result = await self._grace(run, outcome.reason)
        return Outcome(outcome.reason, result, outcome.error), result is not None

    async def _extract(self, run: Run) -> Outcome:
        """Ask for the result until it fits, a few times."""
        message = await _awaited_text(self.build_extraction_message())
        problem = ""
        for _ in range(1 + RETRIES):
            ended = await self._turn(run, message, Limits(rounds=2, empty_answers=1), None)
            if ended.reason not in ("answer", "empty", "max_rounds", "repeating"):
                outcome = cut_short(ended)
                assert outcome is not None
                return outcome
            result, problem = read_output(self.definition, ended.text if ended.reason == "answer" else "")
            if not problem:
                return Outcome("goal", result)
            run.activities.error(problem, "output")
            message = retry_message(problem)
        return Outcome("error", error=f"no valid result after {1 + RETRIES} tries: {problem}")

    async def _grace(self, run: Run, reason: TerminateReason) -> Any:
        """One short turn without tools for the best result that can still be given; None if there is none."""
        run.clock = Deadline(grace_seconds(run.clock.seconds))
        message = grace_message(self.definition, reason, run.inputs)
        ended = await self._turn(run, message, Limits(rounds=1, empty_answers=1), None)
        if ended.reason != "answer":
            run.activities.error(f"the grace turn gave no result: {ended.error or ended.text}", "grace")
            return None
        result, problem = read_output(self.definition, ended.text)
        if problem:
            run.activities.error(problem, "grace")
        return result

    async def _turn(self, run: Run, message: str, limits: Limits, tools: ToolRegistry | None) -> TurnEnded:
        """One turn of the engine in the run's conversation; without tools, a call of any is answered with an error."""
        offered = tools if tools is not None else ToolRegistry()
        said = UserSaid(clean(message))
        run.log.entries.append(said)
        turn = Turn(run.id, [said], run.conversation, run.log, run.activities.emit)

        async def check() -> None:
            if (due := run.due()) is not None:
                turn.stop(due, STOPPED[due])
                await asyncio.sleep(0)  # where the stop takes effect

        model = GoalModel(self.call_model, offered.get_definitions() or None, check, run.window)
        context = self._surroundings.context(run.id, run.conversation, offered, self._policy)
        toolbox = GoalTools(
            offered,
            Tools(offered, self._policy, context, attended=False),
            self.process_function_calls,
            self._overrides("process_function_calls"),
            run.activities,
        )
        async with stopping(turn, run):
            ended = await run_turn(turn, model, toolbox, limits, run.window)
        assert isinstance(ended, TurnEnded)
        return ended

    def _overrides(self, step: str) -> bool:
        return getattr(getattr(self, step), "__func__", None) is not getattr(AgentExecutor, step)

    def _blind(self) -> bool:
        """Whether the model cannot see pictures."""
        if self._vision != "auto":
            return self._vision == "no"
        return model_info(self._model_name).vision is False

    @property
    def _model_name(self) -> str:
        return self.model or getattr(self.provider, "get_default_model", str)() or ""


async def _awaited(run: RunCall, call: Call) -> ToolResult:
    return await run(call)


async def _awaited_text(text: Any) -> str:
    """What a step gave; one of a subclass may be async."""
    return str(await text if inspect.isawaitable(text) else text)
