"""The commands that work in every chat."""

from __future__ import annotations

from typing import Literal

from .bus import Kind

Name = Literal["stop", "new", "help", "status"]

COMMANDS: dict[Name, str] = {
    "stop": "stop the running turn and its tools",
    "new": "start a new conversation (the old one stays readable)",
    "status": "show the model, the session and what is running",
    "help": "show this",
}
# These are answered at once; the others wait for their place in the session.
URGENT: frozenset[Name] = frozenset({"stop", "help", "status"})

HELP = "\n".join(f"/{name}  {what}" for name, what in COMMANDS.items())


def command_of(text: str) -> Name | None:
    """The command that a message is, if it is one: a slash, a name, and nothing after it."""
    word = text.strip().lower()
    if not word.startswith("/"):
        return None
    name = word[1:].partition("@")[0]  # group chats write /stop@botname
    for known in COMMANDS:
        if name == known:
            return known
    return None


def kind_of(text: str) -> Kind:
    """How a message enters the inbox."""
    name = command_of(text)
    if name is None:
        return "message"
    return "urgent" if name in URGENT else "command"
