"""Prepares an answer for a network: splits it into parts, and converts its Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .base import Can, Form, Unit

MARK = "(perhaps a repeat)"  # precedes a part that the network may already have
MAX_MARK = len(MARK) + 1
_FENCE = re.compile(r"^(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*$", re.M)


def length(text: str, unit: Unit) -> int:
    """Return a text's length in the network's unit."""
    if unit == "bytes":
        return len(text.encode())
    return len(text) if unit == "characters" else len(text.encode("utf-16-le")) // 2


def without_name(text: str, *names: str) -> tuple[str, bool]:
    """Return the text without a name that it begins with, and whether it has any of these names."""
    known = "|".join(map(re.escape, names))
    if begins := re.match(rf"@?(?:{known})[:,]?\s+", text, re.IGNORECASE):
        return text[begins.end() :], True
    return text, re.search(rf"(?<![\w-])(?:{known})(?![\w-])", text, re.IGNORECASE) is not None


# ------------------------------------------------------------------------------------------------------- splitting


class Piece(NamedTuple):
    """A piece of an answer, and the offset at which it ends in the answer's text."""

    text: str
    end: int


def split(text: str, can: Can, start: int = 0) -> Iterator[Piece]:
    """Split a text, starting at an offset, into pieces that each fit into one part.

    A piece ends at a paragraph if possible, else at a line, a sentence or a word. A code block that is split is closed
    and reopened. Where a piece ends depends only on the text after its start, so that an interrupted delivery resumes
    with the same pieces.
    """
    room = max(can.text - MAX_MARK, 16)
    while start < len(text):
        fence = _open_fence(text[:start]) if can.lines and can.form != "plain" else ""
        opened = f"{fence}\n" if fence else ""
        spare = room - length(opened, can.unit) - (4 if opened else 0)
        start = _skip_blank(text, start, bool(fence))
        end = _cut(text, start, max(spare, 8), can)
        piece, start = text[start:end], end
        if can.lines and can.form != "plain" and (now_open := _open_fence(opened + piece)):
            piece = f"{piece.rstrip()}\n{now_open[:3]}"
        if piece.strip():
            yield Piece(opened + piece.strip("\n").rstrip(), _skip_blank(text, end, False))


def _skip_blank(text: str, start: int, in_code: bool) -> int:
    """Return where the next piece begins. Blank lines between two pieces belong to neither."""
    letters = "\n" if in_code else "\n\r \t"
    while start < len(text) and text[start] in letters:
        start += 1
    return start


def _cut(text: str, start: int, room: int, can: Can) -> int:
    """Return where the piece that begins at `start` ends."""
    end = _fits(text, start, room, can.unit)
    if not can.lines and (line := text.find("\n", start, end)) >= 0:
        return line
    if end == len(text):
        return end
    least = start + (end - start) // 3  # a tiny piece is worse than a cut in a bad place
    for place in (_outside_code(text, start, least, end), text.rfind("\n", least, end)):
        if place > least:
            return place
    for mark in (". ", "! ", "? ", "; ", ", ", " "):
        if (found := text.rfind(mark, least, end)) > least:
            return found + len(mark.rstrip())
    return end


def _outside_code(text: str, start: int, least: int, end: int) -> int:
    """Return the last blank line in this range that is outside of code blocks; -1 if there is none."""
    place = text.rfind("\n\n", least, end)
    while place > least and _open_fence(text[start:place]):
        place = text.rfind("\n\n", least, place)
    return place


def _fits(text: str, start: int, room: int, unit: Unit) -> int:
    """Return the last position at which the text still fits, without splitting a character."""
    end = min(len(text), start + room)
    while length(text[start:end], unit) > room:
        over = length(text[start:end], unit) - room
        end -= max(over // 4, 1)
    while start + 1 < end < len(text) and _joins(text[end]):
        end -= 1
    return max(end, start + 1)


def _joins(letter: str) -> bool:
    """Return whether a character modifies the one before it: an accent, a variant, a joiner or a skin tone."""
    code = ord(letter)
    return 0x300 <= code <= 0x36F or code in (0x200D, 0xFE0E, 0xFE0F) or 0x1F3FB <= code <= 0x1F3FF


def _open_fence(text: str) -> str:
    """Return the line that opens a code block that the text does not close; "" if there is none."""
    opened = ""
    for found in _FENCE.finditer(text):
        marks = found[1]
        if not opened:
            opened = marks + found[2]
        elif marks[0] == opened[0] and len(marks) >= len(opened) - len(opened.lstrip(marks[0])) and not found[2]:
            opened = ""
    return opened


# ------------------------------------------------------------------------------------------------------- rendering


def render(text: str, form: Form) -> str:
    """Convert Markdown to the form of a network."""
    match form:
        case "markdown":
            return text
        case "plain":
            return _blocks(text, _Plain())
        case "html":
            return _blocks(text, _Html())
        case "telegram":
            return _blocks(text, _Telegram())
        case "slack":
            return _blocks(text, _Slack())


def literal(text: str) -> str:
    """Escape a text for Markdown, so that a person's name cannot become a link to somewhere else."""
    return re.sub(r"[\\`*_~\[\]]", r"\\\g<0>", text)


class _Plain:
    """Plain text. A link's address follows its text."""

    def escape(self, text: str) -> str:
        return text

    def code(self, text: str) -> str:
        return text

    def block(self, text: str, language: str) -> str:
        return text

    def strong(self, text: str) -> str:
        return text

    def emphasis(self, text: str) -> str:
        return text

    def struck(self, text: str) -> str:
        return text

    def link(self, text: str, address: str) -> str:
        return address if text == address else f"{text} ({address})"

    def heading(self, text: str) -> str:
        return text

    def quote(self, text: str) -> str:
        return "\n".join(f"> {line}" for line in text.split("\n"))

    def item(self, indent: str, mark: str, text: str) -> str:
        return f"{indent}{mark} {text}"


class _Telegram(_Plain):
    """Telegram's HTML, which has few tags and preserves line breaks."""

    def escape(self, text: str) -> str:
        return html.escape(text, quote=False)

    def code(self, text: str) -> str:
        return f"<code>{self.escape(text)}</code>"

    def block(self, text: str, language: str) -> str:
        inside = self.escape(text)
        if language:
            inside = f'<code class="language-{html.escape(language)}">{inside}</code>'
        return f"<pre>{inside}</pre>"

    def strong(self, text: str) -> str:
        return f"<b>{text}</b>"

    def emphasis(self, text: str) -> str:
        return f"<i>{text}</i>"

    def struck(self, text: str) -> str:
        return f"<s>{text}</s>"

    def link(self, text: str, address: str) -> str:
        return f'<a href="{html.escape(address)}">{text}</a>'

    def heading(self, text: str) -> str:
        return f"<b>{text}</b>"

    def quote(self, text: str) -> str:
        return f"<blockquote>{text}</blockquote>"


class _Html(_Telegram):
    """HTML for e-mail."""

    def heading(self, text: str) -> str:
        return f"<strong>{text}</strong>"


class _Slack(_Plain):
    """Slack's mrkdwn. `<`, `>` and `&` are escaped, so that no text can notify a whole channel."""

    def escape(self, text: str) -> str:
        return html.escape(text, quote=False)

    def code(self, text: str) -> str:
        return f"`{self.escape(text)}`"

    def block(self, text: str, language: str) -> str:
        return f"```\n{self.escape(text)}\n```"

    def strong(self, text: str) -> str:
        return f"*{text}*"

    def emphasis(self, text: str) -> str:
        return f"_{text}_"

    def struck(self, text: str) -> str:
        return f"~{text}~"

    def link(self, text: str, address: str) -> str:
        return f"<{self.escape(address).replace('|', '%7C')}|{text}>"

    def heading(self, text: str) -> str:
        return f"*{text}*"


_INLINE = re.compile(
    r"(?P<escaped>\\[\\`*_~\[\]()#>-])"
    r"|(?P<ticks>`+)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|\[(?P<words>[^\[\]\n]+)\]\((?P<address>https?://[^\s()]*(?:\([^\s()]*\)[^\s()]*)*|mailto:[^\s()]+)\)"
    r"|\*\*(?P<strong>(?=\S)(?:[^*\n]|\*(?!\*))+?(?<=\S))\*\*"
    r"|(?<!\w)__(?P<strong2>(?=\S)[^_\n]+?(?<=\S))__(?!\w)"
    r"|~~(?P<struck>(?=\S)[^~\n]+?(?<=\S))~~"
    r"|(?<![\w*])\*(?P<emphasis>(?=[^\s*])[^*\n]*?(?<=[^\s*]))\*(?![\w*])"
    r"|(?<!\w)_(?P<emphasis2>(?=[^\s_])[^_\n]*?(?<=[^\s_]))_(?!\w)"
)
_ITEM = re.compile(r"^(?P<indent>\s*)(?P<mark>[-*+]|\d{1,9}[.)])\s+(?P<text>.*)$")
_HEADING = re.compile(r"^#{1,6}\s+(?P<text>.*?)\s*#*\s*$")


def _inline(text: str, style: _Plain) -> str:
    """Convert one line, with its emphasis, code and links."""
    made, end = [], 0
    for found in _INLINE.finditer(text):
        made.append(style.escape(text[end : found.start()]))
        made.append(_marked(found, style))
        end = found.end()
    return "".join([*made, style.escape(text[end:])])


def _marked(found: re.Match[str], style: _Plain) -> str:
    if found["escaped"]:
        return style.escape(found["escaped"][1:])
    if found["ticks"]:
        return style.code(found["code"].strip() if found["code"].strip() else found["code"])
    if found["words"]:
        return style.link(_inline(found["words"], style), found["address"])
    kinds: tuple[tuple[str, Callable[[str], str]], ...] = (
        ("strong", style.strong),
        ("strong2", style.strong),
        ("struck", style.struck),
        ("emphasis", style.emphasis),
        ("emphasis2", style.emphasis),
    )
    return next(make(_inline(found[kind], style)) for kind, make in kinds if found[kind])


def _blocks(text: str, style: _Plain) -> str:
    """Convert a whole text: code blocks, quotes, headings, lists and lines."""
    lines, made = text.split("\n"), []
    place = 0
    while place < len(lines):
        line = lines[place]
        if fence := _FENCE.match(line):
            last = _end_of_code(lines, place, fence[1])
            made.append(style.block("\n".join(lines[place + 1 : last]), fence[2]))
            place = last + 1
        elif line.startswith(">"):
            last = next((n for n in range(place, len(lines)) if not lines[n].startswith(">")), len(lines))
            quoted = [_inline(one[1:].removeprefix(" "), style) for one in lines[place:last]]
            made.append(style.quote("\n".join(quoted)))
            place = last
        else:
            made.append(_line(line, style))
            place += 1
    return "\n".join(made)


def _end_of_code(lines: list[str], start: int, marks: str) -> int:
    """Return the line that closes the code block beginning at `start`, or the number of lines."""
    for number in range(start + 1, len(lines)):
        closing = lines[number].strip()
        if closing and set(closing) == {marks[0]} and len(closing) >= len(marks):
            return number
    return len(lines)


def _line(line: str, style: _Plain) -> str:
    if heading := _HEADING.match(line):
        return style.heading(_inline(heading["text"], style))
    if item := _ITEM.match(line):
        mark = "•" if item["mark"] in "-*+" else item["mark"]
        return style.item(item["indent"], mark, _inline(item["text"], style))
    return _inline(line, style)
