"""The commands of the chat in the terminal, in addition to those that every chat has."""

from __future__ import annotations

import re

from ..commands import COMMANDS, command_of

LOCAL: dict[str, str] = {
    "model": "show the model; /model NAME switches to another one in this chat",
    "sessions": "list the sessions, and choose one",
    "resume": "continue another session: its key, its number, or words of its title",
    "rename": "give this session a title",
    "pair": "admit a person of a chat network, by the code they got: /pair CODE",
    "export": "write this session to a file, without secrets: [md|jsonl|html] [FILE]",
    "diff": "show what the last turn changed in the workspace",
    "undo": "undo what the last turn changed in the workspace",
    "cost": "show the tokens and the cost of this session",
    "context": "show how full the model's window is",
    "show": "show a tool call in full: /show 3, or the latest (also Ctrl-O)",
    "exit": "leave (also quit, Ctrl-D); a running turn continues at the next start",
}
KEYS: dict[str, str] = {
    "@file": "attach a file of the workspace; Tab completes its path",
    "!command": "run a command in the sandbox; the agent sees its output",
    "Alt-Enter": "start a new line (also Ctrl-J, or \\ before Enter)",
    "Tab": "complete a command or a file",
    "Ctrl-R": "search your input history, including earlier chats",
    "Ctrl-O": "show the latest tool call in full",
    "Ctrl-C": "stop the running turn; twice when idle leaves",
}
_WORD = re.compile(r"/([A-Za-z][\w-]*)(?:\s|$)")


def local_command(line: str) -> tuple[str, str] | None:
    """Return the terminal command that a line is, and what follows it."""
    found = _WORD.match(line)
    if found is None or (name := found[1].lower()) not in LOCAL:
        return None
    return name, line[found.end() :].strip()


def unknown_command(line: str) -> str | None:
    """Return what to tell a user whose line looks like a command and is none. A path, with a second slash, is a
    message.
    """
    found = _WORD.match(line)
    if found is None or command_of(line) is not None or (name := found[1].lower()) in LOCAL:
        return None
    if name in COMMANDS:
        return f"/{name} takes no arguments."
    from difflib import get_close_matches

    close = get_close_matches(name, [*COMMANDS, *LOCAL], 1, 0.5)
    meant = f"did you mean /{close[0]}? " if close else ""
    return f"There is no command /{name}: {meant}/help lists them. Start with a space to send it as a message."


def plain_refusal(line: str) -> str | None:
    """Return what to tell a user without a full terminal whose line looks like a command that does not work there."""
    if (local := local_command(line)) is not None:
        return f"/{local[0]} works only in a terminal that can move its cursor."
    return unknown_command(line)


def help_text() -> str:
    """Return all commands and keys, in two columns."""
    commands = [(f"/{name}", text) for name, text in (*COMMANDS.items(), *LOCAL.items())]
    wide = max(len(name) for name, _ in (*commands, *KEYS.items()))
    lines = [f"{name:<{wide}}  {text}" for name, text in commands]
    return "\n".join([*lines, "", *(f"{name:<{wide}}  {text}" for name, text in KEYS.items())])
