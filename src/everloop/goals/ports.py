"""What the engine's ports are in an executor: its overridable steps as model and tools, and a log in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from .. import events
from ..engine import Review
from ..log import Call, Entry, UserSaid, Written
from ..messages import Conversation
from ..providers.base import LLMResponse
from ..runtime.model_call import read_text_calls
from ..runtime.tool_calls import Tools
from ..text import clean
from ..tools.registry import ToolRegistry, ToolResult, as_text, error_result
from .activities import Activities
from .window import GoalWindow

log = logging.getLogger(__name__)
STOP_SECONDS = 10.0  # that tools have to let go when they are stopped

RunCall = Callable[[Call], Awaitable[ToolResult]]


class MemoryLog:
    """The log of a run that lives and dies with its process."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, entries: Sequence[Entry], flush: bool = True) -> Written[None]:
        self.entries += entries
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    def park(self, entries: Sequence[Entry], question: str) -> Written[None]:
        return self.append(entries)

    def steered(self) -> Sequence[UserSaid]:
        return ()


class CallModel(Protocol):
    async def __call__(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, emit: events.Emit | None
    ) -> LLMResponse: ...


class GoalModel:
    """The executor's `call_model`, with its thoughts parted from its answers. `check` comes first, and may stop it."""

    def __init__(
        self,
        call_model: CallModel,
        tools: list[dict[str, Any]] | None,
        check: Callable[[], Awaitable[None]],
        window: GoalWindow,
    ) -> None:
        self._call_model = call_model
        self._tools = tools
        self._check = check
        self._window = window

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        await self._check()
        watch = _Watch(emit) if emit is not None else None
        response = await self._call_model(conversation, self._tools, watch)
        self._window.observe(conversation, response)
        response = await read_text_calls(response, conversation, None)  # a step of a subclass may not have come by it
        if watch is not None and not watch.thought and (thoughts := getattr(response, "reasoning", None)):
            watch(events.Reasoning(clean(thoughts)))
        return response


class _Watch:
    """Passes on the events of one answer as it comes, and knows whether there was a thought among them."""

    def __init__(self, emit: events.Emit) -> None:
        self._emit = emit
        self.thought = False

    def __call__(self, event: events.Event) -> None:
        self.thought |= isinstance(event, events.Reasoning)
        self._emit(event)


class ProcessCalls(Protocol):
    async def __call__(self, calls: Sequence[Call], run: RunCall) -> Sequence[ToolResult]: ...


class GoalTools:
    """The executor's `process_function_calls` as the engine's tools. What is not listed is answered and never run."""

    def __init__(
        self, registry: ToolRegistry, tools: Tools, process: ProcessCalls, together: bool, activities: Activities
    ) -> None:
        """`together`: results go on only when the step has given all of them, since it may have changed some."""
        self._registry = registry
        self._tools = tools
        self._process = process
        self._together = together
        self._activities = activities
        self._batch: _Batch | None = None
        self.replay_safe, self.read_only = registry.replay_safe, registry.read_only

    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        return await self._tools.review(calls, conversation)

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        calls = self._registry.batch(calls)
        self._batch = _Batch(calls, self._process, self._run_listed, self._together, self._activities)
        return calls

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        assert self._batch is not None
        return await self._batch.result(call, progress)

    async def _run_listed(self, call: Call, progress: Callable[[str], None]) -> ToolResult:
        if call.name in self._registry:
            return await self._tools.run(call, progress, False)
        names = ", ".join(self._registry.names) or "none"
        problem = f'"{call.name}" is not among your tools: there are {names}.'
        self._activities.error(f'the model called "{call.name}", which the definition does not list', "unlisted_tool")
        return ToolResult(error_result(problem, "Use one of those, or do without."), "error")


class _Batch:
    """Calls that start together: one step of the executor, which the engine waits for call by call."""

    def __init__(
        self,
        calls: Sequence[Call],
        process: ProcessCalls,
        run: Callable[[Call, Callable[[str], None]], Awaitable[ToolResult]],
        together: bool,
        activities: Activities,
    ) -> None:
        self._calls = calls
        self._process = process
        self._run = run
        self._together = together
        self._activities = activities
        self._progress: dict[str, Callable[[str], None]] = {}
        loop = asyncio.get_running_loop()
        self._results: dict[str, asyncio.Future[ToolResult]] = {call.id: loop.create_future() for call in calls}
        self._task: asyncio.Task[None] | None = None

    async def result(self, call: Call, progress: Callable[[str], None]) -> ToolResult:
        """The result of one call. The step begins when the engine waits for all of them."""
        self._progress[call.id] = progress
        if len(self._progress) == len(self._calls):
            self._task = asyncio.create_task(self._step())
        try:
            return await self._results[call.id]
        except asyncio.CancelledError:
            if self._task is not None:  # nothing of it may go on behind a turn that was stopped
                self._task.cancel()
                _, stuck = await asyncio.wait([self._task], timeout=STOP_SECONDS)
                if stuck:
                    log.warning("%s does not let itself be stopped and is left behind", call.name)
            raise

    async def _step(self) -> None:
        problem = "it was left without a result"
        try:
            given = list(await self._process(self._calls, self._one))
            for call, result in zip(self._calls, given, strict=False):
                self._hand_over(call, result if hasattr(result, "status") else ToolResult(as_text(result)))
        except (Exception, asyncio.CancelledError) as error:  # a fault in a subclass is told like one in a tool
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            log.exception("process_function_calls failed")
            problem = clean(str(error)) or type(error).__name__
            self._activities.error(problem, "tool")
        for call in self._calls:
            self._hand_over(call, ToolResult(error_result(f"{call.name} failed: {problem}"), "error"))

    async def _one(self, call: Call) -> ToolResult:
        result = await self._run(call, self._progress.get(call.id, _nobody))
        if not self._together:
            self._hand_over(call, result)
        return result

    def _hand_over(self, call: Call, result: ToolResult) -> None:
        waiting = self._results.get(call.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)


def _nobody(text: str) -> None:
    """Nobody watches a call that the engine does not know of."""
