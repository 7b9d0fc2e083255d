"""The grammar of a shell command line: finds the simple commands wherever they stand.

It follows bash as far as the meaning is certain, and gives up (`Opaque`) where it is not: a line that is read wrongly
would be worse than one that is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .lexing import Lexer
from .parts import TEXT, Findings, Opaque, Piece, SimpleCommand, Stdin, Target, Word, unknown
from .running import run

_DESCRIPTOR = re.compile(r"(?:[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})(?=[<>])")
_REDIRECTION = re.compile(r"[<>]&-|&>>|&>|<<<|<<-|<<|<>|>>|>\||>&|<&|>(?!\()|<(?!\()")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?(\+?=)", re.S)
_ELEMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[")
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REGULAR = re.compile(r"(?:[^\s;&`$'\"\\<>]|\$(?=[\s)|])|\\[^\n])+")
_CASE_ENDS = (";;&", ";;", ";&")
_OPENING = frozenset({"{", "if", "while", "until", "for", "select", "case", "function", "[[", "!", "time", "coproc"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_DECLARING = frozenset({"declare", "typeset", "local", "export", "readonly"})
_NUMERIC_TESTS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})


class _Heredoc:
    """A here-document whose text begins after the line it is announced in."""

    def __init__(self, delimiter: Word, tabs: bool) -> None:
        self.end = delimiter.literal
        self.literal = any(piece.quoted for piece in delimiter.pieces)
        self.tabs = tabs
        self.stdin: Stdin | None = None
        if TEXT in self.end:
            raise Opaque("the end of a here-document cannot be known")


class _Simple:
    """A simple command while it is being read."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.targets: list[Target] = []
        self.heredoc: _Heredoc | None = None
        self.stdin: Stdin | None = None


class Grammar(Lexer):
    """Reads a whole command line into its findings."""

    def __init__(self, text: str, findings: Findings, depth: int = 0) -> None:
        super().__init__(text, findings, depth)
        self.announced: list[tuple[_Heredoc, _Simple]] = []

    # ------------------------------------------------------------------------------------------ lists

    def read(self) -> None:
        """Read it all."""
        self.statements(())
        if self.announced:
            raise Opaque("a here-document is not closed")

    def inner(self, text: str) -> None:
        Grammar(text, self.findings, self.depth + 1).read()

    def substitution(self) -> None:
        outer, self.announced = self.announced, []
        start = self.place
        self.statements((")",))
        self.place += 1
        if self.announced or (outer and "\n" in self.text[start : self.place]):
            raise Opaque("it has a here-document in an unusual place")
        self.announced = outer

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

    def statements(self, stops: tuple[str, ...]) -> str:
        """Read commands up to one of the words or operators in `stops`, which is given back.

        A word is consumed, a parenthesis or the end of a case is not.
        """
        while True:
            self.step()
            self.newlines()
            if self.place >= len(self.text):
                if stops:
                    raise Opaque("it is not complete")
                return ""
            if stop := self.stop(stops):
                return stop
            self.and_or()
            self.blanks()
            if stop := next((stop for stop in stops if not stop.isalpha() and stop != "}" and self.peek(stop)), ""):
                return stop
            if self.place < len(self.text) and not (self.peek("\n") or self.separator()):
                raise Opaque("its grammar is not understood")

    def stop(self, stops: tuple[str, ...]) -> str:
        for stop in stops:
            if not stop.isalpha() and stop != "}":
                if self.peek(stop):
                    return stop
            elif self.keyword(stop):
                return stop
        return ""

    def separator(self) -> bool:
        if any(self.peek(end) for end in _CASE_ENDS):
            return False
        return self.take(";") or (not self.peek("&&") and self.take("&"))

    def keyword(self, word: str) -> bool:
        """Take this word if it stands here without quotes."""
        if self.lexeme() != word:
            return False
        self.word()
        return True

    def and_or(self) -> None:
        self.pipeline()
        self.blanks()
        while self.take("&&") or self.take("||"):
            self.newlines()
            self.pipeline()
            self.blanks()

    def pipeline(self) -> None:
        self.command()
        self.blanks()
        while not self.peek("||") and (self.take("|&") or self.take("|")):
            self.newlines()
            self.command()
            self.blanks()

    # ------------------------------------------------------------------------------------------ compound commands

    def command(self) -> None:
        """One command of any kind, with its redirections."""
        with self.deeper():
            self.step()
            self.blanks()
            self.any_command()

    def any_command(self) -> None:
        if self.take("(("):
            start = self.place
            self.arithmetic("))")
            # A plain POSIX shell takes it for two subshells.
            self.findings.commands.append(SimpleCommand(tuple(self.text[start : self.place - 2].split()), wrapper=True))
        elif self.take("("):
            self.statements((")",))
            self.place += 1
        elif reader := self.compound(self.lexeme()):
            self.word()
            reader()
        else:
            self.simple()
            return
        after = _Simple()
        while self.redirection(after):
            pass
        self.finish(after)

    def compound(self, keyword: str) -> Callable[[], object] | None:
        readers: dict[str, Callable[[], object]] = {
            "{": lambda: self.statements(("}",)),
            "if": self.if_,
            "while": self.loop,
            "until": self.loop,
            "for": self.for_,
            "select": self.for_,
            "case": self.case,
            "function": self.function,
            "[[": self.test,
            "!": self.command,
            "time": self.time,
        }
        return readers.get(keyword)

    def time(self) -> None:
        self.blanks()
        for option in ("-p", "--"):
            if self.keyword(option):
                self.blanks()
        if self.place < len(self.text) and self.text[self.place] not in ";\n&|)":
            self.command()

    def if_(self) -> None:
        self.statements(("then",))
        while (stop := self.statements(("elif", "else", "fi"))) != "fi":
            if stop == "elif":
                self.statements(("then",))

    def loop(self) -> None:
        self.statements(("do",))
        self.statements(("done",))

    def for_(self) -> None:
        self.blanks()
        if self.take("(("):
            for end in (";", ";", "))"):
                self.arithmetic(end)
        else:
            name = self.word()
            if name is None or not name.plain:
                raise Opaque("the variable of a loop cannot be known")
            self.newlines()
            sure = True
            if self.keyword("in"):
                while (word := self.next_word()) is not None:
                    sure = sure and word.number
            self.findings.set(name.plain, sure)
        self.blanks()
        self.take(";")
        self.newlines()
        if self.keyword("{"):
            self.statements(("}",))
        elif self.keyword("do"):
            self.statements(("done",))
        else:
            raise Opaque("a loop is not understood")

    def next_word(self) -> Word | None:
        self.blanks()
        return self.word()

    def case(self) -> None:
        self.next_word()
        self.newlines()
        if not self.keyword("in"):
            raise Opaque("a case is not understood")
        while True:
            self.newlines()
            if self.keyword("esac"):
                return
            self.take("(")
            while self.next_word() is not None:
                self.blanks()
                if not self.take("|"):
                    break
            if not self.take(")"):
                raise Opaque("a case is not understood")
            stop = self.statements((*_CASE_ENDS, "esac"))
            if stop == "esac":
                return
            self.take(stop)

    def function(self) -> None:
        if self.next_word() is None:
            raise Opaque("a function has no name")
        self.blanks()
        if self.take("("):
            self.blanks()
            if not self.take(")"):
                raise Opaque("a function is not understood")
        self.newlines()
        self.command()

    def test(self) -> None:
        """A [[ … ]]. Numbers in it are evaluated as arithmetic; a plain POSIX shell runs what comes after && and ||."""
        before = ""
        words: list[Word] = []
        numeric = False
        while True:
            self.newlines()
            if self.place >= len(self.text):
                raise Opaque("a test is not closed")
            if operator := next((o for o in ("&&", "||", "(", ")", "<", ">") if self.take(o)), ""):
                before = operator
                continue
            word = self.regular_expression() if before == "=~" else self.word()
            if word is None:
                raise Opaque("a test is not understood")
            if word.plain == "]]":
                break
            if before in ("&&", "||") and not unknown(word.value):
                self.findings.commands.append(SimpleCommand((word.value, TEXT), wrapper=True))
            before = word.plain or "word"
            numeric = numeric or before in _NUMERIC_TESTS or before in ("-v", "-R")
            words.append(word)
        if numeric:
            self.evaluate(words)

    def regular_expression(self) -> Word | None:
        found = _REGULAR.match(self.text, self.place)
        if found is not None and self.text[found.end() : found.end() + 1] in (" ", "\t", "\n"):
            self.place = found.end()
            return Word(())
        return self.word()

    def evaluate(self, words: list[Word]) -> None:
        """Note the variables in words that a test takes for numbers."""
        for piece in (piece for word in words for piece in word.pieces):
            if (piece.text == TEXT and not piece.number and not piece.name) or re.search(r"[\[$`]", piece.text):
                raise Opaque("it calculates with something that cannot be known")
            self.findings.calculated.update([piece.name] if piece.name else _NAMES.findall(piece.text))

    # ------------------------------------------------------------------------------------------ simple commands

    def simple(self) -> None:
        simple = _Simple()
        while True:
            self.blanks()
            if self.redirection(simple):
                continue
            word = self.word()
            if word is None:
                break
            if (not simple.words or self.declares(simple)) and self.assignment(word, simple):
                continue
            if not simple.words and (word.plain in _OPENING or word.plain in _CLOSING):
                raise Opaque(f"{word.plain} stands in an unexpected place")
            simple.words.append(word)
            if len(simple.words) == 1 and self.defines():
                return
        if self.peek("("):
            raise Opaque("its grammar is not understood")
        if self.place < len(self.text) and self.text[self.place] not in "\n;&|)":
            raise Opaque("its grammar is not understood")
        self.finish(simple)

    def declares(self, simple: _Simple) -> bool:
        return simple.words[0].literal in _DECLARING

    def assignment(self, word: Word, simple: _Simple) -> bool:
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
            self.findings.set(found[1], sure)
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

    def finish(self, simple: _Simple) -> None:
        """The command is complete, unless its here-document is still to come."""
        if simple.heredoc is None:
            self.run(simple)

    def run(self, simple: _Simple) -> None:
        words = tuple(word.value for word in simple.words)
        if words or simple.targets:
            run(words, tuple(simple.targets), simple.stdin, self.findings, self.inner)

    # ------------------------------------------------------------------------------------------ redirections

    def redirection(self, simple: _Simple) -> bool:
        self.blanks()
        place = self.place
        self.match(_DESCRIPTOR)
        found = self.match(_REDIRECTION)
        if found is None:
            self.place = place
            return False
        if found[0].endswith("-") and found[0] != "<<-":  # closes: what follows is a word of its own
            return True
        self.blanks()
        word = self.word()
        if word is None:
            raise Opaque("a redirection has no target")
        if found[0] in ("<<", "<<-"):
            if simple.heredoc is not None:
                raise Opaque("it has several here-documents")
            simple.heredoc = _Heredoc(word, found[0] == "<<-")
            self.announced.append((simple.heredoc, simple))
        elif found[0] == "<<<":
            simple.stdin = Stdin(None if TEXT in word.literal else word.literal)
        elif found[0] not in (">&", "<&") or not re.fullmatch(r"[0-9]*-?", word.literal):
            if "<" in found[0]:
                simple.stdin = Stdin(None)
            simple.targets.append(Target(word.value, ">" in found[0]))
        return True

    def heredoc(self, heredoc: _Heredoc, simple: _Simple) -> None:
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
            body = Grammar(text, self.findings, self.depth + 1)
            pieces: list[Piece] = []
            body.quoted(pieces, "")
            text = "".join(piece.text for piece in pieces)
        simple.stdin = Stdin(None if TEXT in text else text)
        self.run(simple)

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
