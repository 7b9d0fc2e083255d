"""`message`: sends a message to a chat during a turn."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..bus import PULLED, OutboundMessage
from .base import Plan, Tool, ToolError
from .context import current_call

PARAMETERS = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "What to say.", "minLength": 1},
        "channel": {"type": "string", "description": "Another channel than the one you are in."},
        "chat_id": {"type": "string", "description": "Another chat than the one you are in."},
    },
    "required": ["content"],
}


class MessageTool(Tool):
    """Sends a message to the chat of the turn, or to another one that the settings allow."""

    name = "message"
    description = (
        "Say something in a chat now, before your final answer: by default in the chat that you are in, which gets "
        "your final answer anyway."
    )
    parameters = PARAMETERS
    replay = "safe"  # the outbox accepts one message per call
    parallel = False  # keeps messages in order

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = tuple(allowed)

    async def execute(self, content: str, channel: str = "", chat_id: str = "") -> str:
        call = current_call()
        target = self._target(channel, chat_id)
        if call.send is None or target[0] in PULLED:
            raise ToolError("There is no chat here to send a message to: put it into your final answer.")
        await call.send(OutboundMessage(*target, content))
        return f"Sent to {':'.join(target)}."

    def plan(self, arguments: dict[str, Any]) -> Plan:
        call = current_call()
        target = self._target(arguments.get("channel", ""), arguments.get("chat_id", ""))
        elsewhere = target != (call.channel, call.chat_id)
        return Plan(shown=f"message to {':'.join(target)}:\n{arguments['content']}", sends=elsewhere)

    def _target(self, channel: str, chat_id: str) -> tuple[str, str]:
        """Return the target chat, by default that of the turn; raises a ToolError if it is not allowed."""
        call = current_call()
        if channel and channel != call.channel and not chat_id:
            raise ToolError(f"Which chat of {channel} is meant? Give chat_id too.")
        target = channel or call.channel, chat_id or call.chat_id
        allowed = any(fnmatchcase(":".join(target), pattern) for pattern in self._allowed)
        if target != (call.channel, call.chat_id) and not allowed:
            others = ", ".join(self._allowed) or "none"
            raise ToolError(
                f"{':'.join(target)} is not a chat that I may write to (allowed besides this one: {others}): leave "
                "channel and chat_id out, or ask the user to add it to message_to in the settings."
            )
        return target
