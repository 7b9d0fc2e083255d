"""The grammar of a shell command line: finds the simple commands wherever they stand.

It follows bash as far as the meaning is certain, and gives up (`Opaque`) where it is not: a line that is read wrongly
would be worse than one that is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .parts import TEXT, Opaque, SimpleCommand, Word, unknown
from .simple import Redirected, SimpleReader

_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REGULAR = re.compile(r"(?:[^\s;&`$'\"\\<>]|\$(?=[\s)|])|\\[^\n])+")
_CASE_ENDS = (";;&", ";;", ";&")
_NUMERIC_TESTS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})


class Grammar(SimpleReader):
    """Reads a whole command line into its findings."""

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
        after = Redirected()
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
