"""One question to a model: streamed when somebody watches and the provider can, in one piece otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import events
from ..messages import Conversation
from ..providers.base import Delta, LLMProvider, LLMResponse, StreamingProvider, option_keywords


async def ask(
    provider: LLMProvider,
    conversation: Conversation,
    tools: Sequence[dict[str, Any]] | None,
    model: str | None,
    emit: events.Emit | None,
    options: Mapping[str, Any] | None = None,
) -> LLMResponse:
    """The model's whole answer; `emit` is shown it as it comes. `options` go to a provider that honours some."""
    wishes = option_keywords(provider, options)
    if emit is not None and isinstance(provider, StreamingProvider):
        return await _stream(provider, conversation, tools, model, emit, wishes)
    response = await provider.chat(conversation, tools=tools, model=model, **wishes)
    if emit is not None:
        if response.reasoning:
            emit(events.Reasoning(response.reasoning))
        if response.content:
            emit(events.Text(response.content))
    return response


async def _stream(
    provider: StreamingProvider,
    conversation: Conversation,
    tools: Sequence[dict[str, Any]] | None,
    model: str | None,
    emit: events.Emit,
    wishes: dict[str, Any],
) -> LLMResponse:
    texts: list[str] = []
    whole: LLMResponse | None = None
    async for item in provider.stream(conversation, tools=tools, model=model, **wishes):
        if isinstance(item, Delta):
            if item.restart:
                texts.clear()
                emit(events.Restarted(item.restart))
            if item.reasoning:
                emit(events.Reasoning(item.reasoning))
            if item.text:
                texts.append(item.text)
                emit(events.Text(item.text))
        else:
            whole = item
    return whole if whole is not None else LLMResponse("".join(texts))
