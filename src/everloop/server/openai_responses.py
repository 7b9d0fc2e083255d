"""`/v1/responses`: OpenAI's Responses API.

A body is converted to a chat request, and a stored response is a turn of a stored session: `previous_response_id`
continues the session, or a copy of it if it has continued already, and the log has everything that is needed to return
the response again.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from ..log import Call, Logged, Request, ResponseFacts, TurnEnded, UserSaid
from ..messages import encode_json
from ..runtime.agent import AgentLoop
from ..runtime.api_requests import Outcome
from ..runtime.owners import OWN
from ..store.base import Incoming, Store
from ..text import clean, one_line
from .errors import ApiError, bad_request, failure_of, not_found
from .guard import OWNER, without_body
from .requests import (
    EFFORTS,
    MAX_TOOLS,
    AnyMessage,
    AssistantMessage,
    CalledCustom,
    CalledFunction,
    ChatBody,
    ChatRequest,
    ChosenFunction,
    CustomTool,
    DeveloperMessage,
    Function,
    Id,
    ImagePart,
    JsonFormat,
    Name,
    NamedSchema,
    Pairs,
    RefusalPart,
    Schema,
    SchemaFormat,
    SystemMessage,
    TextPart,
    Tokens,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
    chat_request,
    convert_at,
    image_part,
    named_in_header,
    only_text,
    parse_body,
    unknown_keys,
)
from .responses import arguments_of, custom_input, event_comment, json_string, named_event
from .turns import (
    CHANNEL,
    IDEMPOTENCY_KEY,
    SESSION,
    Asked,
    Known,
    StoredSession,
    Turns,
    finish_of,
    json_response,
    new_id,
)

PREFIX = "resp_"
ITEM = re.compile(r"(msg|fc|ctc|rs)_([0-9a-f]{24})_(\d{1,4})", re.ASCII)
CONTINUATIONS = 1024  # counters per owner; each continuation of a response uses one
LOGPROBS = "message.output_text.logprobs"  # in `include`; other values request nothing that exists here
CONTINUATION_SECONDS = 60.0  # longer than a request takes until its message is on disk
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Parameters that request nothing that the answer would lack.
QUIET = frozenset({"truncation", "service_tier", "stream_options", "prompt_cache_retention", "client_metadata"})

# ---------------------------------------------------------------------------------------------- requests


class InputText(Struct, tag="input_text", tag_field="type"):
    text: str


class OutputText(Struct, tag="output_text", tag_field="type"):
    text: str


class InputImage(Struct, tag="input_image", tag_field="type"):
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    file_id: str | None = None


Part = InputText | OutputText | TextPart | RefusalPart | InputImage


class MessageItem(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] = "message"


class FunctionCallItem(Struct):
    call_id: Id
    name: Name
    arguments: str
    type: Literal["function_call"]


class CustomCallItem(Struct):
    call_id: Id
    name: Name
    input: str
    type: Literal["custom_tool_call"]


class OutputItem(Struct):
    """The result of a call."""

    call_id: Id
    output: str | list[Part]
    type: Literal["function_call_output", "custom_tool_call_output"]


class ReferenceItem(Struct):
    """A reference to an item of a stored response."""

    id: str
    type: Literal["item_reference"] | None = None


class ReasoningItem(Struct):
    """The model's own reasoning, which is dropped."""

    type: Literal["reasoning"]


Item = MessageItem | FunctionCallItem | CustomCallItem | OutputItem | ReferenceItem | ReasoningItem
ITEMS: Mapping[str | None, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call_output": OutputItem,
    "item_reference": ReferenceItem,
    "reasoning": ReasoningItem,
}


class ResponseTool(Struct):
    """A tool of the client: a "function", or a "custom" one that takes text. Other types have no effect."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


class ChosenTool(Struct):
    """A tool that the model must call, or the tools that it may call."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormatParam(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextParam(Struct):
    format: TextFormatParam | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningParam(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Struct, kw_only=True):
    """The body of a request."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_output_tokens: Tokens | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: Pairs | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    conversation: Any = None
    prompt: Any = None


_decoder = msgspec.json.Decoder(ResponsesBody)


@dataclass(slots=True)
class ParsedBody:
    """A parsed body, and its parameters without effect."""

    body: ResponsesBody
    ignored: list[str] = field(default_factory=list)


def read_body(body: bytes) -> ParsedBody:
    asked = parse_body(body, _decoder)
    for name in ("conversation", "prompt"):
        if getattr(asked, name) is not None:
            raise bad_request(f"{name}: not supported; use previous_response_id", name, "unsupported_parameter")
    if asked.background and asked.store is False:
        raise bad_request("background: only allowed for a stored response", "background")
    return ParsedBody(asked, [name for name in unknown_keys(body, ResponsesBody) if name not in QUIET])


def items_of(body: ResponsesBody) -> list[Item]:
    """Return the validated items of the input."""
    if isinstance(body.input, str):
        return [MessageItem("user", body.input)]
    found: list[Item] = []
    for number, item in enumerate(body.input):
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        where = f"input[{number}]"
        if not isinstance(kind, str) or (shape := ITEMS.get(kind)) is None:
            problem = f"{where}: {one_line(str(kind), 40)!r} is not supported as an item here"
            raise bad_request(problem, where, "unsupported_value")
        found.append(convert_at(item, shape, where))
    return found


# ---------------------------------------------------------------------------------------------- into a chat request


@dataclass(slots=True)
class Stored:
    """A stored response."""

    row: Incoming
    logged: Sequence[Logged]

    @property
    def id(self) -> str:
        return self.row.message.id or ""

    @property
    def request(self) -> Request | None:
        first = self.logged[0].entry if self.logged else None
        return first.request if isinstance(first, UserSaid) else self.row.message.request

    @property
    def facts(self) -> ResponseFacts:
        request = self.request
        return request.response or ResponseFacts() if request is not None else ResponseFacts()

    @property
    def outcome(self) -> Outcome:
        last = self.logged[-1].entry if self.logged else None
        return Outcome(last.text if isinstance(last, TurnEnded) else "", [one.entry for one in self.logged])

    @property
    def calls(self) -> list[Call]:
        """The calls that the client had to run, by its own names."""
        names = self.facts.names
        return [msgspec.structs.replace(call, name=names.get(call.name, call.name)) for call in self.outcome.calls]


def to_chat(
    parsed: ParsedBody,
    items: Sequence[Item],
    referenced: Mapping[str, Stored],
    previous: Stored | None,
    *,
    honours: frozenset[str],
    messages_limit: int,
) -> ChatRequest:
    """Convert a body to a chat request."""
    body = parsed.body
    messages: list[AnyMessage] = []
    places: list[str] = []

    def add(message: AnyMessage, place: str) -> None:
        last = messages[-1] if messages else None
        if not isinstance(message, AssistantMessage) or not isinstance(last, AssistantMessage):
            messages.append(message)
            places.append(place)
        elif message.tool_calls or last.tool_calls:  # the text and the calls of one answer are separate items
            last.tool_calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
            last.content = "\n".join(str(one.content) for one in (last, message) if one.content) or None
        else:
            messages.append(message)
            places.append(place)

    if body.instructions:
        add(SystemMessage(body.instructions), "instructions")
    if previous is not None and (answered := _answered(previous, items)):
        add(AssistantMessage(tool_calls=[_tool_call(call) for call in answered]), "previous_response_id")
    seen: set[str] = set()
    for number, item in enumerate(items):
        place = f"input[{number}]"
        for message in _messages(item, place, referenced, seen):
            add(message, place)
    tools, left_out = _tools(body)
    chat = ChatBody(messages, model=body.model, tools=tools or None, tool_choice=_choice(body, tools))
    ignored = [*parsed.ignored, *left_out, *_set_options(chat, body)]
    return chat_request(
        chat,
        honours=honours,
        messages_limit=messages_limit,
        places=places,
        ignored=ignored,
        client_is_agent=bool(body.tools),
    )


def _answered(previous: Stored, items: Sequence[Item]) -> list[Call]:
    """Return the calls of the previous response whose results are in the input."""
    own = {item.call_id for item in items if isinstance(item, FunctionCallItem | CustomCallItem)}
    results = {item.call_id for item in items if isinstance(item, OutputItem)} - own
    return [call for call in previous.calls if call.id in results]


def _messages(item: Item, where: str, referenced: Mapping[str, Stored], seen: set[str]) -> Iterator[AnyMessage]:
    match item:
        case MessageItem(role, content):
            yield _message(role, content, where)
        case FunctionCallItem(call_id, name, arguments):
            yield AssistantMessage(tool_calls=[ToolCall(call_id, CalledFunction(name, arguments))])
        case CustomCallItem(call_id, name, text):
            yield AssistantMessage(tool_calls=[ToolCall(call_id, None, "custom", CalledCustom(name, text))])
        case OutputItem(call_id, output):
            yield ToolMessage(output if isinstance(output, str) else _parts(output, where) or "", call_id)
        case ReferenceItem(id):
            yield from _referenced(id, referenced.get(id), where, seen)
        case ReasoningItem():
            return


def _referenced(id: str, stored: Stored | None, where: str, seen: set[str]) -> Iterator[AnyMessage]:
    found = ITEM.fullmatch(id)
    if found is None or stored is None:
        raise not_found(f"{where}.id: there is no item {one_line(id, 80)!r}", f"{where}.id")
    kind, response, number = found[1], found[2], int(found[3])
    if kind == "msg" and response not in seen:
        seen.add(response)
        yield AssistantMessage(stored.outcome.text)
    if kind in ("fc", "ctc"):
        if number >= len(stored.calls):
            raise not_found(f"{where}.id: there is no item {one_line(id, 80)!r}", f"{where}.id")
        yield AssistantMessage(tool_calls=[_tool_call(stored.calls[number])])


def _message(role: str, content: str | list[Part], where: str) -> AnyMessage:
    if role == "user":
        return UserMessage(content if isinstance(content, str) else _parts(content, where) or "")
    text = (
        content
        if isinstance(content, str)
        else "\n".join(part.text for part in only_text(_parts(content, where), where))
    )
    if role == "assistant":
        return AssistantMessage(text)
    return SystemMessage(text) if role == "system" else DeveloperMessage(text)


def _parts(content: list[Part], where: str) -> list[TextPart | ImagePart]:
    parts: list[TextPart | ImagePart] = []
    for number, part in enumerate(content):
        match part:
            case TextPart():
                parts.append(part)
            case InputText(text) | OutputText(text) | RefusalPart(text):
                parts.append(TextPart(text))
            case InputImage(url, detail):
                place = f"{where}.content[{number}].image_url"
                if url is None:
                    raise bad_request(f"{place}: is missing; files of the API are not supported", place)
                parts.append(image_part(url, place, detail))
    return parts


def _tool_call(call: Call) -> ToolCall:
    return ToolCall(call.id, CalledFunction(call.name, arguments_of(call)))


def _tools(body: ResponsesBody) -> tuple[list[Tool], list[str]]:
    """Return the tools to offer to the model, and those without effect."""
    allowed: set[str] | None = None
    if isinstance(body.tool_choice, ChosenTool) and body.tool_choice.type == "allowed_tools":
        allowed = {str(tool.get("name")) for tool in body.tool_choice.tools or ()}
    made: list[Tool] = []
    left_out: list[str] = []
    for number, tool in enumerate(body.tools or ()):
        if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
            where = f"tools[{number}].parameters"
            raise bad_request(f'{where}: must be a schema of type "object"', where, "invalid_value")
        if tool.type not in ("function", "custom"):
            left_out.append(f"tools.{named_in_header(tool.type)}")
        elif tool.name is None:
            raise bad_request(f"tools[{number}].name: is missing", f"tools[{number}].name")
        elif allowed is not None and tool.name not in allowed:
            continue
        elif tool.type == "function":
            made.append(Tool(Function(tool.name, tool.description, tool.parameters, tool.strict)))
        else:
            made.append(Tool(None, "custom", CustomTool(tool.name, tool.description, tool.format)))
    return made, left_out


def _choice(body: ResponsesBody, tools: Sequence[Tool]) -> Literal["none", "auto", "required"] | ToolChoice | None:
    choice = body.tool_choice
    if not isinstance(choice, ChosenTool):
        return choice if tools or choice == "none" else None
    if choice.type == "allowed_tools":
        return "required" if choice.mode == "required" and tools else "auto" if tools else None
    if choice.type in ("function", "custom") and choice.name:
        return ToolChoice(ChosenFunction(choice.name))
    raise bad_request(f"tool_choice: {one_line(choice.type, 40)!r} is not supported", "tool_choice")


def _set_options(chat: ChatBody, body: ResponsesBody) -> list[str]:
    """Set the options of the model; return the parameters without effect."""
    ignored: list[str] = []
    chat.stream, chat.temperature, chat.top_p = body.stream, body.temperature, body.top_p
    chat.max_tokens, chat.user, chat.metadata = body.max_output_tokens, body.user, body.metadata
    chat.parallel_tool_calls = body.parallel_tool_calls if chat.tools else None
    if LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    elif body.top_logprobs:
        ignored.append("top_logprobs")
    if body.text is not None:
        chat.verbosity = body.text.verbosity
        chat.response_format = _format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        if body.reasoning.effort in EFFORTS:
            chat.reasoning_effort = body.reasoning.effort  # type: ignore[assignment]
        else:
            ignored.append("reasoning.effort")
    return ignored


def _format(wanted: TextFormatParam | None) -> JsonFormat | SchemaFormat | None:
    match wanted.type if wanted is not None else "text":
        case "json_object":
            return JsonFormat()
        case "json_schema" if wanted is not None:
            if wanted.name is None:
                raise bad_request("text.format.name: is missing", "text.format.name")
            return SchemaFormat(NamedSchema(wanted.name, wanted.description, wanted.schema, wanted.strict))
    return None


# ---------------------------------------------------------------------------------------------- handlers


class ResponsesHandler:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/responses`."""
        parsed = await self._turns.read(request, read_body)
        agent, body, items = await self._turns.agent(request), parsed.body, items_of(parsed.body)
        owner = request[OWNER]
        previous = await self._previous(agent, owner, body.previous_response_id)
        referenced = await self._referenced(agent, owner, items)
        if IDEMPOTENCY_KEY in request.headers and body.store is not False:
            parsed.ignored.append(IDEMPOTENCY_KEY)
        chat = to_chat(
            parsed,
            items,
            referenced,
            previous,
            honours=self._turns.honours,
            messages_limit=self._turns.messages_limit,
        )
        id = new_id(PREFIX)
        facts = ResponseFacts(body.previous_response_id or "", bool(body.background), chat.names, tuple(chat.custom))
        session = await self._session(agent, request, body, previous, id, facts)
        asked = await self._turns.ask(request, chat, id, session)
        if asked.background and not chat.stream:
            await self._turns.enqueue(asked)
            return json_response(encode_json(_shown(asked, facts, status="queued")), chat)
        return await self._turns.respond(
            request, asked, lambda made: ResponseWire(made, facts, body.store is not False)
        )

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /v1/responses/ID`: return the response, or stream it from the start or after an event."""
        streamed = request.query.get("stream", "false").lower()
        if streamed not in ("true", "false"):
            raise bad_request("stream: must be true or false", "stream")
        after = request.query.get("starting_after", "-1")
        if "starting_after" in request.query and re.fullmatch(r"[0-9]{1,12}", after, re.ASCII) is None:
            raise bad_request("starting_after: must be the sequence_number of an event", "starting_after")
        agent, stored = await self._stored(request)
        if streamed == "false":
            return json_response(encode_json(_shown_again(stored, request[OWNER] == OWN)))
        kept = stored.request or Request()
        chat = ChatRequest(
            [],
            system=kept.system,
            model=kept.model,
            tools=[*kept.tools],
            options=kept.options,
            stream=True,
            metadata=kept.metadata,
            names=stored.facts.names,
        )
        asked = Asked(
            agent,
            stored.row.message,
            chat,
            agent.model_for(kept.model),
            stored.id,
            _created(stored),
            Known(repeated=True),
            commands=False,
            background=True,
        )
        return await self._turns.respond(
            request, asked, lambda made: ResponseWire(made, stored.facts, True, int(after))
        )

    @without_body
    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Handle `DELETE /v1/responses/ID`: it can no longer be read or continued. The activity log keeps it."""
        agent, stored = await self._stored(request)
        await agent.requests.cancel(request[OWNER], stored.id)
        await agent.store.hide(request[OWNER], stored.id)
        return json_response(encode_json(DeletedResponse(stored.id)))

    @without_body
    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/responses/ID/cancel`: stop it, wherever it runs."""
        agent, stored = await self._stored(request)
        if not stored.facts.background:
            raise bad_request("only a response that was made with background can be cancelled")
        await agent.requests.cancel(request[OWNER], stored.id)
        _, stored = await self._stored(request)
        shown = _shown_again(stored, request[OWNER] == OWN)
        if shown.status in ("queued", "in_progress"):
            shown.status = "cancelled"  # it has been asked to stop, and will do so in a moment
        return json_response(encode_json(shown))

    async def _stored(self, request: web.Request) -> tuple[AgentLoop, Stored]:
        agent, id = await self._turns.agent(request), request.match_info["id"]
        found = await find(agent, request[OWNER], id)
        if found is None:
            raise not_found(f"there is no response {one_line(id, 80)!r}", code="response_not_found")
        return agent, found

    async def _previous(self, agent: AgentLoop, owner: str, id: str | None) -> Stored | None:
        if id is None:
            return None
        name = "previous_response_id"
        found = await find(agent, owner, id)
        if found is None:
            problem = f"{name}: there is no response {one_line(id, 80)!r}"
            raise bad_request(problem, name, "previous_response_not_found")
        if not found.row.done:
            raise bad_request(f"{name}: that response is not finished", name)
        return found

    async def _referenced(self, agent: AgentLoop, owner: str, items: Sequence[Item]) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for id in [item.id for item in items if isinstance(item, ReferenceItem)]:
            match = ITEM.fullmatch(id)
            if match is not None and (stored := await find(agent, owner, f"{PREFIX}{match[2]}")) is not None:
                found[id] = stored
        return found

    async def _session(
        self,
        agent: AgentLoop,
        request: web.Request,
        body: ResponsesBody,
        previous: Stored | None,
        id: str,
        facts: ResponseFacts,
    ) -> StoredSession | None:
        """Return the stored session that a response belongs to; None if it is not stored."""
        header = request.headers.get(SESSION)
        if previous is not None:
            if header is not None:
                raise bad_request(f"previous_response_id: not together with {SESSION}", "previous_response_id")
            stored = body.store is not False
            key = await continued(agent.store, request[OWNER], previous, id, copied=not stored)
            return StoredSession(key, False, facts if stored else None)
        if body.store is False:
            return None
        return StoredSession(header or f"{CHANNEL}:{id}", header is None, facts)


async def find(agent: AgentLoop, owner: str, id: str) -> Stored | None:
    """Return the stored response with this id. Requests of other APIs, and unstored ones, do not count."""
    row = await agent.store.find(owner, id) if id.startswith(PREFIX) else None
    if row is None:
        return None
    logged = await agent.store.read_turn(row.session, row.first_seq) if row.first_seq is not None else []
    found = Stored(row, logged)
    request = found.request
    # A message that was cancelled before it started has neither a log nor a request.
    return found if (request is not None and request.response is not None) or (row.done and not logged) else None


async def continued(store: Store, owner: str, previous: Stored, id: str, copied: bool) -> str:
    """Return the key of the session that continues a response: its own, or a copy if that has continued already."""
    key, last = previous.row.message.session_key, previous.logged[-1].seq if previous.logged else 0
    info = await store.session(owner, key)
    is_last = info is not None and info.entries == last and info.open_turn is None
    if is_last and not copied and not await store.waiting(owner, key):
        # Of several concurrent requests only one continues in the session, over all servers of the store. Two
        # continuations may collide on a counter, which costs no more than a copy.
        place = zlib.crc32(f"{key}:{last}".encode()) % CONTINUATIONS
        if not await store.admit(owner, f"continuation {place}", 1, CONTINUATION_SECONDS):
            return key
    copy = f"{CHANNEL}:{id}"
    await store.fork(owner, key, last, copy)
    return copy


# ---------------------------------------------------------------------------------------------- responses


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Response(Struct, kw_only=True):
    """A response, as it is now."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[dict[str, Any]]
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    object: Literal["response"] = "response"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def _shown(asked: Asked, facts: ResponseFacts, *, status: Status = "in_progress", store: bool = True) -> Response:
    """Return a response without output."""
    made = Response(
        id=asked.id,
        created_at=asked.created,
        status=status,
        model=clean(asked.model),
        output=[],
        store=store,
    )
    return _shown_facts(made, asked.chat, facts)


def _shown_again(stored: Stored, own: bool) -> Response:
    """Build a stored response from its log."""
    request, outcome, facts = stored.request or Request(), stored.outcome, stored.facts
    chat = ChatRequest([], request.system, request.model, [*request.tools], request.options, metadata=request.metadata)
    shown = Response(
        id=stored.id,
        created_at=_created(stored),
        status="queued",
        model=clean(outcome.model or request.model),
        output=[],
    )
    full = _shown_facts(shown, chat, facts)
    if not stored.row.done:
        full.status = "in_progress" if stored.logged else "queued"
        return full
    if not stored.logged or outcome.reason in ("cancelled", "aborted"):
        full.status = "cancelled"
        return full
    if (failure := failure_of(outcome, own)) is not None:
        full.status, full.error = "failed", ResponseError(failure.code or "server_error", failure.message)
        return full
    calls = stored.calls
    full.output = items_out(stored.id, outcome, calls, facts)
    return _completed(full, outcome)


def _shown_facts(shown: Response, chat: ChatRequest, facts: ResponseFacts) -> Response:
    """Add the request's parameters to a response."""
    options = chat.options
    shown.background, shown.previous_response_id = facts.background, facts.previous or None
    shown.instructions, shown.metadata = clean(chat.system) or None, chat.metadata
    shown.max_output_tokens, shown.user = options.get("max_tokens"), options.get("user")
    shown.parallel_tool_calls = options.get("parallel_tool_calls", True)
    shown.temperature, shown.top_p = options.get("temperature"), options.get("top_p")
    shown.reasoning = {"effort": options.get("reasoning_effort"), "summary": None}
    shown.text = {
        "format": _shown_format(options.get("response_format")),
        "verbosity": options.get("verbosity", "medium"),
    }
    shown.tool_choice = _shown_choice(options.get("tool_choice"), facts)
    shown.tools = [_shown_tool(tool["function"], facts) for tool in chat.tools]
    return shown


def _created(stored: Stored) -> int:
    return int(stored.logged[0].at if stored.logged else time.time())


def _shown_tool(function: Mapping[str, Any], facts: ResponseFacts) -> dict[str, Any]:
    name = facts.names.get(function["name"], function["name"])
    if name in facts.custom:
        return {"type": "custom", "name": name, "description": function.get("description")}
    return {
        "type": "function",
        "name": name,
        "description": function.get("description"),
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        "strict": bool(function.get("strict")),
    }


def _shown_choice(choice: Any, facts: ResponseFacts) -> Any:
    if not isinstance(choice, dict):
        return choice or "auto"
    name = choice["function"]["name"]
    return {"type": "function", "name": facts.names.get(name, name)}


def _shown_format(wanted: Any) -> dict[str, Any]:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted if isinstance(wanted, dict) else {"type": "text"}
    return {"type": "json_schema", **wanted["json_schema"]}


def _completed(response: Response, outcome: Outcome) -> Response:
    """Return the response with its final status and usage."""
    response.status = "completed"
    if (reason := INCOMPLETE.get(finish_of(outcome))) is not None:
        response.status, response.incomplete_details = "incomplete", IncompleteDetails(reason)
    if outcome.model:
        response.model = clean(outcome.model)
    if tokens := outcome.usage:
        read, written = tokens.get("prompt_tokens", 0), tokens.get("completion_tokens", 0)
        response.usage = ResponseUsage(
            read,
            written,
            tokens.get("total_tokens") or read + written,
            {"cached_tokens": tokens.get("cached_tokens", 0)},
            {"reasoning_tokens": tokens.get("reasoning_tokens", 0)},
        )
    return response


def items_out(id: str, outcome: Outcome, calls: Sequence[Call], facts: ResponseFacts) -> list[dict[str, Any]]:
    """Return the output of a complete response: reasoning, the answer, calls for the client."""
    about = id.removeprefix(PREFIX)
    output: list[dict[str, Any]] = []
    if outcome.reasoning:
        output.append(_reasoning_item(f"rs_{about}_0", clean(outcome.reasoning)))
    if outcome.text or not calls:
        output.append(_message_item(f"msg_{about}_0", clean(outcome.text), logprobs=_logprobs(outcome)))
    return output + [_call_item(about, number, call, facts) for number, call in enumerate(calls)]


def _reasoning_item(id: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": id, "summary": [{"type": "summary_text", "text": text}] if text else []}


def _message_item(
    id: str, text: str, status: str = "completed", logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    content = [_text_part(text, logprobs)] if status == "completed" else []
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the log probabilities of an answer's tokens. Here each has its bytes, which a model may omit."""

    def shown(token: Mapping[str, Any]) -> dict[str, Any]:
        text = clean(token["token"])
        given = token.get("bytes")
        return {"token": text, "bytes": [*text.encode()] if given is None else given, "logprob": token["logprob"]}

    return [{**shown(one), "top_logprobs": [*map(shown, one.get("top_logprobs") or ())]} for one in outcome.logprobs]


def _call_item(about: str, number: int, call: Call, facts: ResponseFacts, status: str = "completed") -> dict[str, Any]:
    id, name, empty = clean(call.id), clean(call.name), status != "completed"
    if name in facts.custom:
        text = "" if empty else custom_input(call)
        return {
            "type": "custom_tool_call",
            "id": f"ctc_{about}_{number}",
            "call_id": id,
            "name": name,
            "input": text,
            "status": status,
        }
    arguments = "" if empty else arguments_of(call)
    return {
        "type": "function_call",
        "id": f"fc_{about}_{number}",
        "call_id": id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


# A text delta, by far the most frequent event. Its text and number come last.
TEXT_DELTA = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","output_index":%d,"item_id":"%b",'
    b'"content_index":0,"logprobs":[],"delta":%%b,"sequence_number":'
)


class ResponseWire:
    """Writes one response.

    Events are numbered so that a number tells how much of the answer has been sent: a delta counts one per character,
    every other event one. A stream that is resumed after the event `after` then continues exactly there, however the
    text is split into deltas.
    """

    content_type = "text/event-stream"

    def __init__(self, asked: Asked, facts: ResponseFacts, store: bool = True, after: int = -1) -> None:
        self._asked = asked
        self._facts = facts
        self._about = asked.id.removeprefix(PREFIX)
        self._response = _shown(asked, facts, store=store)
        self._after = after
        self._number = -1
        self._kind: Literal["", "message", "reasoning"] = ""
        self._texts: list[str] = []  # of the open item
        self._delta = b""  # the common part of its delta events
        self._counts = {"message": 0, "reasoning": 0}
        self._head = b"".join(
            self._event(f"response.{name}", response=self._response) for name in ("created", "in_progress")
        )

    def start(self) -> bytes:
        return self._head

    def text(self, text: str, id: bytes = b"") -> bytes:
        opened = self._opened("message") if self._kind != "message" else b""
        if not (new := self._unseen(clean(text))):
            return opened + id
        return b"%b%b%b%d}\n\n" % (opened, id, self._delta % json_string(new), self._number)

    def reasoning(self, text: str) -> bytes:
        opened, name = self._opened("reasoning"), "response.reasoning_summary_text.delta"
        if not (new := self._unseen(clean(text))):
            return opened
        return opened + self._written(name, item_id=self._id(), output_index=self._index, delta=new, summary_index=0)

    def comment(self, text: str, alone: bool = True) -> bytes:
        return event_comment(text)

    def end(self, outcome: Outcome) -> bytes:
        closed = self._closed(_logprobs(outcome) if outcome.logprobs else ())
        calls = b"".join(self._call(number, call) for number, call in enumerate(outcome.calls))
        response = _completed(self._response, outcome)
        name = "response.completed" if response.status == "completed" else "response.incomplete"
        return closed + calls + self._event(name, response=response)

    def error(self, error: ApiError) -> bytes:
        closed = self._closed()
        self._response.status = "failed"
        self._response.error = ResponseError(error.code or "server_error", clean(error.message))
        return closed + self._event("response.failed", response=self._response)

    def whole(self, outcome: Outcome) -> bytes:
        self._response.output = items_out(self._asked.id, outcome, outcome.calls, self._facts)
        return encode_json(_completed(self._response, outcome))

    def _opened(self, kind: Literal["message", "reasoning"]) -> bytes:
        """Return the events that open an item of this kind, unless it is open."""
        if self._kind == kind:
            return b""
        closed, self._kind = self._closed(), kind
        id = self._id()
        item = _message_item(id, "", "in_progress") if kind == "message" else _reasoning_item(id, "")
        opened = self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "message":
            self._delta = TEXT_DELTA % (self._index, id.encode())
            return (
                closed
                + opened
                + self._item_event("response.content_part.added", id, content_index=0, part=_text_part(""))
            )
        part = {"type": "summary_text", "text": ""}
        return (
            closed + opened + self._item_event("response.reasoning_summary_part.added", id, summary_index=0, part=part)
        )

    def _closed(self, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Return the events that close the open item, if there is one. The log probabilities are those of a message."""
        kind = self._kind
        if not kind:
            return b""
        id, text = self._id(), "".join(self._texts)
        if kind == "message":
            item = _message_item(id, text, logprobs=logprobs)
            done = self._item_event("response.output_text.done", id, content_index=0, text=text, logprobs=logprobs)
            part = item["content"][0]
            done += self._item_event("response.content_part.done", id, content_index=0, part=part)
        else:
            item = _reasoning_item(id, text)
            done = self._item_event("response.reasoning_summary_text.done", id, summary_index=0, text=text)
            part = {"type": "summary_text", "text": text}
            done += self._item_event("response.reasoning_summary_part.done", id, summary_index=0, part=part)
        done += self._event("response.output_item.done", output_index=self._index, item=item)
        self._response.output.append(item)
        self._counts[kind] += 1
        self._kind, self._texts = "", []
        return done

    def _call(self, number: int, call: Call) -> bytes:
        opened = _call_item(self._about, number, call, self._facts, "in_progress")
        item = _call_item(self._about, number, call, self._facts)
        events = self._event("response.output_item.added", output_index=self._index, item=opened)
        if item["type"] == "function_call":
            what, value = "function_call_arguments", "arguments"
        else:
            what, value = "custom_tool_call_input", "input"
        events += self._item_event(f"response.{what}.delta", item["id"], delta=item[value])
        done: dict[str, Any] = {value: item[value], **({"name": item["name"]} if value == "arguments" else {})}
        events += self._item_event(f"response.{what}.done", item["id"], **done)
        events += self._event("response.output_item.done", output_index=self._index, item=item)
        self._response.output.append(item)
        return events

    @property
    def _index(self) -> int:
        return len(self._response.output)

    def _id(self) -> str:
        kind = "msg" if self._kind == "message" else "rs"
        return f"{kind}_{self._about}_{self._counts[self._kind or 'message']}"

    def _unseen(self, delta: str) -> str:
        """Count a delta of the open item, and return the part of it that the client does not have yet."""
        self._texts.append(delta)
        begins, self._number = self._number, self._number + len(delta)
        return delta[max(self._after - begins, 0) :]

    def _item_event(self, name: str, id: str, /, **facts: Any) -> bytes:
        return self._event(name, item_id=id, output_index=self._index, **facts)

    def _event(self, name: str, /, **facts: Any) -> bytes:
        self._number += 1
        return self._written(name, **facts) if self._number > self._after else b""

    def _written(self, name: str, /, **facts: Any) -> bytes:
        return named_event(name, encode_json({"type": name, "sequence_number": self._number, **facts}))
