"""Replies of a fake model server: queued by a test, or scripted by the model's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..providers.base import ToolCallRequest

MARK = re.compile(r"mark:([A-Za-z0-9_.-]+)")
SCRIPT = re.compile(r"(?:.*/)?tools-(\d+)x(\d+)((?:-[dtnf]\w+)*)")


@dataclass(slots=True)
class Reply:
    """One answer of the server. The fields from `status` on deliberately break the contract."""

    text: str | None = None
    calls: list[ToolCallRequest] = field(default_factory=list)
    reasoning: str | None = None
    finish_reason: str | None = None
    tokens: list[str] | None = None  # the chunks of a streamed text; words by default
    delay: float = 0.0  # seconds before the first byte
    token_delay: float = 0.0
    status: int = 200
    body: Any = None  # sent verbatim (bytes) or as JSON
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None  # a streamed body, sent verbatim
    piece: int = 0  # bytes of `raw` per write; all at once if 0
    cut_after: int | None = None  # chunks after which the connection is cut
    hang_after: int | None = None  # chunks after which the server stalls for `hang` seconds
    hang: float = 0.0


def read_state(messages: Sequence[Any]) -> tuple[str, int]:
    """Return the marker of the open turn, and the number of its completed rounds."""
    rounds, since_user = 0, -1
    for message in reversed(messages):
        if not isinstance(message, dict):
            continue
        if message.get("role") == "assistant" and message.get("tool_calls"):
            rounds += 1
        elif message.get("role") == "user":
            if since_user < 0:
                since_user = rounds
            if marks := MARK.findall(text_of(message.get("content"))):
                return marks[-1], rounds
    return "?", max(since_user, 0)


def follow_script(name: str, offered: dict[str, Any], place: int, marker: str, round: int) -> Reply:
    """Return the scripted answer of a model at this point of the turn; `offered` are the tools' schemas."""
    script = SCRIPT.fullmatch(name)
    if script is None:
        raise LookupError(f"the model {name!r} does not exist: queue a reply, or name a script like tools-2x1")
    rounds, width = int(script[1]), int(script[2])
    options = {option[0]: option[1:] for option in script[3].split("-")[1:]}
    reply = Reply(delay=int(options.get("d", 0)) / 1000, token_delay=int(options.get("t", 0)) / 1000)
    if round >= rounds or not offered:
        reply.tokens = [f"done:{marker}", *[" token"] * (int(options.get("n", 1)) - 1)]
        reply.text = "".join(reply.tokens)
        return reply
    tool = options.get("f", "echo")
    if tool not in offered:
        raise ValueError(f"the model wants to call {tool}, but is only offered {', '.join(offered)}")
    reply.calls = [
        ToolCallRequest(f"call_{marker}_{place}_{i}", tool, _arguments(offered[tool], f"{marker}/{round}/{i}"))
        for i in range(width)
    ]
    return reply


def written(reply: Reply, tokens: list[str]) -> int:
    """Return the number of tokens in an answer."""
    return len(tokens) + 8 * len(reply.calls)


def _arguments(schema: dict[str, Any], tag: str) -> dict[str, str]:
    """Put the tag into `text`, or into every required argument of a tool without a `text`."""
    known, required = schema.get("properties") or {}, schema.get("required") or ()
    if "text" in known or not (known or required):
        return {"text": tag}
    return dict.fromkeys(required, tag)


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
