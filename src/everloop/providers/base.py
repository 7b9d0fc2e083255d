"""The port of a model: what a provider gets and what it returns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..text import one_line

if TYPE_CHECKING:
    from ..log import FailedAttempt

# Request options besides messages and tools, under OpenAI's names; `max_tokens` limits the length of the answer.
OPTIONS = frozenset(
    {
        "temperature",
        "top_p",
        "max_tokens",
        "stop",
        "seed",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "reasoning_effort",
        "verbosity",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "metadata",
        "service_tier",
        "logprobs",
        "top_logprobs",
    }
)
# These values have no effect, so every provider accepts them.
USUAL_VALUES: dict[str, Any] = {
    "top_p": 1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "service_tier": "auto",
    "logprobs": False,
    "top_logprobs": 0,
}

Messages = Sequence[dict[str, Any]]  # in OpenAI's format
Tools = Sequence[dict[str, Any]] | None  # their definitions, in OpenAI's format
Options = Mapping[str, Any] | None  # some of OPTIONS

MIN_KEY_LENGTH = 8  # characters
MAX_TOKEN_COUNT = 1 << 48  # a larger count is the server's mistake, and would not fit into a database column


@dataclass(slots=True)
class ToolCallRequest:
    """One tool call of a model's answer.

    `error` says why the arguments could not be read. Such a call never runs; the error is its result.
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class LLMResponse:
    """A model's complete answer. Only `content` is required."""

    content: str | None
    tool_calls: list[ToolCallRequest] = field(default_factory=list)
    finish_reason: str = "stop"
    usage: dict[str, int] = field(default_factory=dict)  # prompt_tokens, completion_tokens, total_tokens, …
    reasoning: str | None = None
    model: str | None = None  # the model that answered, if it is not the one asked for (a fallback)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of each token, in OpenAI's format, if requested
    failures: list[FailedAttempt] = field(default_factory=list)  # the attempts before this answer

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)


def extra_of(provider: LLMProvider) -> dict[str, Any]:
    """Return the further fields of a provider's requests. In a user's own provider that attribute may be anything."""
    extra: Any = getattr(provider, "extra", None)
    return dict(extra) if extra and isinstance(extra, Mapping) else {}


def own_prompt_of(provider: object) -> int:
    """The tokens that a provider sends in place of the system prompt and the tools. Any object may be a provider."""
    tokens = getattr(provider, "own_prompt", 0)
    return tokens if type(tokens) is int else 0


def counts(response: LLMResponse) -> dict[str, int]:
    """Return the plausible token counts in the usage of an answer, whatever the provider put there."""
    usage: Any = getattr(response, "usage", None)
    if not isinstance(usage, dict):
        return {}
    return {str(name): count for name, count in usage.items() if type(count) is int and 0 <= count < MAX_TOKEN_COUNT}


def count_of(response: LLMResponse, name: str) -> int:
    """Return one of the token counts of an answer; 0 if it is missing or implausible."""
    usage: Any = getattr(response, "usage", None)
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < MAX_TOKEN_COUNT else 0


@dataclass(slots=True, frozen=True)
class Delta:
    """A part of an answer as it arrives, for display only: the final LLMResponse is what counts."""

    text: str = ""
    reasoning: str = ""
    restart: str = ""  # why the answer starts over; what was shown of it is void


class LLMProvider:
    """The base of all providers. A subclass needs `chat` and nothing else.

    A provider may also have `stream(messages, tools=None, model=None)`, an async iterator of `Delta`s whose last item
    is the complete `LLMResponse`. It is used whenever the turn has a subscriber. A provider that supports request
    options names them in `options`; both methods then take a keyword `options`, which is passed only if some are set.

    The inherited `__init__` keeps its arguments as `api_key`, `base_url` and `model`, which is also the default model.
    A subclass with its own `__init__` need not call it.
    """

    default_model: str = ""
    options: frozenset[str] = frozenset()
    own_prompt: int = 0  # tokens it sends instead of the system prompt and the tools, if it omits those
    extra: Mapping[str, Any] = MappingProxyType({})  # further fields of every request
    endpoints: frozenset[str] = frozenset()  # of OpenAI's API that `forward` supports: "embeddings", "completions"
    api_key: str | None = None
    base_url: str | None = None
    model: str | None = None

    def __init__(self, api_key: str | None = None, base_url: str | None = None, model: str | None = None) -> None:
        self.api_key = api_key
        self.base_url = base_url
        self.model = model
        if model:
            self.default_model = model

    async def chat(self, messages: Messages, tools: Tools = None, model: str | None = None) -> LLMResponse:
        raise NotImplementedError

    async def forward(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request of OpenAI's API to one of `endpoints`, and return its answer."""
        raise NotImplementedError

    def get_default_model(self) -> str:
        return self.default_model

    def request_body(
        self, messages: Messages, tools: Tools, model: str, options: Options, extra: Mapping[str, Any]
    ) -> bytes | None:
        """Return the JSON of a request as it is sent, except for the fields that ask for a stream.

        `extra` replaces the provider's own. None if requests have another form.
        """
        return None

    @property
    def doing(self) -> str:
        """What the provider is doing before it can answer, such as loading a model, for display; "" if nothing."""
        return ""

    async def close(self) -> None:
        """Close the connections. Called once, when the agent that uses the provider is closed."""


@runtime_checkable
class StreamingProvider(Protocol):
    """A provider that also streams."""

    def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None
    ) -> AsyncIterator[Delta | LLMResponse]: ...


class ProviderError(Exception):
    """A failed model call; the message is one line for a person.

    `retryable`: the same request may succeed later. `retry_after`: the seconds that the server asked to wait.
    `status`: the HTTP status, if there was one. `several`: more than one model was asked.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        retry_after: float | None = None,
        status: int | None = None,
        several: bool = False,
    ) -> None:
        super().__init__(message)
        self.several = several
        self.retryable = retryable
        self.retry_after = retry_after
        self.status = status


def honours(provider: object) -> frozenset[str]:
    """Return the request options that a provider supports; none if it does not say."""
    options = getattr(provider, "options", None)
    return frozenset(options) if isinstance(options, set | frozenset) else frozenset()


def option_keywords(provider: object, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `options` keyword for `chat` or `stream`; empty without options, since a provider may not take it.

    An option that the provider does not support is an error that names it, unless its value has no effect.
    """
    if not options:
        return {}
    honoured = honours(provider)
    given = {name: value for name, value in options.items() if value is not None}
    chosen = {name: value for name, value in given.items() if name in honoured or USUAL_VALUES.get(name) != value}
    if refused := sorted(chosen.keys() - honoured):
        raise ProviderError(f"this model's provider does not take {', '.join(refused)}: leave it out", status=400)
    return {"options": chosen} if chosen else {}


def without_key(text: str, key: str | None) -> str:
    """Return the text without the API key. A short key is a placeholder, such as "none" or "ollama"."""
    return text.replace(key, "***") if key and len(key) >= MIN_KEY_LENGTH else text


def error_text(error: Any) -> str:
    """Return the message of an error body in any of the usual formats."""
    while isinstance(error, dict):
        inner = error.get("error") or error.get("message") or error.get("detail")
        if not inner:
            return one_line(json.dumps(error, ensure_ascii=False))
        error = inner
    return one_line(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))
