"""Parts of a stream, and requests without the cache markers."""

from __future__ import annotations

import json
from typing import Any

from everloop.testing.anthropic_server import event
from tests.providers.openai.streams import ASK, ECHO, until, watch

__all__ = [
    "ASK",
    "ECHO",
    "SECRET",
    "begin",
    "end",
    "event",
    "message",
    "piece",
    "sse",
    "text",
    "unmarked",
    "until",
    "watch",
]

SECRET = "sk-ant-canary-4711"


def begin(index: int, kind: str, **fields: Any) -> bytes:
    return event("content_block_start", index=index, content_block={"type": kind, **fields})


def piece(index: int | None, kind: str, **fields: Any) -> bytes:
    return event("content_block_delta", index=index, delta={"type": kind, **fields})


def text(words: str) -> bytes:
    return piece(0, "text_delta", text=words)


def end(reason: str = "end_turn", **usage: int) -> bytes:
    return event("message_delta", delta={"stop_reason": reason}, usage=usage) + event("message_stop")


def sse(*events: bytes, **usage: int) -> bytes:
    """A stream of these events between a usual start and a usual end."""
    return event("message_start", message={"usage": usage}) + b"".join(events) + end()


def message(*content: Any, reason: str = "end_turn", **fields: Any) -> bytes:
    """A whole answer."""
    return json.dumps({"type": "message", "content": list(content), "stop_reason": reason, **fields}).encode()


def unmarked(value: Any) -> Any:
    """The same without cache markers."""
    if isinstance(value, dict):
        return {key: unmarked(inner) for key, inner in value.items() if key != "cache_control"}
    return [unmarked(inner) for inner in value] if isinstance(value, list) else value
