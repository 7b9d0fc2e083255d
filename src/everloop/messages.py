"""Conversation messages in OpenAI's wire format, and a list of them that caches its own JSON."""

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
    """Return an assistant message; `calls` are (id, name, arguments)."""
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
    """The messages of one request: a list that caches its JSON.

    A conversation only grows at its end, so each message is encoded once and not once per round. This keeps the cost of
    a round independent of the length of the history.
    """

    def __init__(self, messages: Iterable[Message] = (), *, blind: Blind | None = None) -> None:
        """`blind` replaces images for a model without vision."""
        super().__init__()
        self.call_ids: set[str] = set()  # ids of all its tool calls
        self._parts: list[bytes] = []  # of its JSON, without the brackets
        self._encoded = 0  # number of messages encoded in `_parts`
        self._size = 0
        self.untrusted = False  # contains external content, or files of unknown origin
        self.outside = False  # contains content from beyond the person's own files
        self.described_outside = False  # the last request offered tools with external descriptions
        self.blind = blind
        self.summary: Message | None = None  # summary of the earlier conversation
        # For user messages that a person did not write, or not entirely: the person's own words, by index.
        self.own_words: dict[int, Any] = {}
        self.stopgap = False  # the summary was made without a model
        self.weighed = (0, 0)  # number of messages weighed, and their total weight (see `Measure`)
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
        """Replace the contents in place, for every holder of this conversation."""
        self[:] = other
        self.__dict__.update(other.__dict__)

    @property
    def characters(self) -> int:
        """Return an upper bound on the number of characters in all its texts."""
        return self._size

    @property
    def size(self) -> int:
        """Return its approximate size in memory in bytes, whether its JSON is cached or not."""
        return self._size + sum(map(len, self._parts))

    def json(self) -> bytes:
        """Return the messages as a JSON array."""
        return b"".join(self.json_parts())

    def json_parts(self) -> list[bytes]:
        """Return the JSON array in parts, so that it need not be copied.

        There are few parts, and most are unchanged since the last call.
        """
        if self._encoded > len(self):  # messages were removed: start over
            self._parts.clear()
            self._encoded = 0
        if self._encoded < len(self):
            new = b",".join([encode_json(message) for message in self[self._encoded :]])
            self._parts.append(b"," + new if self._parts else new)
            self._encoded = len(self)
            # Each part is more than twice as long as the next, so there are few parts and bytes are rarely copied.
            while len(self._parts) > 1 and len(self._parts[-2]) < 2 * len(self._parts[-1]):
                last = self._parts.pop()
                self._parts[-1] += last
        return [b"[", *self._parts, b"]"]


def _characters(content: Any) -> int:
    """Return the approximate number of characters in a message's content, without copying it."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(50 + _characters(part) for part in content)
    if isinstance(content, dict):
        return sum(50 + _characters(value) for value in content.values())
    return len(str(content))
