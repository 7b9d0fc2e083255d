"""The commands that work in every chat."""

from __future__ import annotations

from typing import Literal

from .bus import INSIDE, InboundMessage, Kind

Name = Literal["stop", "new", "compact", "help", "status", "approve", "deny"]

COMMANDS: dict[Name, str] = {
    "approve": "allow what I asked for",
    "deny": "refuse what I asked for; words after it tell me why",
    "stop": "stop the running turn and its tools",
    "new": "start a new conversation (the old one stays readable)",
    "compact": "summarise the conversation to save room; words after it say what to keep",
    "status": "show the model, the session and what is running",
    "help": "show this",
}
# These are answered at once; the others wait for their place in the session.
URGENT: frozenset[Name] = frozenset({"stop", "help", "status", "approve", "deny"})
WITH_WORDS: frozenset[Name] = frozenset({"deny", "compact"})  # may have text after them

HELP = "\n".join(f"/{name}  {what}" for name, what in COMMANDS.items())


def command_of(text: str) -> Name | None:
    """The command that a message is, if it is one: a slash, a name, and (mostly) nothing after it."""
    head, rest = (*text.split(maxsplit=1), "", "")[:2]
    if not head.startswith("/"):
        return None
    name = head[1:].lower().partition("@")[0]  # group chats write /stop@botname
    for known in COMMANDS:
        if name == known and (not rest or known in WITH_WORDS):
            return known
    return None


def meant_by(text: str) -> Name | None:
    """The command that a message of one word is a slip away from. A path is none: it goes to the model."""
    word = text.strip().lower()
    if not (word.startswith("/") and word[1:].isascii() and word[1:].isalpha()) or command_of(text) is not None:
        return None
    return next((known for known in COMMANDS if _one_slip(word[1:], known)), None)


def _one_slip(word: str, known: str) -> bool:
    """Whether one letter is missing, too many or wrong, or two have changed places."""
    if word == known or abs(len(word) - len(known)) > 1:
        return False
    start = next((n for n, (one, other) in enumerate(zip(word, known, strict=False)) if one != other), len(known))
    mine, theirs = word[start:], known[start:]
    swapped = mine[:2] == theirs[1::-1] and mine[2:] == theirs[2:]
    return swapped or mine[1:] == theirs or mine == theirs[1:] or mine[1:] == theirs[1:]


def words_after(text: str) -> str:
    """What stands after the command."""
    return "".join(text.split(maxsplit=1)[1:]).strip()


def kind_of(message: InboundMessage) -> Kind:
    """How a message enters the inbox. One from inside the system (a sub-agent's result, say) is never a command:
    what an agent wrote must not be able to approve, stop or clear anything."""
    name = command_of(message.content) if message.channel not in INSIDE else None
    if name is None:
        return "urgent" if message.channel not in INSIDE and meant_by(message.content) else "message"
    return "urgent" if name in URGENT else "command"
