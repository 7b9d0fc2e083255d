"""Words of a shell command line: quotes, escapes, expansions, and the commands inside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .parts import TEXT, Findings, Opaque, Piece, Word

MAX_DEPTH = 30
MAX_STEPS = 10_000
_PLAIN = re.compile(r"[^\s;&|()<>$`\"'\\\0-\x1f\x7f]+")
_BACKTICKS = re.compile(r"`((?:[^`\\]|\\.)*)`", re.S)
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_QUOTED = re.compile(r"[^\"$`\\]+")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_LEXEME = re.compile(r"(?:[^\s;&|()<>$`\"'\\\0-\x1f\x7f]|\\\n)+(?=[ \t\n;&|()]|[<>](?!\()|\Z)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACE_HEAD = re.compile(r"([!#]?)([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*?$!#-])")
_ANSI = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|c.|.)|([^\\]+)", re.S)
_ANSI_LETTERS = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ARITHMETIC = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d[\w#@]*|[\s+\-*/%<>=!&|^~?:,]+")
_COUNTED = re.compile(r"\$(?:\{#[A-Za-z_]\w*(?:\[[@*]\])?\}|[#?$])", re.A)
_VALUE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.A)


class Lexer:
    """Reads words at `place` of `text`; what cannot be read for certain raises `Opaque`."""

    def __init__(self, text: str, findings: Findings, depth: int) -> None:
        self.text, self.findings, self.depth, self.place = text, findings, depth, 0
        if depth > MAX_DEPTH:
            raise Opaque("it is nested too deeply")

    # The grammar, which knows lists of commands, overrides these two.

    def substitution(self) -> None:
        """Read commands up to and with the closing parenthesis."""
        raise NotImplementedError

    def inner(self, text: str) -> None:
        """Read a text that is a command line of its own."""
        raise NotImplementedError

    def step(self) -> None:
        self.findings.steps += 1
        if self.findings.steps > MAX_STEPS:
            raise Opaque("it is too long")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.place)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.place += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.place)
        if found is not None:
            self.place = found.end()
        return found

    def blanks(self) -> None:
        """Skip spaces, and a comment where one may begin."""
        self.match(_BLANK)
        if self.peek("#"):
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end

    def word(self) -> Word | None:
        """The word that begins here, or None where there is none."""
        pieces: list[Piece] = []
        while self.place < len(self.text):
            self.step()
            character = self.text[self.place]
            if found := self.match(_PLAIN):
                joined = pieces and not pieces[-1].quoted and pieces[-1].text != TEXT  # over the end of a line
                pieces.append(Piece((pieces.pop().text if joined else "") + found[0], False))
            elif character == "\\":
                self.escape(pieces)
            elif character == "'":
                pieces.append(Piece(self.single_quoted(), True))
            elif character == '"':
                self.place += 1
                pieces.append(Piece("", True))
                self.quoted(pieces, '"')
            elif character == "$":
                pieces.append(self.dollar(quoted=False))
            elif character == "`":
                pieces.append(self.backticks(quoted=False))
            elif character in "<>" and self.text[self.place + 1 : self.place + 2] == "(":
                self.place += 2
                self.substitution()
                pieces.append(Piece(TEXT, True))
            elif character in " \t\n;&|()<>":
                break
            elif character.isspace() and ord(character) > 127:  # to the shell it is a letter; to people it is not
                raise Opaque("it has a space that is none to the shell")
            else:
                raise Opaque(f"it has a control character (U+{ord(character):04X})")
        return Word(tuple(pieces)) if pieces else None

    def lexeme(self) -> str:
        """The word that begins here, if it is plain text to its end and so may be a keyword; nothing is consumed."""
        found = _LEXEME.match(self.text, self.place)
        return "" if found is None else found[0].replace("\\\n", "")

    def escape(self, pieces: list[Piece]) -> None:
        following = self.text[self.place + 1 : self.place + 2]
        if not following:
            raise Opaque("it ends in a backslash")
        self.place += 2
        if following != "\n":
            pieces.append(Piece(following, True))

    def single_quoted(self) -> str:
        end = self.text.find("'", self.place + 1)
        if end < 0:
            raise Opaque("a quote is not closed")
        start, self.place = self.place + 1, end + 1
        return _sure(self.text[start:end])

    def quoted(self, pieces: list[Piece], end: str) -> None:
        """Text as in double quotes, up to `end`; without one, up to the end of the text (a here-document's)."""
        while self.place < len(self.text):
            self.step()
            if found := self.match(_QUOTED):
                pieces.append(Piece(_sure(found[0]), True))
                continue
            character = self.text[self.place]
            if character == "$":
                pieces.append(self.dollar(quoted=True))
            elif character == "`":
                pieces.append(self.backticks(quoted=bool(end)))
            elif character == "\\":
                following = self.text[self.place + 1 : self.place + 2]
                self.place += 2
                if following != "\n":
                    literal = following in ("$", "`", "\\") or (following == '"' and end)
                    pieces.append(Piece(following if literal else "\\" + following, True))
            else:
                self.place += 1
                if end:
                    return
                pieces.append(Piece('"', True))
        if end:
            raise Opaque("a quote is not closed")

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """One level of nesting, of which there is a limit."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Opaque("it is nested too deeply")
        yield
        self.depth -= 1

    def dollar(self, quoted: bool) -> Piece:
        """What a dollar sign begins."""
        with self.deeper():
            return self.expansion(quoted)

    def expansion(self, quoted: bool) -> Piece:
        rest = self.text[self.place + 1 : self.place + 3]
        if rest == "\\\n":
            raise Opaque("a line ends inside an expansion")
        if rest == "((":
            return self.arithmetic_expansion()
        if rest[:1] == "(":
            self.place += 2
            self.substitution()
            return Piece(TEXT, quoted)
        if rest[:1] == "{":
            return self.braces(quoted)
        if rest[:1] == "[":
            raise Opaque("it has arithmetic in an old form")
        if not quoted and rest[:1] == "'":
            return self.ansi_quoted()
        self.place += 1
        if not quoted and rest[:1] == '"':  # a translated text
            self.place += 1
            self.quoted([], '"')
            return Piece(TEXT, True)
        if found := self.match(_PARAMETER):
            name = found[0] if _NAME.match(found[0]) else ""
            return Piece(TEXT, quoted and found[0] != "@", number=found[0] in ("#", "?", "$", "!"), name=name)
        return Piece("$", True)

    def ansi_quoted(self) -> Piece:
        """A $'…' text with its escapes."""
        end = self.text.find("'", self.place + 2)
        inside = self.text[self.place + 2 : end]
        # A plain POSIX shell would end the text at an escaped quote, and read the rest of the line otherwise.
        if end < 0 or (len(inside) - len(inside.rstrip("\\"))) % 2:
            raise Opaque("a quote is not closed")
        self.place = end + 1
        return Piece(_sure("".join(_ansi(found) for found in _ANSI.finditer(inside))), True)

    def backticks(self, quoted: bool) -> Piece:
        """A command in backticks: its text is a command line once its escapes are taken away."""
        found = _BACKTICKS.match(self.text, self.place)
        if found is None:
            raise Opaque("a backtick is not closed")
        self.place = found.end()
        self.inner(re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", found[1]))
        return Piece(TEXT, quoted)

    def braces(self, quoted: bool) -> Piece:
        """A ${…}: what it gives is unknown, but the commands in it are read."""
        self.place += 2
        head = self.match(_BRACE_HEAD)
        if head is None:
            raise Opaque("it has an expansion of an unknown form")
        if head[1] == "!":
            self.findings.calculated.add(head[2])  # an indirect name may be an array's element, which is calculated
        many = head[2] == "@"
        if self.take("["):
            many = self.take("@]")
            if not many and not self.take("*]"):
                self.arithmetic("]")
        if self.text[self.place : self.place + 1] == "@":
            if self.text[self.place + 1 : self.place + 3] not in ("Q}", "U}", "u}", "L}", "E}", "A}", "K}", "a}", "k}"):
                raise Opaque("it expands a variable as a prompt")
        elif self.peek(":") and self.text[self.place + 1 : self.place + 2] not in ("-", "=", "?", "+"):
            self.place += 1
            self.arithmetic("}")
            return Piece(TEXT, quoted and not many)
        if not head[1] and (self.peek("=") or self.peek(":=")):
            self.findings.set(head[2], sure=False)
        name = head[2] if self.peek("}") and not head[1] and _NAME.match(head[2]) else ""
        self.until_brace(quoted)
        return Piece(TEXT, quoted and not many, number=head[1] == "#", name=name)

    def until_brace(self, quoted: bool) -> None:
        aside: list[Piece] = []
        while self.place < len(self.text):
            self.step()
            character = self.text[self.place]
            if character == "}":
                self.place += 1
                return
            if character == "\\":
                self.place += 2
            elif character == '"':
                self.place += 1
                self.quoted(aside, '"')
            elif character == "$":
                self.dollar(quoted)
            elif character == "`":
                self.backticks(quoted)
            elif character == "'" and not quoted:
                self.single_quoted()
            elif character == "'" or (character in "<>" and self.text[self.place + 1 : self.place + 2] == "("):
                raise Opaque("it has an expansion that shells read in different ways")
            else:
                self.place += 1
        raise Opaque("an expansion is not closed")

    def arithmetic_expansion(self) -> Piece:
        self.place += 3
        self.arithmetic("))")
        return Piece(TEXT, True, number=True)

    def arithmetic(self, end: str) -> None:
        """An expression up to `end`. Its variables are noted: the shell evaluates what they hold, commands included."""
        open_ = 0
        while self.place < len(self.text):
            self.step()
            if not open_ and self.take(end):
                return
            if found := _COUNTED.match(self.text, self.place):
                self.place = found.end()
            elif found := _VALUE.match(self.text, self.place) or _ARITHMETIC.match(self.text, self.place):
                self.place = found.end()
                name = found[found.lastindex or 0]
                if _NAME.fullmatch(name):
                    self.findings.calculated.add(name)
            elif self.peek("$(("):
                self.dollar(quoted=True)
            elif self.take("("):
                open_ += 1
            elif open_ and self.take(")"):
                open_ -= 1
            elif self.take("["):
                with self.deeper():
                    self.arithmetic("]")
            else:
                raise Opaque("it calculates with something that cannot be known")
        raise Opaque("an expression is not closed")


def _ansi(found: re.Match[str]) -> str:
    code = found[1]
    if code is None:
        return found[2]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < (128 if code[0] == "x" else 0x110000) else TEXT
    if code[0] in "01234567":
        number = int(code, 8)
        return chr(number) if number < 128 else TEXT
    if code[0] in "cxuU":  # a control character, or a code in a form that only some shells know
        return TEXT
    return _ANSI_LETTERS.get(code, code if code in "\\'\"?" else "\\" + code)


def _sure(text: str) -> str:
    """Literal text; the two characters that stand for unknown text in our words count as unknown."""
    return text.replace("\1", TEXT)
