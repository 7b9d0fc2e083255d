"""Retries with back-off and fallback models, without showing the same output twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from .base import Delta, LLMProvider, LLMResponse, Messages, Options, ProviderError, Tools, honours, option_keywords

Failure = ProviderError | ConnectionError | TimeoutError
FAILURES = (ProviderError, ConnectionError, TimeoutError)


class Resilient(LLMProvider):
    """Asks each (provider, model) in turn until one answers.

    A retryable failure is retried up to `retries` times with exponential back-off. If a server asks for a wait longer
    than `longest_wait` seconds, the next provider is asked instead. A model that the caller names replaces the first
    one's. Request options are those that all providers of the list honour.
    """

    def __init__(
        self,
        providers: Sequence[tuple[LLMProvider, str | None]],
        retries: int = 4,
        base_delay: float = 0.5,
        max_delay: float = 30,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
        *,
        longest_wait: float = 60,
    ) -> None:
        if not providers:
            raise ValueError("Resilient needs at least one provider")
        self._providers = list(providers)
        self._retries = retries
        self._base_delay = base_delay
        self._max_delay = max_delay
        self._longest_wait = longest_wait
        self._sleep = sleep
        self._rng = rng
        self.default_model = self._name(0, None)
        self.options = frozenset.intersection(*(honours(provider) for provider, _ in providers))

    async def chat(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> LLMResponse:
        keywords = option_keywords(self, options)
        failed: list[str] = []
        for place, (provider, own) in enumerate(self._providers):
            for attempt in range(self._retries + 1):
                try:
                    answer = await provider.chat(messages, tools, own if place else model or own, **keywords)
                    return self._with_model(answer, place)
                except FAILURES as error:
                    last = error
                if (wait := self._retry_delay(last, attempt)) is None:
                    break
                await self._sleep(wait)
            failed.append(self._failure_text(place, model, last, attempt))
        raise self._all_failed(failed, last) from last

    async def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        keywords = option_keywords(self, options)
        failed: list[str] = []
        shown = ShownAnswer()
        for place, (provider, own) in enumerate(self._providers):
            for attempt in range(self._retries + 1):
                items: AsyncIterator[Delta | LLMResponse] | None = None
                try:
                    items = _stream_of(provider, messages, tools, own if place else model or own, keywords)
                    async for item in items:
                        if isinstance(item, LLMResponse):
                            for delta in shown.finish():
                                yield delta
                            yield self._with_model(item, place)
                            return
                        for delta in shown.show(item):
                            yield delta
                    raise ProviderError("the stream ended without an answer", retryable=True)
                except FAILURES as error:
                    last = error
                finally:
                    if (close := getattr(items, "aclose", None)) is not None:
                        await close()
                shown.lost(str(last))
                if (wait := self._retry_delay(last, attempt)) is None:
                    break
                await self._sleep(wait)
            failed.append(self._failure_text(place, model, last, attempt))
        raise self._all_failed(failed, last) from last

    @property
    def doing(self) -> str:
        return next((provider.doing for provider, _ in self._providers if provider.doing), "")

    async def close(self) -> None:
        for provider in dict.fromkeys(provider for provider, _ in self._providers):
            await provider.close()

    def _with_model(self, response: LLMResponse, place: int) -> LLMResponse:
        if place and not response.model:
            response.model = self._name(place, None)
        return response

    def _name(self, place: int, asked: str | None) -> str:
        provider, own = self._providers[place]
        return (asked if asked and not place else own) or provider.get_default_model()

    def _retry_delay(self, error: Failure, attempt: int) -> float | None:
        """Seconds until the next attempt, or None if there is none."""
        asked = 0.0
        if isinstance(error, ProviderError):
            if not error.retryable:
                return None
            asked = error.retry_after or 0.0
        if attempt >= self._retries or asked > self._longest_wait:
            return None
        delay: float = min(self._max_delay, self._base_delay * 2**attempt) * (0.5 + 0.5 * self._rng())
        return max(delay, asked)

    def _failure_text(self, place: int, asked: str | None, error: Failure, attempt: int) -> str:
        """Why a provider of the list was given up, in one line."""
        text = str(error) or type(error).__name__
        if attempt:
            text += f" (tried {attempt + 1} times)"
        if isinstance(error, ProviderError) and (error.retry_after or 0) > self._longest_wait:
            text += f" (it asks to wait {error.retry_after:.0f} s)"
        name = self._name(place, asked)
        return f"{name}: {text}" if name and len(self._providers) > 1 else text

    def _all_failed(self, failed: list[str], last: Failure) -> ProviderError:
        text = failed[0] if len(failed) == 1 else "no model answered: " + "; ".join(failed)
        if not isinstance(last, ProviderError):
            return ProviderError(text, retryable=True)
        return ProviderError(
            text,
            retryable=last.retryable,
            retry_after=last.retry_after,
            status=last.status,
            several=last.several or len(failed) > 1,
        )


class ShownAnswer:
    """What a subscriber has been shown of an answer that may have to be requested again.

    While a new attempt repeats the shown text, nothing is shown; once it goes beyond, only the new part is; if it
    differs, one `restart` is sent and then the new attempt from its start.
    """

    def __init__(self) -> None:
        self._texts = (ShownText(), ShownText())  # text, reasoning
        self._repeating = False
        self._reason = ""

    def show(self, delta: Delta) -> tuple[Delta, ...]:
        """What a subscriber is shown for this delta of the current attempt."""
        if delta.restart:  # the provider itself started over
            self._texts = (ShownText(), ShownText())
            self._repeating = False
        text, reasoning = self._texts
        if not self._repeating:
            text.parts.append(delta.text)
            reasoning.parts.append(delta.reasoning)
            return (delta,)
        new_text, new_reasoning = text.repeat(delta.text), reasoning.repeat(delta.reasoning)
        if new_text is None or new_reasoning is None:
            return self._restart()
        self._repeating = text.behind() or reasoning.behind()
        return (Delta(new_text, new_reasoning),) if new_text or new_reasoning else ()

    def finish(self) -> tuple[Delta, ...]:
        """The answer is complete: if it is shorter than the shown text, it is another answer."""
        return self._restart() if self._repeating else ()

    def lost(self, reason: str) -> None:
        """The current attempt failed; the next one is expected to repeat the shown text."""
        self._reason = reason
        for text in self._texts:
            text.rewind()
        self._repeating = any(text.shown for text in self._texts)

    def _restart(self) -> tuple[Delta, ...]:
        self._repeating = False
        text, reasoning = (one.give_up() for one in self._texts)
        whole = (Delta(text, reasoning),) if text or reasoning else ()
        return (Delta(restart=self._reason), *whole)


class ShownText:
    """The text or the reasoning of an answer: what earlier attempts have shown, and what this attempt has sent."""

    def __init__(self) -> None:
        self.shown = ""
        self.parts: list[str] = []
        self._size = 0  # of the parts, while they repeat the shown text

    def repeat(self, part: str) -> str | None:
        """The end of a part that goes beyond the shown text; None if the part differs from it."""
        self.parts.append(part)
        start, self._size = self._size, self._size + len(part)
        known = self.shown[start : self._size]
        return part[len(known) :] if part.startswith(known) else None

    def behind(self) -> bool:
        return self._size < len(self.shown)

    def rewind(self) -> None:
        now = "".join(self.parts)
        if len(now) > len(self.shown):
            self.shown = now
        self.parts, self._size = [], 0

    def give_up(self) -> str:
        """Forget the shown text; return all that this attempt has sent."""
        self.shown = ""
        return "".join(self.parts)


def _stream_of(
    provider: LLMProvider,
    messages: Messages,
    tools: Tools,
    model: str | None,
    keywords: Mapping[str, Any],
) -> AsyncIterator[Delta | LLMResponse]:
    """A provider's stream; a provider without one answers with a single delta."""
    stream: Callable[..., AsyncIterator[Delta | LLMResponse]] | None = getattr(provider, "stream", None)
    if stream is None:
        return _single_delta(provider.chat(messages, tools, model, **keywords))
    return stream(messages, tools, model, **keywords)


async def _single_delta(answer: Awaitable[LLMResponse]) -> AsyncIterator[Delta | LLMResponse]:
    response = await answer
    if response.content or response.reasoning:
        yield Delta(response.content or "", response.reasoning or "")
    yield response
