"""The wire shapes of a conversation, OpenAI's, and the list that knows its own JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
Blind = Callable[[list[dict[str, Any]]], Any]
encode_json = msgspec.json.Encoder().encode


def user_message(content: str | list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": content}


def assistant_message(content: str | None, calls: Sequence[tuple[str, str, dict[str, Any]]] = ()) -> Message:
    """An assistant's message; `calls` are (id, name, arguments)."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": encode_json(arguments).decode()}}
            for id, name, arguments in calls
        ]
    return message


def tool_message(call_id: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


class Conversation(list[Message]):
    """The messages of one request, as a plain list that also keeps its JSON.

    A conversation only grows at its end, so each message is encoded once, not once per round: the cost of a round does
    not depend on the length of the history.
    """

    def __init__(self, messages: Iterable[Message] = (), *, blind: Blind | None = None) -> None:
        """`blind` replaces the pictures, for a model that cannot see them."""
        super().__init__()
        self.call_ids: set[str] = set()  # of all tool calls in it
        self._parts: list[bytes] = []  # of its JSON, without the brackets
        self._encoded = 0  # how many messages the parts contain
        self._size = 0
        self.untrusted = False  # whether it contains untrusted text, from outside or from files of unknown origin
        self.outside = False  # whether some of that came from outside the user's own files
        self.described_outside = False  # whether the last request offered tools with descriptions from outside
        self.blind = blind
        self.summary: Message | None = None  # of the messages before
        # For user messages that a person did not write, or not all of: the part that a person wrote, by position.
        self.own_words: dict[int, Any] = {}
        self.stopgap = False  # the summary was made without a model
        self.weighed = (0, 0)  # how many messages were weighed, and their weight
        self.extend(messages)

    def append(self, message: Message) -> None:
        self.extend((message,))

    def extend(self, messages: Iterable[Message]) -> None:
        for message in messages:
            content = message.get("content")
            if self.blind is not None and isinstance(content, list):
                message = {**message, "content": self.blind(content)}
            super().append(message)
            self._size += 400 + _characters(content)
            for call in message.get("tool_calls") or ():
                self.call_ids.add(call["id"])
                self._size += 400 + len(str(call.get("function")))

    def become(self, other: Conversation) -> None:
        """Replace the messages, for every holder of this conversation."""
        self[:] = other
        self.__dict__.update(other.__dict__)

    @property
    def characters(self) -> int:
        """An upper bound of the characters of all its texts."""
        return self._size

    @property
    def size(self) -> int:
        """About how many bytes it takes in memory, with the JSON that is encoded already."""
        return self._size + sum(map(len, self._parts))

    def json(self) -> bytes:
        """The messages as a JSON array."""
        return b"".join(self.json_parts())

    def json_parts(self) -> list[bytes]:
        """The JSON in a few parts, most of them unchanged since the last call, so that they need not be copied."""
        if self._encoded > len(self):  # messages were removed: encode all again
            self._parts.clear()
            self._encoded = 0
        if self._encoded < len(self):
            new = b",".join([encode_json(message) for message in self[self._encoded :]])
            self._parts.append(b"," + new if self._parts else new)
            self._encoded = len(self)
            # Each part is at least twice as long as the next, so there are few parts, and a byte is seldom copied.
            while len(self._parts) > 1 and len(self._parts[-2]) < 2 * len(self._parts[-1]):
                last = self._parts.pop()
                self._parts[-1] += last
        return [b"[", *self._parts, b"]"]


def _characters(content: Any) -> int:
    """About how many characters a message's content has, without encoding it."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(50 + _characters(part) for part in content)
    if isinstance(content, dict):
        return sum(50 + _characters(value) for value in content.values())
    return len(str(content))
