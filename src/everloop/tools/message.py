"""`message`: sends a message to a chat during a turn, with files of the workspace."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..bus import PULLED, OutboundMessage
from ..sandbox.reach import normalized
from ..threads import in_thread
from .base import Plan, Tool, ToolError
from .context import current_call
from .files.paths import check_kind, explained, reach
from .outgoing import OutgoingFiles

MOST_FILES = 10

PARAMETERS = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "What to say.", "minLength": 1},
        "channel": {"type": "string", "description": "Another channel than the one you are in."},
        "chat_id": {"type": "string", "description": "Another chat than the one you are in."},
        "media": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MOST_FILES,
            "description": "Files of the workspace to send along: pictures, documents.",
        },
    },
    "required": ["content"],
}


class MessageTool(Tool):
    """Sends a message to the chat of the turn, or to another one that the settings allow."""

    name = "message"
    description = (
        "Say something in a chat now, before your final answer: by default in the chat that you are in, which gets "
        "your final answer anyway. This is also how files get to a chat."
    )
    parameters = PARAMETERS
    replay = "safe"  # the outbox accepts one message per call
    parallel = False  # keeps messages in order

    def __init__(self, allowed: Sequence[str] = (), networks: Collection[str] = (), home: Path | None = None) -> None:
        """`networks` are the channels that send files, from copies below `home`; elsewhere files are named."""
        self._allowed = tuple(allowed)
        self._networks = frozenset(networks)
        self._home = home

    async def execute(self, content: str, channel: str = "", chat_id: str = "", media: Sequence[str] = ()) -> str:
        call = current_call()
        target = self._target(channel, chat_id)
        if call.send is None or target[0] in PULLED:
            raise ToolError("There is no chat here to send a message to: put it into your final answer.")
        if target[0] in self._networks and self._home is not None:
            kept = [await in_thread(self._kept, number, path) for number, path in enumerate(media)]
        else:
            kept = [await in_thread(_checked, path) for path in media]
            content = "\n".join([content, *(f"[file: {path}]" for path in media)])
        await call.send(OutboundMessage(*target, content, media=kept))
        files = f" with {len(kept)} file{'s' if len(kept) > 1 else ''}" if kept else ""
        return f"Sent to {':'.join(target)}{files}."

    def plan(self, arguments: dict[str, Any]) -> Plan:
        call = current_call()
        target = self._target(arguments.get("channel", ""), arguments.get("chat_id", ""))
        elsewhere = target != (call.channel, call.chat_id)
        paths = tuple(normalized(path, call.workspace) for path in arguments.get("media") or ())
        lines = [f"message to {':'.join(target)}:", arguments["content"], *(f"[file: {path}]" for path in paths)]
        return Plan(shown="\n".join(lines), paths=paths, sends=elsewhere)

    def _kept(self, number: int, path: str) -> str:
        """Copy a file that the call may read, and return the path of the copy."""
        assert self._home is not None
        with explained(path), reach().open(path) as opened:
            check_kind(os.fstat(opened.descriptor), path)
            with open(opened.descriptor, "rb", closefd=False) as file:
                data = file.read()
            key = f"{current_call().owner}/{current_call().idempotency_key}/{number}"
            return OutgoingFiles(self._home).keep(key, os.path.basename(opened.real), data)

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


def _checked(path: str) -> str:
    """The real path of a file that the call may read."""
    with explained(path), reach().open(path) as opened:
        check_kind(os.fstat(opened.descriptor), path)
        return opened.real
