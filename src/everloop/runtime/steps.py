"""Turn steps overridden by a program, and tools that cannot delay a turn past its deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from .. import events
from ..engine import Review
from ..log import Call
from ..messages import Conversation
from ..providers.base import LLMResponse
from ..tools.registry import ToolResult, as_text, error_result
from .model_call import TurnModelCall, read_text_calls
from .tool_calls import Tools
from .turn_spec import RunCalls

log = logging.getLogger(__name__)
STOP_SECONDS = 10.0  # grace period for a cancelled tool


class SteppedModelCall(TurnModelCall):
    """A model call whose request is made by a step of the program."""

    async def ask(self, conversation: Conversation, tools: Any, emit: events.Emit | None) -> LLMResponse:
        thought = False

        def show(event: events.Event) -> None:
            nonlocal thought
            thought |= isinstance(event, events.Reasoning)
            if emit is not None:
                emit(event)

        assert self._spec.ask_model is not None
        response = await self._spec.ask_model(conversation, tools, show if emit is not None else None)
        response = await read_text_calls(response, conversation, None)  # the step may not have separated its reasoning
        if emit is not None and not thought and (reasoning := getattr(response, "reasoning", None)):
            emit(events.Reasoning(reasoning))
        return response


class StoppableTools:
    """The tools of a turn with a deadline: a call that ignores its cancellation is abandoned."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.replay_safe, self.read_only = tools.replay_safe, tools.read_only

    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        return await self._tools.review(calls, conversation)

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        return self._tools.batch(calls)

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        running = asyncio.create_task(self._tools.run(call, progress, approved))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.cancel()
            _, stuck = await asyncio.wait([running], timeout=STOP_SECONDS)
            if stuck:
                log.warning("%s ignores its cancellation and was abandoned", call.name)
            raise


class SteppedTools(StoppableTools):
    """Tools whose calls run through a step of the program, one batch at a time."""

    def __init__(self, tools: Tools, step: RunCalls) -> None:
        super().__init__(tools)
        self._step = step
        self._calls: Sequence[Call] = ()
        self._results: dict[str, asyncio.Future[ToolResult]] = {}
        self._how: dict[str, tuple[Callable[[str], None], bool]] = {}

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        self._calls = super().batch(calls)
        loop = asyncio.get_running_loop()
        self._results, self._how = {call.id: loop.create_future() for call in self._calls}, {}
        return self._calls

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        """Wait for the result of one call. The last call of the batch runs the step for all of them."""
        self._how[call.id] = (progress, approved)
        if len(self._how) == len(self._calls):
            await self._run_step()
        return await self._results[call.id]

    async def _run_step(self) -> None:
        given = list(await self._step(self._calls, self._run_one))
        given += [_missing(call) for call in self._calls[len(given) :]]
        for call, result in zip(self._calls, given, strict=False):
            self._results[call.id].set_result(result if hasattr(result, "status") else ToolResult(as_text(result)))

    async def _run_one(self, call: Call) -> ToolResult:
        return await super().run(call, *self._how.get(call.id, (_ignore, False)))


def _missing(call: Call) -> ToolResult:
    return ToolResult(error_result(f"{call.name} failed: it was left without a result"), "error")


def _ignore(text: str) -> None:
    """Ignore the progress of a call that the model did not make."""
