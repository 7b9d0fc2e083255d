"""Builds what the model is sent: the system prompt, the history, the current message."""

from __future__ import annotations

import logging
import os
import platform
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..log import day_in_words
from ..messages import Message, assistant_message, tool_message, user_message
from ..sandbox.reach import OutOfReach, Reach
from ..text import clean
from .pictures import user_content
from .skills import BUDGET, Skills, named

log = logging.getLogger(__name__)

BOOTSTRAP_FILES = ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md", "IDENTITY.md")
PARTING = "\n\n---\n\n"
HEARTBEAT_FILE = "HEARTBEAT.md"
MEMORY_FILE = "memory/MEMORY.md"
FILE_LIMIT = 64_000  # characters of one file in the prompt
MEMORY_LIMIT = 16_000  # and of the memory


class ContextBuilder:
    """The prompt of one workspace. The same files give the same bytes, and files are only read when they changed."""

    def __init__(
        self,
        workspace: str | Path,
        name: str = "Everloop",
        reach: Callable[[], Reach] | None = None,
        *,
        memory_limit: int = MEMORY_LIMIT,
        skills_limit: int = BUDGET,
    ) -> None:
        """`reach` says which files may be read for the prompt; it is asked off the event loop."""
        self.workspace = Path(workspace)
        self.name = name
        self.skills = Skills(self.workspace, budget=skills_limit)
        self._reach = reach or (lambda: Reach(self.workspace, restricted=False))
        self._files = [(f"## {name}", name, FILE_LIMIT) for name in BOOTSTRAP_FILES]
        self._files.append(("## Memory", MEMORY_FILE, memory_limit))
        self._texts: dict[str, tuple[tuple[int, ...], str]] = {}
        self._identity = ""
        self._problems: list[str] = []

    def build_system_prompt(self, began: float | None = None) -> str:
        """Identity, bootstrap files, memory, skills, and last of all when the conversation began, by default now:
        parted by `---`."""
        return self.dated(self.standing_prompt(), time.time() if began is None else began)

    def dated(self, standing: str, began: float) -> str:
        """The system prompt of one conversation. It stays as it is for as long as the conversation lives, and is the
        same for all that begin on one day: local servers need not read the tools again, which many chat templates put
        behind it. The time of later messages is told with them."""
        return f"{standing}{PARTING}This conversation began on {day_in_words(began)}."

    def standing_prompt(self) -> str:
        """What all conversations of the workspace begin with. It looks at the disk: call it in a thread."""
        self._identity = self._identity or self._introduce()
        blocks, reach = [self._identity], self._reach()
        blocks += [f"{title}\n\n{text}" for title, path, most in self._files if (text := self._text(path, most, reach))]
        blocks += self.skills.blocks(reach)
        self._report(self.skills.problems())
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
        return user_content(text, media or ())

    def heartbeat_file(self) -> str:
        """The text of HEARTBEAT.md, "" when there is none. It looks at the disk: call it in a thread."""
        return self._text(HEARTBEAT_FILE, FILE_LIMIT, self._reach())

    def skills_in(self, text: str) -> str:
        """The skills that a text names as `$name`, whole. It looks at the disk: call it in a thread."""
        names = named(text)
        reach = self._reach() if names else None
        skills = [self.skills.load(name, reach) for name in names] if reach is not None else []
        return "\n\n".join(f"[The skill that was asked for:]\n\n{skill}" for skill in skills if skill is not None)

    def _report(self, problems: list[str]) -> None:
        """Tell whoever runs the agent what is wrong, once."""
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s", problem)
        self._problems = problems

    def _introduce(self) -> str:
        return (
            f"# {self.name}\n\n"
            f"You are {self.name}, a helpful agent. You work with tools and then answer the user.\n"
            f"Workspace: {self.workspace.resolve()}\n"
            f"Time zone: {time.strftime('%Z (UTC%z)')}\n"
            f"Runtime: {platform.system()} {platform.machine()}, Python {platform.python_version()}"
        )

    def _text(self, path: str, limit: int, reach: Reach) -> str:
        """The file's text, read again only when it changed; "" when there is none that can be read.

        A command of the agent may have put anything there: a link to a file out of its reach, a pipe, a file without
        an end.
        """
        if not os.path.lexists(f"{self.workspace}/{path}"):
            return ""
        try:
            with reach.open(path) as opened:
                info = os.fstat(opened.descriptor)
                version = (info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino)
                known = self._texts.get(path)
                if known is not None and known[0] == version:
                    return known[1]
                if not stat.S_ISREG(info.st_mode):
                    return ""
                with open(opened.descriptor, "rb", closefd=False) as file:
                    text = file.read(4 * limit + 4).decode("utf-8", "replace").strip()
        except (OSError, OutOfReach):
            return ""
        if len(text) > limit:
            text = f"{text[:limit]}\n[cut: {os.path.basename(path)} is longer than {limit} characters]"
        self._texts[path] = (version, text)
        return text
