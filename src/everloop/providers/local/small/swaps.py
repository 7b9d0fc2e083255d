"""What is to be put in the place of what, where a request names both: `Ruby instead of Rosie`.

A model of half a billion parameters copies the wrong line as soon as it may write one. So of a line that is to be
changed, all that was not spoken of is given, and only the new words are left to choose, among those of the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .meanings import pattern, word_set
from .words import BEHIND, key_of, names_key, spans

# Before the old words: a word that says so, or a verb and at most three words.
_BEFORE = (
    r"(?:\b(?:instead of|rather than|not|from|statt|anstatt|nicht|von|en vez de|en lugar de|au lieu de)\s+(?:\w+\s+)?"
    r"|\b(?:chang\w*|replac\w*|swap\w*|renam\w*|exchang\w*|substitut\w*|ersetz\w*|änder\w*|tausch\w*|cambi\w*|reempla\w*"
    r"|remplac\w*)\s+(?:[\w']+\s+){0,3}?|把\s*|里的\s*)[\"'“«]?"
)
# After the old words.
_AFTER = (
    r"[\"'”»]?\s*(?:→|->|(?:should|must) (?:be|read|say)|is now|was renamed|became|with|by|durch|por|par"
    r"|를|을|改成|改为|换成|替换)"
)
_BOTH = pattern("both")
_JOINS = word_set("joins")
_PAIR = pattern("pair")
_SIGNS = pattern("signs")
_WITHIN = re.compile(r"[.,;!?]\s")  # the end of a sentence, or of a part of one
_STOPS = ".,:;!?\"'“”«»()"


def swaps(request: str, lines: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """By line, what stands before and after the words that are to be replaced in it; empty where none were named."""
    found = list(dict.fromkeys(lines))
    named = spans(request, "\n".join(found))
    surely: dict[str, list[tuple[str, str]]] = {}
    perhaps: dict[str, list[tuple[str, str]]] = {}
    for old in named:
        places = surely if _is_old(request, old) else perhaps
        for line in found:
            if old in line and (around := _around(line, old, len(key_of(line)))):
                places.setdefault(line, []).extend(around)
    unsure = _BOTH.search(request) and not any(names_key(request, line) for line in found)
    return surely or (perhaps if unsure else {})


def names_signs(request: str) -> bool:
    """Whether what is to be replaced is called by a name and does not stand there itself: `all commas`."""
    return _SIGNS.search(request) is not None


def names_both(request: str) -> bool:
    """Whether the words that are to be there are named as well as those that are."""
    return _PAIR.search(request) is not None


def new_words(request: str, old: Sequence[str]) -> list[str]:
    """What can be put in their place: words of the request without those that are replaced."""
    said = dict.fromkeys(run.strip(_STOPS) for run in spans(request))
    right = [run for run in said if run and not _WITHIN.search(run) and not any(_stands(one, run) for one in old)]
    return [run for run in right if not _JOINS & {run.lower().split()[0], run.lower().split()[-1]}]


def _is_old(request: str, words: str) -> bool:
    escaped = re.escape(words)
    return re.search(rf"{_BEFORE}{escaped}{BEHIND}|(?<!\w){escaped}{_AFTER}", request, re.I) is not None


def _around(line: str, old: str, start: int) -> list[tuple[str, str]]:
    found = re.compile(rf"(?<!\w){re.escape(old)}{BEHIND}").finditer(line, start)
    return [(line[: one.start()], line[one.end() :]) for one in found]


def _stands(words: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}{BEHIND}", text) is not None
