"""Hooks for schemathesis, so that most generated requests reach the agent."""

from __future__ import annotations

from typing import Any

import schemathesis  # type: ignore[import-not-found]


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Let the user have the last word; whatever is wrong with the messages before stays."""
    if isinstance(body, dict) and isinstance(body.get("messages"), list) and body["messages"]:
        return {**body, "messages": [*body["messages"], {"role": "user", "content": "Hello."}]}
    return body
