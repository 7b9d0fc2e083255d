"""What is known of a shell command line without running it: its simple commands, word by word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

TEXT = "\0"  # in a word: some text that cannot be known before the command runs, possibly none
WORDS = "\1"  # in place of a word: any number of unknown words, possibly none
_UNKNOWN = re.compile(f"[{TEXT}{WORDS}]")
_GLOB = re.compile(r"[*?[]")
DECLARING = frozenset({"declare", "typeset", "local", "export", "readonly"})  # builtins whose words may assign

# Variables that change what a name runs or how the rest of the line is read, or that name a program to be run.
_STEERING = (
    *("PATH", "IFS", "ENV", "SHELL", "SHELLOPTS", "BASHOPTS", "BASH_*", "PS[0-9]", "PROMPT_COMMAND", "EXECIGNORE"),
    *("LD_*", "DYLD_*", "GCONV_PATH", "GLIBC_TUNABLES", "POSIXLY_CORRECT", "PAGER", "*_PAGER", "MANPAGER", "EDITOR"),
    *("VISUAL", "*_EDITOR", "BROWSER", "LESSOPEN", "LESSCLOSE", "*_SSH", "*_SSH_COMMAND", "*_ASKPASS", "*_RSH"),
    *("GIT_*", "TAR_OPTIONS", "HISTFILE", "INPUTRC"),
)
# The only variables of the environment that may be set for a command without changing which code or settings it uses.
_HARMLESS = (
    *("LANG", "LC_*", "TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR"),
    *("CLICOLOR_FORCE", "CI", "DEBUG", "VERBOSE", "SOURCE_DATE_EPOCH"),
    *("GIT_AUTHOR_*", "GIT_COMMITTER_*", "GIT_TERMINAL_PROMPT", "GIT_PAGER_IN_USE"),
)
# Variables in lower case that programs take from the environment. Others are taken for variables of the shell alone.
_LOWER_CASE = ("npm_*", "pnpm_*", "yarn_*", "*_proxy")


class Opaque(Exception):
    """The command line cannot be read to its end; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A file that a redirection opens."""

    path: str  # as it stands in the line; may hold TEXT
    writes: bool


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """One program or builtin with its arguments, quotes removed."""

    words: tuple[str, ...]  # empty: redirections alone
    targets: tuple[Target, ...] = ()
    wrapper: bool = False  # does nothing by itself but run another command, which is listed too

    @property
    def text(self) -> str:
        """The words joined by single spaces; WORDS swallows the space before it, since it may be no word at all."""
        return " ".join(self.words).replace(f" {WORDS}", WORDS)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """All simple commands of a command line, wherever they stand in it."""

    commands: tuple[SimpleCommand, ...]
    opaque: str = ""  # why it could not be read to the end; `commands` is then what was found before
    moves: bool = False  # changes its folder: relative paths are relative to something unknown
    altered: bool = False  # sets a variable by which programs do something else than their words say


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a word: literal text that was `quoted` or not, or (`text` is TEXT) something unknown."""

    text: str
    quoted: bool
    number: bool = False  # unknown, but certainly a number
    name: str = ""  # unknown, the value of this variable


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command line, as its pieces."""

    pieces: tuple[Piece, ...]

    @property
    def plain(self) -> str:
        """The word if nothing in it is quoted or expanded, so that the shell may take it for a keyword; or ""."""
        known = all(not piece.quoted and piece.text != TEXT for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces) if known else ""

    @property
    def number(self) -> bool:
        """Whether its value can only be a number, or nothing."""
        return all(piece.number or re.fullmatch(r"-?\d*", piece.text) for piece in self.pieces)

    @property
    def literal(self) -> str:
        """The word after quote removal, with TEXT for what is unknown, and patterns left as they stand."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def value(self) -> str:
        """The word after all expansions, as far as they can be known."""
        visible = [piece for piece in self.pieces if piece.text]
        if visible and all(piece.text == TEXT and not piece.quoted for piece in visible):
            return WORDS
        # What is quoted, or comes out of an expansion, is no pattern: a dummy stands in its place.
        shape = "".join("x" * len(p.text) if p.quoted or p.text == TEXT else p.text for p in self.pieces)
        cut = min(_pattern(shape), _braces(shape))
        return self.literal if cut == len(shape) else self.literal[:cut] + TEXT


def _pattern(shape: str) -> int:
    """Where a file name pattern begins, or the length."""
    for found in _GLOB.finditer(shape):
        if found[0] != "[" or "]" in shape[found.start() :]:
            return found.start()
    return len(shape)


def _braces(shape: str) -> int:
    """Where a list in braces begins, or the length."""
    start = shape.find("{")
    rest = shape[start:] if start >= 0 else ""
    return start if "}" in rest and ("," in rest or ".." in rest) else len(shape)


@dataclass(frozen=True, slots=True)
class Stdin:
    """What a command reads, where the line says so."""

    text: str | None  # None: unknown


@dataclass(slots=True)
class Findings:
    """What has been found so far, in the line itself and in all command lines that stand inside it."""

    commands: list[SimpleCommand] = field(default_factory=list)
    moves: bool = False
    altered: bool = False
    steps: int = 0  # pieces read, to bound the time
    calculated: set[str] = field(default_factory=set)  # variables whose value is evaluated as arithmetic
    doubtful: set[str] = field(default_factory=set)  # variables whose value may be anything

    def set(self, name: str, sure: bool, exported: bool = False) -> None:
        """Note that a variable is set, `sure` if to a number.

        `exported`: commands get it in their environment. Otherwise they get it only if the environment had it before,
        which is not so for names in lower case.
        """
        if steers(name):
            raise Opaque(f"it sets {name}, which changes what commands mean")
        if not sure:
            self.doubtful.add(name)
        if (exported or not name.islower() or _matches(name, _LOWER_CASE)) and not _matches(name, _HARMLESS):
            self.altered = True


def steers(name: str) -> bool:
    """Whether a variable changes what commands mean."""
    return not _matches(name, _HARMLESS) and _matches(name, _STEERING)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def exported(name: str, arguments: Sequence[str]) -> bool:
    """Whether a declaration puts its variables into the environment of commands."""
    return name == "export" or any(word.startswith("-") and "x" in word for word in arguments)


def unknown(text: str) -> bool:
    """Whether something in a word is not known before the command runs."""
    return _UNKNOWN.search(text) is not None
