"""What the engine's ports are in an agent loop: a provider, a registry of tools, a session's log in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import events
from ..bus import OutboundMessage
from ..dispatch.local import Live
from ..log import Call, Entry, TurnEnded, UserSaid, Written
from ..messages import Conversation
from ..providers.base import Delta, LLMProvider, LLMResponse, StreamingProvider
from ..store.base import Claim, Finished, Store
from ..tools.context import CallContext
from ..tools.registry import ToolRegistry, ToolResult


class Asking:
    """The model: streamed when somebody watches and the provider can, in one piece otherwise."""

    def __init__(self, provider: LLMProvider, model: str | None, tools: ToolRegistry) -> None:
        self._provider = provider
        self._model = model
        self._tools = tools

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        tools = self._tools.get_definitions() or None
        if emit is not None and isinstance(self._provider, StreamingProvider):
            return await self._stream(self._provider, conversation, tools, emit)
        response = await self._provider.chat(conversation, tools=tools, model=self._model)
        if emit is not None:
            if response.reasoning:
                emit(events.Reasoning(response.reasoning))
            if response.content:
                emit(events.Text(response.content))
        return response

    async def _stream(
        self,
        provider: StreamingProvider,
        conversation: Conversation,
        tools: Sequence[dict[str, Any]] | None,
        emit: events.Emit,
    ) -> LLMResponse:
        texts: list[str] = []
        whole: LLMResponse | None = None
        async for item in provider.stream(conversation, tools=tools, model=self._model):
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


class Tools:
    """The registry's tools, each call with its own context."""

    def __init__(self, registry: ToolRegistry, context: Callable[[Call, Callable[[str], None]], CallContext]) -> None:
        self._registry = registry
        self._context = context
        self.batch = registry.batch
        self.replay_safe = registry.replay_safe

    async def run(self, call: Call, progress: Callable[[str], None]) -> ToolResult:
        return await self._registry.run(call, self._context(call, progress))


class SessionLog:
    """The log of a claimed session. Its last append closes the turn and puts the answer into the outbox."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        live: Live,
        answer: Callable[[TurnEnded], Sequence[OutboundMessage]],
        sender: str | None,
    ) -> None:
        self._store = store
        self._claim = claim
        self._live = live
        self._answer = answer
        self._sender = sender
        self._took: list[int] = []
        self._outgoing: Sequence[OutboundMessage] = ()
        self._finished: Written[Finished] | None = None

    def append(self, entries: Sequence[Entry]) -> Written[Any]:
        took, self._took = self._took, []
        if not isinstance(last := entries[-1], TurnEnded):
            return self._store.append(self._claim, entries, took)
        self._outgoing = self._answer(last)
        self._finished = self._store.finish(self._claim, entries, self._outgoing, self._sender, took)
        return self._finished

    def steered(self) -> Sequence[UserSaid]:
        steered = self._live.steer
        if not steered:
            return ()
        self._live.steer = []
        self._took += [id for id, _ in steered]
        return [said for _, said in steered]

    def outgoing(self) -> list[tuple[int, OutboundMessage]]:
        """The answer's rows in the outbox, once the turn is closed."""
        return [] if self._finished is None else list(zip(self._finished.result().outbox, self._outgoing, strict=True))

    def more(self) -> bool:
        """Whether the session has more to do, once the turn is closed."""
        return self._finished is None or self._finished.result().more
