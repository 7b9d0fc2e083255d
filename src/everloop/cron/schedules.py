"""Due times of schedules: pure arithmetic on instants, in seconds since 1970.

cronsim parses cron fields and matches them against naive clock times; this module decides what daylight saving does to
them. Time zones are read from files: call these functions in a thread.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import assert_never

import msgspec

from .zones import BadSchedule, local_name, zone

MAX_INTERVAL = 366 * 86400
MAX_AHEAD = 100 * 366 * 86400
MAX_EXPRESSION = 200
SOME_DAY = datetime(2000, 1, 1)  # noqa: DTZ001 - cronsim is given clock times without a zone
DAY_AND_MORE = 25 * 3600  # no clock is set back by more than this

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_UNIT = r"(?:(s)(?:ec(?:ond)?s?)?|(m)(?:in(?:ute)?s?)?|(h)(?:ours?|rs?)?|(d)(?:ays?)?|(w)(?:eeks?)?)"
_PART = re.compile(rf"(\d{{1,9}}) ?{_UNIT}(?![a-z])(?:,? ?(?:and )?)", re.ASCII)
_CLOCK = re.compile(r"(?:(today|tomorrow),? ?)?(?:at )?(\d{1,2}):(\d\d)", re.ASCII)
_DATE_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[tT ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)? ?(?:[zZ]|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)


class At(msgspec.Struct, frozen=True):
    """Due once."""

    at: int
    tz: str = ""  # only for messages


class Every(msgspec.Struct, frozen=True):
    """Due repeatedly, by elapsed time from an anchor, so that it never drifts."""

    seconds: int
    anchor: int


class Cron(msgspec.Struct, frozen=True):
    """Due by the calendar and the clocks of a time zone."""

    expression: str
    tz: str = ""


Schedule = At | Every | Cron


# ---------------------------------------------------------------------------------------------- arithmetic


def next_after(schedule: Schedule, after: float) -> float | None:
    """Return the first instant after `after` at which the schedule is due; None if there is none."""
    whole = math.floor(after)  # slots are whole seconds
    match schedule:
        case At(at):
            return at if at > whole else None
        case Every(seconds, anchor):
            return anchor + max(1, (whole - anchor) // seconds + 1) * seconds
        case Cron(expression, tz):
            fixed = _is_fixed(expression)
            return _next_fixed(expression, tz, whole) if fixed else _next_running(expression, tz, whole)
        case _:
            assert_never(schedule)


def latest_until(schedule: Schedule, since: float, until: float) -> float:
    """Return the last slot up to `until`, given that one was due at `since`.

    It bisects, so the number of missed slots does not matter.
    """
    if isinstance(schedule, Every):
        return schedule.anchor + max(1, (math.floor(until) - schedule.anchor) // schedule.seconds) * schedule.seconds
    before, beyond = math.floor(since) - 1, math.floor(until)
    found = next_after(schedule, before)
    while found is not None and found <= until and beyond - before > 1:
        middle = (before + beyond) // 2
        later = next_after(schedule, middle)
        if later is not None and later <= until:
            before, found = middle, later
        else:
            beyond = middle
    # If the zone's rules have changed since, `since` may no longer be a slot; it still counts as one.
    return since if found is None or found > until else found


def _is_fixed(expression: str) -> bool:
    """Return whether the expression names clock times, such as 2:30, instead of every hour or minute."""
    minute, hour, *_ = expression.split()
    return not minute.startswith("*") and not hour.startswith("*")


def _next_fixed(expression: str, tz: str, after: int) -> float | None:
    """Return the next due time of fixed clock times.

    A time that daylight saving skips is due when the clocks are set forward; a repeated time is due the first time.
    """
    from cronsim import CronSim

    place = zone(tz)
    for wall in CronSim(expression, place.wall(after)):
        if (at := place.first(wall)) > after:
            return at
    return None


def _next_running(expression: str, tz: str, after: int) -> float | None:
    """Return the next time at which the clocks show a matching time.

    A skipped time is not due; a repeated one is due twice.
    """
    from cronsim import CronSim

    place = zone(tz)
    # If the clocks are about to be set back, clock times that have passed occur again.
    back = place.wall(after) - place.wall(after + DAY_AND_MORE) + timedelta(seconds=DAY_AND_MORE)
    again: float | None = None
    for wall in CronSim(expression, place.wall(after) - max(back, timedelta(0))):
        instants = place.instants(wall)
        if not instants:
            continue
        if again is not None and instants[0] >= again:
            return again
        if instants[0] > after:
            return instants[0]
        if instants[-1] > after and again is None:
            again = instants[-1]
    return again


# ---------------------------------------------------------------------------------------------- reading


def parse_schedule(
    *,
    at: str | None = None,
    every: str | float | None = None,
    cron: str | None = None,
    tz: str | None = None,
    now: float,
    shortest: int = 1,
) -> Schedule:
    """Parse what a person or a model wrote; `shortest` is the minimum for `every`, in seconds."""
    given = [name for name, value in (("at", at), ("every", every), ("cron", cron)) if value not in (None, "")]
    if len(given) != 1:
        wrong = f"{' and '.join(given)} are given" if given else "none is given"
        raise BadSchedule(f"give exactly one of at, every and cron: {wrong}")
    if tz and given == ["every"]:
        raise BadSchedule("a time zone goes with at or cron, not with every: leave it out")
    if every is not None and given == ["every"]:
        return Every(_every(every, shortest), math.ceil(now))
    name = tz or local_name()
    zone(name)  # raises an error if it is unknown
    return _at(at.strip(), name, now, tz) if at and given == ["at"] else _cron(cron or "", name, now)


def duration(text: str) -> int | None:
    """Return the seconds of a duration like "20m", "1h30m" or "2 days"; None if the text is not one."""
    text, seconds, found = " ".join(text.lower().split()), 0, 0
    place, seen = 0, set()
    while place < len(text) and (part := _PART.match(text, place)):
        unit = next(unit for unit in part.groups()[1:] if unit)
        if unit in seen:
            return None
        seen.add(unit)
        seconds, place, found = seconds + int(part[1]) * _UNITS[unit], part.end(), found + 1
    return seconds if found and place == len(text) and text[-1].isalpha() else None


def _every(every: str | float, shortest: int) -> int:
    text = str(every).strip().lower().removeprefix("every ")
    seconds = int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else duration(text)
    if seconds is None:
        raise BadSchedule(f'every: "{str(every)[:60]}" is not a duration: write it like 10m, 1h30m or 2 days')
    if not shortest <= seconds <= MAX_INTERVAL:
        raise BadSchedule(f"every: at least {span(shortest)} and at most {span(MAX_INTERVAL)}, not {span(seconds)}")
    return seconds


def _at(text: str, tz: str, now: float, asked: str | None) -> At:
    seconds = duration(text.lower().removeprefix("in "))
    found = now + seconds if seconds is not None else _clock_time(text, tz, now)
    if found is None:
        found = _date_time(text, tz, asked)
    at = math.ceil(found)
    if at <= now:
        raise BadSchedule(f'at: "{text}" has passed: it is now {moment(now, tz)}')
    if at > now + MAX_AHEAD:
        raise BadSchedule(f'at: "{text[:60]}" is more than 100 years away')
    return At(at, tz)


def _clock_time(text: str, tz: str, now: float) -> float | None:
    """Parse a clock time: 18:00 (the next one), today 18:00, tomorrow at 9:00."""
    found = _CLOCK.fullmatch(" ".join(text.lower().split()))
    if found is None or int(found[2]) > 23 or int(found[3]) > 59:
        return None
    today = zone(tz).wall(now).replace(hour=int(found[2]), minute=int(found[3]), second=0, microsecond=0)
    if found[1] == "tomorrow" or (found[1] is None and zone(tz).first(today) <= now):
        today += timedelta(days=1)
    return zone(tz).first(today)


def _date_time(text: str, tz: str, asked: str | None) -> float:
    """Parse a date with a time; its own UTC offset, if it has one, must match the requested time zone."""
    try:
        if _DATE_TIME.fullmatch(text) is None:
            raise ValueError
        found = datetime.fromisoformat(text.upper().replace(" +", "+").replace(" -", "-").replace(" Z", "Z"))
    except ValueError:
        raise BadSchedule(
            f'at: "{text[:60]}" is not an unambiguous time: write it like 2031-05-02T18:00, "in 20 minutes", '
            '"18:00" or "tomorrow 9:00"'
        ) from None
    try:
        if found.tzinfo is None:
            return zone(tz).first(found)
        at = found.timestamp()
        if asked and zone(tz).wall(at) != found.replace(tzinfo=None):
            shown = zone(tz).wall(at).strftime("%Y-%m-%d %H:%M")
            raise BadSchedule(f'at: "{text}" is {shown} in {tz}: leave out the offset or tz, whichever is wrong')
        return at
    except (OverflowError, ValueError, OSError):
        raise BadSchedule(f'at: "{text}" is beyond what a clock can show: name a nearer year') from None


def _cron(text: str, tz: str, now: float) -> Cron:
    expression = " ".join(text.split())
    check_expression(expression)
    schedule = Cron(expression, tz)
    if next_after(schedule, now) is None:
        raise BadSchedule(f'cron: "{expression}" is never due: there is no such day in 50 years')
    return schedule


def check_expression(expression: str) -> None:
    """Raise a BadSchedule for anything but a cron expression with five fields."""
    from cronsim import CronSim, CronSimError

    wrong = ""
    if len(expression.split()) != 5 or len(expression) > MAX_EXPRESSION:
        wrong = "it needs five fields: minute, hour, day of the month, month, day of the week"
    else:
        try:
            CronSim(expression, SOME_DAY)
        except (CronSimError, ValueError, AssertionError, TypeError) as error:
            wrong = f"{str(error).lower() or 'bad field'}; fields are like 0, */15, 8-17, 1,15 or MON-FRI"
    if wrong:
        raise BadSchedule(f'cron: "{expression[:60]}" is not a cron expression: {wrong}')


# ---------------------------------------------------------------------------------------------- words


def in_words(schedule: Schedule) -> str:
    """Describe a schedule for a person: once at …, every …, or the cron expression with its meaning."""
    match schedule:
        case At(at, tz):
            return f"once, {moment(at, tz)}"
        case Every(seconds):
            return f"every {span(seconds)}"
        case Cron(expression, tz):
            from cronsim import CronSim

            meaning = CronSim(expression, SOME_DAY).explain()
            return f"{meaning} ({expression}{', ' + tz if tz else ''})"
        case _:
            assert_never(schedule)


def moment(at: float, tz: str = "") -> str:
    """Format an instant in a time zone."""
    return zone(tz).wall(at).strftime("%A, %Y-%m-%d %H:%M") + (f" ({tz})" if tz else "")


def span(seconds: int) -> str:
    """Format a duration: 1 h 30 min."""
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        parts += [f"{count} {name}"] if count else []
    return " ".join(parts) or "0 s"
