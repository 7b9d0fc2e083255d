"""What the server answers, in OpenAI's shapes; the OpenAPI document is made from these types too."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length", "tool_calls", "content_filter"]

# ---------------------------------------------------------------------------------------------- usage


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """Tokens of all model calls of the turn together, as the model's server counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


# ---------------------------------------------------------------------------------------------- whole answers


class AnsweredFunction(Struct):
    name: str
    arguments: str


class AnsweredCall(Struct):
    """A call of one of the request's tools, for the client to run."""

    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class AnsweredMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class Choice(Struct):
    message: AnsweredMessage
    finish_reason: Finish
    index: Literal[0] = 0
    logprobs: None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    object: Literal["chat.completion"] = "chat.completion"
    usage: Usage | UnsetType = UNSET


# ---------------------------------------------------------------------------------------------- streamed answers


class FunctionPiece(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallPiece(Struct):
    """Of a call: first its id and name, then its arguments."""

    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallPiece] | UnsetType = UNSET


class ChunkChoice(Struct):
    delta: Delta
    finish_reason: Finish | None
    index: Literal[0] = 0


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
