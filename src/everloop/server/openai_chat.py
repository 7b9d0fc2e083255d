"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from ..runtime.api_requests import Outcome
from .errors import bad_request
from .requests import ChatRequest, read_chat
from .responses import Choice, Chunks, choice, completion
from .turns import SESSION, Asked, Turns, finish_of, json_response, new_id

PREFIX = "chatcmpl-"


class ChatHandler:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._read = partial(read_chat, honours=turns.honours, messages_limit=turns.messages_limit)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        chat = await self._turns.read(request, partial(self._read, kept=SESSION in request.headers))
        if chat.choices > 1:
            return await self._several(request, chat)
        asked = await self._turns.ask(request, chat, new_id(PREFIX))
        return await self._turns.respond(request, asked, ChatWire)

    async def _several(self, request: web.Request, chat: ChatRequest) -> web.StreamResponse:
        """Return several answers to one request: a turn for each, none of which may act."""
        if SESSION in request.headers:
            raise bad_request("n: only 1 is supported in a session", "n", "unsupported_value")
        asked = [await self._turns.ask(request, chat, new_id(PREFIX)) for _ in range(chat.choices)]
        if not asked[0].is_model_only:
            raise bad_request(
                "n: only 1 is supported where the agent uses its own tools; send tools, or the model everloop/chat",
                "n",
                "unsupported_value",
            )
        if chat.stream:
            wires = [ChoiceWire(one, index, asked[0]) for index, one in enumerate(asked)]
            return await self._turns.stream_all(request, asked, wires, wires[0].end_of_all)
        outcomes = await self._turns.run_all(asked)
        made = [_choice(one, outcome) for one, outcome in zip(asked, outcomes, strict=True)]
        first = asked[0]
        body = completion(first.id, first.created, outcomes[0].model or first.model, made, _usage(outcomes))
        return json_response(body, chat)


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
        calls = self.calls(outcome.calls, self._asked.chat.custom)
        return b"".join((calls, self.logprobs(outcome.logprobs), self.finish(finish_of(outcome)), usage, self.done()))

    def whole(self, outcome: Outcome) -> bytes:
        asked = self._asked
        model = outcome.model or asked.model
        return completion(asked.id, asked.created, model, [_choice(asked, outcome)], outcome.usage)


class ChoiceWire(Chunks):
    """Writes one of several answers in a stream. Their chunks have the id of the first."""

    content_type = ChatWire.content_type

    def __init__(self, asked: Asked, index: int, first: Asked) -> None:
        super().__init__(first.id, first.created, asked.model, asked.chat.include_usage, index)
        self._custom = asked.chat.custom

    def start(self) -> bytes:
        return self.role()

    def end(self, outcome: Outcome) -> bytes:
        calls = self.calls(outcome.calls, self._custom)
        return b"".join((calls, self.logprobs(outcome.logprobs), self.finish(finish_of(outcome))))

    def end_of_all(self, outcomes: Sequence[Outcome]) -> bytes:
        """Return the events that follow the last of the answers."""
        return (self.usage(_usage(outcomes)) if self.include_usage else b"") + self.done()

    def whole(self, outcome: Outcome) -> bytes:
        raise NotImplementedError("several answers are encoded together")


def _usage(outcomes: Sequence[Outcome]) -> Counter[str]:
    return sum((Counter(outcome.usage) for outcome in outcomes), Counter[str]())


def _choice(asked: Asked, outcome: Outcome) -> Choice:
    return choice(
        content=None if outcome.calls and not outcome.text else outcome.text,
        finish_reason=finish_of(outcome),
        calls=outcome.calls,
        reasoning=outcome.reasoning,
        custom=asked.chat.custom,
        logprobs=outcome.logprobs,
    )
