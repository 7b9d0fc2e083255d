"""A scripted model for tests."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..providers.base import Delta, LLMProvider, LLMResponse, ToolCallRequest
from .conversation import check_conversation

Said = str | LLMResponse | ToolCallRequest | list[ToolCallRequest] | BaseException
Step = Said | Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], Any]

_ids = itertools.count(1)


def call(name: str, /, **arguments: Any) -> ToolCallRequest:
    """Return a tool call with a unique id."""
    return ToolCallRequest(f"call_{next(_ids)}", name, arguments)


@dataclass(slots=True)
class Request:
    """A request to the model, copied at that moment."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    model: str | None
    streamed: bool


class ChatOnlyProvider(LLMProvider):
    """A scripted model without `stream`.

    Each request takes the next of `steps`: a text, tool calls, a whole LLMResponse, an exception to raise, or a
    function of (messages, tools) that returns any of these. `repeat_last` repeats the last one forever; `delay` is the
    number of seconds before each answer. A request that breaks the conversation's contract fails, unless `check` is
    off.
    """

    def __init__(
        self,
        steps: Iterable[Step] = (),
        *,
        delay: float = 0.0,
        repeat_last: bool = False,
        check: bool = True,
        model: str = "scripted",
    ) -> None:
        self.default_model = model
        self.steps: list[Step] = list(steps)
        self.requests: list[Request] = []
        self.closed = False
        self._delay = delay
        self._repeat_last = repeat_last
        self._check = check

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> LLMResponse:
        return await self._answer(messages, tools, model, streamed=False)

    async def close(self) -> None:
        self.closed = True

    async def _answer(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        model: str | None,
        *,
        streamed: bool,
    ) -> LLMResponse:
        request = Request(
            [copy.deepcopy(message) for message in messages],
            None if tools is None else [copy.deepcopy(tool) for tool in tools],
            model,
            streamed,
        )
        place = len(self.requests)
        self.requests.append(request)
        if self._check and (problems := check_conversation(request.messages)):
            raise AssertionError(f"request {place + 1} is not a valid conversation: {'; '.join(problems)}")
        if place >= len(self.steps) and not (self._repeat_last and self.steps):
            raise AssertionError(f"the scripted model has {len(self.steps)} steps and was asked {place + 1} times")
        step: Any = self.steps[min(place, len(self.steps) - 1)]
        if self._delay:
            await asyncio.sleep(self._delay)
        if callable(step):
            step = step(copy.deepcopy(request.messages), request.tools)
            if inspect.isawaitable(step):
                step = await step
        response = _response(step)
        if place >= len(self.steps):  # a repeated step: its calls need new ids
            for repeated in response.tool_calls:
                repeated.id = f"call_{next(_ids)}"
        return response


class ScriptedProvider(ChatOnlyProvider):
    """A scripted model that also streams, word by word; `token_delay` is the number of seconds between two words."""

    def __init__(self, steps: Iterable[Step] = (), *, token_delay: float = 0.0, **options: Any) -> None:
        super().__init__(steps, **options)
        self._token_delay = token_delay

    async def stream(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        response = await self._answer(messages, tools, model, streamed=True)
        deltas = [Delta(reasoning=word) for word in words(response.reasoning)]
        deltas += [Delta(text=word) for word in words(response.content)]
        for delta in deltas:
            await asyncio.sleep(self._token_delay)
            yield delta
        yield response


def words(text: str | None) -> list[str]:
    """Split the text into words, each with its trailing space."""
    return re.findall(r"\s*\S+\s?|\s+", text or "")


def _response(said: Any) -> LLMResponse:
    if isinstance(said, BaseException):
        raise said
    if isinstance(said, LLMResponse):
        return copy.deepcopy(said)
    if isinstance(said, str):
        return LLMResponse(said)
    calls = [said] if isinstance(said, ToolCallRequest) else said
    if isinstance(calls, list) and all(isinstance(item, ToolCallRequest) for item in calls):
        return LLMResponse(None, copy.deepcopy(calls), "tool_calls")
    raise TypeError(f"a step of the script is a {type(said).__name__}: give a text, calls, an LLMResponse or an error")
