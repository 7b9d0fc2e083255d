"""Which session a request belongs to, and which of its messages are new there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..bus import INSIDE
from ..log import Content, text_of
from ..messages import Message
from ..tools.registry import marked
from .errors import bad_request

HEADER = "X-Session"
LONGEST_KEY = 200


def checked_key(headers: Mapping[str, str], header: str) -> str | None:
    """The key in a header, if it is there."""
    key = headers.get(header)
    if key is not None and (not key.strip() or len(key) > LONGEST_KEY or not key.isprintable()):
        raise bad_request(f"{header}: must be 1 to {LONGEST_KEY} printable characters", header)
    return key


def session_of(headers: Mapping[str, str]) -> str | None:
    """The session that the request goes on with; None for one that brings its whole history."""
    key = checked_key(headers, HEADER)
    if key is not None and key.partition(":")[0] in INSIDE:
        raise bad_request(f"{HEADER}: {key.partition(':')[0]}: is kept for sessions of the system itself", HEADER)
    return key


def said_in(messages: Sequence[Message], kept: bool) -> tuple[Content, list[dict[str, Any]] | None, list[Message]]:
    """(what was said, the same in parts where it is more than text, the messages before it) of a request.

    A kept session has the history: of the request only the last message counts, and results of the client's tools.
    """
    behind = [message for message in messages if message["role"] != "system"] if kept else messages  # reminders aside
    last = behind[-1]
    said: Content = last["content"] if last["role"] == "user" else ""
    before = list(behind[:-1] if last["role"] == "user" else behind)
    if kept:
        before = _results(before)
    return said, said if isinstance(said, list) else None, before


def _results(messages: Sequence[Message]) -> list[Message]:
    """The results that end these messages, as one message: in the log their calls are over already. It stands among the
    user's, so it is marked as what it is: nobody's word."""
    start = len(messages)
    while start and messages[start - 1]["role"] == "tool":
        start -= 1
    if start == len(messages):
        return []
    called = messages[start - 1].get("tool_calls") or () if start else ()
    names = {call["id"]: call["function"]["name"] for call in called}
    texts = [
        f"[Result of {names.get(one['tool_call_id'], 'a tool')}]\n{text_of(one['content'])}" for one in messages[start:]
    ]
    return [{"role": "user", "content": marked("\n\n".join(texts), "the client's tools")}]
