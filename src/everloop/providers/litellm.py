"""Less common model APIs through the litellm package, an extra that is imported on first use."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import re
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from ..errors import ConfigError
from ..text import one_line
from .base import (
    OPTIONS,
    Delta,
    LLMProvider,
    LLMResponse,
    Messages,
    Options,
    ProviderError,
    Tools,
    option_keywords,
    without_key,
)
from .http import ADVICE, RETRYABLE, Timeouts, retry_after
from .openai import Answer, encode

INSTALL = 'pip install "everloop[litellm]"'
# Set before its import: no downloads (it ships copies of what it would fetch), and no settings from a `.env` file in
# the current folder, which need not be the user's.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_MODE": "PRODUCTION",
}
# litellm uses the first for something else, and silently ignores the others.
NOT_HONOURED = frozenset({"metadata", "prompt_cache_key", "user", "logprobs", "top_logprobs"})
NO_KEY = "no-key"
NOT_REACHED = frozenset({"APIConnectionError", "Timeout", "MidStreamFallbackError"})
CLOSE_SECONDS = 2.0  # for an abandoned stream to close
T = TypeVar("T")

# The prefix that it adds to a server's message: "litellm.RateLimitError: RateLimitError: OpenAIException - …"
_titles = re.compile(r"^(?:(?:litellm\.)?\w+(?:Error|Exception|Timeout)(?:: | - ))*")


class BackgroundLoop:
    """An event loop on its own thread, for a library that would block the caller's.

    The thread starts with the first coroutine and ends with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine there and return its result. Cancelling the caller cancels it."""

        async def run() -> T:  # created on that loop: a coroutine that never starts would log a warning
            return await make()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._started()))

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:  # callers may be on several threads
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon thread, so that a hanging library does not keep the process alive.
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return self._loop


LOOP = BackgroundLoop("everloop-litellm")  # one for all providers: litellm's state is global


class LiteLLMProvider(LLMProvider):
    """A model behind any API that litellm supports, by a name such as `groq/llama-3.3-70b-versatile`.

    Without `model`, each call must name one. Without `api_key`, litellm takes the key that the environment has for the
    model's API, but never with a `base_url`, whose server may be somebody else's. litellm runs on its own event loop,
    since it would block the caller's.
    """

    options = OPTIONS - NOT_HONOURED

    def __init__(
        self,
        model: str | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        answer_limit: int = 2_000_000,
        temperature: float | None = None,
        max_tokens: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if find_spec("litellm") is None:
            raise ConfigError(f"provider litellm needs a package that is not installed: {INSTALL}")
        super().__init__(api_key, base_url, model)
        self._secret = api_key
        self._timeouts = timeouts
        self._answer_limit = answer_limit
        settings = {"temperature": temperature, "max_tokens": max_tokens, "base_url": base_url or None}
        settings["api_key"] = api_key or (NO_KEY if base_url else None)
        # Retries and timeouts are up to the caller.
        settings |= {"num_retries": 0, "max_retries": 0, "timeout": timeouts.total}
        self._settings = {name: value for name, value in settings.items() if value is not None} | dict(extra or {})

    async def chat(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> LLMResponse:
        ask = self._asking(messages, tools, model, options, stream=False)
        answer = Answer(self._answer_limit, model or self.default_model)
        await self._run(_load)
        late = f"gave no answer within {self._timeouts.total:g} s"
        answer.feed(await self._run(lambda: _whole(ask), self._timeouts.total, late))
        return answer.response()

    async def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        ask = self._asking(messages, tools, model, options, stream=True)
        answer = Answer(self._answer_limit, model or self.default_model)
        await self._run(_load)
        clock = asyncio.get_running_loop().time
        first, between = self._timeouts.first_token, self._timeouts.token
        due, late = clock() + first, f"sent no first token within {first:g} s"
        pieces: Any = await self._run(ask, first, late)
        try:
            while not answer.over():
                chunk = await self._run(lambda: _next(pieces), due - clock(), late)
                if chunk is None:
                    break
                if delta := answer.feed(chunk):
                    yield delta
                due, late = clock() + between, f"stopped in the middle of the answer: nothing came for {between:g} s"
        finally:
            with suppress(ProviderError):
                await self._run(lambda: _close(pieces), CLOSE_SECONDS)
        if not (answer.finish_reason or answer.over()):
            raise ProviderError(
                f"the stream of {model or self.default_model} ended in the middle of the answer", retryable=True
            )
        yield answer.response()

    def _asking(
        self,
        messages: Messages,
        tools: Tools,
        model: str | None,
        options: Options,
        *,
        stream: bool,
    ) -> Callable[[], Coroutine[Any, Any, Any]]:
        """Return the litellm call for a request, to be run on litellm's loop."""
        if not (model or self.default_model):
            raise ProviderError(
                'no model is set: LiteLLMProvider(model="groq/llama-3.3-70b-versatile"), or name one in each call'
            )
        chosen: dict[str, Any] = option_keywords(self, options).get("options", {})
        request = {"model": model or self.default_model, "messages": list(messages), **self._settings, **chosen}
        if tools:
            request["tools"] = list(tools)
        if stream:
            request |= {"stream": True, "stream_options": {"include_usage": True}}

        async def ask() -> Any:
            # A copy, since litellm modifies its arguments.
            return await import_module("litellm").acompletion(**copy.deepcopy(request))

        return ask

    async def _run(
        self, make: Callable[[], Coroutine[Any, Any, Any]], seconds: float | None = None, late: str = ""
    ) -> Any:
        """Run a call on litellm's loop; every failure becomes a ProviderError in one line."""
        try:
            async with asyncio.timeout(seconds):
                return await LOOP.run(make)
        except TimeoutError:
            raise ProviderError(f"{self.default_model} {late}", retryable=True) from None
        except ProviderError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ProviderError:
        """Convert an error. litellm's own have the attributes of OpenAI's; anything else is a bug in litellm."""
        text = without_key(one_line(_titles.sub("", str(error))) or type(error).__name__, self._secret)
        if type(error).__name__ in NOT_REACHED and "No module named" not in text:
            return ProviderError(f"the connection of {self.default_model} failed: {text}", retryable=True)
        status = getattr(error, "status_code", None)
        if not isinstance(status, int) or isinstance(error, ImportError) or "No module named" in text:
            return ProviderError(f"litellm failed: {text} (is it installed as everloop needs it? {INSTALL})")
        headers = getattr(error, "litellm_response_headers", None) or {}
        advice = f": {ADVICE[status]}" if status in ADVICE else ""
        return ProviderError(
            f"{self.default_model}: HTTP {status}: {text}{advice}",
            retryable=(status in RETRYABLE or status >= 500) and "insufficient_quota" not in str(error),
            retry_after=retry_after({str(name).lower(): str(value) for name, value in dict(headers).items()}),
            status=status,
        )


async def _load() -> None:
    """Import litellm on its own thread, since that takes seconds, and without its output."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        litellm: Any = import_module("litellm")
    except ImportError as error:
        raise ProviderError(f"litellm cannot be used: {one_line(str(error))}: {INSTALL}") from None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    if not os.environ.get("LITELLM_LOG"):
        logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)  # it writes to the terminal itself


async def _whole(ask: Callable[[], Coroutine[Any, Any, Any]]) -> bytes:
    return _json(await ask())


async def _next(pieces: Any) -> bytes | None:
    """Return the next chunk, or None at the end."""
    try:
        return _json(await anext(pieces))
    except StopAsyncIteration:
        return None


async def _close(pieces: Any) -> None:
    if (close := getattr(pieces, "aclose", None)) is not None:
        await close()


def _json(answer: Any) -> bytes:
    """Convert a chunk or a whole answer to the JSON that every other server sends."""
    return encode(answer.model_dump(exclude_none=True))
