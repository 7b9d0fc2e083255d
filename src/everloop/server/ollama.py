"""`/api/…`: Ollama's API. Streams are lines of JSON."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, field

from ..log import Call
from ..messages import encode_json
from ..providers.openai import encode
from ..runtime.api_requests import Outcome
from ..text import clean, one_line
from .agent_choice import header_of, model_of
from .errors import ApiError, body_for, not_found
from .guard import without_content_type
from .requests import (
    MAX_INT,
    MAX_TOOLS,
    AnyMessage,
    AssistantMessage,
    CalledFunction,
    ChatBody,
    ChatRequest,
    Function,
    ImagePart,
    ImageUrl,
    JsonFormat,
    Name,
    NamedSchema,
    Penalty,
    Schema,
    SchemaFormat,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
    chat_request,
    convert_at,
    named_in_header,
    parse_body,
    unknown_keys,
)
from .turns import Asked, Turns, finish_of, json_response, new_id, session_of

VERSION = "0.13.0"  # the version of Ollama whose API this is: clients use it to detect features
LATEST = ":latest"
QUIET = frozenset({"keep_alive"})  # the server keeps its model loaded anyway
# The first characters of a base64 image, by type.
IMAGES = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}

# ---------------------------------------------------------------------------------------------- requests


class OllamaFunction(Struct):
    name: Name
    arguments: dict[str, Any] = {}


class OllamaCall(Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunctionParam(Struct):
    name: Name
    description: str | None = None
    parameters: Schema | None = None


class OllamaTool(Struct):
    function: OllamaFunctionParam
    type: str = "function"


class OllamaOptions(Struct):
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    num_predict: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaBody(Struct, kw_only=True):
    """Fields shared by the bodies of `/api/chat` and `/api/generate`. Unlisted options have no effect."""

    model: str
    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] = field(default_factory=list)
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: list[str] | None = None
    raw: bool | None = None


class OllamaShowBody(Struct):
    model: str = ""
    name: str = ""  # its former name


_chat_decoder = msgspec.json.Decoder(OllamaChatBody)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateBody)
_show_decoder = msgspec.json.Decoder(OllamaShowBody)


def read_ollama_chat(body: bytes, *, honours: frozenset[str], messages_limit: int) -> ChatRequest:
    """Parse a body. One without messages only loads the model; the request then has no messages either."""
    asked = parse_body(body, _chat_decoder)
    conversation = _Conversation()
    messages = [made for number, message in enumerate(asked.messages) for made in conversation.read(message, number)]
    tools = [
        Tool(Function(one.function.name, one.function.description, one.function.parameters))
        for one in asked.tools or ()
    ]
    chat = ChatBody(messages or [UserMessage("")], model=asked.model, tools=tools or None, stream=asked.stream)
    made = _request(chat, asked, body, honours, messages_limit, bool(tools), places=conversation.places)
    return made if messages else replace(made, messages=[])


def read_ollama_generate(body: bytes, *, honours: frozenset[str], messages_limit: int) -> ChatRequest:
    asked = parse_body(body, _generate_decoder)
    if asked.suffix:
        raise ApiError(400, "suffix: the model of this server cannot fill in the middle; leave it out", param="suffix")
    messages: list[AnyMessage] = [SystemMessage(asked.system)] if asked.system else []
    messages.append(UserMessage(_content(asked.prompt, asked.images, "images")))
    chat = ChatBody(messages, model=asked.model, stream=asked.stream)
    # A raw prompt addresses the model directly: a completion, which must not act.
    made = _request(chat, asked, body, honours, messages_limit, bool(asked.raw))
    return made if asked.prompt or asked.images else replace(made, messages=[])


def _request(
    chat: ChatBody,
    asked: OllamaBody,
    body: bytes,
    honours: frozenset[str],
    messages_limit: int,
    client_is_agent: bool,
    places: Sequence[str] = (),
) -> ChatRequest:
    ignored = [name for name in unknown_keys(body, type(asked)) if name not in QUIET]
    ignored += _set_options(chat, asked.options or {}, honours)
    if asked.format:
        schema = asked.format if isinstance(asked.format, dict) else None
        chat.response_format = JsonFormat() if schema is None else SchemaFormat(NamedSchema("answer", schema=schema))
    return chat_request(
        chat,
        honours=honours,
        messages_limit=messages_limit,
        places=places,
        ignored=ignored,
        client_is_agent=client_is_agent,
        hides_reasoning=asked.think is False,
    )


def _set_options(chat: ChatBody, given: dict[str, Any], honours: frozenset[str]) -> list[str]:
    """Set the options of the model; return those without effect."""
    options = convert_at(given, OllamaOptions, "options")
    stops = [options.stop] if isinstance(options.stop, str) else options.stop
    wanted: dict[str, Any] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": [stop for stop in stops or () if stop][:4] or None,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,  # -1 means no limit
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    ignored = [f"options.{named_in_header(name)}" for name in given if name not in OllamaOptions.__struct_fields__]
    for name, value in wanted.items():
        if value is not None and name in honours:
            setattr(chat, name, value)
        elif value is not None:
            ignored.append(f"options.{'num_predict' if name == 'max_tokens' else name}")
    return ignored


class _Conversation:
    """Assigns the ids that calls in Ollama's messages lack; results are matched to calls in order."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._open: list[tuple[str, str]] = []  # (id, name) of calls without a result
        self._count = 0

    def read(self, message: OllamaMessage, number: int) -> list[AnyMessage]:
        made = self._made(message, f"messages[{number}]")
        self.places += [f"messages[{number}]"] * len(made)
        return made

    def _made(self, message: OllamaMessage, where: str) -> list[AnyMessage]:
        text = message.content or ""
        match message.role:
            case "system":
                return [SystemMessage(text)]
            case "user":
                return [UserMessage(_content(text, message.images, f"{where}.images"))]
            case "tool":
                return [ToolMessage(text, self._answered(message), message.tool_name)]
            case "assistant":
                calls = [self._call(call) for call in message.tool_calls or ()]
                return [AssistantMessage(None if calls and not text else text, tool_calls=calls or None)]

    def _call(self, call: OllamaCall) -> ToolCall:
        self._count += 1
        id = call.id or f"call_{self._count}"
        self._open.append((id, call.function.name))
        return ToolCall(id, CalledFunction(call.function.name, encode(call.function.arguments).decode()))

    def _answered(self, message: OllamaMessage) -> str:
        """Return the id of the call that a result belongs to: the named one, else the first of its tool, else the
        first."""
        ids = [id for id, _ in self._open]
        named = [id for id, name in self._open if name == message.tool_name]
        wanted = [message.tool_call_id] if message.tool_call_id in ids else []
        id = next(iter([*wanted, *named, *ids]), message.tool_call_id or "unknown")
        self._open = [one for one in self._open if one[0] != id]
        return str(id)


def _content(text: str, images: Sequence[str] | None, where: str) -> str | list[TextPart | ImagePart]:
    if not images:
        return text
    parts: list[TextPart | ImagePart] = [TextPart(text)] if text else []
    for number, data in enumerate(images):
        kind = next((kind for begin, kind in IMAGES.items() if data.startswith(begin)), None)
        if kind is None:
            raise ApiError(400, f"{where}[{number}]: must be base64 of a png, jpeg, gif or webp", param=where)
        parts.append(ImagePart(ImageUrl(f"data:image/{kind};base64,{data}")))
    return parts


# ---------------------------------------------------------------------------------------------- responses


class AnsweredOllamaFunction(Struct):
    name: str
    arguments: dict[str, Any]


class AnsweredOllamaCall(Struct):
    id: str
    function: AnsweredOllamaFunction


class AnsweredOllamaMessage(Struct):
    content: str = ""
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnsweredOllamaCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """An answer, or one line of it. The last line is `done`, and has the counts."""

    model: str
    created_at: str
    done: bool
    message: AnsweredOllamaMessage | UnsetType = UNSET  # for /api/chat
    response: str | UnsetType = UNSET  # for /api/generate
    thinking: str | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET  # nanoseconds
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaDetails(Struct):
    parent_model: str = ""
    format: str = ""
    family: str = "everloop"
    families: list[str] = field(default_factory=lambda: ["everloop"])
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct):
    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    size: int = 0
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaShown(Struct):
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""
    template: str = ""


class OllamaVersion(Struct):
    version: str = VERSION


class OllamaError(Struct):
    error: str


class OllamaHandler:
    def __init__(self, turns: Turns, names: Sequence[str]) -> None:
        """`names` are the models that a request may name."""
        self._turns = turns
        self._names = names

    @without_content_type
    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_ollama_chat, OllamaChatWire)

    @without_content_type
    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_ollama_generate, OllamaGenerateWire)

    async def _answer(
        self, request: web.Request, read: Callable[..., ChatRequest], wire: type[OllamaWire]
    ) -> web.StreamResponse:
        limits = {"honours": self._turns.honours, "messages_limit": self._turns.messages_limit}
        chat = await self._turns.read(request, lambda body: _latest(read(body, **limits)))
        if not chat.messages:
            session_of(request.headers)  # these two validate the headers
            header_of(request.headers)
            return json_response(encode_json(wire.loaded(chat.model or "")))
        asked = await self._turns.ask(request, chat, new_id("ollama-"))
        return await self._turns.respond(request, asked, wire)

    async def tags(self, request: web.Request) -> web.StreamResponse:
        return json_response(encode_json(OllamaModels([_model(name) for name in self._names])))

    async def ps(self, request: web.Request) -> web.StreamResponse:
        """Return the models in memory: the default one, for as long as the server runs."""
        models = [_model(name) for name in self._names[:1]]
        for model in models:
            model.expires_at, model.size_vram = _time(time.time() + 300), 0
        return json_response(encode_json(OllamaModels(models)))

    async def version(self, request: web.Request) -> web.StreamResponse:
        return json_response(encode_json(OllamaVersion()))

    @without_content_type
    async def show(self, request: web.Request) -> web.StreamResponse:
        body = await self._turns.read(request, lambda data: parse_body(data, _show_decoder))
        name = (body.model or body.name).removesuffix(LATEST)
        if name not in self._names:
            raise not_found(f"model {one_line(name, 80)!r} not found", "model", "model_not_found")
        agent = await self._turns.agent(request)
        info = {"general.architecture": "everloop", "everloop.context_length": agent.window_of(model_of(name))}
        able = ["completion", "tools", "vision"]
        return json_response(encode_json(OllamaShown(OllamaDetails(), info, able, _time(0))))


def _latest(chat: ChatRequest) -> ChatRequest:
    """Return the request with the model's name stripped of the tag that Ollama's clients add."""
    name = (chat.model or "").removesuffix(LATEST)
    return chat if name == chat.model else replace(chat, model=name)


def _model(name: str) -> OllamaModel:
    full = name if ":" in name else f"{name}{LATEST}"
    return OllamaModel(full, full, _time(0), hashlib.sha256(name.encode()).hexdigest(), OllamaDetails())


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaWire:
    """Writes one answer of `/api/chat` or `/api/generate`."""

    content_type = "application/x-ndjson"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._model = clean(asked.chat.model or asked.model)
        self._began = time.monotonic_ns()

    @classmethod
    def loaded(cls, model: str) -> OllamaAnswer:
        """Return the answer to a request that only loads the model."""
        made = OllamaAnswer(model=clean(model), created_at=_time(time.time()), done=True, done_reason="load")
        cls.put(made, "", "", [])
        return made

    @staticmethod
    def put(answer: OllamaAnswer, text: str, thinking: str, calls: list[AnsweredOllamaCall]) -> None:
        """Put text, reasoning and calls into an answer."""
        raise NotImplementedError

    def start(self) -> bytes:
        return b""

    def text(self, text: str, id: bytes = b"") -> bytes:
        return self._line(clean(text))  # JSON lines have no ids

    def reasoning(self, text: str) -> bytes:
        return b"" if self._asked.chat.hides_reasoning else self._line("", clean(text))

    def comment(self, text: str, alone: bool = True) -> bytes:
        return self._line("") if text == "ping" else b""  # JSON lines have no comments

    def end(self, outcome: Outcome) -> bytes:
        calls = self._line("", calls=_calls(outcome.calls)) if outcome.calls else b""
        return calls + encode_json(self._last(outcome, "", "", [])) + b"\n"

    def error(self, error: ApiError) -> bytes:
        return encode(body_for("/api/", error)) + b"\n"

    def whole(self, outcome: Outcome) -> bytes:
        thinking = "" if self._asked.chat.hides_reasoning else clean(outcome.reasoning)
        return encode_json(self._last(outcome, clean(outcome.text), thinking, _calls(outcome.calls)))

    def _line(self, text: str, thinking: str = "", calls: Sequence[AnsweredOllamaCall] = ()) -> bytes:
        answer = OllamaAnswer(model=self._model, created_at=_time(time.time()), done=False)
        self.put(answer, text, thinking, [*calls])
        return encode_json(answer) + b"\n"

    def _last(self, outcome: Outcome, text: str, thinking: str, calls: list[AnsweredOllamaCall]) -> OllamaAnswer:
        took, tokens = time.monotonic_ns() - self._began, outcome.usage
        answer = OllamaAnswer(
            model=self._model,
            created_at=_time(time.time()),
            done=True,
            done_reason="length" if finish_of(outcome) == "length" else "stop",
            total_duration=took,
            load_duration=0,
            prompt_eval_count=tokens.get("prompt_tokens", 0),
            prompt_eval_duration=0,
            eval_count=tokens.get("completion_tokens", 0),
            eval_duration=took,
        )
        self.put(answer, text, thinking, calls)
        return answer


class OllamaChatWire(OllamaWire):
    @staticmethod
    def put(answer: OllamaAnswer, text: str, thinking: str, calls: list[AnsweredOllamaCall]) -> None:
        answer.message = AnsweredOllamaMessage(text, thinking=thinking or UNSET, tool_calls=calls or UNSET)


class OllamaGenerateWire(OllamaWire):
    @staticmethod
    def put(answer: OllamaAnswer, text: str, thinking: str, calls: list[AnsweredOllamaCall]) -> None:
        answer.response, answer.thinking = text, thinking or UNSET


def _calls(calls: Sequence[Call]) -> list[AnsweredOllamaCall]:
    """Return the calls for the client; they may contain any text that the model wrote."""
    plain = [msgspec.json.decode(encode(dict(call.arguments))) for call in calls]
    return [
        AnsweredOllamaCall(clean(call.id), AnsweredOllamaFunction(clean(call.name), arguments))
        for call, arguments in zip(calls, plain, strict=True)
    ]
