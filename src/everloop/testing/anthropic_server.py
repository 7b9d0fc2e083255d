"""A real HTTP server that speaks Anthropic's Messages API and returns scripted answers: see `openai_server`.

It validates requests as the API does, and simulates a prompt cache, so that its usage reports what was read from it.

    python -m everloop.testing.anthropic_server --port 0
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from ..messages import encode_json
from .anthropic_request import blocks_of, check_request
from .replies import Reply, text_of, written
from .scripted import words
from .server import FakeServer, Seen, as_json, run

__all__ = ["FakeAnthropic", "Reply", "Seen"]

LOOK_BACK = 20  # number of blocks before a marker in which an older marker's prefix is found
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class FakeAnthropic(FakeServer):
    """The server: each request of `/v1/messages` takes the next queued reply; without one, the model's name decides."""

    path = "/v1/messages"

    def __init__(self, *, port: int = 0, keep_bodies: bool = True) -> None:
        super().__init__(port=port, keep_bodies=keep_bodies)
        self._cached: set[bytes] = set()

    def refuse(self, request: web.Request) -> web.Response | None:
        if not (request.headers.get("x-api-key") or request.headers.get("Authorization")):
            return as_json(self.error("x-api-key header is required", 401), 401)
        if not request.headers.get("anthropic-version"):
            return as_json(self.error("anthropic-version: header is required"), 400)
        return None

    def check(self, body: dict[str, Any]) -> list[str]:
        return check_request(body)

    def plain(self, body: dict[str, Any]) -> list[Any]:
        plain: list[Any] = []
        for message in body.get("messages") or ():
            content = message.get("content") if isinstance(message, dict) else None
            kinds = (
                [block.get("type") for block in content if isinstance(block, dict)] if isinstance(content, list) else []
            )
            if "tool_use" in kinds:
                plain.append({"role": "assistant", "tool_calls": kinds})
            elif text_of(content) or "tool_result" not in kinds:
                plain.append(message)
        return plain

    def offered(self, body: dict[str, Any]) -> dict[str, Any]:
        if (body.get("tool_choice") or {}).get("type") == "none":
            return {}
        return {tool["name"]: tool["input_schema"] for tool in body.get("tools") or ()}

    def error(self, message: str, status: int = 400, code: str | None = None) -> Any:
        return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}

    def models(self) -> Any:
        return {"data": [{"type": "model", "id": "tools-1x1", "display_name": "a script"}], "has_more": False}

    def events(self, reply: Reply, tokens: list[str], body: dict[str, Any], size: int) -> list[bytes]:
        """Yield events as the API sends them; a block is opened before its first chunk and closed after its last."""
        usage = {**self._usage(body), "output_tokens": 1}
        message = {**_head(body), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        chunks = [event("message_start", message=message) + event("ping")]
        for index, (block, pieces) in enumerate(_blocks(reply, tokens)):
            deltas = [event("content_block_delta", index=index, delta=piece) for piece in pieces] or [b""]
            deltas[0] = event("content_block_start", index=index, content_block=block) + deltas[0]
            deltas[-1] += event("content_block_stop", index=index)
            chunks += deltas
        stop = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        chunks.append(event("message_delta", delta=stop, usage={"output_tokens": written(reply, tokens)}))
        return [*chunks, event("message_stop")]

    def whole(self, reply: Reply, tokens: list[str], body: dict[str, Any], size: int) -> Any:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": "c2lnbmVk"})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        content += [{**_call(call), "input": call.arguments} for call in reply.calls]
        usage = {**self._usage(body), "output_tokens": written(reply, tokens)}
        end = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        return {**_head(body), "content": content, **end, "usage": usage}

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        """Return the usage of this request, and update the cache: the prefix up to each marker."""
        sizes, prefixes, marks = [0], [b""], []
        state = hashlib.blake2b()
        for part in _cacheable(body):
            data = encode_json({key: value for key, value in part.items() if key != "cache_control"})
            state.update(data)
            sizes.append(sizes[-1] + len(data) // 4)
            prefixes.append(state.digest())
            if "cache_control" in part:
                marks.append(len(prefixes) - 1)
        known = [
            at for mark in marks for at in range(mark, max(mark - LOOK_BACK, 0), -1) if prefixes[at] in self._cached
        ]
        read, until = sizes[max(known, default=0)], sizes[marks[-1]] if marks else 0
        self._cached.update(prefixes[mark] for mark in marks)
        return {
            "input_tokens": sizes[-1] - max(read, until),
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": max(until - read, 0),
        }


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **fields}))


def _cacheable(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks, preceded by everything that invalidates the cached messages if it changes."""
    parts = list(blocks_of({**body, "messages": []}))
    settings = {"model": body.get("model"), "thinking": body.get("thinking"), "choice": body.get("tool_choice")}
    return [*parts, settings, *blocks_of({"messages": body["messages"]})]


def _blocks(reply: Reply, tokens: list[str]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return each block as it is opened, with the chunks that follow."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if reply.reasoning:
        pieces = [{"type": "thinking_delta", "thinking": word} for word in words(reply.reasoning)]
        signature = {"type": "signature_delta", "signature": "c2lnbmVk"}
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, [*pieces, signature]))
    if tokens:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": token} for token in tokens]))
    for call in reply.calls:
        text = encode_json(call.arguments).decode()
        halves = ("", text[: len(text) // 2], text[len(text) // 2 :])
        blocks.append(
            ({**_call(call), "input": {}}, [{"type": "input_json_delta", "partial_json": half} for half in halves])
        )
    return blocks


def _call(call: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": re.sub(r"[^A-Za-z0-9_-]", "_", call.id), "name": call.name}


def _head(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "msg_fake", "type": "message", "role": "assistant", "model": body.get("model")}


def _stop_reason(reply: Reply) -> str:
    return reply.finish_reason or ("tool_use" if reply.calls else "end_turn")


def main(arguments: Sequence[str] | None = None) -> int:
    return run(FakeAnthropic, "anthropic_server", "A fake Anthropic API.", arguments)


if __name__ == "__main__":
    sys.exit(main())
