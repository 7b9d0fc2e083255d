"""The chat commands that work in every channel."""

from __future__ import annotations

from typing import Literal

import msgspec

from .bus import INSIDE, InboundMessage, Kind

Name = Literal["stop", "new", "compact", "help", "status", "approve", "deny"]

COMMANDS: dict[Name, str] = {
    "approve": "allow what I asked for (also y); /approve always (a): this session",
    "deny": "refuse what I asked for (also n); you can add a reason",
    "stop": "stop the running turn and its tools",
    "new": "start a new conversation (the old one stays readable)",
    "compact": "summarise older turns to save space; you can add what to keep",
    "status": "show the model, the session and what is running",
    "help": "show this",
}
# These are answered at once; the others wait their turn in the session.
URGENT: frozenset[Name] = frozenset({"stop", "help", "status", "approve", "deny"})
WITH_WORDS: frozenset[Name] = frozenset({"deny", "compact"})  # commands that accept text after them
ALWAYS = "always"

# These work in chat networks alone, whose channels run them.
NETWORK_COMMANDS: dict[str, str] = {
    "link": "get a code; /link CODE in another direct chat of yours lets it share this session",
    "unlink": "end that",
}


def help_text(*, in_network: bool) -> str:
    commands = [*COMMANDS.items(), *(NETWORK_COMMANDS.items() if in_network else ())]
    return "\n".join(f"/{name}  {what}" for name, what in commands)


class Answer(msgspec.Struct, frozen=True):
    """A person's answer to a question."""

    allowed: bool
    always: bool = False  # for the rest of the session
    note: str = ""  # passed on to the model


# Words that answer an open question in their session, and are ordinary messages otherwise.
REPLIES = {
    "y": Answer(True),
    "yes": Answer(True),
    "n": Answer(False),
    "no": Answer(False),
    "a": Answer(True, always=True),
    ALWAYS: Answer(True, always=True),
}


HOW_TO_ANSWER = (
    "Answer y (yes), n (no) or a (always in this session). "
    "/approve, /deny and /approve always do the same; you can add a reason after /deny."
)


def with_how_to_answer(question: str) -> str:
    """Return a question as a message to a chat, where words answer it."""
    return f"{question}\n\n{HOW_TO_ANSWER}"


def answer_of(text: str) -> Answer | None:
    """Return the answer that a message gives to an open question, as a command or a single word."""
    match command_of(text):
        case "approve":
            return Answer(True, always=bool(words_after(text)))
        case "deny":
            return Answer(False, note=words_after(text))
    return REPLIES.get(text.strip().lower())


def command_of(text: str) -> Name | None:
    """Return the command in a message, or None.

    A command is a slash and a name, with nothing after it unless it takes text.
    """
    head, rest = (*text.split(maxsplit=1), "", "")[:2]
    if not head.startswith("/"):
        return None
    name = head[1:].lower().partition("@")[0]  # group chats write /stop@botname
    for known in COMMANDS:
        if name == known and (not rest or known in WITH_WORDS or (known == "approve" and rest.lower() == ALWAYS)):
            return known
    return None


def meant_by(text: str) -> Name | None:
    """Return the command that a one-word message probably misspells. A path is not a command; it goes to the model."""
    word = text.strip().lower()
    if not (word.startswith("/") and word[1:].isascii() and word[1:].isalpha()) or command_of(text) is not None:
        return None
    return next((known for known in COMMANDS if _one_slip(word[1:], known)), None)


def _one_slip(word: str, known: str) -> bool:
    """Return whether the words differ by one missing, extra or wrong letter, or by two transposed letters."""
    if word == known or abs(len(word) - len(known)) > 1:
        return False
    start = next((n for n, (one, other) in enumerate(zip(word, known, strict=False)) if one != other), len(known))
    mine, theirs = word[start:], known[start:]
    swapped = mine[:2] == theirs[1::-1] and mine[2:] == theirs[2:]
    return swapped or mine[1:] == theirs or mine == theirs[1:] or mine[1:] == theirs[1:]


def words_after(text: str) -> str:
    """Return the text after the command."""
    return "".join(text.split(maxsplit=1)[1:]).strip()


def kind_of(message: InboundMessage) -> Kind:
    """Return how a message enters the inbox.

    A message from inside the system (a sub-agent's result, a scheduled job) is never a command: text that an agent
    wrote must not be able to approve, stop or clear anything.
    """
    if message.channel in INSIDE or message.cron is not None:
        return "message"
    if (name := command_of(message.content)) is not None:
        return "urgent" if name in URGENT else "command"
    if meant_by(message.content):
        return "urgent"
    return "reply" if not message.media and message.content.strip().lower() in REPLIES else "message"
