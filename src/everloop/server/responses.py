"""What the answers of the APIs share: token usage, small bodies, server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ..log import Call
from ..messages import encode_json
from ..providers.openai import encode
from ..text import clean
from .requests import INPUT

DONE = b"data: [DONE]\n\n"
# Line terminators for clients that split a stream with str.splitlines; JSON escapes all others anyway.
_LINE_ENDS = [(mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029"]

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


# ---------------------------------------------------------------------------------------------- other bodies


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


def model(id: str) -> bytes:
    return encode_json(Model(clean(id)))


def models(ids: Sequence[str]) -> bytes:
    return encode_json(Models([Model(clean(id)) for id in ids]))


def health() -> bytes:
    return encode_json(Health())


def custom_input(call: Call) -> str:
    """Return the text that a custom tool is called with."""
    given = call.arguments.get(INPUT)
    return clean(given) if isinstance(given, str) else arguments_of(call)


def arguments_of(call: Call) -> str:
    """Return the arguments of a call as JSON."""
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
