"""A real HTTP server that speaks Anthropic's Messages API and returns scripted answers: see `openai_server`.

It validates requests as the API does, and simulates a prompt cache, so that its usage reports what was read from it.

    python -m everloop.testing.anthropic_server --port 0
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from ..messages import encode_json
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


# -------------------------------------------------------------------------------------------- the contract

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ID = re.compile(r"[A-Za-z0-9_-]+")
UNIONS = {"anyOf", "oneOf", "allOf"}
PICTURES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
KINDS = {
    "user": {"text", "image", "document", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
}
MAX_MARKERS = 4


def check_request(body: dict[str, Any]) -> list[str]:
    """Return the problems of a request, one line each; empty if it is valid.

    As strict as the API, and stricter where the API repairs requests itself: roles must alternate.
    """
    problems: list[str] = []
    if not isinstance(body.get("model"), str) or not body["model"]:
        problems.append("model: a name is required")
    if type(body.get("max_tokens")) is not int or body["max_tokens"] < 1:
        problems.append("max_tokens: a positive integer is required")
    problems += _check_system(body.get("system"))
    problems += _check_tools(body.get("tools"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return [*problems, "messages: at least one message is required"]
    problems += _check_messages(messages)
    if any(_kinds(message) & {"tool_use", "tool_result"} for message in messages) and not body.get("tools"):
        problems.append("tools: a request with tool_use or tool_result blocks must define tools")
    problems += _check_thinking(body, messages)
    marked = [block for block in blocks_of(body) if "cache_control" in block]
    if len(marked) > MAX_MARKERS:
        problems.append(f"cache_control: {len(marked)} blocks have one, and {MAX_MARKERS} may")
    if any(block["cache_control"].get("type") != "ephemeral" for block in marked):
        problems.append("cache_control: the type must be ephemeral")
    return problems


def blocks_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield everything that can be cached, in caching order."""
    for part in (body.get("tools"), body.get("system"), *(_content(m) for m in body.get("messages") or ())):
        yield from (block for block in part or () if isinstance(block, dict))


def _content(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _kinds(message: Any) -> set[Any]:
    return {block.get("type") for block in _content(message) or () if isinstance(block, dict)}


def _check_system(system: Any) -> list[str]:
    if system is None or isinstance(system, str):
        return []
    if not isinstance(system, list):
        return ["system: must be a string or a list of text blocks"]
    return [f"system.{at}: {wrong}" for at, block in enumerate(system) if (wrong := _check_block(block, {"text"}))]


def _check_tools(tools: Any) -> list[str]:
    problems, seen = [], set()
    for at, tool in enumerate(tools or ()):
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in seen:
            problems.append(f"tools.{at}.name: {name!r} is not a valid name, or is a duplicate")
        seen.add(name)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            problems.append(f"tools.{at}.input_schema: the type must be object")
        elif UNIONS & schema.keys():
            problems.append(f"tools.{at}.input_schema: no oneOf, allOf or anyOf at the top level")
        if extra := tool.keys() - {"name", "description", "input_schema", "cache_control", "type"}:
            problems.append(f"tools.{at}: {', '.join(sorted(extra))} is not allowed")
    return problems


def _check_messages(messages: list[Any]) -> list[str]:
    problems: list[str] = []
    seen: set[str] = set()
    waiting: list[str] = []  # ids of the calls in the preceding message
    side = "user"
    for at, message in enumerate(messages):
        where, role = f"messages.{at}", message.get("role") if isinstance(message, dict) else None
        if role != side:
            problems.append(f"{where}: role {role!r}, expected {side}")
        if role not in KINDS:
            continue
        side = "assistant" if role == "user" else "user"
        content = _content(message)
        if not isinstance(content, list) or not content:
            problems.append(f"{where}: content must not be empty")
            content = []
        problems += [
            f"{where}.{n}: {wrong}" for n, one in enumerate(content) if (wrong := _check_block(one, KINDS[role]))
        ]
        problems += [f"{where}: {wrong}" for wrong in _check_results(content, waiting)]
        waiting = [
            str(block.get("id")) for block in content if isinstance(block, dict) and block.get("type") == "tool_use"
        ]
        problems += [f"{where}: duplicate call id {id!r}" for id in waiting if id in seen]
        seen.update(waiting)
    if waiting:
        problems.append(f"messages: calls {waiting} have no results")
    last = (_content(messages[-1]) or [{}])[-1]
    if side == "user" and last.get("type") == "text" and last.get("text", "") != last.get("text", "").rstrip():
        problems.append("messages: the last assistant text must not end in whitespace")
    return problems


def _check_results(content: list[Any], waiting: list[str]) -> list[str]:
    """Return the problems of the results: they come first in the message right after their calls, each exactly once."""
    kinds = [block.get("type") for block in content if isinstance(block, dict)]
    ids = [
        block.get("tool_use_id") for block in content if isinstance(block, dict) and block.get("type") == "tool_result"
    ]
    problems = []
    if kinds[: len(ids)] != ["tool_result"] * len(ids):
        problems.append("results must come first")
    if sorted(map(str, ids)) != sorted(map(str, waiting)):
        problems.append(f"results for {ids}, but the preceding calls were {waiting}")
    return problems


def _check_block(block: Any, kinds: set[str]) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in kinds:
        return f"a block of type {kind!r} is not allowed here"
    if kind == "text" and not (isinstance(block.get("text"), str) and block["text"].strip()):
        return "a text must not be empty"
    if kind == "tool_use":
        if not isinstance(block.get("id"), str) or not ID.fullmatch(block["id"]):
            return f"id {block.get('id')!r} contains characters that are not allowed in an id"
        if not isinstance(block.get("name"), str) or not NAME.fullmatch(block["name"]):
            return f"{block.get('name')!r} is not a valid tool name"
        return None if isinstance(block.get("input"), dict) else "input must be an object"
    if kind == "tool_result" and isinstance(block.get("content"), list):
        return next((wrong for one in block["content"] if (wrong := _check_block(one, {"text", "image"}))), None)
    return _check_picture(block.get("source")) if kind == "image" else None


def _check_picture(source: Any) -> str | None:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return None if str(source.get("url")).startswith(("http://", "https://")) else "an image needs a URL"
    if kind != "base64" or source.get("media_type") not in PICTURES:
        return "an image needs a source of a known type"
    try:
        base64.b64decode(source.get("data"), validate=True)
    except (ValueError, TypeError):
        return "an image must be base64"
    return None


def _check_thinking(body: dict[str, Any], messages: list[Any]) -> list[str]:
    thinking = body.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return []
    problems, budget = [], thinking.get("budget_tokens")
    if type(budget) is not int or not 1024 <= budget < (body.get("max_tokens") or 0):
        problems.append("thinking.budget_tokens: at least 1024, and less than max_tokens")
    if body.get("temperature", 1) != 1:
        problems.append("temperature: may only be 1 when thinking is enabled")
    if messages[-1].get("role") == "assistant":
        problems.append("messages: with thinking, the last message must be the user's")
    if "tool_result" in _kinds(messages[-1]) and len(messages) > 1:
        first = (_content(messages[-2]) or [{}])[0]
        if first.get("type") not in ("thinking", "redacted_thinking"):
            problems.append(
                "messages: with thinking, the calls before the last results must begin with a thinking block"
            )
    return problems


if __name__ == "__main__":
    sys.exit(main())
