"""The contract that a conversation must fulfil for OpenAI's API."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PARTS = {
    "system": {"text"},
    "developer": {"text"},
    "user": {"text", "image_url", "input_audio", "file"},
    "assistant": {"text", "refusal"},
    "tool": {"text"},
}


def check_conversation(messages: Sequence[Any], *, strict: bool = False) -> list[str]:
    """Return the problems of a request's messages, one line each; empty if they are valid.

    Stricter than some servers: call ids are unique in the whole conversation, and every call has exactly one result
    right after its message. `strict` also requires roles as the strictest chat templates do: the system prompt alone
    and first, then the user, and never two assistant messages in a row.
    """
    if not isinstance(messages, list) or not messages:
        return ["messages: must be a list with at least one message"]
    problems: list[str] = _check_roles(messages) if strict else []
    seen: set[str] = set()
    waiting: dict[str, int] = {}  # ids of calls without a result, and their positions
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in PARTS:
            problems.append(f"{where}: role {role!r} is not one of {', '.join(PARTS)}")
            continue
        problems += [f"{where}: {problem}" for problem in _check_content(role, message)]
        if role == "tool":
            id = message.get("tool_call_id")
            if not isinstance(id, str) or waiting.pop(id, None) is None:
                problems.append(f"{where}: result for {id!r}, which is not an open call")
            continue
        problems += [f"messages[{place}]: call {id!r} has no result" for id, place in waiting.items()]
        waiting = {}
        if role == "assistant" and message.get("tool_calls") is not None:
            ids, wrong = _check_calls(message["tool_calls"])
            problems += [f"{where}: {problem}" for problem in wrong]
            problems += [f"{where}: call id {id!r} occurs in the conversation twice" for id in ids if id in seen]
            seen.update(ids)
            waiting = dict.fromkeys(ids, at)
    return problems + [f"messages[{place}]: call {id!r} has no result" for id, place in waiting.items()]


def _check_roles(messages: Sequence[Any]) -> list[str]:
    """Return the problems in the order of roles. Consecutive user messages are allowed."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    before: dict[Any, set[Any]] = {
        "system": set(),
        "user": {"system", "user", "assistant", "tool"},
        "assistant": {"user", "tool"},
        "tool": {"assistant", "tool"},
    }
    return [
        f"messages[{at}]: a {role!r} message cannot follow {last!r}"
        for at, (last, role) in enumerate(zip([None, *roles], roles, strict=False))
        if last not in before.get(role, ()) and not (at == 0 and role in ("system", "user"))
    ]


def _check_content(role: str, message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return []
    if content is None:
        if role == "assistant" and (message.get("tool_calls") or message.get("refusal")):
            return []
        return [f"a {role} message must have content"]
    if not isinstance(content, list) or not content:
        return [f"content must be a string or a list of parts, not {type(content).__name__}"]
    return [problem for part in content if (problem := _check_part(role, part))]


def _check_part(role: str, part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS[role]:
        return f"a {role} message cannot have a part of type {kind!r}"
    value = part.get(kind)
    if kind == "image_url":
        value = value.get("url") if isinstance(value, dict) else None
    if kind in ("text", "refusal", "image_url") and not isinstance(value, str):
        return f"a part of type {kind} must contain a string"
    return None


def _check_calls(calls: Any) -> tuple[list[str], list[str]]:
    """Return the ids of a message's calls, and the problems of the calls."""
    if not isinstance(calls, list) or not calls:
        return [], ["tool_calls must be a list with at least one call"]
    ids: list[str] = []
    wrong: list[str] = []
    for call in calls:
        call = call if isinstance(call, dict) else {}
        function: Any = call.get("function")
        function = function if isinstance(function, dict) else {}
        id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
        if not isinstance(id, str) or not id:
            wrong.append(f"call id {id!r} is not a string")
            continue
        if id in ids:
            wrong.append(f"call id {id!r} occurs in one message twice")
        ids.append(id)
        if call.get("type") != "function":
            wrong.append(f"call {id}: type {call.get('type')!r} is not 'function'")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            wrong.append(f"call {id}: {name!r} is not a valid tool name")
        if not isinstance(arguments, str) or not _is_object(arguments):
            wrong.append(f"call {id}: arguments must be a JSON object in a string, not {arguments!r:.100}")
    return ids, wrong


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
