"""Retries with backoff and fallback models that never show the same output twice."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ..log import FailedAttempt
from ..text import one_line
from ..text_cursor import TextCursor
from .base import (
    Delta,
    LLMProvider,
    LLMResponse,
    Messages,
    Options,
    ProviderError,
    Tools,
    honours,
    option_keywords,
    own_prompt_of,
)

Failure = ProviderError | ConnectionError | TimeoutError
FAILURES = (ProviderError, ConnectionError, TimeoutError)
MAX_ERROR_LENGTH = 300  # characters
MAX_FAILURES = 20  # per call; only the latest are kept


class Resilient(LLMProvider):
    """Asks each (provider, model) in turn until one answers.

    A retryable failure is retried up to `retries` times with exponential backoff. If a server asks to wait longer than
    `longest_wait` seconds, the next provider is asked instead. A model that the caller names replaces that of the first
    provider. The supported request options are those that all providers support.
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
        self.endpoints = getattr(providers[0][0], "endpoints", frozenset())

    async def chat(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> LLMResponse:
        keywords = option_keywords(self, options)
        failed: list[str] = []
        attempts = Attempts()
        for place, (provider, own) in enumerate(self._providers):
            for attempt in range(self._retries + 1):
                attempts.begin()
                try:
                    answer = await provider.chat(messages, tools, own if place else model or own, **keywords)
                    return attempts.end(self._with_model(answer, place))
                except FAILURES as error:
                    last = error
                attempts.fail(last)
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
        said: list[Delta] = []  # by the first attempt
        shown: ShownAnswer | None = None  # once it has failed
        attempts = Attempts()
        for place, (provider, own) in enumerate(self._providers):
            for attempt in range(self._retries + 1):
                attempts.begin()
                items: AsyncIterator[Delta | LLMResponse] | None = None
                try:
                    items = _stream_of(provider, messages, tools, own if place else model or own, keywords)
                    async for item in items:
                        if isinstance(item, LLMResponse):
                            for delta in shown.finish() if shown is not None else ():
                                yield delta
                            yield attempts.end(self._with_model(item, place))
                            return
                        if shown is None:
                            said.append(item)
                            yield item
                        else:
                            for delta in shown.show(item):
                                yield delta
                    raise ProviderError("the stream ended without an answer", retryable=True)
                except FAILURES as error:
                    last = error
                finally:
                    if (close := getattr(items, "aclose", None)) is not None:
                        await close()
                attempts.fail(last)
                shown = shown or ShownAnswer(said)
                shown.fail(str(last))
                if (wait := self._retry_delay(last, attempt)) is None:
                    break
                await self._sleep(wait)
            failed.append(self._failure_text(place, model, last, attempt))
        raise self._all_failed(failed, last) from last

    async def forward(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask only the first provider: the embeddings of other models, for example, do not match its own."""
        for attempt in range(self._retries + 1):
            try:
                return await self._providers[0][0].forward(endpoint, body)
            except FAILURES as error:
                if (wait := self._retry_delay(error, attempt)) is None:
                    raise
            await self._sleep(wait)
        raise AssertionError("the last attempt raises")

    @property
    def extra(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self._providers[0][0].extra

    def request_body(
        self, messages: Messages, tools: Tools, model: str, options: Options, extra: Mapping[str, Any]
    ) -> bytes | None:
        chosen = option_keywords(self, options).get("options")
        return self._providers[0][0].request_body(messages, tools, model, chosen, extra)

    @property
    def own_prompt(self) -> int:  # type: ignore[override]
        return own_prompt_of(self._providers[0][0])

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
        """Return the seconds until the next attempt, or None if there is none."""
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
        """Return why a provider was given up, in one line."""
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


class Attempts:
    """The failed attempts of one model call: when each began, how long it took, and why it failed."""

    def __init__(self) -> None:
        self._first = self._began = time.monotonic()
        self._failures: list[FailedAttempt] = []

    def begin(self) -> None:
        self._began = time.monotonic()

    def fail(self, error: Failure) -> None:
        began, seconds = self._began - self._first, time.monotonic() - self._began
        text = one_line(str(error) or type(error).__name__, MAX_ERROR_LENGTH)
        self._failures = [*self._failures[-MAX_FAILURES:], FailedAttempt(text, round(began, 4), round(seconds, 4))]

    def end(self, response: LLMResponse) -> LLMResponse:
        if self._failures:
            response.failures = self._failures
        return response


class ShownAnswer:
    """What has been shown of an answer that may have to be requested again: its text and its reasoning.

    As long as an attempt repeats what was shown, nothing is shown; after that, only the new part. If it differs, a
    `restart` comes first, and then the attempt from its beginning. `said` is what the first attempt has shown.
    """

    def __init__(self, said: Iterable[Delta]) -> None:
        self._text = TextCursor()
        self._reasoning = TextCursor()
        self._reason = ""
        for delta in said:
            self.show(delta)

    def show(self, delta: Delta) -> tuple[Delta, ...]:
        """Return what to show for this delta of the running attempt."""
        if delta.restart:  # the provider itself starts over, and says so
            self._text, self._reasoning = TextCursor(), TextCursor()
        text, reasoning = self._text.feed(delta.text), self._reasoning.feed(delta.reasoning)
        if text is None or reasoning is None:
            return self._restart()
        if delta.restart:
            return (delta,)
        return (Delta(text, reasoning),) if text or reasoning else ()

    def finish(self) -> tuple[Delta, ...]:
        """Return what to show once the answer is complete: a restart if it is shorter than what was shown."""
        return self._restart() if self._text.is_behind or self._reasoning.is_behind else ()

    def fail(self, reason: str) -> None:
        """Record that the running attempt has failed; the next one should repeat what was shown so far."""
        self._reason = reason
        self._text.begin()
        self._reasoning.begin()

    def _restart(self) -> tuple[Delta, ...]:
        text, reasoning = self._text.restart(), self._reasoning.restart()
        whole = (Delta(text, reasoning),) if text or reasoning else ()
        return (Delta(restart=self._reason), *whole)


def _stream_of(
    provider: LLMProvider,
    messages: Messages,
    tools: Tools,
    model: str | None,
    keywords: Mapping[str, Any],
) -> AsyncIterator[Delta | LLMResponse]:
    """Return a provider's stream; a provider without one answers with a single delta."""
    stream: Callable[..., AsyncIterator[Delta | LLMResponse]] | None = getattr(provider, "stream", None)
    if stream is None:
        return _single_delta(provider.chat(messages, tools, model, **keywords))
    return stream(messages, tools, model, **keywords)


async def _single_delta(answer: Awaitable[LLMResponse]) -> AsyncIterator[Delta | LLMResponse]:
    response = await answer
    if response.content or response.reasoning:
        yield Delta(response.content or "", response.reasoning or "")
    yield response
