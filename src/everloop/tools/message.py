"""`message`: sends a message to a chat during a turn, with files of the workspace.

Files are copied to where the agent cannot change them, so that what was allowed is what is sent.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..bus import PULLED, OutboundMessage
from ..sandbox.reach import normalized
from ..text import clean
from ..threads import in_thread
from .base import Plan, Tool, ToolError
from .context import current_call
from .files.paths import check_kind, explained, reach

MAX_FILES = 10

PARAMETERS = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "What to say.", "minLength": 1},
        "channel": {"type": "string", "description": "Another channel than the one you are in."},
        "chat_id": {"type": "string", "description": "Another chat than the one you are in."},
        "media": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MAX_FILES,
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
    """Return the real path of a file that the call may read."""
    with explained(path), reach().open(path) as opened:
        check_kind(os.fstat(opened.descriptor), path)
        return opened.real


KEPT_SECONDS = 30 * 24 * 3600.0  # of a file that was never sent: its message may be a dead letter
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OutgoingFiles:
    """A folder next to the workspace, with a subfolder for each file. All methods block: call them in a thread."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "outgoing"

    def keep(self, key: str, name: str, data: bytes) -> str:
        """Copy a file durably, and return the path of the copy.

        A call that is run again has the same key, and keeps the copy that it made first.
        """
        name = re.sub(r"[/\\\x00-\x1f\x7f]+", "-", clean(name)).strip()[-100:]
        folder = self._folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        place = folder / (name if name.strip(".") else "file")
        if not place.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = folder / f".{secrets.token_hex(8)}"
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(place)
            for changed in (folder, self._folder):
                _flush(changed)
        return os.path.abspath(place)

    def read(self, path: str, most: int) -> bytes:
        """Return the content of a copy: at most one byte more than `most`. Raises OSError for anything else."""
        place = Path(path)
        if place.parent.parent != Path(os.path.abspath(self._folder)) or place.parent.name == "..":
            raise FileNotFoundError(path)
        with open(os.open(place, _FLAGS), "rb") as file:
            return file.read(most + 1)

    def forget(self, paths: Iterable[str]) -> None:
        """Delete copies that were sent."""
        for path in paths:
            place = Path(path)
            if place.parent.parent == Path(os.path.abspath(self._folder)):
                shutil.rmtree(place.parent, ignore_errors=True)

    def sweep(self) -> None:
        """Delete the copies that are too old to be sent."""
        with suppress(FileNotFoundError):
            for folder in list(self._folder.iterdir()):
                with suppress(OSError):
                    if folder.lstat().st_mtime < time.time() - KEPT_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
