"""Time zones: conversion between instants and clock times."""

from __future__ import annotations

import os
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import EverloopError

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

LOCAL_FILE = "/etc/localtime"


class BadSchedule(EverloopError):
    """A schedule that is malformed, or never due."""


class Zone:
    """A time zone by its IANA name; "" is the machine's own. Reads files: construct it in a thread."""

    def __init__(self, name: str) -> None:
        self._info = _load(name) if name else None

    def wall(self, at: float) -> datetime:
        """Return the clock time of an instant, without a zone."""
        return datetime.fromtimestamp(at, self._info).replace(tzinfo=None, fold=0)

    def instants(self, wall: datetime) -> list[float]:
        """Return the instants of a clock time: usually one, none in a gap of daylight saving, two in an overlap."""
        return sorted({at for at in self._both(wall) if self.wall(at) == wall})

    def first(self, wall: datetime) -> float:
        """Return the first instant of a clock time; in a gap of daylight saving, the end of the gap."""
        found = self.instants(wall)
        if found:
            return found[0]
        inside, beyond = sorted(self._both(wall))  # one on each side of the change
        while beyond - inside > 1:
            middle = (inside + beyond) // 2
            if self.wall(middle) < wall:
                inside = middle
            else:
                beyond = middle
        return beyond

    def _both(self, wall: datetime) -> tuple[float, float]:
        first, second = (wall.replace(tzinfo=self._info, fold=fold).timestamp() for fold in (0, 1))
        return first, second


@lru_cache(64)
def zone(name: str) -> Zone:
    """Return the zone of this name; an unknown name raises an error with a suggestion."""
    return Zone(name)


def local_name() -> str:
    """Return the IANA name of this machine's zone; "" if it has none."""
    set_by_hand = os.environ.get("TZ")
    if set_by_hand is not None:
        name = set_by_hand.removeprefix(":") or "UTC"
    elif os.path.exists(LOCAL_FILE):
        name = os.path.realpath(LOCAL_FILE).partition("/zoneinfo/")[2]
    else:
        name = "UTC"
    try:
        zone(name)
    except BadSchedule:
        return ""
    return name


def _load(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown, malformed, or a folder of names
        raise BadSchedule(f'"{name[:60]}" is not a time zone: {_advice(name)}') from None


def _advice(name: str) -> str:
    from difflib import get_close_matches
    from zoneinfo import available_timezones

    known: dict[str, str] = {}
    for one in sorted(available_timezones(), reverse=True):
        known[one.lower()] = known[one.rpartition("/")[2].lower()] = one
    close = get_close_matches(name[:60].lower().replace(" ", "_"), known, n=1, cutoff=0.75)
    return f'did you mean "{known[close[0]]}"?' if close else "give a name like Europe/Vienna or UTC"
