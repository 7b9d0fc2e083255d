"""A provider over others: retries with back-off, then the next of a list, and never the same output twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from .base import Delta, LLMProvider, LLMResponse, ProviderError, honours, option_keywords

Failure = ProviderError | ConnectionError | TimeoutError
FAILURES = (ProviderError, ConnectionError, TimeoutError)


class Resilient(LLMProvider):
    """Asks each (provider, model) in turn until one answers.

    What may succeed later is tried up to `retries` times more, each wait about twice the one before; a server that
    asks for a longer wait than `longest_wait` seconds is left for the next in the list. A model asked for by the
    caller replaces the first one's. Request options are those that all of the list honour.
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
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LLMResponse:
        keywords = option_keywords(self, options)
        failed: list[str] = []
        for place, (provider, own) in enumerate(self._providers):
            for attempt in range(self._retries + 1):
                try:
                    answer = await provider.chat(messages, tools, own if place else model or own, **keywords)
                    return self._signed(answer, place)
                except FAILURES as error:
                    last = error
                if (wait := self._wait(last, attempt)) is None:
                    break
                await self._sleep(wait)
            failed.append(self._obituary(place, model, last, attempt))
        raise self._all_failed(failed, last) from last

    async def stream(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        keywords = option_keywords(self, options)
        failed: list[str] = []
        screen = Screen()
        for place, (provider, own) in enumerate(self._providers):
            for attempt in range(self._retries + 1):
                pieces: AsyncIterator[Delta | LLMResponse] | None = None
                try:
                    pieces = _pieces(provider, messages, tools, own if place else model or own, keywords)
                    async for piece in pieces:
                        if isinstance(piece, LLMResponse):
                            for delta in screen.finish():
                                yield delta
                            yield self._signed(piece, place)
                            return
                        for delta in screen.show(piece):
                            yield delta
                    raise ProviderError("the stream ended without an answer", retryable=True)
                except FAILURES as error:
                    last = error
                finally:
                    if (close := getattr(pieces, "aclose", None)) is not None:
                        await close()
                screen.lost(str(last))
                if (wait := self._wait(last, attempt)) is None:
                    break
                await self._sleep(wait)
            failed.append(self._obituary(place, model, last, attempt))
        raise self._all_failed(failed, last) from last

    @property
    def doing(self) -> str:
        return next((provider.doing for provider, _ in self._providers if provider.doing), "")

    async def close(self) -> None:
        for provider in dict.fromkeys(provider for provider, _ in self._providers):
            await provider.close()

    def _signed(self, response: LLMResponse, place: int) -> LLMResponse:
        if place and not response.model:
            response.model = self._name(place, None)
        return response

    def _name(self, place: int, asked: str | None) -> str:
        provider, own = self._providers[place]
        return (asked if asked and not place else own) or provider.get_default_model()

    def _wait(self, error: Failure, attempt: int) -> float | None:
        """Seconds until the next try, or None when there is none."""
        asked = 0.0
        if isinstance(error, ProviderError):
            if not error.retryable:
                return None
            asked = error.retry_after or 0.0
        if attempt >= self._retries or asked > self._longest_wait:
            return None
        delay: float = min(self._max_delay, self._base_delay * 2**attempt) * (0.5 + 0.5 * self._rng())
        return max(delay, asked)

    def _obituary(self, place: int, asked: str | None, error: Failure, attempt: int) -> str:
        """Why one of the list was given up, in one line."""
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


class Screen:
    """What a watcher has been shown of an answer that may have to be asked for again.

    While a new try repeats what is shown, nothing is shown; when it goes on beyond, only the new part is; when it
    differs, one `restart` comes first and then the new try from its start.
    """

    def __init__(self) -> None:
        self._tracks = (Track(), Track())  # text, reasoning
        self._repeating = False
        self._reason = ""

    def show(self, delta: Delta) -> tuple[Delta, ...]:
        """What a watcher gets to see for this piece of the try that runs."""
        if delta.restart:  # the provider begins again by itself, and says so
            self._tracks = (Track(), Track())
            self._repeating = False
        text, reasoning = self._tracks
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
        """The answer is whole: if it is shorter than what is shown, that was another one."""
        return self._restart() if self._repeating else ()

    def lost(self, reason: str) -> None:
        """The try that ran has failed; the next one should repeat what is shown by now."""
        self._reason = reason
        for track in self._tracks:
            track.rewind()
        self._repeating = any(track.shown for track in self._tracks)

    def _restart(self) -> tuple[Delta, ...]:
        self._repeating = False
        text, reasoning = (track.give_up() for track in self._tracks)
        whole = (Delta(text, reasoning),) if text or reasoning else ()
        return (Delta(restart=self._reason), *whole)


class Track:
    """One of the two texts of an answer: what tries before have shown of it, and what this try has brought."""

    def __init__(self) -> None:
        self.shown = ""
        self.parts: list[str] = []
        self._size = 0  # of the parts, while they repeat what is shown

    def repeat(self, piece: str) -> str | None:
        """The part of a piece that goes beyond what is shown; None if it is not what was shown."""
        self.parts.append(piece)
        start, self._size = self._size, self._size + len(piece)
        known = self.shown[start : self._size]
        return piece[len(known) :] if piece.startswith(known) else None

    def behind(self) -> bool:
        return self._size < len(self.shown)

    def rewind(self) -> None:
        now = "".join(self.parts)
        if len(now) > len(self.shown):
            self.shown = now
        self.parts, self._size = [], 0

    def give_up(self) -> str:
        """Forget what was shown; returns all that this try has brought."""
        self.shown = ""
        return "".join(self.parts)


def _pieces(
    provider: LLMProvider,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    model: str | None,
    keywords: Mapping[str, Any],
) -> AsyncIterator[Delta | LLMResponse]:
    """A provider's stream; one that has none answers in one piece."""
    stream: Callable[..., AsyncIterator[Delta | LLMResponse]] | None = getattr(provider, "stream", None)
    if stream is None:
        return _one_piece(provider.chat(messages, tools, model, **keywords))
    return stream(messages, tools, model, **keywords)


async def _one_piece(answer: Awaitable[LLMResponse]) -> AsyncIterator[Delta | LLMResponse]:
    response = await answer
    if response.content or response.reasoning:
        yield Delta(response.content or "", response.reasoning or "")
    yield response
