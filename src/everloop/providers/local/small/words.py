"""The words of requests: what they mean, in which language, which files they name, and what kind of request it is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....tools.seen import is_file


def data(name: str) -> Mapping[str, Any]:
    """What a file of data beside this one says."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


_DATA = data("words")
MEANINGS: Mapping[str, str] = _DATA["meanings"]
PATTERNS: Mapping[str, re.Pattern[str]] = {name: re.compile(text, re.I) for name, text in _DATA["patterns"].items()}


def says(text: str, name: str) -> bool:
    """Whether the pattern of this name is found in a text."""
    return PATTERNS[name].search(text) is not None


def word_set(name: str) -> frozenset[str]:
    return frozenset(_DATA["words"][name].split())


EMPTY = word_set("empty")
_BY_WORD = {word: f"§{meaning}" for meaning, said in MEANINGS.items() for word in said.split()}
# A stroke behind a word: whatever begins with it; the longest beginning counts.
_BEGINNINGS = sorted(
    ((word[:-1], one) for word, one in _BY_WORD.items() if word[-1] == "-"), key=lambda pair: -len(pair[0])
)
_SCRIPTS: Mapping[str, str] = _DATA["scripts"]
_SAID_TOGETHER = [(re.compile(rf"(?<!\w)(?:{runs})\b"), f" §{meaning} ") for meaning, runs in _DATA["phrases"].items()]
MEANT = frozenset(f"§{meaning}" for meaning in (*MEANINGS, *_DATA["phrases"]))


def together(text: str) -> str:
    """The text with each run of words that has a meaning as that meaning."""
    text = text.lower()
    for pattern, meaning in _SAID_TOGETHER:
        text = pattern.sub(meaning, text)
    return text


@lru_cache(maxsize=4096)
def meanings_of(word: str) -> list[str]:
    """What a word means, or itself; a run of letters without spaces between words may mean several things."""
    if word in _BY_WORD or word[0] == "§":
        return [_BY_WORD.get(word, word)]
    unspaced = "\u3000" < word[0] < "\uac00"
    found = [one for begin, one in _BEGINNINGS if (begin in word if unspaced else word.startswith(begin))]
    return (found if unspaced else found[:1]) or [word]


# ---------------------------------------------------------------------------------------------- languages

LATIN = "§latin"

_TONGUE_WORDS = {str(tongue): frozenset(words.split()) for tongue, words in _DATA["tongues"].items()}


def weekday(text: str) -> str:
    """The one day of the week that is named, as cron writes it, or nothing."""
    named = [str(number) for number, names in enumerate(_DATA["days"]["names"]) if re.search(names, text, re.I)]
    return named[0] if len(named) == 1 else ""


def clock(text: str) -> tuple[str, str]:
    """The minute and the hour of the one time of day that is named for sure, as cron writes them, or nothing."""
    named = {
        (int(found["hour"] or found["full"]), int(found["minute"] or 0)) for found in PATTERNS["clock"].finditer(text)
    }
    if len(named) != 1:
        return "", ""
    hour, minute = named.pop()
    if says(text, "late") and hour < 12:
        hour += 12
    elif says(text, "early") and hour == 12:
        hour = 0
    return (str(minute), str(hour)) if hour < 24 and minute < 60 else ("", "")


def script(text: str) -> str:
    """Which letters it is written in."""
    return next((name for name, letters in _SCRIPTS.items() if re.search(letters, text)), LATIN)


@lru_cache(maxsize=1024)  # that of each example is asked for again and again
def tongue(text: str) -> str:
    """Which language it is in, as far as that matters: its letters, or one of those that have examples here."""
    if (letters := script(text)) != LATIN:
        return letters
    said = {word.strip(".,:;!?¿¡()") for word in text.lower().split()}
    # English first: where two have as many words, it is the one that was meant.
    return max(_TONGUE_WORDS, key=lambda name: len(said & _TONGUE_WORDS[name]))


# ---------------------------------------------------------------------------------------------- names and words

_ADDRESS = PATTERNS["address"]
BEHIND = r"(?!\w|[.,:]\d)"  # what ends a word or a number: 273 does not stand in 273.15
LONGEST = 600  # characters of a request whose runs of words are looked at
LOOKED_THROUGH = 20_000  # characters of a text whose names of files are known
_ENDLESS = re.compile(r"\S{300,}")  # no name, and slow to look through
_NAME = "0-9A-Za-z_À-ÖØ-öø-ɏ"  # where no spaces part words, a name would take its neighbours in
_FILE = re.compile(
    rf"(?:[{_NAME}.-]+/)*[{_NAME}-]*(?:\.[{_NAME}-]+)*\.[A-Za-z][A-Za-z0-9_]{{0,4}}(?![A-Za-z0-9_])"
    rf"|[{_NAME}.-]+/(?:[{_NAME}.-]+/?)*"
)
_KEY = re.compile(r"\s*[\"']?[\w.-]+[\"']?\s*[=:]\s*")
_SURE = re.compile(r"[\w-]{2,}\.[A-Za-z]\w{0,4}$|\w\.[A-Za-z]\w{1,4}$|\w/$|/.*/|^\.{1,2}/|/.*\.\w+$", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_./~-]+|[^\W\d_a-zA-Z][\w.-]*")
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_WORD = re.compile(r"[a-zà-öø-ÿß]+|\d+|[\u3040-\u30ff\u4e00-\u9fff]+|[\uac00-\ud7a3]+|§\w+")

_INSIDE = word_set("inside")

# What asks for a change, and what asks for any work at all.
CHANGES = ("create", "write", "add", "change", "rename", "move", "copy", "delete", "sort")
WORK = (*CHANGES, "folder", "file", "find", "run", "command", "remember", "remind", "web")


def names_a_file(text: str) -> bool:
    """Whether a file or a folder is named for sure: `and/or` and `e.g.` only look like it."""
    return any(_SURE.search(path) for path in paths_in(text, whole=True))


def alike(request: str, lines: Iterable[str]) -> list[str]:
    """The lines that have most words of a request, or all where none has any."""
    said = {word for word in words(without_files(request)) if word not in EMPTY}
    shared = {line: len(said & set(words(line))) for line in lines if line.strip()}
    most = max(shared.values(), default=0)
    return [line for line, count in shared.items() if count == most]


def key_of(line: str) -> str:
    """The key of a setting with all up to its value, or nothing."""
    found = _KEY.match(line)
    return found[0] if found else ""


def names_key(request: str, line: str) -> bool:
    """Whether a line is a setting whose key a request names."""
    key = {word for word in words(key_of(line)) if word not in EMPTY}
    return bool(key) and key <= {*words(without_files(request))}


def kept(request: str, line: str) -> str:
    """What a line keeps when it replaces another: its key, or a first word that the request does not mention."""
    if key := key_of(line):
        return key
    indent = line[: len(line) - len(line.lstrip())]
    first = (line.split() or [""])[0]
    return indent if set(words(first)) & set(words(request)) else indent + first


def means(text: str, *meanings: str) -> bool:
    """Whether a word of it has one of the meanings."""
    return not _meant(text).isdisjoint(f"§{meaning}" for meaning in meanings)


@lru_cache(maxsize=64)  # one request is asked for dozens of meanings
def _meant(text: str) -> frozenset[str]:
    return frozenset(part for word in words(together(without_files(text))) for part in meanings_of(word))


def paths_in(text: str, whole: bool = False) -> list[str]:
    """The names of files and folders that stand in a text; `whole` with the stroke at a folder's end."""
    text = PATTERNS["zone"].sub(" ", _ADDRESS.sub(" ", _ENDLESS.sub(" ", text[:LOOKED_THROUGH])))
    # An ending right behind letters of another kind is that of a name which we cannot tell from its neighbours.
    found = [one[0] for one in _FILE.finditer(text) if not (one[0][0] == "." and text[: one.start()][-1:].isalpha())]
    if whole:
        return found
    return list(dict.fromkeys(path.rstrip("/") for path in found if path.strip("./")))


def tokens(text: str) -> list[str]:
    """All that could be the name of something in a text."""
    return list(dict.fromkeys(found.strip(".,:;!?") for found in _TOKEN.findall(text) if found.strip(".,:;!?")))


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def features(text: str) -> dict[str, float]:
    """What a request is made of, each with its weight: what its words mean above all, then the words themselves and
    which stand together. Names of files and quotes are only that."""
    text = _ENDLESS.sub(" ", text)
    for pattern, name in ((_QUOTED, "§quote"), (_ADDRESS, "§address"), (_FILE, "§path")):
        text = pattern.sub(f" {name} ", text)
    text = together(text)
    said = ["§digits" if word.isdigit() else word for word in words(text)]
    meant = [part for word in said for part in meanings_of(word)]
    found: dict[str, float] = {}
    for one, two in pairwise(["^", *meant, "$"]):
        found[f"{one} {two}"] = 0.5
    found[script(text)] = 1.5
    found[f"§paths{min(said.count('§path'), 2)}"] = 1.5
    for word in meant:
        if word not in EMPTY:
            found[word] = 2.0 if word in MEANT else 1.0
    return found


def spans(text: str, within: str = "", most: int = 5) -> list[str]:
    """The runs of words of a text without the names of files: whatever a person can have named to be replaced. With
    `within`, only those that stand there."""
    found: dict[str, None] = {quoted[1:-1]: None for quoted in _QUOTED.findall(text)}
    for part in _FILE.split(_ADDRESS.sub(" ", text)) if len(text) <= LONGEST else ():
        said = PATTERNS["letters"].sub(" ", part).split()
        for start in range(len(said)):
            for end in range(start + 1, min(start + most, len(said)) + 1):
                run = " ".join(said[start:end])
                found[run] = found[run.strip(".,:;!?\"'“”«»()")] = None
    runs = [run for run in found if set(words(run)) - EMPTY]
    return [run for run in runs if whole(run).search(within)] if within else runs


def whole(words: str) -> re.Pattern[str]:
    """Where words stand as such, and are no part of longer ones."""
    return re.compile(rf"(?<!\w){re.escape(words)}{BEHIND}")


def folders_in(text: str, inside: bool = True) -> list[str]:
    """The names that stand beside a word for a folder, and with `inside` those behind "in": they may be folders."""
    said = tokens(text)
    near = [said[max(0, at - 2) : at] + said[at + 1 : at + 3] for at, word in enumerate(said) if means(word, "folder")]
    if inside:
        near.append([name for word, name in pairwise(said) if word.lower() in _INSIDE and not is_file(name)])
    found = dict.fromkeys(name for names in near for name in names)
    return [name for name in found if name.lower() not in EMPTY and not means(name, *MEANINGS)]


def files_in(text: str) -> list[str]:
    """The names of files, and not of folders, that stand in a text."""
    return [path for path in paths_in(text) if is_file(path)]


def stems(path: str) -> list[str]:
    """The words of a file's name without its ending."""
    return words(path.rpartition("/")[2].rpartition(".")[0] or path)


def without_files(text: str) -> str:
    """The text without the names of files."""
    return _FILE.sub(" ", _ENDLESS.sub(" ", text))


# ---------------------------------------------------------------------------------------------- kinds of requests

_ASKS = word_set("asks")
_WHOLE = ("show", "read", "say", "file", "collection")


def is_question(text: str) -> bool:
    """Whether something is asked, and not only politely asked for."""
    return says(text, "question") or (re.search("[?\uff1f]", text) is not None and not says(text, "polite"))


def parts_of(text: str) -> list[str]:
    """The parts of what is said, between commas and joining words."""
    return [part for part in PATTERNS["between"].split(text) if part.strip()]


def orders(text: str) -> str:
    """The text without the parts that ask."""
    return " ".join(part for part in PATTERNS["between"].split(text) if not is_question(part))


def runs_then(text: str) -> bool:
    """Whether something is to be run once the rest is done: `… and run it`."""
    return any(means(" ".join(part.split()[:2]), "run") for part in PATTERNS["between"].split(text)[1:])


def asks_for_a_change(text: str) -> bool:
    """Whether it says what one file should say, and is no question about it, nor an order to do something else."""
    if len(files_in(text)) != 1 or is_question(text):
        return False
    if means(text, "delete", "run", "command", "add", "remind", "remember", "copy", "move"):
        return False
    return means(text, "change") or (bool(says(text, "should")) and not means(text, "create", "write"))


def in_every_place(text: str) -> bool:
    """Whether what is to be changed may stand in several places."""
    return says(without_files(text), "every")


def shows_all(text: str) -> bool:
    """Whether the file as a whole is asked for: it is named and nothing else is."""
    if says(text, "exists"):
        return False
    said = words(PATTERNS["refers_to_file"].sub(" ", without_files(text)))
    return all(word in EMPTY or word in _ASKS or means(word, *_WHOLE) for word in said)


def asks_for_the_files(text: str) -> bool:
    """Whether it asks which files there are, and for nothing else."""
    rest = [word for word in words(text) if word not in EMPTY and word not in _ASKS]
    here = means(text, "file", "folder", "here") and len(rest) <= 3
    return here and all(means(word, "file", "folder", "here", "show") for word in rest)
