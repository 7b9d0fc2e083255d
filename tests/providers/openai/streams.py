"""Parts of a stream, and what a subscriber sees of it."""

from __future__ import annotations

import json
from typing import Any

from everloop.providers.base import Delta, LLMResponse
from tests.support.waiting import until as until

ASK = [{"role": "user", "content": "hello"}]
ECHO = [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}]


async def watch(provider: Any, messages: Any = ASK, tools: Any = None, model: Any = None) -> tuple[list[Delta], Any]:
    """Return everything that a stream shows, and its answer."""
    items: list[Any] = [item async for item in provider.stream(messages, tools, model)]
    assert isinstance(items[-1], LLMResponse)
    assert all(isinstance(item, Delta) for item in items[:-1])
    return items[:-1], items[-1]


def sse(*chunks: Any, done: bool = True, end: str = "\n\n") -> bytes:
    """A stream of these chunks; a dict without choices is a delta."""
    lines = []
    for chunk in chunks:
        if isinstance(chunk, dict) and not {"choices", "error", "usage"} & chunk.keys():
            chunk = {"choices": [{"index": 0, "delta": chunk}]}
        lines.append("data: " + (chunk if isinstance(chunk, str) else json.dumps(chunk)))
    if done:
        lines.append("data: [DONE]")
    return "".join(line + end for line in lines).encode()


def piece(index: int | None = None, id: str | None = None, name: str | None = None, arguments: Any = None) -> dict:
    """A delta with a piece of one tool call."""
    made: dict[str, Any] = {"function": {"name": name, "arguments": arguments}, "id": id}
    if index is not None:
        made["index"] = index
    return {"tool_calls": [made]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
