"""Commands that read neither files nor the network: what they say, the model has said itself."""

from __future__ import annotations

from ..policy.shell_line import SimpleCommand, unknown

_QUIET = frozenset({"echo", "printf", "pwd", "date", "true", "false", ":", "sleep", "mkdir", "touch", "exit"})
_READING_OPTIONS = ("-f", "--file", "-r", "--ref")  # of date and touch: they take a file


def reads_nothing(command: str) -> bool:
    """Whether a command line consists of such commands only, every word of it written out."""
    from ..policy.shell_syntax import read  # most agents never run a command

    line = read(command)
    return not line.opaque and not line.altered and bool(line.commands) and all(map(_is_quiet, line.commands))


def _is_quiet(command: SimpleCommand) -> bool:
    if not command.words or command.words[0] not in _QUIET or any(map(unknown, command.words)):
        return False
    if not all(target.writes for target in command.targets):
        return False
    return command.words[0] in ("echo", "printf") or not any(
        word.startswith(_READING_OPTIONS) for word in command.words[1:]
    )
