"""The model port: what a provider is asked and what it answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..text import one_line

if TYPE_CHECKING:
    from ..log import FailedAttempt

# Request options beside messages and tools, under OpenAI's names; `max_tokens` is the length of the answer.
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
# These values change nothing, so no provider refuses them.
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

Messages = Sequence[dict[str, Any]]  # in OpenAI's shape
Tools = Sequence[dict[str, Any]] | None  # their definitions, in OpenAI's shape
Options = Mapping[str, Any] | None  # some of OPTIONS

SHORTEST_KEY = 8  # characters
MOST_TOKENS = 1 << 48  # a larger count is an error of the server, and does not fit into a database column


@dataclass(slots=True)
class ToolCallRequest:
    """One tool call of a model's answer.

    `error` says why the arguments could not be read; such a call is answered with it and never run.
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class LLMResponse:
    """A model's whole answer. Only `content` is required."""

    content: str | None
    tool_calls: list[ToolCallRequest] = field(default_factory=list)
    finish_reason: str = "stop"
    usage: dict[str, int] = field(default_factory=dict)  # prompt_tokens, completion_tokens, total_tokens, …
    reasoning: str | None = None
    model: str | None = None  # the one that answered, where it is not the one asked (a fallback)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of each token, in OpenAI's shape, if asked for
    failures: list[FailedAttempt] = field(default_factory=list)  # attempts before the one that gave this answer

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)


def extra_of(provider: LLMProvider) -> dict[str, Any]:
    """The further fields of a provider's requests. A provider of the user's own may have anything under that name."""
    extra: Any = getattr(provider, "extra", None)
    return dict(extra) if extra and isinstance(extra, Mapping) else {}


def own_prompt_of(provider: object) -> int:
    """The tokens that a provider sends in place of the system prompt and the tools. Any object may be a provider."""
    tokens = getattr(provider, "own_prompt", 0)
    return tokens if type(tokens) is int else 0


def counts(response: LLMResponse) -> dict[str, int]:
    """The usage of an answer as plausible token counts, whatever a provider has put there."""
    usage: Any = getattr(response, "usage", None)
    if not isinstance(usage, dict):
        return {}
    return {str(name): count for name, count in usage.items() if type(count) is int and 0 <= count < MOST_TOKENS}


def count_of(response: LLMResponse, name: str) -> int:
    """One of the token counts of an answer; 0 if it is missing or not plausible."""
    usage: Any = getattr(response, "usage", None)
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < MOST_TOKENS else 0


@dataclass(slots=True, frozen=True)
class Delta:
    """A part of an answer as it arrives, to be shown only: the LLMResponse at the end is what counts."""

    text: str = ""
    reasoning: str = ""
    restart: str = ""  # the answer so far was lost and starts over; the text says why


class LLMProvider:
    """The base of all providers. A subclass needs `chat` and nothing else.

    A provider may also have `stream(messages, tools=None, model=None)`, an async iterator of `Delta`s whose
    last item is the whole `LLMResponse`. It is used whenever the turn has a subscriber. One that honours request
    options names them in `options`, and both methods take a further `options`, which is only there when some are set.

    The inherited `__init__` keeps its arguments as `api_key`, `base_url` and `model`, which is also the default model.
    A subclass with an `__init__` of its own need not call it.
    """

    default_model: str = ""
    options: frozenset[str] = frozenset()
    own_prompt: int = 0  # tokens that it sends in place of the system prompt and the tools, if it leaves these out
    extra: Mapping[str, Any] = MappingProxyType({})  # further fields of every request
    endpoints: frozenset[str] = frozenset()  # of OpenAI's API that `forward` knows: "embeddings", "completions"
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
        """Send a request of OpenAI's API to one of `endpoints`, and return the answer."""
        raise NotImplementedError

    def get_default_model(self) -> str:
        return self.default_model

    def request_body(
        self, messages: Messages, tools: Tools, model: str, options: Options, extra: Mapping[str, Any]
    ) -> bytes | None:
        """The JSON of a request as it is sent, but for the fields that ask for a stream; `extra` takes the place of the
        provider's own. None where a request has another form."""
        return None

    @property
    def doing(self) -> str:
        """What it is doing before it can answer, such as loading a model, for a person who waits; "" if nothing."""
        return ""

    async def close(self) -> None:
        """Close connections. Called once, when the agent that uses the provider is closed."""


@runtime_checkable
class StreamingProvider(Protocol):
    """A provider that also streams."""

    def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None
    ) -> AsyncIterator[Delta | LLMResponse]: ...


class ProviderError(Exception):
    """A model call that failed, in one line for a person.

    `retryable`: the same request may succeed later. `retry_after`: how long the server asked us to wait, in
    seconds. `status`: the HTTP status, where there was one. `several`: more than one model was asked.
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
    """The request options that a provider honours; none if it does not say."""
    options = getattr(provider, "options", None)
    return frozenset(options) if isinstance(options, set | frozenset) else frozenset()


def option_keywords(provider: object, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `options` keyword for `chat` or `stream`; empty without options, since a provider may not take it.

    An option that is not honoured is an error that names it, unless its value changes nothing.
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
    """The text without the API key. A short one is a word that stands for none, such as "none" or "ollama"."""
    return text.replace(key, "***") if key and len(key) >= SHORTEST_KEY else text


def error_text(error: Any) -> str:
    """The message of an error body, in any of the usual shapes."""
    while isinstance(error, dict):
        inner = error.get("error") or error.get("message") or error.get("detail")
        if not inner:
            return one_line(json.dumps(error, ensure_ascii=False))
        error = inner
    return one_line(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))
