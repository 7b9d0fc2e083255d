"""The words of requests: the files and folders that they name, what they are made of, and what they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from .languages import script
from .meanings import EMPTY, MEANINGS, MEANT, meanings_of, together

_ADDRESS = re.compile(r"https?://\S+")
BEHIND = r"(?!\w|[.,:]\d)"  # what ends a word or a number: 273 does not stand in 273.15
LONGEST = 600  # characters of a request whose runs of words are looked at
LOOKED_THROUGH = 20_000  # characters of a text whose names of files are known
_ENDLESS = re.compile(r"\S{300,}")  # no name, and slow to look through
_NAME = "0-9A-Za-z_À-ÖØ-öø-ɏ"  # where no spaces part words, a name would take its neighbours in
_FILE = re.compile(
    rf"(?:[{_NAME}.-]+/)*[{_NAME}-]*(?:\.[{_NAME}-]+)*\.[A-Za-z][A-Za-z0-9_]{{0,4}}(?![A-Za-z0-9_])"
    rf"|[{_NAME}.-]+/(?:[{_NAME}.-]+/?)*"
)
_ZONE = re.compile(
    r"\b(?:Etc|Africa|America|Antarctica|Arctic|Asia|Atlantic|Australia|Europe|Indian|Pacific)(?:/[A-Z][\w+-]*){1,2}(?![\w./])"
)
_KEY = re.compile(r"\s*[\"']?[\w.-]+[\"']?\s*[=:]\s*")
_SURE = re.compile(r"[\w-]{2,}\.[A-Za-z]\w{0,4}$|\w\.[A-Za-z]\w{1,4}$|\w/$|/.*/|^\.{1,2}/|/.*\.\w+$", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_./~-]+|[^\W\d_a-zA-Z][\w.-]*")
# Where letters of another kind begin: words of two languages that no space parts.
_LETTERS = re.compile(
    r"(?<=[A-Za-z0-9])(?=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3])|(?<=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3])(?=[A-Za-z0-9])"
)
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_WORD = re.compile(r"[a-zà-öø-ÿß]+|\d+|[\u3040-\u30ff\u4e00-\u9fff]+|[\uac00-\ud7a3]+|§\w+")

_INSIDE = frozenset({"in", "into", "inside", "under", "within", "unter", "en", "dans", "sous"})

# What asks for a change, and what asks for any work at all.
CHANGES = ("create", "write", "add", "change", "rename", "move", "copy", "delete", "sort")
WORK = (*CHANGES, "folder", "file", "find", "run", "command", "remember", "remind", "web")


def names_an_address(text: str) -> bool:
    return _ADDRESS.search(text) is not None


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
    text = _ZONE.sub(" ", _ADDRESS.sub(" ", _ENDLESS.sub(" ", text[:LOOKED_THROUGH])))
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
        said = _LETTERS.sub(" ", part).split()
        for start in range(len(said)):
            for end in range(start + 1, min(start + most, len(said)) + 1):
                run = " ".join(said[start:end])
                found[run] = found[run.strip(".,:;!?\"'“”«»()")] = None
    runs = [run for run in found if set(words(run)) - EMPTY]
    return [run for run in runs if re.search(rf"(?<!\w){re.escape(run)}{BEHIND}", within)] if within else runs


def folders_in(text: str) -> list[str]:
    """The names that stand beside a word for a folder."""
    said = tokens(text)
    beside = [
        near
        for at, word in enumerate(said)
        if means(word, "folder")
        for near in said[max(0, at - 2) : at] + said[at + 1 : at + 3]
    ]
    return [name for name in dict.fromkeys(beside) if name.lower() not in EMPTY and not means(name, *MEANINGS)]


def places_in(text: str) -> list[str]:
    """The names that follow a word for "inside": they may be folders, though nothing says so."""
    said = tokens(text)
    inside = [name for word, name in pairwise(said) if word.lower() in _INSIDE and not is_file(name)]
    return [name for name in inside if name.lower() not in EMPTY and not means(name, *MEANINGS)]


def is_file(path: str) -> bool:
    """Whether a name is a file's: it has an ending, as folders have none."""
    return re.search(r"\.[A-Za-z]\w{0,4}$", path, re.ASCII) is not None


def stems(path: str) -> list[str]:
    """The words of a file's name without its ending."""
    return words(path.rpartition("/")[2].rpartition(".")[0] or path)


def without_files(text: str) -> str:
    """The text without the names of files."""
    return _FILE.sub(" ", _ENDLESS.sub(" ", text))
