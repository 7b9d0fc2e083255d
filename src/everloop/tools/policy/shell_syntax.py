"""Parses a shell command line and finds its simple commands at any depth.

The parser follows bash where the meaning is certain and raises `Opaque` where it is not: misreading a line would be
worse than not reading it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .shell_line import (
    DECLARING,
    TEXT,
    CommandLine,
    Findings,
    Opaque,
    Piece,
    SimpleCommand,
    Stdin,
    Target,
    Word,
    exported,
    steers,
    unknown,
)
from .shell_wrappers import note

MAX_LENGTH = 20_000  # as much as a person can be shown; a longer line is not parsed
# The shell itself sets these, to text from outside.
_FILLED = frozenset({"REPLY", "MAPFILE", "OPTARG", "_", "BASH_REMATCH", "COPROC", "BASH_ARGV", "BASH_COMMAND"})
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
_DESCRIPTOR = re.compile(r"(?:[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})(?=[<>])")
_REDIRECTION = re.compile(r"[<>]&-|&>>|&>|<<<|<<-|<<|<>|>>|>\||>&|<&|>(?!\()|<(?!\()")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?(\+?=)", re.S)
_ELEMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[")
OPENING = frozenset({"{", "if", "while", "until", "for", "select", "case", "function", "[[", "!", "time", "coproc"})
CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REGULAR = re.compile(r"(?:[^\s;&`$'\"\\<>]|\$(?=[\s)|])|\\[^\n])+")
_CASE_ENDS = (";;&", ";;", ";&")
_NUMERIC_TESTS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})


def read(command: str) -> CommandLine:
    """Parse a command line, in bounded time."""
    findings = Findings(doubtful=set(_FILLED))
    try:
        if len(command) > MAX_LENGTH:
            raise Opaque("it is too long")
        if "\0" in command:
            raise Opaque("it has a NUL character")
        Grammar(command, findings).read()
        if steering := sorted(name for name in findings.calculated if steers(name)):
            raise Opaque(f"it evaluates {steering[0]} in arithmetic, which changes what commands mean")
        # bash evaluates the value of a variable in arithmetic: a[$(command)] runs the command.
        if doubtful := sorted(findings.calculated & findings.doubtful):
            raise Opaque(f"it evaluates {doubtful[0]} in arithmetic, whose value is unknown until it runs")
    except Opaque as error:
        return CommandLine(tuple(findings.commands), str(error), findings.moves, findings.altered)
    return CommandLine(tuple(findings.commands), "", findings.moves, findings.altered)


# -------------------------------------------------------------------------------------------- words


class Lexer:
    """Reads words at `place` of `text`; raises `Opaque` where the meaning is uncertain."""

    def __init__(self, text: str, findings: Findings, depth: int) -> None:
        self.text, self.findings, self.depth, self.place = text, findings, depth, 0
        if depth > MAX_DEPTH:
            raise Opaque("it is nested too deeply")

    # `Grammar`, which reads lists of commands, overrides these two.

    def substitution(self) -> None:
        """Read commands up to and including the closing parenthesis."""
        raise NotImplementedError

    def inner(self, text: str) -> None:
        """Read a text that is a command line itself."""
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
        """Skip blanks, and a comment where one may begin."""
        self.match(_BLANK)
        if self.peek("#"):
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end

    def word(self) -> Word | None:
        """Read the word that begins here; None if there is none."""
        pieces: list[Piece] = []
        while self.place < len(self.text):
            self.step()
            character = self.text[self.place]
            if found := self.match(_PLAIN):
                joined = pieces and not pieces[-1].quoted and pieces[-1].text != TEXT  # across a line continuation
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
            elif character.isspace() and ord(character) > 127:  # a letter to the shell, but a space to readers
                raise Opaque("it has a space character that the shell does not treat as a space")
            else:
                raise Opaque(f"it has a control character (U+{ord(character):04X})")
        return Word(tuple(pieces)) if pieces else None

    def lexeme(self) -> str:
        """Return the word that begins here if it is plain text, and so may be a keyword, without consuming it."""
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
        """Read text as in double quotes up to `end`, or, without one, the whole text (of a here-document)."""
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
        """Enter one level of nesting, up to a limit."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Opaque("it is nested too deeply")
        yield
        self.depth -= 1

    def dollar(self, quoted: bool) -> Piece:
        """Read an expansion that begins with a dollar sign."""
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
            raise Opaque("it has arithmetic in the obsolete $[…] form")
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
        """Read a $'…' string with its escapes."""
        end = self.text.find("'", self.place + 2)
        inside = self.text[self.place + 2 : end]
        # A POSIX shell would end the string at an escaped quote, and parse the rest of the line differently.
        if end < 0 or (len(inside) - len(inside.rstrip("\\"))) % 2:
            raise Opaque("a quote is not closed")
        self.place = end + 1
        return Piece(_sure("".join(_ansi(found) for found in _ANSI.finditer(inside))), True)

    def backticks(self, quoted: bool) -> Piece:
        """Read a command in backticks, which is a command line after removing its escapes."""
        found = _BACKTICKS.match(self.text, self.place)
        if found is None:
            raise Opaque("a backtick is not closed")
        self.place = found.end()
        self.inner(re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", found[1]))
        return Piece(TEXT, quoted)

    def braces(self, quoted: bool) -> Piece:
        """Read a ${…}: its value is unknown, but the commands in it are read."""
        self.place += 2
        head = self.match(_BRACE_HEAD)
        if head is None:
            raise Opaque("it has an expansion of an unknown form")
        if head[1] == "!":
            self.findings.calculated.add(head[2])  # an indirect name may be an array element, whose index is evaluated
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
                raise Opaque("it has an expansion that shells interpret differently")
            else:
                self.place += 1
        raise Opaque("an expansion is not closed")

    def arithmetic_expansion(self) -> Piece:
        self.place += 3
        self.arithmetic("))")
        return Piece(TEXT, True, number=True)

    def arithmetic(self, end: str) -> None:
        """Read an arithmetic expression up to `end`, and record its variables: the shell evaluates their values,
        commands included."""
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
                raise Opaque("it has arithmetic with unknown values")
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
    if code[0] in "cxuU":  # a control character, or an escape that only some shells know
        return TEXT
    return _ANSI_LETTERS.get(code, code if code in "\\'\"?" else "\\" + code)


def _sure(text: str) -> str:
    """Return literal text, in which the two characters reserved for unknown text count as unknown."""
    return text.replace("\1", TEXT)


# ---------------------------------------------------------------------------------- simple commands


class Heredoc:
    """A here-document whose text begins on the next line."""

    def __init__(self, delimiter: Word, tabs: bool) -> None:
        self.end = delimiter.literal
        self.literal = any(piece.quoted for piece in delimiter.pieces)
        self.tabs = tabs
        if TEXT in self.end:
            raise Opaque("the delimiter of a here-document is unknown")


class Redirected:
    """The words and redirections of a command that is being read."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.targets: list[Target] = []
        self.heredoc: Heredoc | None = None
        self.fed_by: Heredoc | None = None  # the here-document, unless a later redirection replaces it as input
        self.stdin: Stdin | None = None
        self.assigned: list[tuple[str, bool]] = []  # variables set before the command, and whether to a number


class SimpleReader(Lexer):
    """Reads simple commands; `Grammar` reads the lists and compound commands around them."""

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
        """Go to the next line, after reading the here-documents of this one."""
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
                raise Opaque(f"{word.plain} is in an unexpected place")
            simple.words.append(word)
            if len(simple.words) == 1 and self.defines():
                return
        if self.place < len(self.text) and self.text[self.place] not in "\n;&|)":
            raise Opaque("its syntax is not recognized")
        self.finish(simple)

    def declares(self, simple: Redirected) -> bool:
        return simple.words[0].literal in DECLARING

    def assignment(self, word: Word, simple: Redirected) -> bool:
        """Record the word if it is an assignment, and return whether it is; in a declaration it is an argument too."""
        lead = word.pieces[0]
        found = None if lead.quoted or lead.text == TEXT else _ASSIGNMENT.match(lead.text)
        if found is None:
            if not lead.quoted and _ELEMENT.match(lead.text) and "=" in word.literal and not simple.words:
                raise Opaque("it sets an array element whose index is unknown")
            return False
        sure = Word((Piece(lead.text[found.end() :], False), *word.pieces[1:])).number
        if word.literal == found[0] and self.take("("):
            sure = self.array()
        if found[2]:
            self.element(found[2])
        self.blanks()
        if found[1] != "IFS" or simple.words or self.lexeme() != "read":  # `IFS= read` only affects its own input
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
            raise Opaque("it sets an array element whose index is unknown")
        self.findings.calculated.update(re.findall(r"^[A-Za-z_]\w*", inside, re.A))

    def array(self) -> bool:
        """Read the rest of an array's values; return whether all are numbers."""
        sure = True
        while True:
            self.newlines()
            word = self.word()
            if word is None:
                break
            if word.literal.startswith("["):
                raise Opaque("it sets an array element whose index is unknown")
            sure = sure and word.number
        if not self.take(")") or (self.place < len(self.text) and self.text[self.place] not in " \t\n;&|)"):
            raise Opaque("a list is not closed")
        return sure

    def defines(self) -> bool:
        """Read a function definition if the last word is its name, and return whether it is."""
        place = self.place
        self.blanks()
        if not self.take("("):
            self.place = place
            return False
        self.blanks()
        if not self.take(")"):
            raise Opaque("its syntax is not recognized")
        self.newlines()
        self.command()
        return True

    def finish(self, simple: Redirected) -> None:
        """Record a complete command, unless its here-document is still to be read."""
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
        if feeds:  # the last redirection counts
            simple.stdin, simple.fed_by = Stdin(None), None
        if found[0].endswith("-") and found[0] != "<<-":  # closes a descriptor: what follows is another word
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
        """Read the lines of a here-document, then record its command."""
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
        """Join a line that ends in a backslash with those that continue it."""
        parts = [line]
        while _continues(parts[-1]) and self.place < len(self.text):
            parts[-1] = parts[-1][:-1]
            parts.append(self.line())
        return "".join(parts)


def _continues(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


# ---------------------------------------------------------------------- lists and compound commands


class Grammar(SimpleReader):
    """Reads a whole command line into `findings`."""

    def read(self) -> None:
        """Read the whole line."""
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
        """Read commands up to one of the words or operators in `stops`, and return it.

        A word is consumed, a parenthesis or the end of a case is not.
        """
        while True:
            self.step()
            self.newlines()
            if self.place >= len(self.text):
                if stops:
                    raise Opaque("it is incomplete")
                return ""
            if stop := self.stop(stops):
                return stop
            self.and_or()
            self.blanks()
            if stop := next((stop for stop in stops if not stop.isalpha() and stop != "}" and self.peek(stop)), ""):
                return stop
            if self.place < len(self.text) and not (self.peek("\n") or self.separator()):
                raise Opaque("its syntax is not recognized")

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
        """Consume this word if it comes next, unquoted."""
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
        """Read one command of any kind, with its redirections."""
        with self.deeper():
            self.step()
            self.blanks()
            self.any_command()

    def any_command(self) -> None:
        if self.take("(("):
            start = self.place
            self.arithmetic("))")
            # To a POSIX shell these are two subshells.
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
                raise Opaque("the variable of a loop is unknown")
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
            raise Opaque("a loop is not recognized")

    def next_word(self) -> Word | None:
        self.blanks()
        return self.word()

    def case(self) -> None:
        self.next_word()
        self.newlines()
        if not self.keyword("in"):
            raise Opaque("a case statement is not recognized")
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
                raise Opaque("a case statement is not recognized")
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
                raise Opaque("a function definition is not recognized")
        self.newlines()
        self.command()

    def test(self) -> None:
        """Read a [[ … ]]. Its numbers are arithmetic; a POSIX shell runs what follows && and || as commands."""
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
                raise Opaque("a test is not recognized")
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
        """Record the variables in words that a test evaluates as numbers."""
        for piece in (piece for word in words for piece in word.pieces):
            if (piece.text == TEXT and not piece.number and not piece.name) or re.search(r"[\[$`]", piece.text):
                raise Opaque("it has arithmetic with unknown values")
            self.findings.calculated.update([piece.name] if piece.name else _NAMES.findall(piece.text))
