"""One question to a model: streamed when somebody watches and the provider can, in one piece otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import events
from ..messages import Conversation
from ..providers.base import Delta, LLMProvider, LLMResponse, StreamingProvider, option_keywords
from .model_call import Hearing, heard


async def ask(
    provider: LLMProvider,
    conversation: Conversation,
    tools: Sequence[dict[str, Any]] | None,
    model: str | None,
    emit: events.Emit | None,
    options: Mapping[str, Any] | None = None,
    *,
    text_calls: bool = True,
    brought: Sequence[str] = (),
) -> LLMResponse:
    """The model's whole answer; `emit` is shown it as it comes. `options` go to a provider that honours some.

    `text_calls`: calls of the tools that the model wrote into its text count, where it made none otherwise, and where
    they do not stand in something from outside, as the texts are that a client has `brought`.
    """
    wishes = option_keywords(provider, options)
    callable_tools = tools if text_calls else None
    if emit is not None and isinstance(provider, StreamingProvider):
        hearing = Hearing(conversation, callable_tools, emit, brought)
        return await _stream(provider, conversation, tools, model, hearing, emit, wishes)
    response = await provider.chat(conversation, tools=tools, model=model, **wishes)
    response = await heard(response, conversation, callable_tools, brought)
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
    hearing: Hearing,
    emit: events.Emit,
    wishes: dict[str, Any],
) -> LLMResponse:
    whole: LLMResponse | None = None
    async for item in provider.stream(conversation, tools=tools, model=model, **wishes):
        if isinstance(item, Delta):
            if item.restart:
                hearing.restart()
                emit(events.Restarted(item.restart))
            if item.reasoning:
                emit(events.Reasoning(item.reasoning))
            if item.text and not hearing.take(item.text):
                await hearing.read()
        else:
            whole = item
    return await hearing.end(whole)
