"""The messages of a request as a valid conversation in the shapes that providers take."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any, assert_never

from ..messages import Message, encode_json
from ..providers.sse import parse_arguments
from ..text import one_line
from .errors import ApiError, bad_request
from .shapes import (
    AnyMessage,
    AssistantMessage,
    DeveloperMessage,
    ImagePart,
    OnlyPart,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)

LARGEST_PICTURE = 10_000_000  # bytes
MOST_PICTURES = 20  # of one message
LONGEST_ADDRESS = 8_192


class History:
    """Reads messages one by one; `first` is where they begin in the request, for errors name their place."""

    def __init__(self, first: int = 0) -> None:
        self._at = first
        self._calls = 0  # where the message stands whose calls wait
        self._waiting: dict[str, ToolCall] = {}  # the calls without a result, by the id the client gave them
        self._renamed: dict[str, str] = {}  # the ids of these calls, where they had stood in the conversation before
        self._ids: set[str] = set()
        self._seen: dict[str, int] = {}  # how often an id was given out again

    def read(self, messages: Sequence[AnyMessage]) -> list[Message]:
        """All messages. Every call has exactly one result, and it is the model's turn at the end."""
        made: list[Message] = []
        last, place = "", 0
        for message in messages:
            made.append(self._message(message))
            if made[-1]["role"] != "system":  # a reminder at the end is nobody's turn
                last, place = made[-1]["role"], self._at
            self._at += 1
        self._nothing_waits()
        if last not in ("user", "tool"):
            raise _wrong_end(place, last)
        return made

    def _message(self, message: AnyMessage) -> Message:
        if not isinstance(message, ToolMessage):
            self._nothing_waits()
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
        """Pictures and text as parts; text alone as text, which every server takes."""
        if isinstance(content, str):
            return content
        parts: list[dict[str, Any]] = []
        pictures = 0
        for number, part in enumerate(content):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
                continue
            pictures += 1
            where = f"messages[{self._at}].content[{number}]"
            if pictures > MOST_PICTURES:
                raise bad_request(f"{where}: at most {MOST_PICTURES} pictures are taken in a message", where)
            _check_picture(part.image_url.url, f"{where}.image_url.url")
            picture = {"url": part.image_url.url}
            if part.image_url.detail:
                picture["detail"] = part.image_url.detail
            parts.append({"type": "image_url", "image_url": picture})
        return parts if pictures else "\n".join(part["text"] for part in parts)

    def _assistant(self, message: AssistantMessage) -> Message:
        where = f"messages[{self._at}]"
        for name in ("function_call", "audio"):
            if getattr(message, name) is not None:
                raise bad_request(f"{where}.{name}: not supported; leave it out", f"{where}.{name}")
        text = _text(message.content) if message.content is not None else message.refusal
        if text is None and not message.tool_calls:
            raise bad_request(f"{where}.content: is missing, and there are no tool_calls", f"{where}.content")
        made: Message = {"role": "assistant", "content": text}
        if message.tool_calls:
            self._calls = self._at
            made["tool_calls"] = [self._call(number, call) for number, call in enumerate(message.tool_calls)]
        return made

    def _call(self, number: int, call: ToolCall) -> dict[str, Any]:
        if call.id in self._waiting:
            where = f"messages[{self._at}].tool_calls[{number}].id"
            raise bad_request(f"{where}: a call of this id stands before it", where)
        self._waiting[call.id] = call
        id, count = call.id, self._seen.get(call.id, 1)
        while id in self._ids:  # some models count from 0 in every answer, and other servers want to tell calls apart
            count += 1
            id = f"{call.id[:240]}_{count}"
        self._ids.add(id)
        self._seen[call.id] = count  # or a thousand calls of one id would be counted a thousand times
        self._renamed[call.id] = id
        arguments = call.function.arguments
        if not isinstance(parse_arguments(arguments), dict):  # servers refuse what is no object
            arguments = encode_json({"text": arguments}).decode() if arguments.strip() else "{}"
        return {"id": id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

    def _result(self, message: ToolMessage) -> Message:
        call = self._waiting.pop(message.tool_call_id, None)
        if call is None:
            where, id = f"messages[{self._at}]", one_line(message.tool_call_id, 80)
            raise bad_request(
                f"{where}.tool_call_id: {id!r} is no call of the assistant's message before it that waits for a result",
                f"{where}.tool_call_id",
            )
        id = self._renamed.pop(message.tool_call_id)
        name = message.name or call.function.name
        return {"role": "tool", "tool_call_id": id, "name": name, "content": _text(message.content)}

    def _nothing_waits(self) -> None:
        if self._waiting:
            where, id = f"messages[{self._calls}]", one_line(next(iter(self._waiting)), 80)
            raise bad_request(
                f"{where}.tool_calls: the call {id!r} has no result; a message of role tool must follow for each call",
                f"{where}.tool_calls",
            )


def _text(content: str | Sequence[OnlyPart | TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _wrong_end(at: int, last: str) -> ApiError:
    if last == "assistant":
        where = f"messages[{at}]"
        return bad_request(
            f"{where}: the last message is the assistant's; an answer cannot be begun for the model", where
        )
    return bad_request("messages: there must be a message of the user", "messages")


def _check_picture(url: str, where: str) -> None:
    """Addresses go on as they are; a picture in the request must be one, for some servers fall over it."""
    if not url.startswith("data:"):
        if len(url) > LONGEST_ADDRESS:
            raise bad_request(f"{where}: an address may have {LONGEST_ADDRESS} characters", where)
        return
    data = url[url.index(",") + 1 :]
    if len(data) * 3 // 4 > LARGEST_PICTURE + 2:
        raise bad_request(f"{where}: a picture may have {LARGEST_PICTURE} bytes", where)
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # also for what is not ASCII
        raise bad_request(f"{where}: the data is not base64", where) from None
