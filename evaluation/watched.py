"""A provider that is watched: before each question, the world is looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from everloop.providers.base import Delta, LLMProvider, LLMResponse, StreamingProvider, honours

STEADY = {"temperature": 0, "seed": 7}  # the same question gets the same answer, as far as the model can do that
Observe = Callable[[int], Awaitable[None]]


class Watched(LLMProvider):
    """Asks another provider, after `observe` was told how many results of calls the question has."""

    def __init__(self, inner: LLMProvider, observe: Observe) -> None:
        self.default_model = inner.get_default_model()
        self.options = honours(inner)
        self.inner = inner
        self._observe = observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
        **wishes: Any,
    ) -> LLMResponse:
        await self._observe(_results(messages))
        return await self.inner.chat(messages, tools=tools, model=model, **self._steady(wishes))

    def _steady(self, wishes: Mapping[str, Any]) -> dict[str, Any]:
        steady = {name: value for name, value in STEADY.items() if name in self.options}
        options = {**steady, **wishes.get("options", {})}
        return {**wishes, "options": options} if options else dict(wishes)


class WatchedStream(Watched):
    """The same for a provider that streams."""

    async def stream(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
        **wishes: Any,
    ) -> AsyncIterator[Delta | LLMResponse]:
        await self._observe(_results(messages))
        inner: Any = self.inner
        async for item in inner.stream(messages, tools=tools, model=model, **self._steady(wishes)):
            yield item


def watched(inner: LLMProvider, observe: Observe) -> Watched:
    return (WatchedStream if isinstance(inner, StreamingProvider) else Watched)(inner, observe)


def _results(messages: Sequence[dict[str, Any]]) -> int:
    return sum(message.get("role") == "tool" for message in messages)
