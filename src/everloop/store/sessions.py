"""Sessions for programs without an event loop: a thin view of the store's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..log import Cleared, Entry, Noted, messages_of
from ..messages import Message
from ..text import clean
from .base import Store
from .location import store_at, store_path

ROLES = ("system", "developer", "user", "assistant", "tool")


class Session:
    """A conversation. `SessionManager.save` writes what was added."""

    def __init__(self, key: str, store: Store, owner: str) -> None:
        self.key = key
        self._store = store
        self._owner = owner
        self._unsaved: list[Entry] = []

    @property
    def messages(self) -> list[Message]:
        """The whole current conversation, read from the store, including unsaved messages."""
        entries = [logged.entry for logged in self._store.read_now(self._owner, self.key)]
        for entry in self._unsaved:
            entries = [] if isinstance(entry, Cleared) else [*entries, entry]
        return list(messages_of(entries))

    def add_message(self, role: str, content: Any, **extra: Any) -> None:
        if role not in ROLES:
            raise ValueError(f"the role of a message must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r}")
        content = clean(content) if isinstance(content, str) else content
        self._unsaved.append(Noted({"role": role, "content": content, **extra}))

    def get_history(self, max_messages: int | None = None) -> list[Message]:
        """Return the latest messages, starting with a user message, so that no call is separated from its result."""
        messages = self.messages
        if max_messages is None or len(messages) <= max_messages:
            return messages
        messages = messages[-max_messages:] if max_messages > 0 else []
        while messages and messages[0]["role"] != "user":
            messages.pop(0)
        return messages

    def clear(self) -> None:
        """Start a new conversation; the old one stays in the log."""
        self._unsaved.append(Cleared())

    def _save(self) -> None:
        if entries := list(self._unsaved):
            self._store.note_now(self._owner, self.key, entries)
            del self._unsaved[: len(entries)]  # only now: a failed write can be retried


class SessionManager:
    """The sessions of one owner. Its methods block until the write is on disk: do not use it in coroutines."""

    def __init__(self, workspace: str | Path | None = None, *, store: Store | None = None, owner: str = "me") -> None:
        self._store = store or store_at(store_path(workspace))
        self._owner = owner
        self._sessions: dict[str, Session] = {}

    def get_or_create(self, key: str) -> Session:
        if not key or not isinstance(key, str):
            raise ValueError(f"the key of a session must be a text such as cli:direct, not {key!r}")
        key = clean(key)
        if key not in self._sessions:
            self._sessions[key] = Session(key, self._store, self._owner)
        return self._sessions[key]

    def save(self, session: Session) -> None:
        """Write what was added to a session."""
        session._save()
