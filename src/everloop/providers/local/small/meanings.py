"""What words mean for the choice of a tool. The lists of words are in `words.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_DATA: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
MEANINGS: Mapping[str, str] = _DATA["meanings"]
TONGUES: Mapping[str, str] = _DATA["tongues"]
DAYS: Sequence[str] = _DATA["days"]["names"]


def pattern(name: str) -> re.Pattern[str]:
    """A word list as a regular expression."""
    return re.compile(_DATA["patterns"][name], re.I)


def word_set(name: str) -> frozenset[str]:
    return frozenset(_DATA["words"][name].split())


def _table() -> tuple[dict[str, str], list[tuple[str, str]]]:
    exact, beginnings = {}, []
    for meaning, words in MEANINGS.items():
        for word in words.split():
            if word.endswith("-"):
                beginnings.append((word[:-1], f"§{meaning}"))
            else:
                exact[word] = f"§{meaning}"
    return exact, sorted(beginnings, key=lambda pair: -len(pair[0]))


EMPTY = word_set("empty")
_EXACT, _BEGINNINGS = _table()
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
    if word.startswith("§"):
        return [word]
    if word in _EXACT:
        return [_EXACT[word]]
    if word[0] > "\u3000" and word[0] < "\uac00":
        found = [meaning for beginning, meaning in _BEGINNINGS if beginning in word]
        return found or [word]
    for beginning, meaning in _BEGINNINGS:
        if word.startswith(beginning):
            return [meaning]
    return [word]
