"""What goes back to a client: whole bodies, and the pieces of a stream as every OpenAI client reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from msgspec import UNSET

from ..messages import encode_json
from ..providers.sse import encode
from ..text import clean
from .errors import ApiError
from .responses import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    Choice,
    Completion,
    CompletionDetails,
    Finish,
    Health,
    Model,
    Models,
    PromptDetails,
    Usage,
)

__all__ = ["Chunks", "completion", "health", "model", "models", "usage_of"]

DONE = b"data: [DONE]\n\n"
# Letters that end a line for clients which cut a stream with str.splitlines; JSON escapes the others by itself.
_LINE_ENDS = [(mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029"]


class Called(Protocol):
    """A tool call, such as the log's `Call`."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...


def usage_of(tokens: Mapping[str, int]) -> Usage:
    """Tokens by the names that providers give them, details beside them, as the API nests them."""
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


def completion(
    id: str,
    created: int,
    model: str,
    *,
    content: str | None,
    finish_reason: str = "stop",
    calls: Sequence[Called] = (),
    reasoning: str | None = None,
    usage: Mapping[str, int] | None = None,
) -> bytes:
    """A whole answer. Without a word from the model about its tokens there is no usage in it."""
    made = [AnsweredCall(clean(call.id), AnsweredFunction(clean(call.name), _arguments(call))) for call in calls]
    message = AnsweredMessage(
        content=clean(content) if content is not None else None,
        reasoning_content=clean(reasoning) if reasoning else UNSET,
        tool_calls=made or UNSET,
    )
    answer = Completion(clean(id), created, clean(model), [Choice(message, cast(Finish, finish_reason))])
    if usage:
        answer.usage = usage_of(usage)
    return encode_json(answer)


class Chunks:
    """The events of one streamed answer, as bytes. All but the piece itself is encoded once."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool = False) -> None:
        self.include_usage = include_usage
        facts = {"id": clean(id), "object": "chat.completion.chunk", "created": created, "model": clean(model)}
        self._head = b"data: " + _one_line(encode_json(facts)[:-1]) + b',"choices":['
        # As the API has it: who asks for the usage finds a null in all other chunks.
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._delta = self._head + b'{"index":0,"delta":{'
        self._text = self._delta + b'"content":'
        self._reasoning = self._delta + b'"reasoning_content":'
        self._rest = b'},"finish_reason":null}' + self._end

    def role(self) -> bytes:
        """The first chunk."""
        return self._delta + b'"role":"assistant","content":""' + self._rest

    def text(self, text: str) -> bytes:
        return self._text + _string(text) + self._rest

    def reasoning(self, text: str) -> bytes:
        return self._reasoning + _string(text) + self._rest

    def calls(self, calls: Sequence[Called]) -> bytes:
        """Calls for the client, two chunks each: the id and the name come only once, for some clients join them."""
        pieces: list[bytes] = []
        for index, call in enumerate(calls):
            opening = {"name": clean(call.name), "arguments": ""}
            first = {"index": index, "id": clean(call.id), "type": "function", "function": opening}
            then = {"index": index, "function": {"arguments": _arguments(call)}}
            for piece in (first, then):
                pieces += self._delta, b'"tool_calls":[', _one_line(encode_json(piece)), b"]", self._rest
        return b"".join(pieces)

    def finish(self, reason: str) -> bytes:
        """The last chunk of the answer itself."""
        return self._delta + b'},"finish_reason":"' + reason.encode() + b'"}' + self._end

    def usage(self, tokens: Mapping[str, int]) -> bytes:
        """For those who asked for it: the chunk before the end."""
        return self._head + b'],"usage":' + encode_json(usage_of(tokens)) + b"}\n\n"

    def done(self) -> bytes:
        return DONE

    def comment(self, text: str, alone: bool = True) -> bytes:
        """A line that no client reads as data. After an event with an id it must not be one of its own (`alone`): there
        some clients take the empty line behind it for an event without data, and fail."""
        return b": " + " ".join(clean(text).splitlines()).encode() + (b"\n\n" if alone else b"\n")

    def error(self, error: ApiError) -> bytes:
        """What has gone wrong after the answer had begun, when it is too late for a status."""
        return b"data: " + _one_line(encode(error.body())) + b"\n\n"


# ---------------------------------------------------------------------------------------------- other routes


def model(id: str, created: int = 0, owned_by: str = "everloop") -> bytes:
    return encode_json(Model(clean(id), created, owned_by=owned_by))


def models(ids: Sequence[str], created: int = 0, owned_by: str = "everloop") -> bytes:
    return encode_json(Models([Model(clean(id), created, owned_by=owned_by) for id in ids]))


def health() -> bytes:
    return encode_json(Health())


# ---------------------------------------------------------------------------------------------- JSON


def _arguments(call: Called) -> str:
    return encode(dict(call.arguments)).decode()


def _string(text: str) -> bytes:
    """A text as JSON on one line, whatever a client takes for the end of one."""
    try:
        data = encode_json(text)
    except UnicodeEncodeError:
        data = encode_json(clean(text))
    return data if text.isascii() else _one_line(data)


def _one_line(data: bytes) -> bytes:
    for mark, escaped in _LINE_ENDS:
        if mark in data:
            data = data.replace(mark, escaped)
    return data
