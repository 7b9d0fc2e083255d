"""Chat requests: the types of their bodies, parsing and validation.

msgspec checks the types while it parses, and the OpenAPI document is generated from them. Every parameter that a client
can send is honoured or refused by name; none is ignored silently.
"""

from __future__ import annotations

import binascii
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Never, TypeVar, assert_never

import msgspec
from msgspec import Meta, Struct

from ..messages import Message, encode_json
from ..providers.openai import parse_arguments
from ..text import clean, one_line
from .errors import ApiError, bad_request

# Options that the model may or may not support, with the default of the API.
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "max_tokens": None,
    "stop": [],
    "seed": None,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "reasoning_effort": None,
    "verbosity": "medium",
    "user": "",
    "logprobs": False,
    "top_logprobs": 0,
}
# Bookkeeping parameters: they do not change the answer, so they are accepted without effect.
WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Parameters of other servers and libraries: they are accepted without effect, and the client is told in a header.
IGNORED = (
    "top_k",
    "min_p",
    "chat_template_kwargs",
    "enable_thinking",
    "think",
    "thinking",
    "reasoning",
    "cache_prompt",
    "usage",
)
INPUT = "input"  # the parameter of a custom tool, as the model sees it
MAX_SCHEMA_DEPTH = 100
MAX_TOOLS = 1000
MAX_CHOICES = 8
# Parameters that the server does not support: the values that request nothing. Any other value is refused.
FIXED: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "functions": (None,),
    "function_call": (None,),
}
MAX_INT = 2**63 - 1  # the largest integer that every JSON parser accepts
MAX_IMAGE_BYTES = 10_000_000
MAX_IMAGES = 20  # per message
MAX_URL_LENGTH = 8_192
PICTURE_FOLLOWS = "[a picture, which follows]"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# In Python "$" also matches before a trailing newline.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}(?!\n)$")]
SAFE_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # accepted by every model server
Id = Annotated[str, Meta(min_length=1, max_length=256)]
PersonName = Annotated[str, Meta(min_length=1, max_length=64)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=MAX_INT)]
AnyTokens = Annotated[int, Meta(ge=-1, le=MAX_INT, extra_json_schema={"not": {"const": 0}})]  # -1 means no limit
Pairs = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
Schema = Annotated[dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"enum": ["object"]}}})]

# ---------------------------------------------------------------------------------------------- parts


class TextPart(Struct, tag="text", tag_field="type"):
    text: str


class RefusalPart(Struct, tag="refusal", tag_field="type"):
    refusal: str


Url = Annotated[
    str,
    Meta(
        pattern="^(https?://.|data:image/(png|jpe?g|gif|webp);base64,.)",
        description="A URL, or the image itself: data:image/png;base64,… (png, jpeg, gif or webp)",
        examples=["https://example.com/picture.png"],
    ),
]


class ImageUrl(Struct):
    url: Url
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Struct, tag="image_url", tag_field="type"):
    image_url: ImageUrl | Url


def image_part(url: str, place: str, detail: Any = None) -> ImagePart:
    """Return the image part for an image from another API; `place` names it in errors."""
    try:
        return ImagePart(msgspec.convert({"url": url, "detail": detail}, ImageUrl))
    except msgspec.ValidationError:
        raise bad_request(f"{place}: must be an http(s) URL, or a png, jpeg, gif or webp", place) from None


def only_text(parts: Sequence[TextPart | ImagePart], where: str) -> list[TextPart]:
    """Return the parts of a message that may only contain text."""
    texts = [part for part in parts if isinstance(part, TextPart)]
    if len(texts) < len(parts):
        raise bad_request(f"{where}.content: only a user's message may have images", f"{where}.content")
    return texts


class OnlyPart(Struct):
    """A text part where only text is allowed. (msgspec makes the tag of a single alternative optional.)"""

    type: Literal["text"]
    text: str


Text = str | Annotated[list[OnlyPart], Meta(min_length=1)]

# ---------------------------------------------------------------------------------------------- messages


class SystemMessage(Struct, tag="system", tag_field="role"):
    content: Text
    name: PersonName | None = None


class DeveloperMessage(Struct, tag="developer", tag_field="role"):
    content: Text
    name: PersonName | None = None


class UserMessage(Struct, tag="user", tag_field="role"):
    content: str | Annotated[list[TextPart | ImagePart], Meta(min_length=1)]
    name: PersonName | None = None


class CalledFunction(Struct):
    name: Name
    arguments: Annotated[str, Meta(description="A JSON object, as text")]


class CalledCustom(Struct):
    name: Name
    input: str


class ToolCall(Struct):
    """A call of a function, or of a custom tool, which takes text."""

    id: Id
    function: CalledFunction | None = None
    type: Literal["function", "custom"] = "function"
    custom: CalledCustom | None = None


class AssistantMessage(Struct, tag="assistant", tag_field="role"):
    """An earlier answer of the model; it needs content, a refusal or calls."""

    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    refusal: str | None = None
    name: PersonName | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    function_call: Any = None
    audio: Any = None


class ToolMessage(Struct, tag="tool", tag_field="role"):
    """The result of a call in the preceding assistant message."""

    content: str | Annotated[list[TextPart | ImagePart], Meta(min_length=1)]
    tool_call_id: Id
    name: str | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage

# ---------------------------------------------------------------------------------------------- tools


class Function(Struct, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class CustomTool(Struct):
    """A tool that takes text. The model is offered it as a function with one parameter."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class Tool(Struct):
    function: Function | None = None
    type: Literal["function", "custom"] = "function"
    custom: CustomTool | None = None


class ChosenFunction(Struct):
    name: Name


class ToolChoice(Struct, tag="function", tag_field="type"):
    """A tool of the request that the model must call."""

    function: ChosenFunction


class CustomChoice(Struct, tag="custom", tag_field="type"):
    custom: ChosenFunction


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class AllowedChoice(Struct, tag="allowed_tools", tag_field="type"):
    """The tools of the request that the model may call."""

    allowed_tools: AllowedTools


# ---------------------------------------------------------------------------------------------- the rest


class TextFormat(Struct, tag="text", tag_field="type"):
    pass


class JsonFormat(Struct, tag="json_object", tag_field="type"):
    pass


class NamedSchema(Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag="json_schema", tag_field="type"):
    json_schema: NamedSchema


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Only has an effect together with `stream`."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class ChatBody(Struct, forbid_unknown_fields=True):
    """The body of a chat request. Unlisted fields of messages are dropped."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1)]
    model: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | CustomChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: AnyTokens | None = None
    max_completion_tokens: AnyTokens | None = None
    stop: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=4)]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}(?!\n)$")], Annotated[int, Meta(ge=-100, le=100)]] | None
    ) = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    user: str | None = None
    metadata: Pairs | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    store: Any = None
    service_tier: Any = None
    functions: Any = None
    function_call: Any = None
    top_k: Any = None
    min_p: Any = None
    chat_template_kwargs: Any = None
    enable_thinking: Any = None
    think: Any = None
    thinking: Any = None
    reasoning: Any = None
    cache_prompt: Any = None
    usage: Any = None


# ---------------------------------------------------------------------------------------------- reading

_decoder = msgspec.json.Decoder(ChatBody)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
B = TypeVar("B")
_surrogate = re.compile(rb"\\u[dD][89a-fA-F]").search
_at = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`", re.S)
_unknown = re.compile(r"Object contains unknown field `(.*)`", re.S)
_missing = re.compile(r"Object missing required field `(\w+)`")
_value = re.compile(r"Invalid (?:enum )?value (.*)", re.S)
_WORDS = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "array": "list"}


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """A parsed request. `system` is the text of the leading system messages, `messages` is what follows them."""

    messages: list[Message]
    system: str = ""
    model: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # keyed by the names that providers use
    stream: bool = False
    include_usage: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    answer_only: bool = False  # no tools are offered
    # it brought tools, none of which can be offered: it must not get the agent's tools instead
    client_is_agent: bool = False
    custom: frozenset[str] = frozenset()  # the client's names of its custom tools
    # the client's names of tools that the model knows by another name
    names: dict[str, str] = field(default_factory=dict)
    hides_reasoning: bool = False  # the client does not want the model's reasoning
    choices: int = 1  # number of answers requested
    ignored: tuple[str, ...] = ()  # parameters without effect; the client is told in a header


def read_chat(body: bytes, *, honours: frozenset[str], messages_limit: int, kept: bool = False) -> ChatRequest:
    """Parse a body; an ApiError names the invalid or unsupported parameter.

    `honours` are the options that the model supports; `kept` says that the server has the history. Parsing many
    megabytes takes a while: call it in a thread.
    """
    return chat_request(parse_body(body, _decoder), honours=honours, messages_limit=messages_limit, kept=kept)


def chat_request(
    chat: ChatBody,
    *,
    honours: frozenset[str],
    messages_limit: int,
    places: Sequence[str] = (),
    ignored: Sequence[str] = (),
    client_is_agent: bool = False,
    hides_reasoning: bool = False,
    kept: bool = False,
) -> ChatRequest:
    """Validate a parsed body. Other APIs are converted to this form; `places` names their messages in errors."""
    _refuse_fixed(chat)
    if len(chat.messages) > messages_limit:
        raise bad_request(
            f"messages: there are {len(chat.messages)}, and at most {messages_limit} are allowed", "messages"
        )
    custom, brought = _custom_tools(chat, places), bool(chat.tools)
    _allow_tools(chat)
    ignored = [*ignored, *_ignored(chat, honours)]
    leading, messages = _split(chat.messages)
    options = chat.stream_options
    safe = _safe_names(chat)
    return ChatRequest(
        messages=History(len(leading), places, safe, kept).read(messages),
        system="\n\n".join(text for message in leading if (text := _text(message.content).strip())),
        model=chat.model or None,
        tools=_tools(chat, safe),
        options=_options(chat, honours, safe),
        names={name: own for own, name in safe.items()},
        stream=bool(chat.stream),
        include_usage=bool(chat.stream and options and options.include_usage),
        metadata=chat.metadata or {},
        answer_only=chat.tool_choice == "none",
        client_is_agent=client_is_agent or (brought and not chat.tools),
        custom=custom,
        hides_reasoning=hides_reasoning,
        choices=chat.n or 1,
        ignored=tuple(ignored),
    )


# ---------------------------------------------------------------------------------------------- parameters


def _refuse_fixed(chat: ChatBody) -> None:
    for name, values in FIXED.items():
        value = getattr(chat, name)
        if value is not None and not any(_same(value, accepted) for accepted in values):
            _refuse_value(name, values)
    options = chat.stream_options
    if options is not None and options.include_obfuscation not in (None, False):
        _refuse_value("stream_options.include_obfuscation", (False,))


def _same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _refuse_value(name: str, values: tuple[Any, ...]) -> Never:
    allowed = " or ".join(encode_json(value).decode() for value in values if value is not None)
    what = f"only {allowed} is supported" if allowed else "not supported"
    raise bad_request(
        f"{name}: {what}; leave it out", name, "unsupported_value" if allowed else "unsupported_parameter"
    )


def _custom_tools(chat: ChatBody, places: Sequence[str]) -> frozenset[str]:
    """Convert custom tools and their calls to functions. Return the names of the tools."""
    names: set[str] = set()
    for number, tool in enumerate(chat.tools or ()):
        if tool.type == "custom" and tool.custom is not None:
            own = tool.custom
            names.add(own.name)
            schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
            tool.function = Function(own.name, _described(own), schema)
        elif tool.type == "custom" or tool.function is None:
            where = f"tools[{number}].{tool.type}"
            raise bad_request(f"{where}: is missing", where, "missing_required_parameter")
    for at, message in enumerate(chat.messages):
        for number, call in enumerate((isinstance(message, AssistantMessage) and message.tool_calls) or ()):
            if call.type == "custom" and call.custom is not None:
                call.function = CalledFunction(call.custom.name, encode_json({INPUT: call.custom.input}).decode())
            elif call.type == "custom" or call.function is None:
                where = f"{places[at] if places else f'messages[{at}]'}.tool_calls[{number}].{call.type}"
                raise bad_request(f"{where}: is missing", where, "missing_required_parameter")
    if isinstance(choice := chat.tool_choice, CustomChoice):
        chat.tool_choice = ToolChoice(choice.custom)
    return frozenset(names)


def _described(tool: CustomTool) -> str | None:
    """Return a custom tool's description for the model, including the grammar of its text if it has one."""
    wanted = tool.format or {}
    inner = wanted.get("grammar")
    grammar = wanted.get("definition") or (inner.get("definition") if isinstance(inner, dict) else "")
    if not grammar:
        return tool.description
    return f"{tool.description or ''}\n\nThe input follows this grammar:\n{grammar}".strip()


def _allow_tools(chat: ChatBody) -> None:
    """Offer only the tools that `allowed_tools` names."""
    if not isinstance(choice := chat.tool_choice, AllowedChoice):
        return
    inner = [tool.get(str(tool.get("type"))) or tool for tool in choice.allowed_tools.tools]
    names = {str(one.get("name")) for one in inner if isinstance(one, dict)}
    chat.tools = [tool for tool in chat.tools or () if tool.function is not None and tool.function.name in names]
    chat.tool_choice = choice.allowed_tools.mode if chat.tools else None


def _ignored(chat: ChatBody, honours: frozenset[str]) -> list[str]:
    """Apply parameters of other servers where there is an equivalent; return those without effect."""
    ignored = [name for name in IGNORED if getattr(chat, name) is not None]
    effort = chat.reasoning.get("effort") if isinstance(chat.reasoning, dict) else None
    if effort in EFFORTS and chat.reasoning_effort is None and "reasoning_effort" in honours:
        chat.reasoning_effort = effort
        ignored.remove("reasoning")
    if chat.reasoning_effort == "max":
        chat.reasoning_effort = "xhigh"
    if chat.stream_options is not None and not chat.stream:
        ignored.append("stream_options")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(chat, name) == 0:
            raise bad_request(f"{name}: must be at least 1, or -1 for no limit", name, "invalid_value")
        if getattr(chat, name) == -1:
            setattr(chat, name, None)
    return ignored


def _options(chat: ChatBody, honours: frozenset[str], safe: Mapping[str, str]) -> dict[str, Any]:
    """Return the options for the model. Unsupported ones are refused, unless they have their default value."""
    if chat.max_completion_tokens is not None:
        if chat.max_tokens not in (None, chat.max_completion_tokens):
            problem = "max_tokens: differs from max_completion_tokens, its newer name; send one of them"
            raise bad_request(problem, "max_tokens", "invalid_value")
        chat.max_tokens = chat.max_completion_tokens
    options: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = getattr(chat, name)
        if value is None or value == [] or value == {}:
            continue
        if isinstance(value, msgspec.Struct):
            value = msgspec.to_builtins(value)
        if name in honours:
            options[name] = value
        elif value != default and name not in WITHOUT_EFFECT and not (name == "tool_choice" and value == "none"):
            sent = "max_completion_tokens" if name == "max_tokens" and chat.max_completion_tokens else name
            raise bad_request(
                f"{sent}: the model of this server does not support it; leave it out", sent, "unsupported_parameter"
            )
    if isinstance(choice := chat.tool_choice, ToolChoice) and choice.function.name in safe and "tool_choice" in options:
        options["tool_choice"] = {"type": "function", "function": {"name": safe[choice.function.name]}}
    if isinstance(chat.response_format, TextFormat):
        options.pop("response_format", None)
    if isinstance(chat.response_format, SchemaFormat):
        _check_depth(chat.response_format.json_schema.schema, "response_format.json_schema.schema")
    return options


def _safe_names(chat: ChatBody) -> dict[str, str]:
    """Return replacements for tool names that some model servers refuse: dotted and long ones."""
    used = [tool.function.name for tool in chat.tools or () if tool.function is not None]
    called = (one.tool_calls or () for one in chat.messages if isinstance(one, AssistantMessage))
    used += [call.function.name for calls in called for call in calls if call.function is not None]
    taken = {name for name in used if SAFE_NAME.fullmatch(name)}
    safe: dict[str, str] = {}
    for name in dict.fromkeys(used):
        if name in taken:
            continue
        made = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
        if len(made) > 64 or made in taken or made in safe.values():
            made = f"{made[:55]}_{zlib.crc32(name.encode()):08x}"
        safe[name] = made
    return safe


def _tools(chat: ChatBody, safe: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the client's tools. A `tool_choice` must be one of them."""
    tools, names = [], set()
    for at, tool in enumerate(chat.tools or ()):
        function, where = tool.function, f"tools[{at}].{tool.type}"
        assert function is not None
        if function.name in names:
            raise bad_request(f"{where}.name: another tool has the same name", f"{where}.name", "invalid_value")
        if function.parameters is not None and function.parameters.get("type", "object") != "object":
            where = f"{where}.parameters"
            raise bad_request(f'{where}: must be a schema of type "object"', where, "invalid_value")
        _check_depth(function.parameters, f"{where}.parameters")
        names.add(function.name)
        made = msgspec.to_builtins(function)
        tools.append({"type": "function", "function": {**made, "name": safe.get(function.name, function.name)}})
    choice = chat.tool_choice
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise bad_request("tool_choice: names a tool that is not in tools", "tool_choice", "invalid_value")
    if choice == "required" and not tools:
        raise bad_request("tool_choice: only allowed together with tools", "tool_choice", "invalid_value")
    return tools


def _check_depth(schema: Any, where: str) -> None:
    """Refuse a schema that the JSON encoder could not encode when called from deeper in the stack."""
    encoded = encode_json(schema)
    if encoded.count(b"{") + encoded.count(b"[") <= MAX_SCHEMA_DEPTH:  # cheap, and sufficient for most schemas
        return
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
        if not level:
            return
    raise bad_request(f"{where}: is nested more than {MAX_SCHEMA_DEPTH} levels deep", where, "invalid_value")


# ---------------------------------------------------------------------------------------------- messages


def _split(messages: list[AnyMessage]) -> tuple[list[SystemMessage | DeveloperMessage], list[AnyMessage]]:
    """Split off the leading system messages."""
    leading: list[SystemMessage | DeveloperMessage] = []
    for message in messages:
        if not isinstance(message, SystemMessage | DeveloperMessage):
            break
        leading.append(message)
    return leading, messages[len(leading) :]


class History:
    """Converts the messages of a request to a valid conversation for a provider.

    `first` is the index of the first message in the request, and `places` are the names of all messages, for errors.
    If the server has `kept` the history, a request may begin with the results of calls that are only there.
    """

    def __init__(
        self, first: int = 0, places: Sequence[str] = (), safe: Mapping[str, str] | None = None, kept: bool = False
    ) -> None:
        self._at = first
        self._pictures: list[dict[str, Any]] = []  # from the results of a message's calls
        self._safe = safe or {}  # tools with a different name for the model
        self._places = places
        self._kept = kept
        self._calls = 0  # the index of the message whose calls are open
        self._waiting: dict[str, ToolCall] = {}  # calls without a result, by the client's id
        self._renamed: dict[str, str] = {}  # their ids in the conversation, which differ if a client reuses one
        self._ids: set[str] = set()
        self._seen: dict[str, int] = {}  # how often each id was reused

    def read(self, messages: Sequence[AnyMessage]) -> list[Message]:
        """Convert all messages. Every call must have exactly one result, and the model must be next to speak."""
        made: list[Message] = []
        last, place = "", 0
        for message in messages:
            if not isinstance(message, ToolMessage):
                made += self._shown_pictures()
            made.append(self._message(message))
            if made[-1]["role"] != "system":  # a trailing reminder does not count
                last, place = made[-1]["role"], self._at
            self._at += 1
        made += self._shown_pictures()
        self._check_no_open_calls()
        if last not in ("user", "tool"):
            raise _wrong_end(self._place(place), last)
        return made

    def _place(self, at: int) -> str:
        return self._places[at] if self._places else f"messages[{at}]"

    def _shown_pictures(self) -> list[Message]:
        """Return the images of tool results. A tool message can only hold text, so they follow in a user message."""
        pictures, self._pictures = self._pictures, []
        return [{"role": "user", "content": pictures}] if pictures else []

    def _message(self, message: AnyMessage) -> Message:
        if not isinstance(message, ToolMessage):
            self._check_no_open_calls()
        match message:
            case SystemMessage() | DeveloperMessage():
                made: Message = {"role": "system", "content": _text(message.content)}
            case UserMessage():
                made = {"role": "user", "content": self._content(message.content)}
            case AssistantMessage():
                made = self._assistant(message)
            case ToolMessage():
                return self._result(message)
            case _:
                assert_never(message)
        if message.name:
            made["name"] = message.name
        return made

    def _content(self, content: str | list[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
        """Keep parts where there are images; join text parts to plain text, which every server accepts."""
        if isinstance(content, str):
            return content
        parts: list[dict[str, Any]] = []
        images = 0
        for number, part in enumerate(content):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
                continue
            images += 1
            where = f"{self._place(self._at)}.content[{number}]"
            if images > MAX_IMAGES:
                raise bad_request(f"{where}: a message may have at most {MAX_IMAGES} images", where)
            given = ImageUrl(part.image_url) if isinstance(part.image_url, str) else part.image_url
            _check_image(given.url, f"{where}.image_url" + ("" if given is not part.image_url else ".url"))
            image = {"url": given.url}
            if given.detail:
                image["detail"] = given.detail
            parts.append({"type": "image_url", "image_url": image})
        return parts if images else "\n".join(part["text"] for part in parts)

    def _assistant(self, message: AssistantMessage) -> Message:
        where = self._place(self._at)
        for name in ("function_call", "audio"):
            if getattr(message, name) is not None:
                raise bad_request(f"{where}.{name}: not supported; leave it out", f"{where}.{name}")
        text = _text(message.content) if message.content is not None else message.refusal
        if text is None and not message.tool_calls:
            raise bad_request(f"{where}.content: missing, and there are no tool_calls", f"{where}.content")
        made: Message = {"role": "assistant", "content": text}
        if message.tool_calls:
            self._calls = self._at
            made["tool_calls"] = [self._call(number, call) for number, call in enumerate(message.tool_calls)]
        return made

    def _call(self, number: int, call: ToolCall) -> dict[str, Any]:
        if call.id in self._waiting:
            where = f"{self._place(self._at)}.tool_calls[{number}].id"
            raise bad_request(f"{where}: another call has the same id", where)
        self._waiting[call.id] = call
        id, count = call.id, self._seen.get(call.id, 1)
        while id in self._ids:  # some models restart their ids in every answer, and other servers require unique ones
            count += 1
            id = f"{call.id[:240]}_{count}"
        self._ids.add(id)
        self._seen[call.id] = count  # where to continue counting: starting over would be quadratic
        self._renamed[call.id] = id
        assert call.function is not None
        arguments = call.function.arguments
        if not isinstance(parse_arguments(arguments), dict):  # servers reject anything but an object
            arguments = encode_json({"text": arguments}).decode() if arguments.strip() else "{}"
        name = self._safe.get(call.function.name, call.function.name)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, message: ToolMessage) -> Message:
        if self._kept and not self._ids:
            return self._result_of("", message.tool_call_id, message)
        call = self._waiting.pop(message.tool_call_id, None)
        if call is None:
            where, id = self._place(self._at), one_line(message.tool_call_id, 80)
            raise bad_request(
                f"{where}.tool_call_id: {id!r} is not an open call of the preceding assistant message",
                f"{where}.tool_call_id",
            )
        called = call.function.name if call.function is not None else ""
        return self._result_of(called, self._renamed.pop(message.tool_call_id), message)

    def _result_of(self, called: str, id: str, message: ToolMessage) -> Message:
        name = message.name or called
        name = self._safe.get(name, name)
        content = self._content(message.content)
        if isinstance(content, list):
            self._pictures += [part for part in content if part["type"] == "image_url"]
            content = "\n".join(part["text"] for part in content if part["type"] == "text") or PICTURE_FOLLOWS
        return {"role": "tool", "tool_call_id": id, "name": name, "content": content}

    def _check_no_open_calls(self) -> None:
        if self._waiting:
            where, id = self._place(self._calls), one_line(next(iter(self._waiting)), 80)
            raise bad_request(
                f"{where}.tool_calls: the call {id!r} has no result; each call needs a message of role tool",
                f"{where}.tool_calls",
            )


def _text(content: str | Sequence[OnlyPart | TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _wrong_end(where: str, last: str) -> ApiError:
    if last == "assistant":
        return bad_request(
            f"{where}: the last message is from the assistant; prefilling an answer is not supported", where
        )
    return bad_request("messages: there must be a user message", "messages")


def _check_image(url: str, where: str) -> None:
    """Check an image. URLs are passed on; inline data must be valid, because some servers crash on it."""
    if not url.startswith("data:"):
        if len(url) > MAX_URL_LENGTH:
            raise bad_request(f"{where}: a URL may have at most {MAX_URL_LENGTH} characters", where)
        return
    data = url[url.index(",") + 1 :]
    if len(data) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise bad_request(f"{where}: an image may have at most {MAX_IMAGE_BYTES} bytes", where)
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # also raised for non-ASCII data
        raise bad_request(f"{where}: the data is not base64", where) from None


# ---------------------------------------------------------------------------------------------- parsing


def parse_body(body: bytes, decoder: msgspec.json.Decoder[B]) -> B:
    """Parse a body as the decoder's type; an ApiError names the place of the error."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _surrogate(body):  # half of a character, from a client that truncated a text
            return _parse_odd(body, decoder)
        raise _no_json(error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def convert_at(value: Any, type: type[B], where: str) -> B:
    """Convert a part of a parsed body; an ApiError names its place in the body."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        text = str(error)
        raise _refusal(text.replace("`$", f"`$.{where}", 1) if "`$" in text else f"{text} - at `$.{where}`") from None


def unknown_keys(body: bytes, known: type[Struct]) -> list[str]:
    """Return the parameters of a body that its type does not have."""
    try:
        keys = _keys.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # it was parsed with replaced characters
        return []
    return [named_in_header(name) for name in keys if name not in known.__struct_fields__]


def named_in_header(name: str) -> str:
    """Return a name in a form allowed in a header."""
    return "".join(c for c in name[:64] if c.isascii() and c.isprintable() and c not in '"\\')


def _parse_odd(body: bytes, decoder: msgspec.json.Decoder[B]) -> B:
    """Parse with the standard library, and replace lone surrogates."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        return msgspec.convert(cleaned(value), decoder.type)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise _no_json(error) from None


def cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): cleaned(item) for key, item in value.items()}
    return value


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def _no_json(error: Exception) -> ApiError:
    return bad_request(f"the body is not JSON: {one_line(str(error))}", code="invalid_json")


def _refusal(text: str) -> ApiError:
    """Convert a validation error of msgspec to one that names the parameter."""
    found = _at.fullmatch(text)
    what, path = (found["what"], found["path"].partition("[...]")[0]) if found else (text, "")
    if unknown := _unknown.fullmatch(what):
        name = _below(path, one_line(unknown[1], 64))
        return bad_request(f"{name}: unknown parameter", name, "unknown_parameter")
    if missing := _missing.fullmatch(what):
        name = _below(path, missing[1])
        return bad_request(f"{name}: is missing", name, "missing_required_parameter")
    if value := _value.fullmatch(what):
        return _wrong_value(path, one_line(value[1], 80))
    reason = re.sub(r"`([^`]*)`", lambda words: _in_words(words[1]), what)
    reason = reason[:1].lower() + one_line(reason[1:])
    subject = f"a key of {path}" if found and found["key"] else path or "the body"
    return bad_request(f"{subject}: {reason}", path or None, "invalid_type" if ", got " in reason else "invalid_value")


def _wrong_value(path: str, value: str) -> ApiError:
    if path.startswith("messages") and path.endswith(".role"):
        known = "system, developer, user, assistant or tool" + (", its newer name" if "function" in value else "")
        return bad_request(f"{path}: {value} is not supported; it must be {known}", path, "invalid_value")
    if path.startswith("messages") and path.endswith("].type"):
        path = path.removesuffix(".type")
        return bad_request(f"{path}: {value} is not supported as a content part here", path, "unsupported_value")
    return bad_request(f"{path}: {value} is not supported", path, "invalid_value")


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(word, word) for word in types.split(" | "))
