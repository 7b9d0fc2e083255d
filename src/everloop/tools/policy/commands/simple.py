"""Simple commands: their words, assignments, redirections and here-documents."""

from __future__ import annotations

import re

from .lexing import Lexer
from .parts import DECLARING, TEXT, Findings, Opaque, Piece, Stdin, Target, Word, exported
from .unwrapping import note

_DESCRIPTOR = re.compile(r"(?:[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})(?=[<>])")
_REDIRECTION = re.compile(r"[<>]&-|&>>|&>|<<<|<<-|<<|<>|>>|>\||>&|<&|>(?!\()|<(?!\()")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?(\+?=)", re.S)
_ELEMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[")
OPENING = frozenset({"{", "if", "while", "until", "for", "select", "case", "function", "[[", "!", "time", "coproc"})
CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


class Heredoc:
    """A here-document whose text begins after the line it is announced in."""

    def __init__(self, delimiter: Word, tabs: bool) -> None:
        self.end = delimiter.literal
        self.literal = any(piece.quoted for piece in delimiter.pieces)
        self.tabs = tabs
        if TEXT in self.end:
            raise Opaque("the end of a here-document cannot be known")


class Redirected:
    """A command's words and redirections while they are being read."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.targets: list[Target] = []
        self.heredoc: Heredoc | None = None
        self.fed_by: Heredoc | None = None  # the here-document, unless something else is its input in the end
        self.stdin: Stdin | None = None
        self.assigned: list[tuple[str, bool]] = []  # variables set before the command, and whether to a number


class SimpleReader(Lexer):
    """Reads a simple command; the lists and compound commands around it are the grammar's."""

    def __init__(self, text: str, findings: Findings, depth: int = 0) -> None:
        super().__init__(text, findings, depth)
        self.announced: list[tuple[Heredoc, Redirected]] = []

    def command(self) -> None:
        """Read one command of any kind."""
        raise NotImplementedError

    def newlines(self) -> None:
        self.blanks()
        while self.peek("\n"):
            self.newline()
            self.blanks()

    def newline(self) -> None:
        """Go to the next line: here-documents announced in the last one are read first."""
        self.place += 1
        announced, self.announced = self.announced, []
        for heredoc, simple in announced:
            self.heredoc(heredoc, simple)

    def simple(self) -> None:
        simple = Redirected()
        while True:
            self.blanks()
            if self.redirection(simple):
                continue
            word = self.word()
            if word is None:
                break
            if (not simple.words or self.declares(simple)) and self.assignment(word, simple):
                continue
            if not simple.words and (word.plain in OPENING or word.plain in CLOSING):
                raise Opaque(f"{word.plain} stands in an unexpected place")
            simple.words.append(word)
            if len(simple.words) == 1 and self.defines():
                return
        if self.place < len(self.text) and self.text[self.place] not in "\n;&|)":
            raise Opaque("its grammar is not understood")
        self.finish(simple)

    def declares(self, simple: Redirected) -> bool:
        return simple.words[0].literal in DECLARING

    def assignment(self, word: Word, simple: Redirected) -> bool:
        """Whether the word is an assignment, which is then noted; in a declaration it stays an argument too."""
        lead = word.pieces[0]
        found = None if lead.quoted or lead.text == TEXT else _ASSIGNMENT.match(lead.text)
        if found is None:
            if not lead.quoted and _ELEMENT.match(lead.text) and "=" in word.literal and not simple.words:
                raise Opaque("it sets an element that cannot be known")
            return False
        sure = Word((Piece(lead.text[found.end() :], False), *word.pieces[1:])).number
        if word.literal == found[0] and self.take("("):
            sure = self.array()
        if found[2]:
            self.element(found[2])
        self.blanks()
        if found[1] != "IFS" or simple.words or self.lexeme() != "read":  # `IFS= read` splits its own input, no more
            words = [word.literal for word in simple.words]
            self.findings.set(found[1], sure, bool(words) and exported(words[0], words[1:]))
            if not words:
                simple.assigned.append((found[1], sure))
        if simple.words:
            simple.words.append(word)
        return True

    def element(self, subscript: str) -> None:
        inside = subscript[1:-1]
        if not re.fullmatch(r"\w+", inside, re.A):
            raise Opaque("it sets an element that cannot be known")
        self.findings.calculated.update(re.findall(r"^[A-Za-z_]\w*", inside, re.A))

    def array(self) -> bool:
        """The rest of an array's values; whether all are numbers."""
        sure = True
        while True:
            self.newlines()
            word = self.word()
            if word is None:
                break
            if word.literal.startswith("["):
                raise Opaque("it sets an element that cannot be known")
            sure = sure and word.number
        if not self.take(")") or (self.place < len(self.text) and self.text[self.place] not in " \t\n;&|)"):
            raise Opaque("a list is not closed")
        return sure

    def defines(self) -> bool:
        """Whether the word just read is the name of a function that is defined here; its body is read."""
        place = self.place
        self.blanks()
        if not self.take("("):
            self.place = place
            return False
        self.blanks()
        if not self.take(")"):
            raise Opaque("its grammar is not understood")
        self.newlines()
        self.command()
        return True

    def finish(self, simple: Redirected) -> None:
        """The command is complete, unless its here-document is still to come."""
        if simple.words:
            for name, sure in simple.assigned:
                self.findings.set(name, sure, exported=True)
        if simple.heredoc is None:
            self.note(simple)

    def note(self, simple: Redirected) -> None:
        words = tuple(word.value for word in simple.words)
        if words or simple.targets:
            note(words, tuple(simple.targets), simple.stdin, self.findings, self.inner)

    # ------------------------------------------------------------------------------------------ redirections

    def redirection(self, simple: Redirected) -> bool:
        self.blanks()
        place = self.place
        descriptor = self.match(_DESCRIPTOR)
        found = self.match(_REDIRECTION)
        if found is None:
            self.place = place
            return False
        feeds = not descriptor[0].strip("0") if descriptor else found[0][0] == "<"
        if feeds:  # the last one counts
            simple.stdin, simple.fed_by = Stdin(None), None
        if found[0].endswith("-") and found[0] != "<<-":  # closes: what follows is a word of its own
            return True
        self.blanks()
        word = self.word()
        if word is None:
            raise Opaque("a redirection has no target")
        if found[0] in ("<<", "<<-"):
            if simple.heredoc is not None:
                raise Opaque("it has several here-documents")
            simple.heredoc = Heredoc(word, found[0] == "<<-")
            simple.fed_by = simple.heredoc if feeds else simple.fed_by
            self.announced.append((simple.heredoc, simple))
        elif found[0] == "<<<":
            if feeds:
                simple.stdin = Stdin(None if TEXT in word.literal else word.literal)
        elif found[0] not in (">&", "<&") or not re.fullmatch(r"[0-9]*-?", word.literal):
            simple.targets.append(Target(word.value, ">" in found[0]))
        return True

    def heredoc(self, heredoc: Heredoc, simple: Redirected) -> None:
        """Read a here-document's lines, and then what was waiting for them."""
        lines: list[str] = []
        while True:
            if self.place >= len(self.text):
                raise Opaque("a here-document is not closed")
            line = self.line()
            if not heredoc.literal and _continues(line):
                line = self.joined(line)
            if heredoc.tabs:
                line = line.lstrip("\t")
            if line == heredoc.end:
                break
            lines.append(line + "\n")
        text = "".join(lines)
        if not heredoc.literal:
            body = type(self)(text, self.findings, self.depth + 1)
            pieces: list[Piece] = []
            body.quoted(pieces, "")
            text = "".join(piece.text for piece in pieces)
        if simple.fed_by is heredoc:
            simple.stdin = Stdin(None if TEXT in text else text)
        self.note(simple)

    def line(self) -> str:
        end = self.text.find("\n", self.place)
        end = len(self.text) if end < 0 else end
        start, self.place = self.place, min(end + 1, len(self.text))
        return self.text[start:end]

    def joined(self, line: str) -> str:
        """A line that ends in a backslash, with those that continue it."""
        parts = [line]
        while _continues(parts[-1]) and self.place < len(self.text):
            parts[-1] = parts[-1][:-1]
            parts.append(self.line())
        return "".join(parts)


def _continues(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1
