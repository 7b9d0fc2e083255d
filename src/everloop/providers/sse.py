"""Reads an OpenAI-shaped answer, whole or streamed, from the many servers that depart from that shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..messages import encode_json
from ..text import clean, one_line
from .base import Delta, LLMResponse, ProviderError, ToolCallRequest

FINAL_ERRORS = frozenset({400, 401, 403, 404, 413, 422})  # a retry gives the same
MAX_CALLS = 512
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Function(msgspec.Struct, gc=False):
    name: Any = None
    arguments: Any = None


class CallDelta(msgspec.Struct, gc=False):
    index: Any = None
    id: Any = None
    function: Function | None = None


class MessageDelta(msgspec.Struct, gc=False):
    """The message of a choice, streamed or whole: both have these fields."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    refusal: Any = None
    tool_calls: list[CallDelta | None] | None = None


class Choice(msgspec.Struct, gc=False):
    index: Any = None
    delta: MessageDelta | None = None
    message: MessageDelta | None = None
    finish_reason: Any = None


class Chunk(msgspec.Struct, gc=False):
    """A streamed chunk or a whole completion; fields we do not read are skipped, all may be null."""

    choices: list[Choice | None] | None = None
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


class Lines:
    """Splits network chunks into lines; an unfinished line is buffered, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = limit
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        lines = data.split(b"\n")
        if len(lines) > 1 and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts, self._size = [], 0
        if self._first and len(lines) > 1:
            self._first, lines[0] = False, lines[0].removeprefix(BYTE_ORDER_MARK)
        if tail := lines.pop():
            self._parts.append(tail)
            self._size += len(tail)
            if self._size > self._limit:
                raise ProviderError(f"one line of the model's stream is longer than {self._limit} bytes")
        return lines

    def rest(self) -> bytes:
        """The last line, when the stream ended without a line end."""
        line = b"".join(self._parts)
        return line.removeprefix(BYTE_ORDER_MARK) if self._first else line


class PartialCall:
    """A tool call whose parts are still arriving."""

    __slots__ = ("_depth", "_escaped", "_opened", "_over", "_quoted", "_scanned", "id", "index", "name", "parts")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self.parts: list[str] = []
        self._scanned = self._depth = 0  # how many parts were scanned, and how many brackets they leave open
        self._opened = self._quoted = self._escaped = False
        self._over = False  # all brackets are closed and it is not an object: nothing that follows makes it one

    def complete(self) -> bool:
        """Whether the arguments are complete. This may be asked for every part, so each part is scanned once."""
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
    """A model's answer as it grows: `feed` takes a server's JSON, `response` gives the whole.

    At most `limit` characters of text, of reasoning and of arguments are kept; beyond that the answer is `over` and
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
        self._full = False
        self._sizes = [0, 0, 0]  # text, thoughts, arguments
        self._half = ""  # the first half of a surrogate pair that was split over two chunks

    def feed(self, payload: bytes) -> Delta | None:
        """Add one chunk or one whole completion; return what it adds to the shown text."""
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
            if choice.finish_reason and not self._full:
                self.finish_reason = clean(str(choice.finish_reason))
            break
        return delta

    def over(self) -> bool:
        """Whether nothing more is added: the answer is complete, or the limit is reached."""
        return self.ended or self._full

    def size(self) -> int:
        """A number that grows with every chunk that has content."""
        return sum(self._sizes) + len(self._calls) + bool(self.finish_reason)

    def response(self) -> LLMResponse:
        """The whole answer, after the last chunk."""
        if self._half:
            self._text.append("\ufffd")
        cut = self.finish_reason == "length"
        last = len(self._calls) - 1
        seen: set[str] = set()
        calls = []
        for i, partial in enumerate(self._calls):
            # Results are matched by id, so two calls must not share one: the engine gives the second a new id.
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
            thoughts = self._keep(1, thoughts)
            self._thoughts.append(thoughts)
        if text:
            text = "" if self._full else self._keep(0, text)
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
        else:  # an object where OpenAI's API has a string of JSON
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
            partial.parts.append(self._keep(2, arguments))

    def _begun(self, index: Any, id: str, name: str, more: bool) -> PartialCall | None:
        """The call that a delta continues, or None when it begins one.

        Index and id decide where they are present: a new id begins a new call. Without an id, so does another name, or
        a name with arguments after a complete call.
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

    def _keep(self, kind: int, text: str) -> str:
        """The part of the text that the limit still allows; reaching the limit ends the answer."""
        size = self._sizes[kind] + len(text)
        self._sizes[kind] = size
        if size <= self._limit:
            return text
        self._full = True
        self.finish_reason = "length"
        return text[: len(text) - (size - self._limit)] if size - len(text) < self._limit else ""

    def _cut(self, text: str) -> str:
        """End the answer with a line that says where it was cut; return what is left to show."""
        what = ("answer", "model's reasoning", "model's tool call")[
            next(kind for kind in range(3) if self._sizes[kind] > self._limit)
        ]
        notice = f"[The {what} was cut at {self._limit} characters.]"
        if any(self._text):
            notice = "\n\n" + notice
        self._text.append(notice)
        return text + notice

    def _mend(self, text: str) -> str:
        """Join surrogate pairs that were split over two chunks; replace a lone surrogate."""
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._half, text = text[-1], text[:-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def parse_arguments(raw: str) -> Any:
    """The arguments that a JSON text holds, or the error that says why it cannot be decoded."""
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
    """A call whose arguments are an object, or whose `error` says why they are not."""
    if not raw.strip() and not cut:
        return ToolCallRequest(id, name)
    value = parse_arguments(raw)
    if isinstance(value, dict):
        return ToolCallRequest(id, name, value)
    why = "the answer was cut off before the arguments were complete" if cut else one_line(str(value), 100)
    return ToolCallRequest(id, name, {}, f"arguments are not valid JSON: {why}: {raw[:200]}")


def read_usage(usage: Any) -> dict[str, int]:
    """The integers of a usage object; those of nested details are moved to the top level."""
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
    """An error that a server reported inside a 200 response."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else None
    return ProviderError(
        f"{where} reported an error: {error_text(error)}", retryable=status not in FINAL_ERRORS, status=status
    )


def error_text(error: Any) -> str:
    """The message of an error body, in any of the usual shapes."""
    while isinstance(error, dict):
        inner = error.get("error") or error.get("message") or error.get("detail")
        if not inner:
            return one_line(json.dumps(error, ensure_ascii=False))
        error = inner
    return one_line(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))


def text_of(content: Any) -> str:
    """The text of a content field that is not a plain string: null, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    return ""


def thoughts_of(content: Any) -> str:
    """The reasoning among the parts of a content field."""
    parts = content if isinstance(content, list) else ()
    return "".join(text_of(part.get("thinking")) for part in parts if isinstance(part, dict))


def encode(value: Any) -> bytes:
    """Encode any value as JSON bytes, including lone surrogates and unknown types."""
    try:
        return encode_json(value)
    except (UnicodeEncodeError, TypeError, OverflowError):
        return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
