"""Chat requests as clients send them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from everloop.server.errors import ApiError
from everloop.server.requests import DEFAULTS, ChatRequest, read_chat

ALL = frozenset(DEFAULTS)
NONE: frozenset[str] = frozenset()
HELLO = {"role": "user", "content": "hello"}
LIMIT = 100  # messages
PIXEL = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def read(honours: frozenset[str] = ALL, **fields: Any) -> ChatRequest:
    body = json.dumps({"messages": [HELLO], **fields}).encode()
    return read_chat(body, honours=honours, messages_limit=LIMIT)


def refused(honours: frozenset[str] = ALL, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(honours, **fields)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert "\n" not in error.message
    assert error.param is None or error.param in error.message
    return error


def tool(name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(levels: int) -> dict[str, Any]:
    return {"properties": nested(levels - 1)} if levels else {}


def calls(*ids: str, content: str | None = None) -> dict[str, Any]:
    made = [{"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(id: str, content: Any = "seen") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
