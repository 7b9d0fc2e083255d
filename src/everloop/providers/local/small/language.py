"""The language of requests: meanings of words, the language they are in, names of files, and kinds of requests."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....tools.seen import is_file


def load_toml(name: str) -> Mapping[str, Any]:
    """Load a data file of this package."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


_DATA = load_toml("language")
PATTERNS: Mapping[str, re.Pattern[str]] = {name: re.compile(text, re.I) for name, text in _DATA["patterns"].items()}


def matches(text: str, pattern: str) -> bool:
    """Whether the pattern of this name occurs in a text."""
    return PATTERNS[pattern].search(text) is not None


def word_set(name: str) -> frozenset[str]:
    return frozenset(_DATA["words"][name].split())


STOPWORDS = word_set("stopwords")

# ---------------------------------------------------------------------------------------------- meanings

MEANINGS: Mapping[str, str] = _DATA["meanings"]
# What asks for a change, and what asks for any task.
CHANGES = ("create", "write", "add", "change", "rename", "move", "copy", "delete", "sort")
TASKS = (*CHANGES, "folder", "file", "find", "run", "command", "remember", "remind", "web")
_BY_WORD = {word: f"§{meaning}" for meaning, listed in MEANINGS.items() for word in listed.split()}
# The longest prefix counts.
_BY_PREFIX = sorted(
    ((word[:-1], meaning) for word, meaning in _BY_WORD.items() if word[-1] == "-"), key=lambda pair: -len(pair[0])
)
_PHRASES = [(re.compile(rf"(?<!\w)(?:{phrases})\b"), f" §{meaning} ") for meaning, phrases in _DATA["phrases"].items()]
_MEANING_MARKS = frozenset(f"§{meaning}" for meaning in (*MEANINGS, *_DATA["phrases"]))


def means(text: str, *meanings: str) -> bool:
    """Whether a word or a phrase of a text has one of the meanings. Names of files have none."""
    return not _meanings_in(text).isdisjoint(f"§{meaning}" for meaning in meanings)


@lru_cache(maxsize=64)  # dozens of meanings are looked up in one request
def _meanings_in(text: str) -> frozenset[str]:
    return frozenset(part for word in words(_mark_phrases(without_paths(text))) for part in _meanings_of(word))


def _mark_phrases(text: str) -> str:
    """Replace each phrase that has a meaning by the mark of that meaning."""
    text = text.lower()
    for pattern, mark in _PHRASES:
        text = pattern.sub(mark, text)
    return text


@lru_cache(maxsize=4096)
def _meanings_of(word: str) -> list[str]:
    """The marks of a word's meanings, or the word itself. Where words are not separated by spaces, a run of letters may
    have several meanings."""
    if word in _BY_WORD or word[0] == "§":
        return [_BY_WORD.get(word, word)]
    unspaced = "\u3000" < word[0] < "\uac00"
    found = [mark for prefix, mark in _BY_PREFIX if (prefix in word if unspaced else word.startswith(prefix))]
    return (found if unspaced else found[:1]) or [word]


def features(text: str) -> dict[str, float]:
    """The features by which requests are compared, each with its weight: meanings, other words, and pairs of them.
    Which file is named and what is quoted makes no difference."""
    text = _UNBROKEN.sub(" ", text)
    for pattern, mark in ((_QUOTED, "§quote"), (PATTERNS["url"], "§url"), (_PATH, "§path")):
        text = pattern.sub(f" {mark} ", text)
    said = ["§digits" if word.isdigit() else word for word in words(_mark_phrases(text))]
    meant = [part for word in said for part in _meanings_of(word)]
    found = {f"{one} {two}": 0.5 for one, two in pairwise(["^", *meant, "$"])}
    found |= {f"§{script_of(text)}": 1.5, f"§paths{min(said.count('§path'), 2)}": 1.5}
    return found | {word: 2.0 if word in _MEANING_MARKS else 1.0 for word in meant if word not in STOPWORDS}


# ---------------------------------------------------------------------------------------------- languages and times

ENGLISH = "english"  # also the name of all languages in Latin letters, where only the script is known
_SCRIPTS: Mapping[str, str] = _DATA["scripts"]
_LANGUAGE_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(listed.split()) for language, listed in _DATA["languages"].items()
}


def script_of(text: str) -> str:
    """The language that the letters of a text belong to; all Latin letters are taken for English."""
    return next((name for name, letters in _SCRIPTS.items() if re.search(letters, text)), ENGLISH)


@lru_cache(maxsize=1024)  # the language of each example is looked up for every request
def language_of(text: str) -> str:
    """The language of a text, as far as there are examples in it."""
    if (script := script_of(text)) != ENGLISH:
        return script
    said = {word.strip(".,:;!?¿¡()") for word in text.lower().split()}
    # English is the first one, so it wins a tie.
    return max(_LANGUAGE_WORDS, key=lambda language: len(said & _LANGUAGE_WORDS[language]))


def cron_weekday(text: str) -> str:
    """The one weekday that is named, as a field of cron, or ""."""
    named = [str(number) for number, names in enumerate(_DATA["days"]["names"]) if re.search(names, text, re.I)]
    return named[0] if len(named) == 1 else ""


def cron_time(text: str) -> tuple[str, str]:
    """The minute and the hour of the one time of day that is named, as fields of cron, or two times ""."""
    times = [
        (int(found["hour"] or found["full"]), int(found["minute"] or 0)) for found in PATTERNS["time"].finditer(text)
    ]
    if len(set(times)) != 1:
        return "", ""
    hour, minute = times[0]
    if matches(text, "pm") and hour < 12:
        hour += 12
    elif matches(text, "am") and hour == 12:
        hour = 0
    return (str(minute), str(hour)) if hour < 24 and minute < 60 else ("", "")


# ---------------------------------------------------------------------------------------------- words and paths

WORD_END = r"(?!\w|[.,:]\d)"  # 273 does not occur in 273.15
MAX_PHRASE_TEXT = 600  # characters of a request whose phrases are listed
MAX_PATH_TEXT = 20_000  # characters of a text in which paths are found
_UNBROKEN = re.compile(r"\S{300,}")  # is no path, and would take long to search
_NAME = "0-9A-Za-z_À-ÖØ-öø-ɏ"  # no letters of languages without spaces: a name would include its neighbours
_PATH = re.compile(
    rf"(?:[{_NAME}.-]+/)*[{_NAME}-]*(?:\.[{_NAME}-]+)*\.[A-Za-z][A-Za-z0-9_]{{0,4}}(?![A-Za-z0-9_])"
    rf"|[{_NAME}.-]+/(?:[{_NAME}.-]+/?)*"
)
_CERTAIN_PATH = re.compile(r"[\w-]{2,}\.[A-Za-z]\w{0,4}$|\w\.[A-Za-z]\w{1,4}$|\w/$|/.*/|^\.{1,2}/|/.*\.\w+$", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_./~-]+|[^\W\d_a-zA-Z][\w.-]*")
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_WORD = re.compile(r"[a-zà-öø-ÿß]+|\d+|[\u3040-\u30ff\u4e00-\u9fff]+|[\uac00-\ud7a3]+|§\w+")
_BEFORE_FOLDER = word_set("before_folder")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def content_words(text: str) -> set[str]:
    """The words of a text without stop words."""
    return set(words(text)) - STOPWORDS


def tokens(text: str) -> list[str]:
    """Everything in a text that could be a name."""
    return list(dict.fromkeys(found.strip(".,:;!?") for found in _TOKEN.findall(text) if found.strip(".,:;!?")))


def raw_paths_in(text: str) -> list[str]:
    """All that has the form of a path, folders with the slash at their end."""
    text = PATTERNS["time_zone"].sub(" ", PATTERNS["url"].sub(" ", _UNBROKEN.sub(" ", text[:MAX_PATH_TEXT])))
    # An extension after letters of another script belongs to a name that cannot be told from its neighbours.
    return [one[0] for one in _PATH.finditer(text) if not (one[0][0] == "." and text[: one.start()][-1:].isalpha())]


def paths_in(text: str) -> list[str]:
    """The paths of files and folders in a text."""
    return list(dict.fromkeys(path.rstrip("/") for path in raw_paths_in(text) if path.strip("./")))


def files_in(text: str) -> list[str]:
    """The paths of files, not of folders, in a text."""
    return [path for path in paths_in(text) if is_file(path)]


def names_path(text: str) -> bool:
    """Whether a text certainly names a file or a folder; `and/or` and `e.g.` only look like one."""
    return any(_CERTAIN_PATH.search(path) for path in raw_paths_in(text))


def folders_in(text: str, after_prepositions: bool = True) -> list[str]:
    """The names next to a word for a folder. Names after "in" and the like may be folders, too."""
    said = tokens(text)
    near = [said[max(0, at - 2) : at] + said[at + 1 : at + 3] for at, word in enumerate(said) if means(word, "folder")]
    if after_prepositions:
        near.append([name for word, name in pairwise(said) if word.lower() in _BEFORE_FOLDER and not is_file(name)])
    found = dict.fromkeys(name for names in near for name in names)
    return [name for name in found if name.lower() not in STOPWORDS and not means(name, *MEANINGS)]


def without_paths(text: str) -> str:
    return _PATH.sub(" ", _UNBROKEN.sub(" ", text))


def name_words(path: str) -> list[str]:
    """The words of a file's name without its extension."""
    return words(path.rpartition("/")[2].rpartition(".")[0] or path)


def phrases_in(text: str, within: str = "", longest: int = 5) -> list[str]:
    """The quotes and runs of up to five words of a text, without paths: all that a person can have named for a
    replacement. With `within`, only those that occur there."""
    found: dict[str, None] = {quoted[1:-1]: None for quoted in _QUOTED.findall(text)}
    for part in _PATH.split(PATTERNS["url"].sub(" ", text)) if len(text) <= MAX_PHRASE_TEXT else ():
        said = PATTERNS["script_change"].sub(" ", part).split()
        for start in range(len(said)):
            for end in range(start + 1, min(start + longest, len(said)) + 1):
                run = " ".join(said[start:end])
                found[run] = found[run.strip(".,:;!?\"'“”«»()")] = None
    phrases = [phrase for phrase in found if content_words(phrase)]
    return [phrase for phrase in phrases if whole_words(phrase).search(within)] if within else phrases


def whole_words(phrase: str) -> re.Pattern[str]:
    """The pattern of a phrase that is not part of longer words or numbers."""
    return re.compile(rf"(?<!\w){re.escape(phrase)}{WORD_END}")


# ---------------------------------------------------------------------------------------------- kinds of requests

_ASKS = word_set("asks")


def is_question(text: str) -> bool:
    """Whether a request is a question, not a polite command."""
    return matches(text, "question") or (re.search("[?\uff1f]", text) is not None and not matches(text, "polite"))


def clauses(text: str) -> list[str]:
    """The parts of a request between punctuation and conjunctions."""
    return [part for part in PATTERNS["clause_end"].split(text) if part.strip()]


def commands_in(text: str) -> str:
    """A request without its questions."""
    return " ".join(clause for clause in clauses(text) if not is_question(clause))


def asks_to_run_afterwards(text: str) -> bool:
    """Whether a result is to be run: `… and run it`."""
    return any(means(" ".join(clause.split()[:2]), "run") for clause in clauses(text)[1:])


def asks_for_edit(text: str) -> bool:
    """Whether a request says what one existing file should say."""
    if len(files_in(text)) != 1 or is_question(text):
        return False
    if means(text, "delete", "run", "command", "add", "remind", "remember", "copy", "move"):
        return False
    return means(text, "change") or (matches(text, "should") and not means(text, "create", "write"))


def replaces_all(text: str) -> bool:
    """Whether the words to be replaced may occur several times."""
    return matches(without_paths(text), "every")


def asks_for_whole_file(text: str) -> bool:
    """Whether a request is to show a file, and nothing about it in particular."""
    if matches(text, "exists"):
        return False
    said = words(PATTERNS["refers_to_file"].sub(" ", without_paths(text)))
    shows = ("show", "read", "say", "file", "collection")
    return all(word in STOPWORDS or word in _ASKS or means(word, *shows) for word in said)


def asks_for_listing(text: str) -> bool:
    """Whether a request asks which files there are, and nothing else."""
    rest = [word for word in words(text) if word not in STOPWORDS and word not in _ASKS]
    shows = ("file", "folder", "here")
    return means(text, *shows) and len(rest) <= 3 and all(means(word, *shows, "show") for word in rest)
