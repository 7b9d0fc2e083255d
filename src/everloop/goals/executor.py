"""AgentExecutor: runs an agent definition to its result, unattended.

A run is a session `executor:NAME/ID` in the store: its turns go through `AgentLoop`, and the phases between them are in
`goals.phases`. An interrupted run is resumed by running the same definition with the same inputs again.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from .. import events
from ..bus import EXECUTOR, InboundMessage, MessageBus, SubagentTask
from ..config import Config
from ..config.sources import DSN
from ..log import Call, Entry, Logged, ModelAnswered, TurnEnded, day_in_words, tokens_of
from ..messages import Conversation
from ..providers.base import LLMProvider, LLMResponse, ProviderError, option_keywords
from ..runtime.agent import AgentLoop
from ..runtime.model_call import ModelCall
from ..runtime.turn_spec import RunCall, TurnSpec
from ..store.base import Claim, Store
from ..text import clean
from ..threads import in_thread
from ..tools.registry import ToolRegistry, ToolResult, error_result
from . import phases
from .activities import Activities, OnActivity
from .definitions import AgentDefinition, DefinitionError
from .extraction import extraction_message, read_output, system_prompt, work_message
from .phases import CUT, Outcome, Step, TerminateReason
from .templates import InputError, check_inputs

__all__ = ["AgentExecutor", "OutputObject"]

log = logging.getLogger(__name__)
OWNER = "me"
NO_CHAT = frozenset({"message", "cron"})  # tools that write to a chat

_current: ContextVar[_Run] = ContextVar("everloop_executor_run")
_running: set[str] = set()  # ids of the runs in this process


@dataclass(slots=True, frozen=True)
class OutputObject:
    """The outcome of a run. `result` is text, or JSON that fits the output schema; None if there is none."""

    result: Any
    terminate_reason: TerminateReason
    turns: int = 0  # model answers in the work phase
    duration: float = 0.0  # seconds
    usage: dict[str, int] = field(default_factory=dict)  # tokens of all model calls, as reported by the provider
    recovered: bool = False  # the result is the best effort of the grace turn, and the goal was not reached
    recovered_from: str | None = None  # the limit that cut the work short
    error: str | None = None  # the error, in one line
    log: tuple[Entry, ...] = field(default=(), repr=False)  # the complete log of the run
    session: str = ""  # the key of the run's session in the store


@dataclass(slots=True)
class _Run:
    """A run in progress in this process."""

    inputs: dict[str, Any]
    signal: asyncio.Event | None
    activities: Activities
    began: float = 0.0
    system: str | None = None  # its system prompt, once built


@contextmanager
def _step_of(run: _Run) -> Iterator[None]:
    """Make the run current, so that a subclass's step sees its inputs."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


class AgentExecutor:
    """Runs a definition: works with tools until the model stops calling them, then asks for the result.

    Create one with `await AgentExecutor.create(…)`. One executor can have several runs at once. A subclass can override
    the steps: `call_model`, `process_function_calls`, `build_system_prompt` and `build_extraction_message`.
    """

    def __init__(
        self,
        definition: AgentDefinition,
        provider: LLMProvider,
        workspace: Path,
        tools: ToolRegistry,
        make_loop: Callable[[], AgentLoop],
        *,
        model: str | None = None,
        on_activity: OnActivity | None = None,
        session: str | None = None,
    ) -> None:
        """`tools` are those of the definition; `make_loop` creates the agent of one run."""
        self.definition = definition
        self.provider = provider
        self.workspace = workspace
        self.tools = tools
        self.model = definition.model or model
        self._make_loop = make_loop
        self._on_activity = on_activity
        self._session = session

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
        store: Store | str | Path | DSN | None = None,
        session: str | None = None,
    ) -> Self:
        """Create an executor; raise a one-line DefinitionError if the definition cannot run here.

        `tools` is a registry of additional tools that the definition may name; they override built-in ones. `store` is
        where runs are kept, by default the workspace's own store. `session` is the key of the runs' session, by default
        one per run.
        """
        _check_arguments(definition, provider, workspace, tools, config)
        assert provider is not None
        assert workspace is not None
        folder = await in_thread(_folder, definition.name, workspace)

        def make_loop() -> AgentLoop:
            loop = AgentLoop(
                MessageBus(),
                provider,
                folder,
                model=model,
                brave_api_key=brave_api_key,
                exec_config=exec_config,
                restrict_to_workspace=restrict_to_workspace,
                config=config,
                store=store,
            )
            for tool in tools or ():
                loop.tools.register(tool, borrowed=True)
            return loop

        loop = make_loop()
        try:
            if config is not None and config.mcp:
                await loop.provide_tools()
            await _check_tools(definition, loop)
        finally:
            await loop.release()
        return cls(
            definition,
            provider,
            folder,
            loop.tools.only(lambda name: name in definition.tools),
            make_loop,
            model=loop.model,
            on_activity=on_activity,
            session=session,
        )

    # ------------------------------------------------------------------------------------------ steps

    def build_system_prompt(self, inputs: Mapping[str, Any]) -> str:
        """Return the system prompt of a run with these inputs."""
        run = _current.get(None)
        facts = [f"Workspace: {self.workspace}"] if self.definition.tools else []
        began = run.began if run is not None and run.began else time.time()
        return system_prompt(self.definition, inputs, "\n".join([*facts, f"Today is {day_in_words(began)}."]))

    def build_extraction_message(self) -> str:
        """Return the message that asks for the result once the work is done."""
        return extraction_message(self.definition, self.inputs)

    async def call_model(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, emit: events.Emit | None = None
    ) -> LLMResponse:
        """Call the model once. `tools` are the definitions to offer; with `emit`, the answer is streamed."""
        return await ModelCall(self.provider, self.model, self.definition.options).ask(conversation, tools, emit)

    async def process_function_calls(self, calls: Sequence[Call], run: RunCall) -> Sequence[ToolResult]:
        """Run calls of an answer that may start together, each with `run(call)`, and return their results in order."""
        return await asyncio.gather(*(run(call) for call in calls))

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of the current run, for the steps of a subclass."""
        run = _current.get(None)
        return run.inputs if run is not None else {}

    # ------------------------------------------------------------------------------------------ runs

    async def run(
        self, inputs: Mapping[str, Any] | None = None, signal: asyncio.Event | None = None, *, key: str | None = None
    ) -> OutputObject:
        """Run the definition to its end, or resume an interrupted run with the same inputs.

        Missing or invalid inputs raise an InputError; later errors are in the output. Setting `signal` ends the run for
        good; cancelling this call interrupts it. `key` is an idempotency key: a second run with the same key returns
        the output of the first.
        """
        started = time.monotonic()
        definition = self.definition
        activities = Activities(self._on_activity, definition.tools)
        loop = self._make_loop()
        id = ""
        try:
            values = self._checked(inputs, activities)
            run = _Run(values, signal, activities)
            message = await self._message(loop, values, key)
            id, key = phases.id_of(message), message.session_key
            if activities.emit is not None:
                loop.watch(key, activities.emit)
            logged = await loop.subagents.run(message, partial(self._adapt, run))
            output = _output(definition, logged, key, time.monotonic() - started)
            if output.terminate_reason == "error" and not activities.errors:  # no turn could start
                activities.error(output.error or "", "error")
            return output
        finally:
            _running.discard(id)
            await loop.release()
            await activities.close()

    def _checked(self, inputs: Any, activities: Activities) -> dict[str, Any]:
        """Return the validated inputs in the form in which the store keeps them."""
        definition = self.definition
        try:
            values = check_inputs(definition.name, definition.inputs, inputs, definition.prompts)
        except InputError as error:
            activities.error(str(error), "inputs")
            raise
        kept: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return kept

    async def _message(self, loop: AgentLoop, inputs: dict[str, Any], key: str | None) -> InboundMessage:
        """Return the message of an interrupted run with these inputs, or one that starts a new run."""
        definition, name = asdict(self.definition), self.definition.name
        if key is not None:
            id = hashlib.sha256(f"{name}\0{key}".encode()).hexdigest()[:12]
            known = await loop.store.find(OWNER, f"spawn:{id}")
            if known is not None and (task := known.message.task) is not None:
                if (task.definition, task.inputs) != (definition, inputs):
                    raise InputError(f'agent {name}: the run "{key[:60]}" had another definition or other inputs')
                return known.message
        else:
            for row in await loop.subagents.open_runs(OWNER):
                task = row.message.task
                if task is None or (task.definition, task.inputs) != (definition, inputs):
                    continue
                mine = self._session in (None, row.message.session_key) and not await loop.subagents.is_held(row)
                if mine and task.id not in _running:
                    _running.add(task.id)
                    log.info("resuming the interrupted run %s", row.message.session_key)
                    return row.message
            id = secrets.token_hex(6)
        _running.add(id)
        return InboundMessage(
            EXECUTOR,
            "user",
            name,
            work_message(self.definition, inputs),
            id=f"spawn:{id}",
            owner=OWNER,
            session=self._session or f"{EXECUTOR}:{name}/{id}",
            reply=False,
            attended=False,
            cause=SubagentTask(
                id=id,
                label=name,
                root=id,  # all its turns share one budget
                depth=0,
                seconds=60 * self.definition.max_time_minutes,
                report=False,
                definition=definition,
                inputs=inputs,
            ),
        ).addressed()

    async def _adapt(self, run: _Run, claim: Claim, task: SubagentTask, spec: TurnSpec) -> TurnSpec:
        """Return the spec of one of the run's turns with the executor's steps added."""
        run.began = run.began or claim.began
        if run.system is None:
            run.system = clean(await self._text(run, partial(self.build_system_prompt, run.inputs)))
        system = run.system
        asks = task.phase == "extract" and not task.tries
        return replace(
            spec,
            system=lambda _: system,
            dated=False,
            aborted=run.signal,
            opening=partial(self._text, run, self.build_extraction_message) if asks else None,
            ask_model=partial(self._ask_model, run) if self._overrides("call_model") else None,
            run_calls=partial(self._run_calls, run) if self._overrides("process_function_calls") else None,
            follow=partial(self._follow, run, task, spec),
        )

    async def _text(self, run: _Run, build: Callable[[], Any]) -> str:
        """Return the text that a step builds; a subclass's step may be async."""
        with _step_of(run):
            text = build()
            return str(await text if inspect.isawaitable(text) else text)

    async def _ask_model(
        self, run: _Run, conversation: Conversation, tools: list[dict[str, Any]] | None, emit: events.Emit | None
    ) -> LLMResponse:
        with _step_of(run):
            return await self.call_model(conversation, tools, emit)

    async def _run_calls(self, run: _Run, calls: Sequence[Call], run_call: RunCall) -> Sequence[ToolResult]:
        """Run the step of a subclass. If it fails, every call gets an error result."""
        try:
            with _step_of(run):
                return list(await self.process_function_calls(calls, run_call))
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            log.exception("process_function_calls failed")
            problem = clean(str(error)) or type(error).__name__
            run.activities.error(problem, "tool")
            return [ToolResult(error_result(f"{call.name} failed: {problem}"), "error") for call in calls]

    def _follow(
        self, run: _Run, task: SubagentTask, spec: TurnSpec, ended: TurnEnded, untrusted: bool
    ) -> Sequence[InboundMessage]:
        """Report how a turn ended, unless its events already did, and return the messages that follow it."""
        following = phases.after(self.definition, phases.step_of(task), ended)
        tell = run.activities.error
        match following:
            case Step(phase="grace", cut=cut):
                limit = phases.LIMITS[cut]
                tell(CUT[limit], limit)
            case Step(problem=problem) if problem:
                tell(problem, "output")
            case Outcome(recovered=False) if task.phase == "grace":
                problem = read_output(self.definition, ended.text)[1] if ended.reason == "answer" else ""
                tell(problem or f"the grace turn gave no result: {ended.error or ended.text}", "grace")
            case Outcome(reason="aborted" | "error" as reason, error=error) if error != run.activities.model_error:
                tell(error or "", reason)
        return spec.follow(ended, untrusted)

    def _overrides(self, step: str) -> bool:
        return getattr(getattr(self, step), "__func__", None) is not getattr(AgentExecutor, step)


def _output(definition: AgentDefinition, logged: Sequence[Logged], key: str, seconds: float) -> OutputObject:
    """Build the output of a run from its log."""
    entries = [one.entry for one in logged]
    outcome = phases.outcome_of(definition, [entry for entry in entries if isinstance(entry, TurnEnded)])
    turns, works = 0, True
    for entry in entries:
        works = works and not isinstance(entry, TurnEnded)
        if isinstance(entry, ModelAnswered):
            turns += works and entry.finish_reason != "cancelled"
    return OutputObject(
        outcome.result,
        outcome.reason,
        turns,
        round(seconds, 4),
        tokens_of(entries),
        outcome.recovered,
        outcome.reason if outcome.recovered else None,
        outcome.error,
        tuple(entries),
        key,
    )


# ---------------------------------------------------------------------------------------------- checks


def _check_arguments(definition: Any, provider: Any, workspace: Any, tools: Any, config: Any) -> None:
    if not isinstance(definition, AgentDefinition):
        raise DefinitionError(f"the definition must be an AgentDefinition, not {type(definition).__name__}")
    about = f"agent {definition.name}: "
    if provider is None:
        raise DefinitionError(f"{about}provider is None: give one, such as everloop.providers.openai.OpenAIProvider(…)")
    if isinstance(provider, type) or not callable(getattr(provider, "chat", None)):
        shown = f"the class {provider.__name__}" if isinstance(provider, type) else type(provider).__name__
        raise DefinitionError(f"{about}provider must be an LLMProvider with a method chat, not {shown}")
    if not isinstance(workspace, str | os.PathLike):
        raise DefinitionError(f"{about}workspace must be the path of a folder, not {type(workspace).__name__}")
    if tools is not None and not isinstance(tools, ToolRegistry):
        raise DefinitionError(f"{about}tools must be a ToolRegistry of further tools, not {type(tools).__name__}")
    if config is not None and not isinstance(config, Config):
        raise DefinitionError(f"{about}config must be a Config, not {type(config).__name__}")
    try:
        option_keywords(provider, definition.options)
    except ProviderError as error:
        told = str(error).replace("reasoning_effort", "reasoning")
        raise DefinitionError(f"{about}{told}") from None


def _folder(agent: str, workspace: str | Path) -> Path:
    folder = Path(os.path.abspath(workspace))
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist: create the folder, or configure another one"
        raise DefinitionError(f"agent {agent}: workspace: {folder} {what}")
    return folder


async def _check_tools(definition: AgentDefinition, loop: AgentLoop) -> None:
    """Reject unknown tools, tools that need a chat, and tools that would need a person's approval for every call."""
    about = f"agent {definition.name}: tools:"
    known = [name for name in loop.tools.names if name not in NO_CHAT]
    for name in definition.tools:
        if name in NO_CHAT:
            raise DefinitionError(f"{about} {name} writes to a chat, and an executor has none: remove it from the list")
        if name not in loop.tools:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
            raise DefinitionError(f"{about} there is no tool {name} ({hint})")
        if why := await loop.refuses(name, EXECUTOR, definition.name):
            raise DefinitionError(
                f"{about} {name} would need a person's approval for every call, and there is no one to give it: "
                f"{why}. Remove it from the list, or change the policy"
            )
