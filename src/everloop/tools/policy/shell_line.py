"""A shell command line as far as it is known without running it: its simple commands, word by word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

TEXT = "\0"  # in a word: text that is unknown until the command runs, possibly empty
WORDS = "\1"  # instead of a word: any number of unknown words, possibly none
_UNKNOWN = re.compile(f"[{TEXT}{WORDS}]")
_GLOB = re.compile(r"[*?[]")
DECLARING = frozenset(
    {"declare", "typeset", "local", "export", "readonly"}
)  # builtins whose arguments may be assignments

# Variables that change which program a name runs or how the rest of the line is parsed, or that name a program to run.
_STEERING = (
    *("PATH", "IFS", "ENV", "SHELL", "SHELLOPTS", "BASHOPTS", "BASH_*", "PS[0-9]", "PROMPT_COMMAND", "EXECIGNORE"),
    *("LD_*", "DYLD_*", "GCONV_PATH", "GLIBC_TUNABLES", "POSIXLY_CORRECT", "PAGER", "*_PAGER", "MANPAGER", "EDITOR"),
    *("VISUAL", "*_EDITOR", "BROWSER", "LESSOPEN", "LESSCLOSE", "*_SSH", "*_SSH_COMMAND", "*_ASKPASS", "*_RSH"),
    *("GIT_*", "TAR_OPTIONS", "HISTFILE", "INPUTRC"),
)
# The only environment variables that cannot change which code or settings a command uses.
_HARMLESS = (
    *("LANG", "LC_*", "TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR"),
    *("CLICOLOR_FORCE", "CI", "DEBUG", "VERBOSE", "SOURCE_DATE_EPOCH"),
    *("GIT_AUTHOR_*", "GIT_COMMITTER_*", "GIT_TERMINAL_PROMPT", "GIT_PAGER_IN_USE"),
)
# Lower-case variables that programs read from the environment. Others are assumed to be variables of the shell only.
_LOWER_CASE = ("npm_*", "pnpm_*", "yarn_*", "*_proxy")
# Programs that write to the files they are given: to all of them, to the last one, or with -i.
_WRITES_ALL = frozenset({"tee", "touch", "truncate"})
_WRITES_LAST = frozenset({"cp", "mv", "ln", "install", "rsync"})
_EDITS = frozenset({"sed", "gsed", "perl", "ruby"})
_EDITS_IN_PLACE = re.compile(r"-[A-Za-z]*i|--in-place")


class Opaque(Exception):
    """The command line cannot be parsed completely; the message says why."""


class Target(msgspec.Struct, frozen=True):
    """A file that a redirection opens."""

    path: str  # as written in the line; may contain TEXT
    writes: bool


class SimpleCommand(msgspec.Struct, frozen=True):
    """One program or builtin with its arguments, quotes removed."""

    words: tuple[str, ...]  # empty for redirections without a command
    targets: tuple[Target, ...] = ()
    wrapper: bool = False  # only runs another command, which is listed too

    @property
    def text(self) -> str:
        """The words joined by single spaces, without a space before WORDS, which may stand for no word at all."""
        return " ".join(self.words).replace(f" {WORDS}", WORDS)


class CommandLine(msgspec.Struct, frozen=True):
    """All simple commands of a command line, at any depth."""

    commands: tuple[SimpleCommand, ...]
    opaque: str = ""  # why it could not be parsed completely; `commands` is what was found until then
    moves: bool = False  # changes its working directory, so that relative paths are unknown
    altered: bool = False  # sets a variable that may change what its programs do


class Piece(msgspec.Struct, frozen=True):
    """A part of a word: literal text, `quoted` or not, or an unknown part (`text` is TEXT)."""

    text: str
    quoted: bool
    number: bool = False  # unknown, but a number
    name: str = ""  # unknown: the value of this variable


class Word(msgspec.Struct, frozen=True):
    """One word of a command line, as its pieces."""

    pieces: tuple[Piece, ...]

    @property
    def plain(self) -> str:
        """The word if no part of it is quoted or expanded, so that it may be a keyword; otherwise ""."""
        known = all(not piece.quoted and piece.text != TEXT for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces) if known else ""

    @property
    def number(self) -> bool:
        """Whether its value can only be a number or empty."""
        return all(piece.number or re.fullmatch(r"-?\d*", piece.text) for piece in self.pieces)

    @property
    def literal(self) -> str:
        """The word after quote removal, with TEXT for unknown parts and file name patterns unexpanded."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def value(self) -> str:
        """The word after all expansions, as far as they are known."""
        visible = [piece for piece in self.pieces if piece.text]
        if visible and all(piece.text == TEXT and not piece.quoted for piece in visible):
            return WORDS
        # Quoted text and the results of expansions are not patterns: a placeholder replaces them.
        shape = "".join("x" * len(p.text) if p.quoted or p.text == TEXT else p.text for p in self.pieces)
        cut = min(_pattern(shape), _braces(shape))
        return self.literal if cut == len(shape) else self.literal[:cut] + TEXT


def _pattern(shape: str) -> int:
    """Return where a file name pattern begins, or the length."""
    for found in _GLOB.finditer(shape):
        if found[0] != "[" or "]" in shape[found.start() :]:
            return found.start()
    return len(shape)


def _braces(shape: str) -> int:
    """Return where a brace expansion begins, or the length."""
    start = shape.find("{")
    rest = shape[start:] if start >= 0 else ""
    return start if "}" in rest and ("," in rest or ".." in rest) else len(shape)


class Stdin(msgspec.Struct, frozen=True):
    """The standard input of a command, where the line redirects it."""

    text: str | None  # None: unknown


class Findings(msgspec.Struct):
    """What has been found so far, in the line itself and in all command lines nested in it."""

    commands: list[SimpleCommand] = []
    moves: bool = False
    altered: bool = False
    steps: int = 0  # parts read, to bound the time
    calculated: set[str] = set()  # variables whose value is evaluated as arithmetic
    doubtful: set[str] = set()  # variables whose value may be anything

    def set(self, name: str, sure: bool, exported: bool = False) -> None:
        """Record that a variable is set, `sure` if to a number.

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
    """Return whether a variable changes what commands mean."""
    return not _matches(name, _HARMLESS) and _matches(name, _STEERING)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def exported(name: str, arguments: Sequence[str]) -> bool:
    """Return whether a declaration exports its variables to commands."""
    return name == "export" or any(word.startswith("-") and "x" in word for word in arguments)


def written_files(line: CommandLine) -> Iterator[str]:
    """Yield the files that a command line writes, as far as its redirections and the usual programs show it."""
    for command in line.commands:
        yield from (target.path for target in command.targets if target.writes)
        name, words = command.words[0].rpartition("/")[2] if command.words else "", command.words[1:]
        files = [word for word in words if not word.startswith("-")]
        if name in _WRITES_ALL or (name in _EDITS and any(_EDITS_IN_PLACE.match(word) for word in words)):
            yield from files
        elif name in _WRITES_LAST:
            yield from files[-1:]
        elif name == "dd":
            yield from (word[3:] for word in words if word.startswith("of="))


def unknown(text: str) -> bool:
    """Return whether a word has parts that are unknown until the command runs."""
    return _UNKNOWN.search(text) is not None
