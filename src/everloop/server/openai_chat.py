"""`POST /v1/chat/completions`: OpenAI's chat completions.

The types of the answers, from which the OpenAPI document is generated, their encoding, and the handler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from ..log import Call
from ..messages import encode_json
from ..providers.openai import encode
from ..runtime.api_requests import Outcome
from ..text import clean
from .errors import ApiError, bad_request
from .requests import ChatRequest, read_chat
from .responses import (
    DONE,
    Usage,
    arguments_of,
    custom_input,
    escape_line_ends,
    event_comment,
    json_string,
    usage_of,
)
from .turns import SESSION, Asked, Turns, finish_of, json_response, new_id

PREFIX = "chatcmpl-"
Finish = Literal["stop", "length", "tool_calls", "content_filter"]

# ---------------------------------------------------------------------------------------------- whole answers


class AnsweredFunction(Struct):
    name: str
    arguments: str


class AnsweredCall(Struct, tag="function", tag_field="type"):
    """A call of one of the request's tools, for the client to run."""

    id: str
    function: AnsweredFunction


class AnsweredCustom(Struct):
    name: str
    input: str


class AnsweredCustomCall(Struct, tag="custom", tag_field="type"):
    """A call of one of the request's custom tools."""

    id: str
    custom: AnsweredCustom


class AnsweredMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall | AnsweredCustomCall] | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class Logprobs(Struct):
    """The log probabilities of the tokens of the last model call."""

    content: list[TokenLogprob]
    refusal: None = None


class Choice(Struct):
    message: AnsweredMessage
    finish_reason: Finish
    index: int = 0
    logprobs: Logprobs | None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    object: Literal["chat.completion"] = "chat.completion"
    usage: Usage | UnsetType = UNSET


# ---------------------------------------------------------------------------------------------- streamed answers


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """Part of a call: first its id and name, then its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    delta: Delta
    finish_reason: Finish | None
    index: int = 0
    logprobs: Logprobs | UnsetType = UNSET


class Chunk(Struct):
    """One event of a stream; with `stream_options.include_usage` the last one has the usage and no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


# ---------------------------------------------------------------------------------------------- encoding


def choice(
    *,
    content: str | None,
    finish_reason: str = "stop",
    calls: Sequence[Call] = (),
    reasoning: str | None = None,
    custom: Container[str] = (),
    logprobs: Sequence[Mapping[str, Any]] = (),
) -> Choice:
    """Return one complete answer."""
    made: list[AnsweredCall | AnsweredCustomCall] = [
        AnsweredCustomCall(clean(call.id), AnsweredCustom(clean(call.name), custom_input(call)))
        if call.name in custom
        else AnsweredCall(clean(call.id), AnsweredFunction(clean(call.name), arguments_of(call)))
        for call in calls
    ]
    message = AnsweredMessage(
        content=clean(content) if content is not None else None,
        reasoning_content=clean(reasoning) if reasoning else UNSET,
        tool_calls=made or UNSET,
    )
    return Choice(message, cast(Finish, finish_reason), logprobs=logprobs_of(logprobs))


def logprobs_of(tokens: Sequence[Mapping[str, Any]]) -> Logprobs | None:
    return msgspec.convert({"content": tokens}, Logprobs) if tokens else None


def completion(
    id: str, created: int, model: str, choices: Sequence[Choice], usage: Mapping[str, int] | None = None
) -> bytes:
    """Encode complete answers. They have no `usage` if the model reported none."""
    for index, one in enumerate(choices):
        one.index = index
    answer = Completion(clean(id), created, clean(model), [*choices])
    if usage:
        answer.usage = usage_of(usage)
    return encode_json(answer)


class Chunks:
    """Encodes the events of one streamed answer, or of one of several in a stream.

    The part common to all of them is encoded once.
    """

    def __init__(self, id: str, created: int, model: str, include_usage: bool = False, index: int = 0) -> None:
        self.include_usage = include_usage
        facts = {"id": clean(id), "object": "chat.completion.chunk", "created": created, "model": clean(model)}
        self._head = b"data: " + escape_line_ends(encode_json(facts)[:-1]) + b',"choices":['
        # As in OpenAI's API: with include_usage, all chunks but the last have null.
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._delta = self._head + b'{"index":%d,"delta":{' % index
        self._text = self._delta + b'"content":'
        self._reasoning = self._delta + b'"reasoning_content":'
        self._rest = b'},"finish_reason":null}' + self._end

    def role(self) -> bytes:
        """Return the first chunk."""
        return self._delta + b'"role":"assistant","content":""' + self._rest

    def text(self, text: str, id: bytes = b"") -> bytes:
        return id + self._text + (encode_json(text) if text.isascii() else json_string(text)) + self._rest

    def reasoning(self, text: str) -> bytes:
        return self._reasoning + json_string(text) + self._rest

    def calls(self, calls: Sequence[Call], custom: Container[str] = ()) -> bytes:
        """Return calls for the client, two chunks each: some clients concatenate the id and the name of all chunks."""
        encoded: list[bytes] = []
        for index, call in enumerate(calls):
            kind, value = ("custom", "input") if call.name in custom else ("function", "arguments")
            opening = {"name": clean(call.name), value: ""}
            first = {"index": index, "id": clean(call.id), "type": kind, kind: opening}
            text = custom_input(call) if kind == "custom" else arguments_of(call)
            then = {"index": index, kind: {value: text}}
            for part in (first, then):
                encoded += self._delta, b'"tool_calls":[', escape_line_ends(encode_json(part)), b"]", self._rest
        return b"".join(encoded)

    def logprobs(self, tokens: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the log probabilities of the whole answer, in one chunk after it."""
        if not tokens:
            return b""
        written = escape_line_ends(encode_json(logprobs_of(tokens)))
        return self._delta + b'},"logprobs":' + written + b',"finish_reason":null}' + self._end

    def finish(self, reason: str) -> bytes:
        """Return the last chunk of the answer itself."""
        return self._delta + b'},"finish_reason":"' + reason.encode() + b'"}' + self._end

    def usage(self, tokens: Mapping[str, int]) -> bytes:
        """Return the chunk before the end, with include_usage."""
        return self._head + b'],"usage":' + encode_json(usage_of(tokens)) + b"}\n\n"

    def done(self) -> bytes:
        return DONE

    def comment(self, text: str, alone: bool = True) -> bytes:
        """Return a line that clients skip.

        In a stream with event ids it must not stand `alone`: some clients take the empty line after it for an event
        without data, and fail.
        """
        return event_comment(text) if alone else event_comment(text)[:-1]

    def error(self, error: ApiError) -> bytes:
        """Return an error after the response has started, when it is too late for a status."""
        return b"data: " + escape_line_ends(encode(error.body())) + b"\n\n"


# ---------------------------------------------------------------------------------------------- handler


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
