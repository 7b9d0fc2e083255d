"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from ..runtime.api_requests import Outcome
from .requests import read_chat
from .responses import Chunks, completion
from .turns import Asked, Turns, finish_of


class ChatHandler:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._read = partial(read_chat, honours=turns.honours, messages_limit=turns.messages_limit)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        return await self._turns.answer(request, self._read, ChatWire, "chatcmpl-")


class ChatWire(Chunks):
    """Writes one answer."""

    content_type = "text/event-stream"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked.id, asked.created, asked.model, asked.chat.include_usage)
        self._asked = asked

    def start(self) -> bytes:
        return self.role()

    def end(self, outcome: Outcome) -> bytes:
        usage = self.usage(outcome.usage) if self.include_usage else b""
        return b"".join(
            (self.calls(outcome.calls, self._asked.chat.custom), self.finish(finish_of(outcome)), usage, self.done())
        )

    def whole(self, outcome: Outcome) -> bytes:
        return completion(
            self._asked.id,
            self._asked.created,
            outcome.model or self._asked.model,
            content=None if outcome.calls and not outcome.text else outcome.text,
            finish_reason=finish_of(outcome),
            calls=outcome.calls,
            reasoning=outcome.reasoning,
            usage=outcome.usage,
            custom=self._asked.chat.custom,
        )
