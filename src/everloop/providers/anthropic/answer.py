"""Read an answer of Anthropic's Messages API, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ...text import clean, one_line
from ..base import Delta, LLMResponse, ProviderError, error_text
from ..openai import FINAL_ERRORS, Answer, CallDelta, Function, MessageDelta

MAX_BLOCKS = 4096
STOP_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",  # only server-side tools pause a turn, and requests ask for none
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
FINAL = FINAL_ERRORS | {402}


class Block(msgspec.Struct, gc=False):
    """A content block or a delta of one; both have these fields."""

    type: Any = None
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    id: Any = None
    name: Any = None
    input: Any = None
    stop_reason: Any = None


class Event(msgspec.Struct, gc=False):
    """A streamed event or a whole message. Fields that are not listed are skipped, and every field may be null."""

    type: Any = None
    index: Any = None
    delta: Block | None = None
    content_block: Block | None = None
    content: list[Block | None] | None = None
    message: Any = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


class MessageAnswer(Answer):
    """An answer that arrives as Anthropic's events.

    `names` maps the tool names that the request had to change to the original ones. The `secret` is removed from every
    error that a server sends.
    """

    def __init__(self, limit: int, where: str, names: Mapping[str, str], secret: str | None = None) -> None:
        super().__init__(limit, where)
        self._names = names
        self._secret = secret
        self._blocks: dict[int | None, str] = {}  # the type of each block
        self._input: Any = None  # of the open call, if the server sends it whole
        self._counts: dict[str, int] = {}

    def feed(self, payload: bytes) -> Delta | None:
        """Add one event or one whole message, and return what it adds to the visible text."""
        odd = False
        try:
            event = _decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            event, odd = self._decode_odd_event(payload), True
        kind = event.type
        if event.error or kind == "error":
            raise self._error(event.error)
        if kind == "content_block_delta":
            return self._take_delta(event.index, event.delta or Block(), odd)
        if kind == "content_block_start":
            return self._begin(event.index, event.content_block or Block(), odd)
        if kind == "content_block_stop":
            self._finish_call()
        elif kind == "message_start":
            self._count(event.message.get("usage") if isinstance(event.message, dict) else None)
        elif kind == "message_delta":
            self._finish_call()
            self._count(event.usage)
            self._stop(event.delta.stop_reason if event.delta else None)
        elif kind == "message_stop":
            self._finish_call()
            self.ended = True
        elif event.content is not None:
            return self._take_whole(event, odd)
        elif kind is None:
            raise self._not_a_message(payload, "it has no type")
        return None

    def response(self) -> LLMResponse:
        self._finish_call()
        response = super().response()
        for call in response.tool_calls:
            call.name = self._names.get(call.name, call.name)
        return response

    def _take_whole(self, event: Event, odd: bool) -> Delta | None:
        text, thoughts = "", ""
        for block in event.content or ():
            if block is not None and not self._full and (delta := self._take_block(block, None, odd, block.input)):
                text, thoughts = text + delta.text, thoughts + delta.reasoning
        self._count(event.usage)
        self._stop(event.stop_reason)
        self.ended = True
        return Delta(text, thoughts) if text or thoughts else None

    def _begin(self, index: Any, block: Block, odd: bool) -> Delta | None:
        self._finish_call()
        self._blocks[_place(index)] = str(block.type)
        if len(self._blocks) > MAX_BLOCKS:
            raise ProviderError(f"{self._where} sent more than {MAX_BLOCKS} blocks in one answer")
        if block.type == "tool_use":
            self._input = block.input
        return self._take_block(block, _place(index), odd, None)

    def _take_block(self, block: Block, index: int | None, odd: bool, input: Any) -> Delta | None:
        """Add a block, or the beginning of one. Blocks of other types are ignored."""
        if block.type == "text":
            return self._take(MessageDelta(content=block.text), odd, whole=True)
        if block.type == "thinking":
            return self._take(MessageDelta(reasoning=block.thinking), odd, whole=True)
        if block.type == "tool_use":
            call = CallDelta(index, block.id, Function(block.name, input))
            return self._take(MessageDelta(tool_calls=[call]), odd, whole=True)
        return None

    def _take_delta(self, index: Any, piece: Block, odd: bool) -> Delta | None:
        if piece.type == "text_delta":
            return self._take(MessageDelta(content=piece.text), odd, whole=False)
        if piece.type == "thinking_delta":
            return self._take(MessageDelta(reasoning=piece.thinking), odd, whole=False)
        if piece.type != "input_json_delta" or not piece.partial_json:
            return None
        kind = self._blocks.get(_place(index))
        if kind is None:
            raise ProviderError(f"{self._where} sent a piece of a tool call that had not begun", retryable=True)
        if kind != "tool_use":
            return None
        self._input = None
        call = CallDelta(_place(index), None, Function(None, piece.partial_json))
        return self._take(MessageDelta(tool_calls=[call]), odd, whole=False)

    def _finish_call(self) -> None:
        """End the open call. Arguments that came with its start count only if no deltas followed."""
        given, self._input = self._input, None
        if given and not self._full and self._calls:
            call = CallDelta(self._calls[-1].index, None, Function(None, given))
            self._take(MessageDelta(tool_calls=[call]), True, whole=False)

    def _stop(self, reason: Any) -> None:
        if reason and not self._full:
            self.finish_reason = STOP_REASONS.get(str(reason)) or clean(str(reason))

    def _count(self, usage: Any) -> None:
        """Update the token counts: later numbers replace earlier ones, and a zero often means "not given"."""
        if not isinstance(usage, dict):
            return
        counts = self._counts
        for name, value in usage.items():
            if type(value) is int and (value > 0 or name not in counts):
                counts[name] = value
        read, written = counts.get("cache_read_input_tokens", 0), counts.get("cache_creation_input_tokens", 0)
        prompt, completion = counts.get("input_tokens", 0) + read + written, counts.get("output_tokens", 0)
        self.usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if read:
            self.usage["cached_tokens"] = read
        if written:
            self.usage["cache_write_tokens"] = written

    def _error(self, error: Any) -> ProviderError:
        """Return the error that a server reported inside a 200 response."""
        kind = error.get("type") if isinstance(error, dict) else None
        status = STATUS.get(kind) if isinstance(kind, str) else None
        text = self._hidden(error_text(error))
        return ProviderError(f"{self._where} reported an error: {text}", retryable=status not in FINAL, status=status)

    def _decode_odd_event(self, payload: bytes) -> Event:
        """Decode what the strict decoder refuses: lone surrogates, raw control characters, invalid UTF-8."""
        try:
            return msgspec.convert(json.loads(payload.decode("utf-8", "replace"), strict=False), Event)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._not_a_message(payload, one_line(str(error), 100)) from None

    def _not_a_message(self, payload: bytes, why: str) -> ProviderError:
        shown = self._hidden(one_line(payload[:200].decode("utf-8", "replace")))
        return ProviderError(
            f"{self._where} sent something that is not a message of Anthropic's API ({why}): {shown}", retryable=True
        )

    def _hidden(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


def _place(index: Any) -> int | None:
    return index if type(index) is int else None
