"""Build the messages for the model: the system prompt, the history, the current message."""

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
from ..messages import Conversation, Message, assistant_message, tool_message, user_message
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
MEMORY_LIMIT = 16_000  # characters of the memory in the prompt


class ContextBuilder:
    """Builds the prompt of one workspace. Same files, same bytes; a file is reread only if it has changed."""

    def __init__(
        self,
        workspace: str | Path,
        name: str = "Everloop",
        reach: Callable[[], Reach] | None = None,
        *,
        memory_limit: int = MEMORY_LIMIT,
        skills_limit: int = BUDGET,
        trusted: bool = True,
    ) -> None:
        """`reach` returns which files may be read for the prompt; it is called in a thread.

        Without `trusted`, no file of the workspace is used: no instructions, memory, skills or heartbeat.
        """
        self.workspace = Path(workspace).absolute()
        self.name = name
        self.trusted = trusted
        self.skills = Skills(self.workspace, budget=skills_limit, trusted=trusted)
        self._reach = reach or (lambda: Reach(self.workspace, restricted=False))
        self._files = [(f"## {name}", name, FILE_LIMIT) for name in BOOTSTRAP_FILES]
        self._files.append(("## Memory", MEMORY_FILE, memory_limit))
        self._texts: dict[str, tuple[tuple[int, ...], str]] = {}
        self._identity = ""
        self._problems: list[str] = []

    def build_system_prompt(self, began: float | None = None) -> str:
        """Return the system prompt: identity, bootstrap files, memory, skills, and last the day on which the
        conversation began, by default today; separated by `---`."""
        return self.dated(self.standing_prompt(), time.time() if began is None else began)

    def dated(self, standing: str, began: float) -> str:
        """Return the system prompt of one conversation.

        It does not change during the conversation, and is the same for all that begin on the same day, so that a local
        server need not process the tools again, which many chat templates put after it. Later messages carry their own
        time.
        """
        return f"{standing}{PARTING}This conversation began on {day_in_words(began)}."

    def shared_prompt(self) -> str:
        """Return the part of the prompt that all conversations share; the whole prompt if a subclass builds it.

        Reads the disk: call it in a thread.
        """
        return clean(self.build_system_prompt()) if self._builds("build_system_prompt") else self.standing_prompt()

    def conversation_prompt(self, shared: str, began: float) -> str:
        """Return the system prompt of a conversation, given the shared part."""
        return shared if self._builds("build_system_prompt") else self.dated(shared, began)

    @property
    def builds_messages(self) -> bool:
        """Return whether a subclass builds the requests."""
        return self._builds("build_messages")

    def _builds(self, method: str) -> bool:
        """Return whether a subclass, or this object, overrides the method."""
        return method in self.__dict__ or getattr(type(self), method) is not getattr(ContextBuilder, method)

    def standing_prompt(self) -> str:
        """Return the part of the prompt that all conversations share. Reads the disk: call it in a thread."""
        self._identity = self._identity or self._introduce()
        blocks, reach = [self._identity], self._reach()
        blocks += [f"{title}\n\n{text}" for title, path, most in self._files if (text := self._text(path, most, reach))]
        blocks += self.skills.blocks(reach)
        self._report(self.skills.problems())
        return clean(PARTING.join(blocks))  # a path may contain bytes that are not text

    def build_messages(
        self, history: Sequence[Message], current_message: str, media: Sequence[str] | None = None
    ) -> list[Message]:
        """Return all messages of a request: system prompt, history, current message."""
        system: Message = {"role": "system", "content": self.build_system_prompt()}
        return [system, *history, user_message(self.user_content(current_message, media))]

    def add_assistant_message(
        self, messages: list[Message], content: str | None, tool_calls: Sequence[dict[str, Any]] | None = None
    ) -> list[Message]:
        """Append an assistant message; `tool_calls` are in the wire format."""
        message = assistant_message(content)
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        messages.append(message)
        return messages

    def add_tool_result(self, messages: list[Message], tool_call_id: str, name: str, result: str) -> list[Message]:
        messages.append(tool_message(tool_call_id, name, result))
        return messages

    def user_content(self, text: str, media: Sequence[str] | None = None) -> str | list[dict[str, Any]]:
        """Return the text, preceded by its pictures if it has any; other files are named by their paths."""
        return user_content(text, media or ())

    def heartbeat_file(self) -> str:
        """Return the text of HEARTBEAT.md, "" if there is none. Reads the disk: call it in a thread."""
        return self._text(HEARTBEAT_FILE, FILE_LIMIT, self._reach())

    def skills_in(self, text: str) -> str:
        """Return the full text of the skills that a message names as `$name`. Reads the disk: call it in a thread."""
        names = named(text)
        reach = self._reach() if names else None
        skills = [self.skills.load(name, reach) for name in names] if reach is not None else []
        return "\n\n".join(f"[The skill that was asked for:]\n\n{skill}" for skill in skills if skill is not None)

    def _report(self, problems: list[str]) -> None:
        """Log each problem once."""
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
        """Return the file's text, reread only if it has changed; "" if it is missing or cannot be read.

        A command of the agent may have put anything there: a link to an inaccessible file, a pipe, an endless file.
        """
        # checked first: most of these files are missing, and the error for that costs several times as much
        if not self.trusted or not os.access(f"{self.workspace}/{path}", os.F_OK):
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


class Composer:
    """Builds the requests of one turn with a subclass's `build_messages`, and appends the turn's later rounds.

    The result of `build_messages` is kept for all rounds of the turn, so that they share their prefix.
    """

    def __init__(self, builder: ContextBuilder, current: Message, text: str, media: Sequence[str]) -> None:
        """`current` is the turn's first message in the log; `text` and `media` are what the user sent."""
        self._builder = builder
        self._current = current
        content = current.get("content")
        self._text = content if isinstance(content, str) else text
        self._media = list(media) or None
        self._history: list[Message] = []
        self._built: list[Message] | None = None

    def __call__(self, conversation: Conversation) -> Conversation:
        """Return the messages of the next request. May read the disk: call it in a thread."""
        place = next((n for n in range(len(conversation) - 1, 0, -1) if self._is_current(conversation[n])), None)
        if place is None:  # it has become part of a summary
            return conversation
        history = conversation[1:place]
        if self._built is None or history != self._history:
            self._built = self._builder.build_messages(list(history), self._text, self._media)
            self._history = history
        made = Conversation([*self._built, *conversation[place + 1 :]], blind=conversation.blind)
        made.untrusted, made.call_ids = conversation.untrusted, conversation.call_ids
        if len(made) == len(conversation):
            made.own_words = conversation.own_words
        return made

    def _is_current(self, message: Message) -> bool:
        return message is self._current or message == self._current
