"""In which language a request is written, as far as a small model must see examples in that one."""

from __future__ import annotations

import re

from .meanings import DAYS, TONGUES, pattern

LATIN = "§latin"

_TONGUE_WORDS = {tongue: frozenset(words.split()) for tongue, words in TONGUES.items()}
_CLOCK = re.compile(
    r"(?<![\d:.])(?:(?P<hour>\d{1,2}):(?P<minute>\d{2})(?![\d:])"
    r"|(?P<full>\d{1,2}) ?(?:[ap]\.?m\b|uhr\b(?! *\d)|o'clock|heures?\b(?! *\d)))",
    re.I,
)
_LATE = pattern("late")
_EARLY = pattern("early")


def weekday(text: str) -> str:
    """The one day of the week that is named, as cron writes it, or nothing."""
    named = [str(number) for number, names in enumerate(DAYS) if re.search(names, text, re.I)]
    return named[0] if len(named) == 1 else ""


def clock(text: str) -> tuple[str, str]:
    """The minute and the hour of the one time of day that is named for sure, as cron writes them, or nothing."""
    named = {(int(found["hour"] or found["full"]), int(found["minute"] or 0)) for found in _CLOCK.finditer(text)}
    if len(named) != 1:
        return "", ""
    hour, minute = named.pop()
    if _LATE.search(text) and hour < 12:
        hour += 12
    elif _EARLY.search(text) and hour == 12:
        hour = 0
    return (str(minute), str(hour)) if hour < 24 and minute < 60 else ("", "")


def script(text: str) -> str:
    """Which letters it is written in: examples in the same ones come first."""
    if any("\uac00" <= letter <= "\ud7a3" for letter in text):
        return "§korean"
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "§japanese"
    if any("\u4e00" <= letter <= "\u9fff" for letter in text):
        return "§chinese"
    return LATIN


def tongue(text: str) -> str:
    """Which language it is in, as far as that matters: its letters, or one of those that have examples here."""
    if (letters := script(text)) != LATIN:
        return letters
    said = {word.strip(".,:;!?¿¡()") for word in text.lower().split()}
    # English first: where two have as many words, it is the one that was meant.
    return max(_TONGUE_WORDS, key=lambda name: len(said & _TONGUE_WORDS[name]))
