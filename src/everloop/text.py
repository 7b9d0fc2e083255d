"""Make text safe to store and to display, and shorten it."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import islice

# Text from a model, a tool or a web page must not move a terminal's cursor, set its title or paste into it: control
# characters are shown as control pictures; bidirectional marks, and invisible letters that are used to hide
# instructions, as a replacement character.
_PRINTABLE: dict[int, int | str | None] = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_PRINTABLE |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_PRINTABLE |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)), "�")
_PRINTABLE |= dict.fromkeys(range(0xE0000, 0xE0080), "�")
_PRINTABLE |= {0x0D: None, 0x7F: "␡", 0x2028: "\n", 0x2029: "\n"}

# Rendered as nothing or as blank space, although they are categorised as letters and marks.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0") | frozenset(
    chr(code) for code in (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
)
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Marks of direction and blanks that can disguise a text, and joiners and variants where no letter or emoji needs them.
_DISGUISES = re.compile(
    "[\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufeff"
    "\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]|[\u200c\u200d]{2,}|[\u200c\u200d](?![^\x00-\x7f])"
    "|(?<![^\x00-\x7f])[\u200c\u200d\ufe00-\ufe0f](?!\u20e3)"
)
_LONG_GAP = re.compile(r"(?<=[^ \n]) {9,}|\n{4,}")
_TRAILING = re.compile(r" +(?=\n|\Z)")


def clean(text: str) -> str:
    """Return the text without lone surrogates, which JSON encoders and databases reject."""
    if text.isascii():  # O(1)
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def printable(text: str) -> str:
    """Return the text with every control character except tabs and newlines made visible."""
    return text if text.isprintable() else text.translate(_PRINTABLE)


def one_line(text: str | bytes, limit: int | None = 300) -> str:
    """Return the text on one line, without anything a terminal would interpret.

    With a limit, longer text is truncated to that many characters, ending in an ellipsis.
    """
    given = text[: 4 * limit] if limit is not None else text
    shown = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
    line = printable(" ".join(shown.split()))
    if limit is None or (len(line) <= limit and len(given) == len(text)):
        return line
    return f"{line[: limit - 1]}…"


def cut(text: str, limit: int, pointer: str = "") -> str:
    """Return the text with its middle replaced by a note if it is longer than `limit`.

    The note counts the omitted characters, ends with `pointer`, and counts towards the limit.
    """
    if len(text) <= limit:
        return text
    note = f"\n[… {len(text) - limit + 60} of {len(text)} characters left out{pointer} …]\n"
    kept = max(limit - len(note), 0)
    note = f"\n[… {len(text) - kept} of {len(text)} characters left out{pointer} …]\n"
    return text[: kept - kept // 2] + note + text[len(text) - kept // 2 :]


def cut_inline(text: str, limit: int) -> str:
    """Return the text with its middle replaced by an inline note with the count, if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ‹… {len(text) - 2 * half} of {len(text)} characters left out …› {text[-half:]}"


def visible(text: str) -> str:
    """Return the text with every invisible character written out, as ‹U+001B›.

    What a person reads before approving it must be what runs. Newlines and indenting tabs are kept. Long gaps, which
    could push text out of sight, are replaced by their length.
    """
    if text.isascii() and text.isprintable() and "  " not in text and not text.endswith(" "):
        return text
    text = _LONG_GAP.sub(lambda found: f"‹{len(found[0])} {'spaces' if found[0][0] == ' ' else 'line ends'}›", text)
    text = _TRAILING.sub(lambda found: _code(" ") * len(found[0]), text)
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip("\t"))
        lines.append(line[:indent] + "".join(_code(c) if _is_hidden(c) else c for c in line[indent:]))
    return "\n".join(lines)


def revealed(text: str) -> str:
    """Return the text with the characters written out, as ‹U+202E›, that change the order of others or are not seen.

    Milder than `visible`: gaps stay, and so do the joiners inside words and emoji.
    """
    return text if text.isascii() else _DISGUISES.sub(lambda found: "".join(map(_code, found[0])), text)


def _is_hidden(character: str) -> bool:
    if " " <= character <= "~":
        return False
    return character in _BLANK or unicodedata.category(character) in _HIDDEN


def _code(character: str) -> str:
    return f"‹U+{ord(character):04X}›"


# ---------------------------------------------------------------------------------------- excerpts

_LOOKED_AT = 100_000  # characters of the text that are searched
_MAX_WORDS = 16
_MAX_HITS = 10  # per word
_LEAD = 60  # characters of context before the first word
_PUNCTUATION = ".,;:!?\"'()[]{}<>*`…“”„‘’«»。、！？「」"


def excerpt(text: str, query: str, most: int = 300) -> str:
    """Return one line of at most `most` characters around the query's words, cut at word boundaries if possible.

    "…" marks omitted text.
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    place = _best_place(line[:_LOOKED_AT], query, most - _LEAD)
    start = 0 if place <= _LEAD else place - _LEAD
    if start and (space := line.find(" ", start, place)) >= 0:
        start = space + 1
    end = start + most - 2
    if end >= len(line):
        end = len(line)
    elif (space := line.rfind(" ", place + 1, end + 1)) > start + most // 2:
        end = space
    return f"{'…' if start else ''}{line[start:end].strip()}{'…' if end < len(line) else ''}"


def _best_place(text: str, query: str, span: int) -> int:
    """Return the offset of the part of the text that contains the most query words."""
    folded, places = _folded(text)
    words = dict.fromkeys(word for part in _folded(query)[0].split() if (word := part.strip(_PUNCTUATION)))
    hits = sorted((at, word) for word in islice(words, _MAX_WORDS) for at in _hits(folded, word))
    best, most = 0, 0
    for number, (at, _) in enumerate(hits):
        here = len({word for other, word in hits[number:] if other < at + span})
        if here > most:
            best, most = at, here
    return places[best] if places else best


def _hits(text: str, word: str) -> list[int]:
    """Return the offsets of a word.

    If there are none, return those of its stem, or of character pairs in scripts without word boundaries.
    """
    tries = [word, *(word[:-cut] for cut in (1, 2, 3) if len(word) - cut >= 3)]
    for each in tries:
        if found := _places(text, each):
            return found
    pairs = [] if word.isascii() else [word[at : at + 2] for at in range(min(len(word) - 1, _MAX_WORDS))]
    return [at for pair in pairs for at in _places(text, pair)[:2]]


def _places(text: str, word: str) -> list[int]:
    found: list[int] = []
    at = text.find(word)
    while at >= 0 and len(found) < _MAX_HITS:
        if not at or not word[0].isascii() or not text[at - 1].isalnum():
            found.append(at)
        at = text.find(word, at + len(word))
    return found


def _folded(text: str) -> tuple[str, list[int]]:
    """Return the text without case, accents and width variants, and the original offset of each of its characters."""
    if text.isascii():
        return text.lower(), []
    plain = list(map(_plain, text))
    return "".join(plain), [at for at, each in enumerate(plain) for _ in each]


@lru_cache(4_096)
def _plain(character: str) -> str:
    parts = unicodedata.normalize("NFKD", character).casefold()
    return "".join(part for part in parts if not "\u0300" <= part <= "\u036f")


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 entry", "2,000 entries"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
