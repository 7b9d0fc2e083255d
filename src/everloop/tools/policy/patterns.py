"""Whether a pattern fits a text that is not known in all its parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from fnmatch import translate
from functools import lru_cache

from .shell_line import TEXT, WORDS, unknown

_TOKEN = re.compile(r"\*+|\?|\[(?:!?\]?[^]]*)\]|.", re.S)
_PATH_TOKEN = re.compile(r"\*\*/|/\*\*\Z|\*\*|\*|\?|\[!?\]?[^]/]*\]|.", re.S)
_PATH_WILD = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_WILD = re.compile(r"[*?[]")


class Fit(IntEnum):
    """How sure it is that a pattern fits."""

    NO = 0
    MAYBE = 1
    YES = 2


def fits(pattern: str, text: str) -> Fit:
    """Whether a shell glob fits the whole text, in which TEXT and WORDS stand for what is unknown."""
    if not unknown(text):
        return Fit.YES if _compiled(pattern).match(text) else Fit.NO
    if _walk(pattern, text, sure=True):
        return Fit.YES
    return Fit.MAYBE if _walk(pattern, text, sure=False) else Fit.NO


def fits_command(pattern: str, text: str) -> Fit:
    """Like `fits`; a pattern without wildcards also fits a command that goes on with further words."""
    if _WILD.search(pattern):
        return fits(pattern, text)
    if text == pattern or (text.startswith(pattern) and text[len(pattern)] in (" ", WORDS)):
        return Fit.YES
    return Fit.MAYBE if unknown(text) and max(fits(pattern, text), fits(pattern + " *", text)) else Fit.NO


def fits_past_options(pattern: str, words: Sequence[str]) -> Fit:
    """Whether a pattern without wildcards fits if options before and between its words are overlooked: `git push` fits
    `git -C folder push`. What follows an option may be its value."""
    wanted = pattern.split(" ")
    if _WILD.search(pattern) or not words or words[0] != wanted[0]:
        return Fit.NO
    place, value = 1, False  # of the next word that is wanted; whether an option's value may come now
    for word in words[1:]:
        if place == len(wanted):
            break
        if word == wanted[place]:
            place, value = place + 1, False
        elif unknown(word):
            return Fit.MAYBE
        elif word.startswith("-"):
            value = "=" not in word
        elif value:
            value = False
        else:
            return Fit.NO
    return Fit.YES if place == len(wanted) else Fit.NO


def fits_path(pattern: str, path: str) -> Fit:
    """Whether a pattern fits a path: `*` stays inside a folder, `**` crosses folders.

    A pattern whose last part has no wildcard also fits what is inside, if that is a folder.
    """
    if not unknown(path):
        return Fit.YES if _path(pattern).match(path) else Fit.NO
    wide = re.sub(r"\*\*/|/\*\*", "*", pattern)
    return Fit.MAYBE if _walk(wide, path, sure=False) or _walk(wide + "/*", path, sure=False) else Fit.NO


@lru_cache(1000)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


@lru_cache(1000)
def _path(pattern: str) -> re.Pattern[str]:
    pattern = pattern.rstrip("/") or "/"
    pieces = []
    for token in _PATH_TOKEN.findall(pattern):
        if token in _PATH_WILD:
            pieces.append(_PATH_WILD[token])
        elif token[0] == "[" and len(token) > 1:
            pieces.append("(?!/)" + translate(token).removeprefix("(?s:").removesuffix(r")\Z"))
        else:
            pieces.append(re.escape(token))
    folder = "" if _WILD.search(pattern.rpartition("/")[2]) else "(?:/.*)?"
    return re.compile("".join(pieces) + folder + r"\Z", re.S)


@lru_cache(1000)
def _tokens(pattern: str) -> tuple[tuple[str, re.Pattern[str] | None], ...]:
    found = (token[:1] if token[:1] == "*" else token for token in _TOKEN.findall(pattern))
    return tuple((token, _compiled(token) if len(token) > 1 else None) for token in found)


def _walk(pattern: str, text: str, sure: bool) -> bool:
    """Whether the pattern fits for every (`sure`) or for some way to fill in what is unknown.

    It goes along the text with the set of places in the pattern where it may be. Unknown text is sure to fit only
    where a star takes it whole; otherwise it may lead to any later place.
    """
    tokens = _tokens(pattern)
    places = _closed({0}, tokens)
    for character in text:
        if character in (TEXT, WORDS):
            stars = {place for place in places if place < len(tokens) and tokens[place][0] == "*"}
            if sure:
                places = stars
            elif character == TEXT:
                places = set(range(min(places), len(tokens) + 1))
            elif spaced := _step(places, " ", tokens):
                places |= set(range(min(spaced), len(tokens) + 1))
        else:
            places = _step(places, character, tokens)
        places = _closed(places, tokens)
        if not places:
            return False
    return len(tokens) in places


def _step(places: set[int], character: str, tokens: tuple[tuple[str, re.Pattern[str] | None], ...]) -> set[int]:
    following = set()
    for place in places:
        if place == len(tokens):
            continue
        token, group = tokens[place]
        if token == "*":
            following.add(place)
        elif token == "?" or token == character or (group is not None and group.match(character)):
            following.add(place + 1)
    return following


def _closed(places: set[int], tokens: tuple[tuple[str, re.Pattern[str] | None], ...]) -> set[int]:
    """With the places that are reached by letting a star take nothing."""
    for place in sorted(places):
        while place < len(tokens) and tokens[place][0] == "*":
            place += 1
            places.add(place)
    return places
