"""Analyse the language of requests: the meanings of words, the language, paths, and the kind of request."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....tools.workspace_view import is_file


def load_toml(name: str) -> Mapping[str, Any]:
    """Load a data file of this package."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


_DATA = load_toml("language")
PATTERNS: Mapping[str, re.Pattern[str]] = {name: re.compile(text, re.I) for name, text in _DATA["patterns"].items()}


WORD_SETS = {str(name): frozenset(listed.split()) for name, listed in _DATA["words"].items()}
STOPWORDS = WORD_SETS["stopwords"]

# ---------------------------------------------------------------------------------------------- meanings

MEANINGS: Mapping[str, str] = _DATA["meanings"]
# The meanings that ask for a change, and those that ask for any task.
CHANGES = ("create", "write", "add", "change", "rename", "move", "copy", "delete", "sort")
TASKS = (*CHANGES, "folder", "file", "find", "run", "command", "remember", "remind", "web")
_BY_WORD = {word: f"§{meaning}" for meaning, listed in MEANINGS.items() for word in listed.split()}
# The longest prefix wins.
_BY_PREFIX = sorted(
    ((word[:-1], meaning) for word, meaning in _BY_WORD.items() if word[-1] == "-"), key=lambda pair: -len(pair[0])
)
_PHRASES = [(re.compile(rf"(?<!\w)(?:{phrases})\b"), f" §{meaning} ") for meaning, phrases in _DATA["phrases"].items()]
_MEANING_MARKS = frozenset(f"§{meaning}" for meaning in (*MEANINGS, *_DATA["phrases"]))


@lru_cache(maxsize=64)  # dozens of meanings are looked up in one request
def _meanings_in(text: str) -> frozenset[str]:
    return frozenset(part for word in words(_mark_phrases(without_paths(text))) for part in _meanings_of(word))


def _mark_phrases(text: str) -> str:
    """Replace each phrase that has a meaning with the mark of that meaning."""
    text = text.lower()
    for pattern, mark in _PHRASES:
        text = pattern.sub(mark, text)
    return text


@lru_cache(maxsize=4096)
def _meanings_of(word: str) -> list[str]:
    """Return the marks of a word's meanings, or the word itself.

    In languages that do not separate words by spaces, a run of letters may have several meanings.
    """
    if word in _BY_WORD or word[0] == "§":
        return [_BY_WORD.get(word, word)]
    unspaced = "\u3000" < word[0] < "\uac00"
    found = [mark for prefix, mark in _BY_PREFIX if (prefix in word if unspaced else word.startswith(prefix))]
    return (found if unspaced else found[:1]) or [word]


def features(text: str) -> dict[str, float]:
    """Return the features by which requests are compared, with their weights: meanings, other words, and pairs of them.

    Which file is named, or what is quoted, makes no difference.
    """
    text = _UNBROKEN.sub(" ", text)
    for pattern, mark in ((_QUOTED, "§quote"), (PATTERNS["url"], "§url"), (_PATH, "§path")):
        text = pattern.sub(f" {mark} ", text)
    marked = ["§digits" if word.isdigit() else word for word in words(_mark_phrases(text))]
    meant = [part for word in marked for part in _meanings_of(word)]
    found = {f"{one} {two}": 0.5 for one, two in pairwise(["^", *meant, "$"])}
    found |= {f"§{script_of(text)}": 1.5, f"§paths{min(marked.count('§path'), 2)}": 1.5}
    return found | {word: 2.0 if word in _MEANING_MARKS else 1.0 for word in meant if word not in STOPWORDS}


# ---------------------------------------------------------------------------------------------- languages and times

ENGLISH = "english"  # also stands for all languages in Latin letters if only the script is known
_SCRIPTS: Mapping[str, str] = _DATA["scripts"]
_LANGUAGE_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(listed.split()) for language, listed in _DATA["languages"].items()
}


def script_of(text: str) -> str:
    """Return the language of a text's script; Latin letters count as English."""
    return next((name for name, letters in _SCRIPTS.items() if re.search(letters, text)), ENGLISH)


@lru_cache(maxsize=1024)  # the language of each example is looked up for every request
def language_of(text: str) -> str:
    """Return the language of a text, out of the languages of the examples."""
    if (script := script_of(text)) != ENGLISH:
        return script
    text_words = {word.strip(".,:;!?¿¡()") for word in text.lower().split()}
    # English comes first, so it wins a tie.
    return max(_LANGUAGE_WORDS, key=lambda language: len(text_words & _LANGUAGE_WORDS[language]))


def cron_weekday(request: Request) -> str:
    """Return the weekday as a cron field if the request names exactly one, or ""."""
    named = [str(number) for number, names in enumerate(_DATA["days"]["names"]) if re.search(names, request, re.I)]
    return named[0] if len(named) == 1 else ""


def cron_time(request: Request) -> tuple[str, str]:
    """Return minute and hour as cron fields if the request names exactly one time of day, or "" twice."""
    times = [
        (int(found["hour"] or found["full"]), int(found["minute"] or 0)) for found in PATTERNS["time"].finditer(request)
    ]
    if len(set(times)) != 1:
        return "", ""
    hour, minute = times[0]
    if request.matches("pm") and hour < 12:
        hour += 12
    elif request.matches("am") and hour == 12:
        hour = 0
    return (str(minute), str(hour)) if hour < 24 and minute < 60 else ("", "")


def times_from_now(request: Request) -> list[str]:
    """Return the named spans from now, in the scheduler's form; none if a day or a time of day is named."""
    if request.matches("time") or request.matches("another_time") or cron_weekday(request):
        return []
    found: dict[str, None] = {}
    for span in PATTERNS["span"].finditer(request):
        if span["before"] or span["after"]:
            unit = next(name for name in ("second", "minute", "hour", "day", "week") if span[name])
            found[f"in {span['number']} {unit}{'' if span['number'] == '1' else 's'}"] = None
    return list(found)


# ---------------------------------------------------------------------------------------------- words and paths

WORD_END = r"(?!\w|[.,:]\d)"  # 273 does not occur in 273.15
MAX_PHRASE_TEXT = 600  # characters of a request whose phrases are listed
MAX_PATH_TEXT = 20_000  # characters of a text in which paths are found
_UNBROKEN = re.compile(r"\S{300,}")  # not a path, and slow to search
_NAME = "0-9A-Za-z_À-ÖØ-öø-ɏ"  # excludes scripts without spaces: a name would include the adjacent words
_PATH = re.compile(
    rf"(?:[{_NAME}.-]+/)*[{_NAME}-]*(?:\.[{_NAME}-]+)*\.[A-Za-z][A-Za-z0-9_]{{0,4}}(?![A-Za-z0-9_])"
    rf"|[{_NAME}.-]+/(?:[{_NAME}.-]+/?)*"
)
_CERTAIN_PATH = re.compile(r"[\w-]{2,}\.[A-Za-z]\w{0,4}$|\w\.[A-Za-z]\w{1,4}$|\w/$|/.*/|^\.{1,2}/|/.*\.\w+$", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_./~-]+|[^\W\d_a-zA-Z][\w.-]*")
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_WORD = re.compile(r"[a-zà-öø-ÿß]+|\d+|[\u3040-\u30ff\u4e00-\u9fff]+|[\uac00-\ud7a3]+|§\w+")
_BEFORE_FOLDER = WORD_SETS["before_folder"]


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def content_words(text: str) -> set[str]:
    """Return the words of a text without stop words."""
    return set(words(text)) - STOPWORDS


def tokens(text: str) -> list[str]:
    """Return everything in a text that could be a name."""
    return list(dict.fromkeys(found.strip(".,:;!?") for found in _TOKEN.findall(text) if found.strip(".,:;!?")))


def raw_paths_in(text: str) -> list[str]:
    """Return everything in the form of a path; folders keep their trailing slash."""
    text = PATTERNS["time_zone"].sub(" ", PATTERNS["url"].sub(" ", _UNBROKEN.sub(" ", text[:MAX_PATH_TEXT])))
    # An extension after letters of another script belongs to a name whose beginning is unknown.
    return [one[0] for one in _PATH.finditer(text) if not (one[0][0] == "." and text[: one.start()][-1:].isalpha())]


def paths_in(text: str) -> list[str]:
    """Return the paths of files and folders in a text."""
    return list(dict.fromkeys(path.rstrip("/") for path in raw_paths_in(text) if path.strip("./")))


def files_in(text: str) -> list[str]:
    """Return the paths of files, without folders, in a text."""
    return [path for path in paths_in(text) if is_file(path)]


def folders_in(text: str, after_prepositions: bool = True) -> list[str]:
    """Return the names next to a word for a folder. Names after "in" and similar words may be folders, too."""
    names = tokens(text)
    near = [
        names[max(0, at - 2) : at] + names[at + 1 : at + 3]
        for at, word in enumerate(names)
        if Request(word).means("folder")
    ]
    if after_prepositions:
        near.append([name for word, name in pairwise(names) if word.lower() in _BEFORE_FOLDER and not is_file(name)])
    found = dict.fromkeys(name for names in near for name in names)
    return [name for name in found if name.lower() not in STOPWORDS and not Request(name).means(*MEANINGS)]


def without_paths(text: str) -> str:
    return _PATH.sub(" ", _UNBROKEN.sub(" ", text))


def name_words(path: str) -> list[str]:
    """Return the words of a file's name without its extension."""
    return words(path.rpartition("/")[2].rpartition(".")[0] or path)


def phrases_in(text: str, within: str = "", longest: int = 5) -> list[str]:
    """Return the quotes and the runs of up to five words in a text, without paths: everything that may be replaced.

    With `within`, return only those that occur there.
    """
    found: dict[str, None] = {quoted[1:-1]: None for quoted in _QUOTED.findall(text)}
    for part in _PATH.split(PATTERNS["url"].sub(" ", text)) if len(text) <= MAX_PHRASE_TEXT else ():
        parts = PATTERNS["script_change"].sub(" ", part).split()
        for start in range(len(parts)):
            for end in range(start + 1, min(start + longest, len(parts)) + 1):
                run = " ".join(parts[start:end])
                found[run] = found[run.strip(".,:;!?\"'“”«»()")] = None
    phrases = [phrase for phrase in found if content_words(phrase)]
    return [phrase for phrase in phrases if whole_words(phrase).search(within)] if within else phrases


def whole_words(phrase: str) -> re.Pattern[str]:
    """Return the pattern of a phrase that is not part of longer words or numbers."""
    return re.compile(rf"(?<!\w){re.escape(phrase)}{WORD_END}")


# ---------------------------------------------------------------------------------------------- requests

_ASKS = WORD_SETS["asks"]


class Request(str):
    """A request of the user, or a part of one, with predicates on its words."""

    def means(self, *meanings: str) -> bool:
        """Return whether a word or a phrase has one of these meanings. Names of files have none."""
        return not _meanings_in(self).isdisjoint(f"§{meaning}" for meaning in meanings)

    def matches(self, pattern: str) -> bool:
        """Return whether the pattern of this name matches somewhere."""
        return PATTERNS[pattern].search(self) is not None

    @property
    def is_question(self) -> bool:
        """Whether it is a question and not a polite command."""
        asks = re.search("[?\uff1f]", self) is not None
        return self.matches("question") or (asks and not self.matches("polite"))

    @property
    def clauses(self) -> list[Request]:
        """The parts between punctuation and conjunctions."""
        return [Request(part) for part in PATTERNS["clause_end"].split(self) if part.strip()]

    @property
    def commands(self) -> Request:
        """The request without its questions."""
        return Request(" ".join(clause for clause in self.clauses if not clause.is_question))

    @property
    def names_path(self) -> bool:
        """Whether it certainly names a file or a folder; `and/or` and `e.g.` only look like paths."""
        return any(_CERTAIN_PATH.search(path) for path in raw_paths_in(self))

    @property
    def asks_to_run(self) -> bool:
        """Whether it asks to run what it asked to create: `… and run it`."""
        return any(Request(" ".join(clause.split()[:2])).means("run") for clause in self.clauses[1:])

    @property
    def asks_for_edit(self) -> bool:
        """Whether it says what an existing file should contain."""
        if len(files_in(self)) != 1 or self.is_question:
            return False
        if self.means("delete", "run", "command", "add", "remind", "remember", "copy", "move"):
            return False
        return self.means("change") or (self.matches("should") and not self.means("create", "write"))

    @property
    def replaces_all(self) -> bool:
        """Whether it asks to replace every occurrence of some words."""
        return Request(without_paths(self)).matches("every")

    @property
    def asks_for_whole_file(self) -> bool:
        """Whether it asks to see a whole file, and nothing in particular in it."""
        rest = words(PATTERNS["refers_to_file"].sub(" ", without_paths(self)))
        meanings = ("show", "read", "say", "file", "collection")
        asks = all(word in STOPWORDS or word in _ASKS or Request(word).means(*meanings) for word in rest)
        return asks and not self.matches("exists")

    @property
    def asks_for_listing(self) -> bool:
        """Whether it asks which files exist, and nothing else."""
        rest = [Request(word) for word in words(self) if word not in STOPWORDS and word not in _ASKS]
        meanings = ("file", "folder", "here")
        return self.means(*meanings) and len(rest) <= 3 and all(word.means(*meanings, "show") for word in rest)
