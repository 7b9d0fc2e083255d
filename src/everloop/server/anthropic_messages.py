"""`POST /v1/messages`: Anthropic's Messages API, and `count_tokens`.

A body is converted to a chat request, so that everything after that is the same as for OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, assert_never

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from ..log import Call
from ..messages import encode_json
from ..providers.openai import encode
from ..runtime.api_requests import Outcome
from ..text import clean
from .errors import ApiError, anthropic_body, bad_request
from .requests import (
    MAX_TOOLS,
    AnyMessage,
    AssistantMessage,
    CalledFunction,
    ChatBody,
    ChatRequest,
    ChosenFunction,
    Function,
    Id,
    ImagePart,
    Name,
    OnlyPart,
    Schema,
    SystemMessage,
    TextPart,
    Tokens,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
    chat_request,
    image_part,
    named_in_header,
    only_text,
    parse_body,
    unknown_keys,
)
from .responses import arguments_of, event_comment, named_event
from .turns import SESSION, Asked, Turns, finish_of

STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
# Sent with a thinking block, because clients expect one. It is never read: thinking blocks in requests are dropped.
SIGNATURE = "ZXZlcmxvb3A="
VERSION_HEADER = "anthropic-version"  # sent by every client of the API

# ---------------------------------------------------------------------------------------------- requests


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag="redacted_thinking", tag_field="type"):
    data: str = ""


class Base64Source(Struct, tag="base64", tag_field="type"):
    media_type: str
    data: str


class UrlSource(Struct, tag="url", tag_field="type"):
    url: str


class TextSource(Struct, tag="text", tag_field="type"):
    data: str


class ImageBlock(Struct, tag="image", tag_field="type"):
    source: Base64Source | UrlSource


class DocumentBlock(Struct, tag="document", tag_field="type"):
    """A text document attached to a message."""

    source: Base64Source | UrlSource | TextSource
    title: str | None = None


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    id: Id
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Struct, tag="tool_result", tag_field="type"):
    tool_use_id: Id
    content: str | list[TextPart | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class MessageParam(Struct):
    role: Literal["user", "assistant", "system"]
    content: (
        str
        | list[
            TextPart
            | ImageBlock
            | DocumentBlock
            | ToolUseBlock
            | ToolResultBlock
            | ThinkingBlock
            | RedactedThinkingBlock
        ]
    )


class ToolParam(Struct):
    """A tool of the client. Types other than "custom" run at Anthropic, and have no effect here."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: Schema | None = None


class ToolChoiceParam(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Metadata(Struct):
    user_id: str | None = None


class CountBody(Struct):
    """The body of a `count_tokens` request."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: str | None = None
    system: str | list[OnlyPart] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of a request. `cache_control` is accepted everywhere, but the server decides what it caches."""

    max_tokens: Tokens
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=100)] | None = None
    metadata: Metadata | None = None


_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)
MAX_STOPS = 4  # stop sequences that OpenAI's servers accept


def read_messages(body: bytes, *, honours: frozenset[str], messages_limit: int, kept: bool = False) -> ChatRequest:
    """Parse a body; an ApiError names the invalid parameter. `kept` says that the server has the history."""
    asked = parse_body(body, _decoder)
    ignored = unknown_keys(body, MessagesBody)
    if asked.top_k is not None:
        ignored.append("top_k")
    if asked.thinking is not None and asked.thinking.budget_tokens is not None:
        ignored.append("thinking.budget_tokens")
    stops = [stop for stop in asked.stop_sequences or () if stop]
    if len(stops) > MAX_STOPS:
        ignored.append(f"stop_sequences[{MAX_STOPS}:]")
    chat, places, left_out = _chat_body(asked)
    chat.stream = asked.stream
    chat.temperature, chat.top_p, chat.stop = asked.temperature, asked.top_p, stops[:MAX_STOPS] or None
    if "max_tokens" in honours:
        chat.max_tokens = asked.max_tokens
    else:
        ignored.append("max_tokens")
    if asked.metadata is not None and asked.metadata.user_id:
        chat.user = asked.metadata.user_id
    return chat_request(
        chat,
        honours=honours,
        messages_limit=messages_limit,
        places=places,
        ignored=[*ignored, *left_out],
        client_is_agent=bool(asked.tools),
        hides_reasoning=asked.thinking is None or asked.thinking.type == "disabled",
        kept=kept,
    )


def read_count(body: bytes, *, honours: frozenset[str], messages_limit: int) -> ChatRequest:
    """Parse the body of a `count_tokens` request."""
    chat, places, left_out = _chat_body(parse_body(body, _count_decoder))
    return chat_request(chat, honours=honours, messages_limit=messages_limit, places=places, ignored=left_out)


def _chat_body(asked: CountBody) -> tuple[ChatBody, list[str], list[str]]:
    """Return the request as a chat body, the places of its messages, and the parameters without effect."""
    messages: list[AnyMessage] = []
    places: list[str] = []
    if system := _system(asked.system):
        messages.append(SystemMessage(system))
        places.append("system")
    for number, message in enumerate(asked.messages):
        for made in _messages(message, f"messages[{number}]"):
            messages.append(made)
            places.append(f"messages[{number}]")
    tools, left_out = _tools(asked.tools or ())
    choice = asked.tool_choice
    chat = ChatBody(messages, model=asked.model, tools=tools or None, tool_choice=_choice(choice, tools))
    if choice is not None and choice.disable_parallel_tool_use and tools:
        chat.parallel_tool_calls = False
    return chat, places, left_out


def _system(system: str | list[OnlyPart] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(block.text for block in system if block.text)


def _tools(tools: Sequence[ToolParam]) -> tuple[list[Tool], list[str]]:
    own = [tool for tool in tools if tool.type in (None, "custom")]
    made = [Tool(Function(tool.name, tool.description, tool.input_schema)) for tool in own]
    return made, [f"tools.{named_in_header(tool.name)}" for tool in tools if tool not in own]


def _choice(
    choice: ToolChoiceParam | None, tools: Sequence[Tool]
) -> Literal["none", "auto", "required"] | ToolChoice | None:
    match choice.type if choice is not None else None:
        case "none":
            return "none"
        case "any" if tools:
            return "required"
        case "tool" if choice is not None and choice.name:
            return ToolChoice(ChosenFunction(choice.name))
        case "tool":
            raise bad_request("tool_choice.name: is missing", "tool_choice.name")
    return None


def _messages(message: MessageParam, where: str) -> Iterator[AnyMessage]:
    """Yield the chat messages in one message: results of calls, then text."""
    content = [TextPart(message.content)] if isinstance(message.content, str) else message.content
    if not content:
        raise bad_request(f"{where}.content: is empty", f"{where}.content")
    said: list[TextPart | ImagePart] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        match block:
            case TextPart() | ImageBlock() | DocumentBlock():
                said.append(_part(block, place))
            case ToolUseBlock(id, name, input):
                calls.append(ToolCall(id, CalledFunction(name, encode(input).decode())))
            case ToolResultBlock():
                yield _result(block, place)
            case ThinkingBlock() | RedactedThinkingBlock():
                pass  # the model's own reasoning: no other model's API accepts it
            case _:
                assert_never(block)
    yield from _said(message.role, said, calls, where)


def _said(
    role: Literal["user", "assistant", "system"], said: list[TextPart | ImagePart], calls: list[ToolCall], where: str
) -> Iterator[AnyMessage]:
    if role == "user":
        if calls:
            raise bad_request(f"{where}.content: a user's message has no tool_use", f"{where}.content")
        if said:
            yield UserMessage(said)
        return
    texts = only_text(said, where)
    if role == "system":
        yield SystemMessage([OnlyPart("text", part.text) for part in texts] or "")
    elif texts or calls:
        yield AssistantMessage([*texts] or None, tool_calls=calls or None)


def _result(block: ToolResultBlock, where: str) -> ToolMessage:
    if not isinstance(block.content, list):
        return ToolMessage(block.content or "", block.tool_use_id)
    parts = [_part(one, f"{where}.content[{number}]") for number, one in enumerate(block.content)]
    return ToolMessage(parts or "", block.tool_use_id)


def _part(block: TextPart | ImageBlock | DocumentBlock, where: str) -> TextPart | ImagePart:
    match block:
        case TextPart():
            return block
        case ImageBlock(UrlSource(url)):
            return image_part(url, f"{where}.source")
        case ImageBlock(Base64Source(media_type, data)):
            return image_part(f"data:{media_type};base64,{data}", f"{where}.source")
        case DocumentBlock(TextSource(data), title):
            return TextPart(f"{title}\n\n{data}" if title else data)
        case DocumentBlock():
            raise bad_request(f"{where}.source: a document must be text; other types are not supported", where)
    raise AssertionError(block)


# ---------------------------------------------------------------------------------------------- responses


class MessagesUsage(Struct):
    """The tokens of all model calls of the turn; cached ones are counted separately."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnsweredText(Struct, tag="text", tag_field="type"):
    text: str


class AnsweredThinking(Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str


class AnsweredToolUse(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class AnsweredMessages(Struct):
    """A complete answer."""

    id: str
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    usage: MessagesUsage
    stop_reason: Literal["end_turn", "tool_use", "max_tokens", "refusal"] | None
    stop_sequence: None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct):
    input_tokens: int


class MessagesErrorFacts(Struct):
    type: str
    message: str


class MessagesError(Struct):
    error: MessagesErrorFacts
    type: Literal["error"] = "error"


def anthropic_models(names: Sequence[str]) -> bytes:
    """Return the list of models in this API's format."""
    data = [
        {"type": "model", "id": clean(name), "display_name": clean(name), "created_at": "1970-01-01T00:00:00Z"}
        for name in names
    ]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return encode_json({"data": data, "has_more": False, **ends})


class MessagesHandler:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def handle(self, request: web.Request) -> web.StreamResponse:
        read = partial(self._read, kept=SESSION in request.headers)
        return await self._turns.answer(request, read, MessagesWire, "msg_")

    async def count(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/messages/count_tokens`: an estimate, calibrated by the counts of the model's server."""
        chat = await self._turns.read(request, self._read_count)
        agent = await self._turns.agent(request)
        system = [{"role": "system", "content": chat.system}] if chat.system else []
        tokens = agent.count_tokens([*system, *chat.messages], chat.tools, agent.model_for(chat.model or ""))
        return web.Response(body=encode_json(TokenCount(tokens)), content_type="application/json")

    def _read(self, body: bytes, kept: bool) -> ChatRequest:
        turns = self._turns
        return read_messages(body, honours=turns.honours, messages_limit=turns.messages_limit, kept=kept)

    def _read_count(self, body: bytes) -> ChatRequest:
        return read_count(body, honours=self._turns.honours, messages_limit=self._turns.messages_limit)


class MessagesWire:
    """Writes one answer: a message made of blocks, which are opened and closed one after the other."""

    content_type = "text/event-stream"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._index = -1
        self._open: Literal["", "text", "thinking"] = ""

    def start(self) -> bytes:
        empty = AnsweredMessages(self._asked.id, clean(self._asked.model), [], MessagesUsage(0, 0), None)
        return _event("message_start", message=empty)

    def text(self, text: str, id: bytes = b"") -> bytes:
        return self._opened("text") + id + self._delta({"type": "text_delta", "text": clean(text)})

    def reasoning(self, text: str) -> bytes:
        if self._asked.chat.hides_reasoning:
            return b""
        return self._opened("thinking") + self._delta({"type": "thinking_delta", "thinking": clean(text)})

    def comment(self, text: str, alone: bool = True) -> bytes:
        if text == "ping":
            return _event("ping")
        return event_comment(text)

    def end(self, outcome: Outcome) -> bytes:
        calls = b"".join(self._call(call) for call in outcome.calls)  # each call closes the block before it
        delta = {"stop_reason": _stop_reason(outcome), "stop_sequence": None}
        ended = _event("message_delta", delta=delta, usage=_usage(outcome)) + _event("message_stop")
        return calls + self._closed() + ended

    def error(self, error: ApiError) -> bytes:
        return named_event("error", encode(anthropic_body(error)))

    def whole(self, outcome: Outcome) -> bytes:
        content: list[AnsweredText | AnsweredThinking | AnsweredToolUse] = []
        if outcome.reasoning and not self._asked.chat.hides_reasoning:
            content.append(AnsweredThinking(clean(outcome.reasoning), SIGNATURE))
        if outcome.text or not outcome.calls:
            content.append(AnsweredText(clean(outcome.text)))
        content += [AnsweredToolUse(clean(call.id), clean(call.name), dict(call.arguments)) for call in outcome.calls]
        model = clean(outcome.model or self._asked.model)
        return encode(
            msgspec.to_builtins(
                AnsweredMessages(self._asked.id, model, content, _usage(outcome), _stop_reason(outcome))
            )
        )

    def _call(self, call: Call) -> bytes:
        closed = self._closed()
        self._index += 1
        block = {"type": "tool_use", "id": clean(call.id), "name": clean(call.name), "input": {}}
        opened = _event("content_block_start", index=self._index, content_block=block)
        arguments = arguments_of(call)
        delta = self._delta({"type": "input_json_delta", "partial_json": arguments})
        return closed + opened + delta + _event("content_block_stop", index=self._index)

    def _opened(self, kind: Literal["text", "thinking"]) -> bytes:
        """Return the events that open a block of this kind, unless it is open."""
        if self._open == kind:
            return b""
        closed, self._open = self._closed(), kind
        self._index += 1
        block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _closed(self) -> bytes:
        """Return the events that close the open block, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed = self._delta(signature) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _stop_reason(outcome: Outcome) -> Any:
    return STOP_REASONS.get(finish_of(outcome), "end_turn")


def _usage(outcome: Outcome) -> MessagesUsage:
    tokens = outcome.usage
    cached = tokens.get("cached_tokens", 0)
    read = max(tokens.get("prompt_tokens", 0) - cached, 0)
    return MessagesUsage(read, tokens.get("completion_tokens", 0), 0, cached)


def _event(type: str, **facts: Any) -> bytes:
    return named_event(type, encode_json({"type": type, **facts}))
