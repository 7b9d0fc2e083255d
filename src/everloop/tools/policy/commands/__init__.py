"""Reading a shell command line without running it."""

from __future__ import annotations

from .parts import TEXT, WORDS, CommandLine, Findings, Opaque, SimpleCommand, Target, steers

__all__ = ["TEXT", "WORDS", "CommandLine", "SimpleCommand", "Target", "read"]

MAX_LENGTH = 20_000  # as much as a person can be shown; a longer line is not read
# The shell fills these itself, with text from outside.
_FILLED = frozenset({"REPLY", "MAPFILE", "OPTARG", "_", "BASH_REMATCH", "COPROC", "BASH_ARGV", "BASH_COMMAND"})


def read(command: str) -> CommandLine:
    """All simple commands of a command line, and why it could not be read to the end, if so. Takes bounded time."""
    from .grammar import Grammar  # most policies have no rule about commands

    findings = Findings(doubtful=set(_FILLED))
    try:
        if len(command) > MAX_LENGTH:
            raise Opaque("it is too long")
        if "\0" in command:
            raise Opaque("it has a NUL character")
        Grammar(command, findings).read()
        if steering := sorted(name for name in findings.calculated if steers(name)):
            raise Opaque(f"it calculates with {steering[0]}, which changes what commands mean")
        # bash evaluates the value of a variable in arithmetic: a[$(command)] runs the command.
        if doubtful := sorted(findings.calculated & findings.doubtful):
            raise Opaque(f"it calculates with {doubtful[0]}, whose value is only known when it runs")
    except Opaque as error:
        return CommandLine(tuple(findings.commands), str(error), findings.moves, findings.altered)
    return CommandLine(tuple(findings.commands), "", findings.moves, findings.altered)
