"""Builds what the model is sent: the system prompt, the history, the current message."""

from __future__ import annotations

import base64
import mimetypes
import os
import platform
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..log import in_words
from ..messages import Message, assistant_message, clean, tool_message, user_message
from ..sandbox.reach import OutOfReach, Reach

BOOTSTRAP_FILES = ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md", "IDENTITY.md")
PARTING = "\n\n---\n\n"
MEMORY_FILE = "memory/MEMORY.md"
FILE_LIMIT = 64_000  # characters of one file in the prompt
IMAGE_LIMIT = 10_000_000  # bytes of one picture


class ContextBuilder:
    """The prompt of one workspace. The same files give the same bytes, and files are only read when they changed."""

    def __init__(self, workspace: str | Path, name: str = "Everloop", reach: Callable[[], Reach] | None = None) -> None:
        """`reach` says which files may be read for the prompt; it is asked off the event loop."""
        self.workspace = Path(workspace)
        self.name = name
        self._reach = reach or (lambda: Reach(self.workspace, restricted=False))
        self._files = [(f"## {name}", name) for name in BOOTSTRAP_FILES]
        self._files.append(("## Memory", MEMORY_FILE))
        self._texts: dict[str, tuple[tuple[int, int, int], str]] = {}
        self._identity = ""

    def build_system_prompt(self, began: float | None = None) -> str:
        """Identity, bootstrap files, memory, skills, and last of all when the conversation began, by default now:
        parted by `---`."""
        return self.dated(self.standing_prompt(), time.time() if began is None else began)

    def dated(self, standing: str, began: float) -> str:
        """The system prompt of one conversation. It stays as it is for as long as the conversation lives: the time of
        later messages is told with them."""
        return f"{standing}{PARTING}This conversation began on {in_words(began)}."

    def standing_prompt(self) -> str:
        """What all conversations of the workspace begin with. It looks at the disk: call it in a thread."""
        self._identity = self._identity or self._introduce()
        blocks, reach = [self._identity], self._reach()
        blocks += [f"{title}\n\n{text}" for title, path in self._files if (text := self._text(path, reach))]
        return clean(PARTING.join(blocks))  # a path may hold bytes that are no text

    def build_messages(
        self, history: Sequence[Message], current_message: str, media: Sequence[str] | None = None
    ) -> list[Message]:
        """The whole request: system prompt, history, current message."""
        system: Message = {"role": "system", "content": self.build_system_prompt()}
        return [system, *history, user_message(self.user_content(current_message, media))]

    def add_assistant_message(
        self, messages: list[Message], content: str | None, tool_calls: Sequence[dict[str, Any]] | None = None
    ) -> list[Message]:
        """Append an assistant's message; `tool_calls` are in the wire's shape."""
        message = assistant_message(content)
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        messages.append(message)
        return messages

    def add_tool_result(self, messages: list[Message], tool_call_id: str, name: str, result: str) -> list[Message]:
        messages.append(tool_message(tool_call_id, name, result))
        return messages

    def user_content(self, text: str, media: Sequence[str] | None = None) -> str | list[dict[str, Any]]:
        """The text alone, or with its pictures before it; what is not a picture is named by its path."""
        pictures: list[dict[str, Any]] = []
        others: list[str] = []
        for path in media or ():
            mime = mimetypes.guess_type(path)[0] or ""
            if mime.startswith("image/") and (data := _read_picture(Path(path))):
                url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
                pictures.append({"type": "image_url", "image_url": {"url": url}})
            else:
                others.append(f"[attachment: {path}]")
        text = clean("\n".join([text, *others]))
        return [*pictures, {"type": "text", "text": text}] if pictures else text

    def _introduce(self) -> str:
        return (
            f"# {self.name}\n\n"
            f"You are {self.name}, a helpful agent. You work with tools and then answer the user.\n"
            f"Workspace: {self.workspace.resolve()}\n"
            f"Time zone: {time.strftime('%Z (UTC%z)')}\n"
            f"Runtime: {platform.system()} {platform.machine()}, Python {platform.python_version()}"
        )

    def _text(self, path: str, reach: Reach) -> str:
        """The file's text, read again only when it changed; "" when there is none that can be read.

        A command of the agent may have put anything there: a link to a file out of its reach, a pipe, a file without
        an end.
        """
        if not os.path.lexists(f"{self.workspace}/{path}"):
            return ""
        try:
            with reach.open(path) as opened:
                info = os.fstat(opened.descriptor)
                version = (info.st_mtime_ns, info.st_size, info.st_ino)
                known = self._texts.get(path)
                if known is not None and known[0] == version:
                    return known[1]
                if not stat.S_ISREG(info.st_mode):
                    return ""
                with open(opened.descriptor, "rb", closefd=False) as file:
                    text = file.read(4 * FILE_LIMIT + 4).decode("utf-8", "replace").strip()
        except (OSError, OutOfReach):
            return ""
        if len(text) > FILE_LIMIT:
            text = f"{text[:FILE_LIMIT]}\n[cut: {os.path.basename(path)} is longer than {FILE_LIMIT} characters]"
        self._texts[path] = (version, text)
        return text


def _read_picture(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(IMAGE_LIMIT + 1)
    except (OSError, ValueError):  # a path that cannot be one is a ValueError
        return b""
    return data if len(data) <= IMAGE_LIMIT else b""
