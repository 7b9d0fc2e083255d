"""OpenAI's chat completions, for any compatible endpoint: encode requests, and read answers, whole or streamed.

The reader accepts the many deviations of servers from OpenAI's format.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from ..messages import Conversation, encode_json
from ..text import clean, one_line
from .base import (
    OPTIONS,
    Delta,
    LLMProvider,
    LLMResponse,
    Messages,
    Options,
    ProviderError,
    ToolCallRequest,
    Tools,
    error_text,
    option_keywords,
)
from .endpoints import Quirks, quirks_of
from .http import Endpoint, Timeouts, endpoint_of, feed_whole

__all__ = ["OpenAIProvider", "Timeouts"]

FINAL_ERRORS = frozenset({400, 401, 403, 404, 413, 422})  # a retry would get the same
MAX_CALLS = 512
SPARE_BYTES = 1 << 20  # of an answer, in addition to its text
END_CHAT = b"}"
END_STREAM = b',"stream":true}'
END_COUNTED = b',"stream":true,"stream_options":{"include_usage":true}}'
CHAT_PATH = "/chat/completions"
NEED_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})


class OpenAIProvider(LLMProvider):
    """A model behind an OpenAI-compatible endpoint.

    `extra` has further fields for every request (temperature, …); an answer is kept up to `answer_limit` characters.
    `quirks` describe how the server differs from OpenAI's API, by default what is known about the one at this base URL.
    """

    options = OPTIONS
    endpoints = frozenset({"embeddings", "completions"})

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str = "",
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        headers: Mapping[str, str] | None = None,
        answer_limit: int = 2_000_000,
        extra: Mapping[str, Any] | None = None,
        quirks: Quirks | None = None,
    ) -> None:
        self.default_model = model
        sent = {"User-Agent": "everloop", **(headers or {})}
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        self._endpoint = Endpoint(endpoint_of(base_url, CHAT_PATH), sent, timeouts, api_key)
        base = base_url.strip().replace(CHAT_PATH, "", 1)
        self._further = {
            name: Endpoint(endpoint_of(base, f"/{name}"), sent, timeouts, api_key) for name in self.endpoints
        }
        self._answer_limit = answer_limit
        self._body_limit = 6 * answer_limit + SPARE_BYTES  # \uXXXX: six bytes for one character
        self._quirks = quirks_of(base_url) if quirks is None else quirks
        self.options = OPTIONS - self._quirks.refused
        self.extra = dict(extra or {})
        self._end_stream = END_COUNTED if self._quirks.stream_options else END_STREAM
        self._tools: dict[int, tuple[Sequence[Any], int, bytes]] = {}

    async def chat(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> LLMResponse:
        answer = Answer(self._answer_limit, self._endpoint.where)
        body = self._body(messages, tools, model, options, END_CHAT)
        data = await self._endpoint.fetch(body, self._body_limit)
        feed_whole(answer, data, self._endpoint.where)
        return answer.response()

    def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        answer = Answer(self._answer_limit, self._endpoint.where)
        body = self._body(messages, tools, model, options, self._end_stream)
        return self._endpoint.stream(body, answer, self._body_limit)

    async def forward(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        where = self._further[endpoint]
        data = await where.fetch([encode({"model": self.default_model, **body})], self._body_limit)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ProviderError(f"{where.where} sent something that is not JSON", retryable=True) from None

    async def close(self) -> None:
        for endpoint in (self._endpoint, *self._further.values()):
            await endpoint.close()

    def _body(
        self,
        messages: Messages,
        tools: Tools,
        model: str | None,
        options: Options,
        end: bytes,
    ) -> list[bytes]:
        """Return the request in parts that are already encoded: a round does not encode the history again."""
        return self._parts(messages, tools, model or self.default_model, options, self.extra, end)

    def request_body(
        self, messages: Messages, tools: Tools, model: str, options: Options, extra: Mapping[str, Any]
    ) -> bytes:
        return b"".join(self._parts(messages, tools, model, options, extra, END_CHAT))

    def _parts(
        self,
        messages: Messages,
        tools: Tools,
        model: str,
        options: Options,
        extra: Mapping[str, Any],
        end: bytes,
    ) -> list[bytes]:
        parts = [b'{"model":', encode(model), b',"messages":', *_history(messages)]
        if tools:
            parts += b',"tools":', self._encoded_tools(tools)
        if fields := {**extra, **self._fields(options, tools)}:
            parts += b",", encode(fields)[1:-1]
        parts.append(end)
        return parts

    def _fields(self, options: Options, tools: Tools) -> dict[str, Any]:
        """Return the options under this server's names for them."""
        chosen: dict[str, Any] = option_keywords(self, options).get("options", {})
        if not tools and chosen.get("tool_choice") in (None, "auto", "none"):  # servers reject these without tools
            chosen = {name: value for name, value in chosen.items() if name not in NEED_TOOLS}
        return {self._quirks.names.get(name, name): value for name, value in chosen.items()}

    def _encoded_tools(self, tools: Sequence[dict[str, Any]]) -> bytes:
        """Return the tools as JSON, cached by list object: a registry makes a new list when its tools change."""
        known = self._tools.get(id(tools))
        if known is not None and known[0] is tools and known[1] == len(tools):
            return known[2]
        if len(self._tools) >= 32:
            self._tools.clear()
        encoded = encode(tools)
        self._tools[id(tools)] = (tools, len(tools), encoded)
        return encoded


def _history(messages: Sequence[dict[str, Any]]) -> list[bytes]:
    if isinstance(messages, Conversation):
        try:
            return messages.json_parts()
        except (UnicodeEncodeError, TypeError, OverflowError):
            pass  # part of it can only be encoded with replacements
    return [encode(messages)]


# ---------------------------------------------------------------------------------------------- answers


class Function(msgspec.Struct, gc=False):
    name: Any = None
    arguments: Any = None


class CallDelta(msgspec.Struct, gc=False):
    index: Any = None
    id: Any = None
    function: Function | None = None


class MessageDelta(msgspec.Struct, gc=False):
    """The message of a choice, streamed or whole; both have these fields."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    refusal: Any = None
    tool_calls: list[CallDelta | None] | None = None


class Choice(msgspec.Struct, gc=False):
    index: Any = None
    logprobs: Any = None
    delta: MessageDelta | None = None
    message: MessageDelta | None = None
    finish_reason: Any = None


class Chunk(msgspec.Struct, gc=False):
    """A streamed chunk or a whole completion. Fields that are not listed are skipped, and every field may be null."""

    choices: list[Choice | None] | None = None
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


class PartialCall:
    """A tool call whose parts are still arriving."""

    __slots__ = ("_depth", "_escaped", "_opened", "_over", "_quoted", "_scanned", "id", "index", "name", "parts")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self.parts: list[str] = []
        self._scanned = self._depth = 0  # number of scanned parts, and of brackets that they leave open
        self._opened = self._quoted = self._escaped = False
        self._over = False  # all brackets are closed, but it is not an object and cannot become one

    def complete(self) -> bool:
        """Return whether the arguments are complete. Called for every part, so each part is scanned only once."""
        for part in self.parts[self._scanned :]:
            self._scan(part)
        self._scanned = len(self.parts)
        if self._over or self._quoted or self._depth or not self._opened:
            return False
        whole = isinstance(parse_arguments("".join(self.parts)), dict)
        self._over = not whole
        return whole

    def _scan(self, part: str) -> None:
        for sign in part:
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = sign == "\\", sign != '"'
            elif sign == '"':
                self._quoted = True
            elif sign in "{[":
                self._opened = True
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1


class Answer:
    """A model's answer as it arrives: `feed` takes a server's JSON, `response` returns the whole.

    At most `limit` characters each of text, reasoning and arguments are kept; beyond that, the answer is `over` and
    says so in its last line. `where` names the server in errors.
    """

    def __init__(self, limit: int, where: str) -> None:
        self.finish_reason = ""
        self.ended = False  # the last event has arrived
        self.usage: dict[str, int] = {}
        self._limit = limit
        self._where = where
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[PartialCall] = []
        self._logprobs: list[dict[str, Any]] = []
        self._full = False
        self._sizes = [0, 0, 0]  # of text, reasoning and arguments
        self._half = ""  # the first half of a surrogate pair that was split over two chunks

    def feed(self, payload: bytes) -> Delta | None:
        """Add one chunk or one whole completion, and return what it adds to the visible text."""
        if payload == b"[DONE]":
            self.ended = True
            return None
        odd = False
        try:
            chunk = _decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            chunk = self._decode_odd(payload)
            odd = True
        if chunk.error:
            raise stream_error(self._where, chunk.error)
        if chunk.usage:
            self.usage = read_usage(chunk.usage)
        delta = None
        for choice in chunk.choices or ():
            if choice is None or choice.index:
                continue
            piece = choice.delta or choice.message
            if piece is not None:
                delta = self._take(piece, odd, whole=choice.delta is None)
            if choice.logprobs and not self._full:
                self._logprobs += read_logprobs(choice.logprobs)
            if choice.finish_reason and not self._full:
                self.finish_reason = clean(str(choice.finish_reason))
            break
        return delta

    def over(self) -> bool:
        """Return whether nothing more is added: the answer is complete, or the limit is reached."""
        return self.ended or self._full

    def size(self) -> int:
        """Return a number that grows with every chunk that has content."""
        return sum(self._sizes) + len(self._calls) + bool(self.finish_reason)

    def response(self) -> LLMResponse:
        """Return the whole answer, after the last chunk."""
        if self._half:
            self._text.append("\ufffd")
        cut = self.finish_reason == "length"
        last = len(self._calls) - 1
        seen: set[str] = set()
        calls = []
        for i, partial in enumerate(self._calls):
            # Results are matched by id, so two calls must not share one: the engine assigns the second a new id.
            id = "" if partial.id in seen else partial.id
            seen.add(id)
            calls.append(read_call(id, partial.name, "".join(partial.parts), cut=cut and i == last))
        reason = self.finish_reason if cut or not calls else "tool_calls"
        text = "".join(self._text)
        return LLMResponse(
            text if text or not calls else None,
            calls,
            reason or "stop",
            self.usage,
            "".join(self._thoughts) or None,
            logprobs=self._logprobs,
        )

    def _decode_odd(self, payload: bytes) -> Chunk:
        """Decode what the strict decoder refuses: lone surrogates, raw control characters, invalid UTF-8."""
        try:
            value = json.loads(payload.decode("utf-8", "replace"), strict=False)
            return msgspec.convert(value, Chunk)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            shown = one_line(payload[:200].decode("utf-8", "replace"))
            raise ProviderError(
                f"{self._where} sent something that is not a chat completion ({one_line(str(error), 100)}): {shown}",
                retryable=True,
            ) from None

    def _take(self, piece: MessageDelta, odd: bool, whole: bool) -> Delta | None:
        text = piece.content
        thoughts = piece.reasoning_content or piece.reasoning or piece.thinking or ""
        if type(thoughts) is not str:
            thoughts = text_of(thoughts)
        if type(text) is not str:
            thoughts = thoughts or thoughts_of(text)
            text = text_of(text)
        if piece.refusal:
            text += text_of(piece.refusal)
        if odd or self._half:
            text, thoughts = self._mend(text), clean(thoughts)
        if thoughts:
            thoughts = thoughts if self._fits(1, len(thoughts)) else self._fitting(1, thoughts)
            self._thoughts.append(thoughts)
        if text:
            if self._full:
                text = ""
            elif not self._fits(0, len(text)):
                text = self._fitting(0, text)
            self._text.append(text)
        for call in piece.tool_calls or ():
            if call is not None and not self._full:
                self._take_call(call, whole)
        if self._full:
            text = self._cut(text)
        return Delta(text, thoughts) if text or thoughts else None

    def _take_call(self, piece: CallDelta, whole: bool) -> None:
        function = piece.function or Function()
        id = clean(piece.id) if isinstance(piece.id, str) else ""
        name = clean(function.name) if isinstance(function.name, str) else ""
        arguments = function.arguments
        if arguments is None:
            arguments = ""
        elif isinstance(arguments, str):
            arguments = clean(arguments)
        else:  # an object where OpenAI's API has a JSON string
            arguments = clean(json.dumps(arguments, ensure_ascii=False))
        partial = None if whole else self._begun(piece.index, id, name, bool(arguments))
        if partial is None:
            partial = PartialCall(piece.index)
            self._calls.append(partial)
            if len(self._calls) > MAX_CALLS:
                raise ProviderError(f"{self._where} sent more than {MAX_CALLS} tool calls in one answer")
        partial.id = partial.id or id
        partial.name = partial.name or name  # a name is never split, but some servers repeat it
        if arguments:
            partial.parts.append(arguments if self._fits(2, len(arguments)) else self._fitting(2, arguments))

    def _begun(self, index: Any, id: str, name: str, more: bool) -> PartialCall | None:
        """Return the call that a delta continues, or None if it begins a new one.

        Index and id decide if they are present: a new id begins a new call. Without an id, a different name begins one,
        and so does a name with arguments after a complete call.
        """
        calls = self._calls if index is None else [call for call in self._calls if call.index == index]
        if not calls:
            return None
        last = calls[-1]
        if id:
            same = [call for call in calls if call.id == id]
            return same[-1] if same else None if last.id else last
        if name and (name != (last.name or name) or (more and last.complete())):
            return None
        return last

    def _fits(self, kind: int, length: int) -> bool:
        """Count characters, and return whether the limit still allows them; reaching the limit ends the answer."""
        self._sizes[kind] += length
        if self._sizes[kind] <= self._limit:
            return True
        self._full = True
        self.finish_reason = "length"
        return False

    def _fitting(self, kind: int, text: str) -> str:
        """Return the part of an already counted text that the limit allows."""
        return text[: max(len(text) - (self._sizes[kind] - self._limit), 0)]

    def _cut(self, text: str) -> str:
        """End the answer with a line that says where it was cut, and return what is left to show."""
        what = ("answer", "model's reasoning", "model's tool call")[
            next(kind for kind in range(3) if self._sizes[kind] > self._limit)
        ]
        notice = f"[The {what} was cut at {self._limit} characters.]"
        if any(self._text):
            notice = "\n\n" + notice
        self._text.append(notice)
        return text + notice

    def _mend(self, text: str) -> str:
        """Join surrogate pairs that were split across two chunks, and replace lone surrogates."""
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._half, text = text[-1], text[:-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def parse_arguments(raw: str) -> Any:
    """Return the arguments in a JSON text, or the error that says why it cannot be decoded."""
    try:
        return _decode_arguments(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        value = json.loads(raw, strict=False, parse_constant=_refuse)
        if not isinstance(value, dict):
            return ValueError("not an object")
        return json.loads(clean(json.dumps(value, ensure_ascii=False)), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return error


def read_call(id: str, name: str, raw: str, *, cut: bool) -> ToolCallRequest:
    """Return a call whose arguments are an object, or whose `error` says why they are not."""
    if not raw.strip() and not cut:
        return ToolCallRequest(id, name)
    value = parse_arguments(raw)
    if isinstance(value, dict):
        return ToolCallRequest(id, name, value)
    why = "the answer was cut off before the arguments were complete" if cut else one_line(str(value), 100)
    return ToolCallRequest(id, name, {}, f"arguments are not valid JSON: {why}: {raw[:200]}")


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


def read_logprobs(value: Any) -> list[dict[str, Any]]:
    """Return the tokens of a choice's `logprobs`; entries that are not in OpenAI's format are left out."""
    try:
        tokens = msgspec.convert(value.get("content") or [], list[TokenLogprob])
    except (msgspec.ValidationError, AttributeError):
        return []
    for token in [*tokens, *(top for one in tokens for top in one.top_logprobs)]:
        token.token = clean(token.token)
    return [msgspec.to_builtins(token) for token in tokens]


def read_usage(usage: Any) -> dict[str, int]:
    """Return the integers of a usage object; those of nested details are moved to the top level."""
    if not isinstance(usage, dict):
        return {}
    numbers = {}
    for name, value in usage.items():
        if type(value) is int:
            numbers[name] = value
        elif type(value) is dict:
            numbers |= {inner: count for inner, count in value.items() if type(count) is int and count}
    return numbers


def stream_error(where: str, error: Any) -> ProviderError:
    """Return the error that a server reported inside a 200 response."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else None
    return ProviderError(
        f"{where} reported an error: {error_text(error)}", retryable=status not in FINAL_ERRORS, status=status
    )


def text_of(content: Any) -> str:
    """Return the text of a content field that is not a plain string: null, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    return ""


def thoughts_of(content: Any) -> str:
    """Return the reasoning among the parts of a content field."""
    parts = content if isinstance(content, list) else ()
    return "".join(text_of(part.get("thinking")) for part in parts if isinstance(part, dict))


def encode(value: Any) -> bytes:
    """Encode any value as JSON bytes, even lone surrogates and unknown types."""
    try:
        return encode_json(value)
    except (UnicodeEncodeError, TypeError, OverflowError):
        return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
