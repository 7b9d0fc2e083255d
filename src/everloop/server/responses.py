"""Responses in OpenAI's format: their types, from which the OpenAPI document is generated, and their encoding."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..log import Call
from ..messages import encode_json
from ..providers.openai import encode
from ..text import clean
from .errors import ApiError
from .requests import INPUT

DONE = b"data: [DONE]\n\n"
# Line terminators for clients that split a stream with str.splitlines; JSON escapes all others anyway.
_LINE_ENDS = [(mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029"]

Finish = Literal["stop", "length", "tool_calls", "content_filter"]

# ---------------------------------------------------------------------------------------------- usage


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """The tokens of all model calls of the turn, as counted by the model's server."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


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


# ---------------------------------------------------------------------------------------------- the rest


class Model(Struct):
    id: str
    created: int = 0
    object: Literal["model"] = "model"
    owned_by: str = "everloop"


class Models(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Health(Struct):
    status: Literal["ok"] = "ok"


class ErrorFacts(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorFacts


# ---------------------------------------------------------------------------------------------- encoding


def usage_of(tokens: Mapping[str, int]) -> Usage:
    """Convert the providers' token counts to the API's nested form."""
    prompt, answer = tokens.get("prompt_tokens", 0), tokens.get("completion_tokens", 0)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=answer,
        total_tokens=tokens.get("total_tokens") or prompt + answer,
        prompt_tokens_details=PromptDetails(tokens["cached_tokens"]) if "cached_tokens" in tokens else UNSET,
        completion_tokens_details=(
            CompletionDetails(tokens["reasoning_tokens"]) if "reasoning_tokens" in tokens else UNSET
        ),
    )


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
        else AnsweredCall(clean(call.id), AnsweredFunction(clean(call.name), _arguments(call)))
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
            text = custom_input(call) if kind == "custom" else _arguments(call)
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


def model(id: str, created: int = 0, owned_by: str = "everloop") -> bytes:
    return encode_json(Model(clean(id), created, owned_by=owned_by))


def models(ids: Sequence[str], created: int = 0, owned_by: str = "everloop") -> bytes:
    return encode_json(Models([Model(clean(id), created, owned_by=owned_by) for id in ids]))


def health() -> bytes:
    return encode_json(Health())


def custom_input(call: Call) -> str:
    """Return the text that a custom tool is called with."""
    given = call.arguments.get(INPUT)
    return clean(given) if isinstance(given, str) else _arguments(call)


def _arguments(call: Call) -> str:
    return encode(dict(call.arguments)).decode()


def json_string(text: str) -> bytes:
    """Encode a text as JSON on one line, for any client's notion of a line."""
    try:
        data = encode_json(text)
    except UnicodeEncodeError:
        data = encode_json(clean(text))
    return data if text.isascii() else escape_line_ends(data)


def named_event(name: str, data: bytes) -> bytes:
    """Return a server-sent event for APIs with named events."""
    return b"event: " + name.encode() + b"\ndata: " + escape_line_ends(data) + b"\n\n"


def event_comment(text: str) -> bytes:
    """Return a comment between events, which clients skip."""
    return b": " + " ".join(clean(text).splitlines()).encode() + b"\n\n"


def escape_line_ends(data: bytes) -> bytes:
    """Return JSON without the line terminators that some clients split on."""
    for mark, escaped in _LINE_ENDS:
        if mark in data:
            data = data.replace(mark, escaped)
    return data
