"""The model port: what a provider is asked and what it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)


def counts(response: LLMResponse) -> dict[str, int]:
    """The usage of an answer, whatever a provider has put there: only what are numbers."""
    usage: Any = getattr(response, "usage", None)
    if not isinstance(usage, dict):
        return {}
    return {str(name): count for name, count in usage.items() if type(count) is int and count >= 0}


@dataclass(slots=True, frozen=True)
class Delta:
    """A piece of an answer as it arrives, for watching only: the LLMResponse at the end is the truth."""

    text: str = ""
    reasoning: str = ""
    restart: str = ""  # the answer so far was lost and begins again; the text says why


class LLMProvider:
    """The base of all providers. A subclass needs `chat` and nothing else.

    A provider may also have `stream(messages, tools=None, model=None)`, an async iterator of `Delta`s whose
    last item is the whole `LLMResponse`. It is used whenever somebody is watching the turn.
    """

    default_model: str = ""

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> LLMResponse:
        raise NotImplementedError

    def get_default_model(self) -> str:
        return self.default_model

    async def close(self) -> None:
        """Give back connections. Called once, when the loop that uses the provider is closed."""


@runtime_checkable
class StreamingProvider(Protocol):
    """A provider that also streams."""

    def stream(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
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
