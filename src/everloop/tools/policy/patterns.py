"""Glob matching against texts of which parts are unknown."""

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
    """Whether a pattern matches, as far as the text is known."""

    NO = 0
    MAYBE = 1
    YES = 2


def fits(pattern: str, text: str) -> Fit:
    """Match a shell glob against a whole text, in which TEXT and WORDS stand for unknown parts."""
    if not unknown(text):
        return Fit.YES if _compiled(pattern).match(text) else Fit.NO
    if _walk(pattern, text, sure=True):
        return Fit.YES
    return Fit.MAYBE if _walk(pattern, text, sure=False) else Fit.NO


def fits_command(pattern: str, text: str) -> Fit:
    """Match a command. A pattern without wildcards also matches a command with further words."""
    if _WILD.search(pattern):
        return fits(pattern, text)
    if text == pattern or (text.startswith(pattern) and text[len(pattern)] in (" ", WORDS)):
        return Fit.YES
    return Fit.MAYBE if unknown(text) and max(fits(pattern, text), fits(pattern + " *", text)) else Fit.NO


def fits_past_options(pattern: str, words: Sequence[str]) -> Fit:
    """Match a pattern without wildcards, ignoring options: `git push` matches `git -C folder push`.

    A word after an option may be the option's value.
    """
    wanted = pattern.split(" ")
    if _WILD.search(pattern) or not words or words[0] != wanted[0]:
        return Fit.NO
    place, value = 1, False  # index of the next wanted word; whether this word may be an option's value
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
    """Match a path: `*` stays inside a folder, `**` crosses folders.

    A pattern whose last part has no wildcard also matches everything inside that folder.
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
    """Return whether the pattern matches for every (`sure`) or for some value of the unknown parts.

    Simulates the pattern as a state machine. Unknown text matches for certain only where a star consumes all of it;
    otherwise it may lead to any later state.
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
    """Add the states that are reached by stars that match nothing."""
    for place in sorted(places):
        while place < len(tokens) and tokens[place][0] == "*":
            place += 1
            places.add(place)
    return places
