"""The contract that a request to Anthropic's Messages API must fulfil."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ID = re.compile(r"[A-Za-z0-9_-]+")
UNIONS = {"anyOf", "oneOf", "allOf"}
PICTURES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
KINDS = {
    "user": {"text", "image", "document", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
}
MOST_MARKERS = 4


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
    if len(marked) > MOST_MARKERS:
        problems.append(f"cache_control: {len(marked)} blocks have one, and {MOST_MARKERS} may")
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
