"""When scheduled work is due, against croniter and against a reference that walks the minutes."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from croniter import croniter  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.cron import zones
from everloop.cron.schedules import (
    SOME_DAY,
    At,
    Cron,
    Every,
    Schedule,
    duration,
    in_words,
    latest_until,
    moment,
    next_after,
    parse_schedule,
)
from everloop.cron.zones import BadSchedule, zone

from ..support.cases import each

HOUR, DAY, YEAR = 3600, 86400, 366 * 86400
AROUND = 7 * HOUR // 2  # before and after a clock change, which is two hours at most
NOW = datetime(2026, 6, 15, 12, 0, tzinfo=UTC).timestamp()  # a Monday
# Zones whose clocks change: at night or at midnight, by an hour, half an hour or two, in both halves of the year.
CHANGING = (
    "Europe/Vienna", "America/New_York", "America/Santiago", "America/Havana", "Asia/Beirut", "Africa/Cairo",
    "Australia/Sydney", "Australia/Lord_Howe", "Antarctica/Troll", "Africa/Casablanca", "America/St_Johns", "Asia/Gaza",
)  # fmt: skip
ZONES = (*CHANGING, "UTC", "Asia/Kolkata", "Asia/Kathmandu", "Pacific/Chatham", "Asia/Tokyo", "Pacific/Kiritimati")
FIELDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
NAMES = {
    3: ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    4: ("sun", "MON", "Tue", "wed", "thu", "fri", "sat"),
}


def instant(text: str, tz: str, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(tz), fold=fold).timestamp()


def slots(schedule: Schedule, after: float, until: float) -> list[float]:
    found = []
    due = next_after(schedule, after)
    while due is not None and due <= until:
        found.append(due)
        due = next_after(schedule, due)
    return found


# ---------------------------------------------------------------------------------------------- the references


def a_field(rng: random.Random, number: int) -> tuple[str, set[int]]:
    """A random field of an expression, as text and as its meaning."""
    low, high = FIELDS[number]
    every = set(range(low, high + 1))
    match rng.randrange(7):
        case 0 | 1:
            return "*", every
        case 2:
            step = rng.randint(2, max(2, high // 2))
            return f"*/{step}", set(range(low, high + 1, step))
        case 3:
            first = rng.randint(low, high)
            last = rng.randint(first, high)
            step = rng.randint(1, 4)
            if first == last:  # with a step this would mean: from here on
                return str(first), {first}
            return (f"{first}-{last}" + (f"/{step}" if step > 1 else "")), set(range(first, last + 1, step))
        case 4:
            some = {rng.randint(low, high) for _ in range(rng.randint(2, 4))}
            return ",".join(str(one) for one in sorted(some)), some
        case 5 if number in NAMES:
            one = rng.randint(low, high)
            return NAMES[number][one - low], {one}
        case _:
            one = rng.randint(low, high)
            return str(one), {one}


Meaning = tuple[str, list[set[int]]]


def an_expression(rng: random.Random, frequent: bool = False) -> Meaning:
    found = [a_field(rng, number) for number in range(5)]
    if min(found[2][1]) > 28:  # 31 April never comes, and croniter gives up on "31 April or a Monday"
        found[2] = ("28", {28})
    if frequent:  # on most days, so that they include a day with a clock change
        found[2:4] = [("*", set(range(1, 32))), ("*", set(range(1, 13)))]
    return " ".join(text for text, _ in found), [values for _, values in found]


def is_named(expression: str) -> bool:
    minute, hour = expression.split()[:2]
    return not minute.startswith("*") and not hour.startswith("*")


def matches(meaning: Meaning, wall: datetime) -> bool:
    expression, (minutes, hours, days, months, weekdays) = meaning
    if wall.minute not in minutes or wall.hour not in hours or wall.month not in months or wall.second:
        return False
    day, weekday = wall.day in days, wall.isoweekday() % 7 in weekdays
    either = not expression.split()[2].startswith("*") and not expression.split()[4].startswith("*")
    return day or weekday if either else day and weekday


def walked(meaning: Meaning, tz: str, after: float, until: float) -> Iterator[float]:
    """Every slot, found by walking the minutes according to the rule in docs/cron.md.

    An expression that names hours and minutes is due once: when the clocks show it for the first time, or when they are
    put forward beyond it. One with a star there is due each time that the clocks show it.
    """
    named, info = is_named(meaning[0]), ZoneInfo(tz)
    at = int(after // 60) * 60 - 26 * HOUR
    before: datetime | None = None
    latest = SOME_DAY
    while at <= until:
        wall = datetime.fromtimestamp(at, info).replace(tzinfo=None, fold=0)
        due = matches(meaning, wall) and (not named or wall > latest)
        if named and before is not None:
            skipped = before + timedelta(minutes=1)
            while skipped < wall:
                due = due or (skipped > latest and matches(meaning, skipped))
                skipped += timedelta(minutes=1)
        if due and at > after:
            yield at
        before, latest, at = wall, max(latest, wall), at + 60


def changes_near(tz: str, at: float) -> bool:
    info = ZoneInfo(tz)
    offsets = {datetime.fromtimestamp(at + hours * HOUR, info).utcoffset() for hours in range(-26, 27, 2)}
    return len(offsets) > 1


@functools.cache
def edges(tz: str, first: int, last: int) -> list[int]:
    """The instants at which the clocks of a zone change, to the minute. No zone changes them twice in five days."""
    info, found = ZoneInfo(tz), []
    at, end = datetime(first, 1, 1, tzinfo=UTC).timestamp(), datetime(last, 1, 1, tzinfo=UTC).timestamp()
    while at < end:
        offset = datetime.fromtimestamp(at, info).utcoffset()
        if datetime.fromtimestamp(at + 5 * DAY, info).utcoffset() != offset:
            low, high = at, at + 5 * DAY
            while high - low > 60:
                middle = (low + high) // 120 * 60
                same = datetime.fromtimestamp(middle, info).utcoffset() == offset
                low, high = (middle, high) if same else (low, middle)
            found.append(int(high))
        at += 5 * DAY
    return found


# ---------------------------------------------------------------------------------------------- properties


def their_next(expression: str, tz: str, after: float) -> float:
    start = datetime.fromtimestamp(after, ZoneInfo(tz))
    # Debian's rule for a day of the month and a day of the week: either of them, unless one begins with a star.
    found = croniter(expression, start, implement_cron_bug=True).get_next(datetime)
    return float(found.timestamp())


@pytest.mark.parametrize("seed", range(4))
def test_random_expressions_over_fifty_years_agree_with_croniter(seed):
    rng = random.Random(seed)
    for _ in range(500):
        meaning, tz = an_expression(rng), rng.choice(ZONES)
        after = rng.uniform(NOW, NOW + 50 * YEAR)
        ours = next_after(Cron(meaning[0], tz), after)
        assert ours is not None
        theirs = their_next(meaning[0], tz, after)
        if ours != theirs:  # only where clocks change; what the differences are, the next test says
            assert changes_near(tz, min(ours, theirs)), (meaning[0], tz, after)
            assert ours == next(walked(meaning, tz, max(after, min(ours, theirs) - 2 * DAY), ours))


@pytest.mark.parametrize("tz", CHANGING)
def test_on_clock_change_days_croniter_only_adds_skipped_star_slots_and_repeated_named_times(tz):
    rng = random.Random(tz)
    for edge in rng.sample(edges(tz, 2026, 2077), 4):
        forward = zone(tz).wall(edge) - zone(tz).wall(edge - 60) > timedelta(minutes=1)
        for _ in range(5):
            meaning = an_expression(rng, frequent=True)
            after, until = edge - AROUND, edge + AROUND
            theirs = []
            running = croniter(meaning[0], datetime.fromtimestamp(after, ZoneInfo(tz)), implement_cron_bug=True)
            while (at := running.get_next(datetime).timestamp()) <= until:
                theirs.append(at)
            ours = slots(Cron(meaning[0], tz), after, until)
            assert set(ours) <= set(theirs)
            if ours != theirs:
                assert is_named(meaning[0]) != forward
                assert not forward or set(theirs) - set(ours) == {edge}
                assert forward or all(edge <= at < edge + 3 * HOUR for at in set(theirs) - set(ours))


@pytest.mark.parametrize("tz", CHANGING)
def test_on_clock_change_days_every_slot_is_the_one_found_minute_by_minute(tz):
    rng = random.Random(tz)
    found = edges(tz, 2026, 2077)
    assert len(found) > 90 or tz == "Africa/Casablanca"
    for edge in rng.sample(found, 5):
        for _ in range(4):
            meaning = an_expression(rng, frequent=True)
            after, until = edge - AROUND - rng.randrange(3600), edge + AROUND
            assert slots(Cron(meaning[0], tz), after, until) == list(walked(meaning, tz, after, until)), (meaning, edge)


@pytest.mark.parametrize("tz", CHANGING)
def test_from_any_second_of_a_clock_change_day_the_next_slot_is_the_first_one_after_it(tz):
    rng = random.Random(tz)
    for edge in rng.sample(edges(tz, 2026, 2077), 4):
        for _ in range(4):
            meaning = an_expression(rng, frequent=True)
            all_slots = list(walked(meaning, tz, edge - 5 * HOUR, edge + 5 * HOUR))
            for _ in range(20):
                after = edge + rng.uniform(-4 * HOUR, 4 * HOUR)
                expected = next((one for one in all_slots if one > after), None)
                found = next_after(Cron(meaning[0], tz), after)
                assert found == expected or (expected is None and found is not None and found > edge + 5 * HOUR)


@pytest.mark.parametrize("seed", range(4))
def test_the_latest_of_many_missed_slots_is_the_last_one_that_stepping_finds(seed):
    rng = random.Random(seed)
    for _ in range(40):
        (expression, _), tz = an_expression(rng, frequent=True), rng.choice(ZONES)
        schedule = Cron(expression, tz)
        since = next_after(schedule, rng.uniform(NOW, NOW + 50 * YEAR))
        if since is None:
            continue
        until = since + rng.choice((0, 59, HOUR, DAY)) * rng.random()
        passed = [since, *slots(schedule, since, until)]
        assert latest_until(schedule, since, until) == passed[-1]
        assert latest_until(schedule, since, passed[-1]) == passed[-1]


@given(
    st.integers(1, 10**6), st.integers(0, 2**33), st.floats(-1e6, 1e9), st.floats(0, 1e9)
)  # fmt: skip
def test_every_stays_on_the_grid_of_its_anchor(seconds, anchor, later, missed):
    schedule, after = Every(seconds, anchor), anchor + later
    due = next_after(schedule, after)
    assert due is not None
    assert (due - anchor) % seconds == 0
    assert due > after
    assert due >= anchor + seconds
    assert due - seconds <= after or due == anchor + seconds
    last = latest_until(schedule, due, due + missed)
    assert (last - anchor) % seconds == 0
    assert due <= last <= due + missed < last + seconds


def test_a_slot_stays_a_slot_after_its_zone_changed_its_rules():
    assert latest_until(Cron("0 9 * * *", "UTC"), NOW + 1, NOW + 2) == NOW + 1
    assert latest_until(At(5), NOW, NOW + 1) == NOW


def test_years_of_missed_minutes_are_skipped_without_counting():
    began = time.process_time()
    assert latest_until(Cron("* * * * *", "Europe/Vienna"), NOW, NOW + 20 * YEAR + 30) == NOW + 20 * YEAR
    assert time.process_time() - began < 2


# ---------------------------------------------------------------------------------------------- days of change


def test_a_skipped_clock_time_fires_once_when_clocks_are_put_forward():
    night = instant("2027-03-28T01:00", "Europe/Vienna")
    at_three = instant("2027-03-28T03:00", "Europe/Vienna")
    assert slots(Cron("30 2 * * *", "Europe/Vienna"), night, night + 20 * HOUR) == [at_three]
    assert slots(Cron("0,20,40 2,3 * * *", "Europe/Vienna"), night, night + 20 * HOUR) == [
        at_three, at_three + 1200, at_three + 2400
    ]  # fmt: skip


def test_a_repeated_clock_time_fires_the_first_time():
    night = instant("2027-10-31T00:00", "Europe/Vienna")
    assert slots(Cron("30 2 * * *", "Europe/Vienna"), night, night + 20 * HOUR) == [night + 2.5 * HOUR]
    second = instant("2027-10-31T02:10", "Europe/Vienna", fold=1)
    assert next_after(Cron("30 2 * * *", "Europe/Vienna"), second) == instant("2027-11-01T02:30", "Europe/Vienna")


def test_hourly_and_quarter_hourly_slots_continue_through_a_clock_change():
    for text in ("2027-03-28T00:00", "2027-10-31T00:00"):
        night = instant(text, "Europe/Vienna")
        hours = slots(Cron("0 * * * *", "Europe/Vienna"), night, night + 6 * HOUR)
        assert hours == [night + n * HOUR for n in range(1, 7)]
        quarters = slots(Cron("*/15 * * * *", "Europe/Vienna"), night, night + 6 * HOUR)
        assert quarters == [night + n * 900 for n in range(1, 25)]


def test_a_day_that_a_zone_skipped_fires_once():
    # Samoa had no 30 December 2011.
    eve = instant("2011-12-29T12:00", "Pacific/Apia")
    found = slots(Cron("0 9 * * *", "Pacific/Apia"), eve, eve + 2 * DAY)
    assert [moment(at, "Pacific/Apia")[-32:-15] for at in found[:2]] == [" 2011-12-31 00:00", " 2011-12-31 09:00"]


def test_a_single_time_follows_the_same_rule():
    now = instant("2027-01-01T00:00", "Europe/Vienna")
    skipped = parse_schedule(at="2027-03-28T02:30", tz="Europe/Vienna", now=now)
    assert skipped == At(int(instant("2027-03-28T03:00", "Europe/Vienna")), "Europe/Vienna")
    twice = parse_schedule(at="2027-10-31T02:30", tz="Europe/Vienna", now=now)
    assert twice == At(int(instant("2027-10-31T02:30", "Europe/Vienna", fold=0)), "Europe/Vienna")
    second = parse_schedule(at="2027-10-31T02:30+01:00", tz="Europe/Vienna", now=now)
    assert second == At(int(instant("2027-10-31T02:30", "Europe/Vienna", fold=1)), "Europe/Vienna")


@pytest.mark.parametrize("set_by_hand", [None, "", ":"])
def test_a_machine_without_a_zone_uses_utc_and_its_jobs_keep_it_elsewhere(monkeypatch, tmp_path, set_by_hand):
    monkeypatch.setattr(zones, "LOCAL_FILE", str(tmp_path / "localtime"))  # there is none, as in a small container
    monkeypatch.delenv("TZ", raising=False)
    if set_by_hand is not None:
        monkeypatch.setenv("TZ", set_by_hand)
    assert parse_schedule(cron="0 8 * * *", now=NOW) == Cron("0 8 * * *", "UTC")


def test_without_a_zone_the_machines_own_applies(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert parse_schedule(cron="0 8 * * *", now=NOW) == Cron("0 8 * * *", "America/New_York")
        named = parse_schedule(at="2027-03-14T02:30", now=NOW)
        assert named == At(int(instant("2027-03-14T03:00", "America/New_York")), "America/New_York")
        monkeypatch.setenv("TZ", "XYZ5ABC,M3.2.0,M11.1.0")  # a rule without a name: the machine itself is asked
        time.tzset()
        assert parse_schedule(cron="0 8 * * *", now=NOW) == Cron("0 8 * * *", "")
        unnamed = parse_schedule(at="2027-03-14T02:30", now=NOW)
        assert isinstance(unnamed, At)
        assert unnamed.at == named.at
        for expression in ("30 2 * * *", "*/15 * * * *", "0 1 * * *"):
            for night in (
                instant("2027-03-14T00:00", "America/New_York"),
                instant("2027-11-07T00:00", "America/New_York"),
            ):
                expected = slots(Cron(expression, "America/New_York"), night, night + 6 * HOUR)
                assert slots(Cron(expression, ""), night, night + 6 * HOUR) == expected
    finally:
        monkeypatch.undo()
        time.tzset()


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20m", 1200), ("1h30m", 5400), ("1h 30m", 5400), ("2 days", 2 * DAY), ("90s", 90),
        ("1 hour and 5 minutes", 3900), ("1 week", 7 * DAY),
        ("1 day, 2 hrs", DAY + 2 * HOUR), ("10 Minutes", 600), ("3 secs", 3),
    ],
)  # fmt: skip
def test_time_spans_are_parsed(text, seconds):
    assert duration(text) == seconds
    assert parse_schedule(every=text, now=NOW) == Every(seconds, int(NOW))
    assert parse_schedule(at=f"in {text}", now=NOW, tz="UTC") == At(int(NOW) + seconds, "UTC")
    assert parse_schedule(at=text, now=NOW, tz="UTC") == At(int(NOW) + seconds, "UTC")


@pytest.mark.parametrize(
    "text",
    ["", "m", "20", "1h30", "20 moons", "1.5h", "-5m", "5m5m", "m20", "20mm", "٢m", "1h,", "1h and", "9" * 20 + "s"],
)
def test_an_ambiguous_time_span_is_refused(text):
    assert duration(text) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2031-05-02T18:00", "2031-05-02 18:00"), ("2031-05-02 18:00:30", "2031-05-02 18:00"),
        ("2031-05-02T18:00Z", "2031-05-02 20:00"), ("2031-05-02T18:00+09:00", "2031-05-02 11:00"),
        ("2031-05-02 18:00 -0400", "2031-05-03 00:00"), ("18:00", "2026-06-15 18:00"), ("at 9:05", "2026-06-16 09:05"),
        ("today 18:00", "2026-06-15 18:00"), ("tomorrow at 9:00", "2026-06-16 09:00"),
        ("Tomorrow, 9:00", "2026-06-16 09:00"),
    ],
)  # fmt: skip
def test_times_are_parsed_in_the_given_zone(text, shown, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Vienna")
    schedule = parse_schedule(at=text, now=NOW)
    assert isinstance(schedule, At)
    assert shown in moment(schedule.at, "Europe/Vienna")


@each(
    "given",
    [
        {}, {"at": "", "every": "", "cron": ""}, {"at": "18:00", "every": "1h"}, {"every": "1h", "cron": "* * * * *"},
        {"at": "soon"}, {"at": "2031-05-02"}, {"at": "20"}, {"at": "1794739511"}, {"at": "25:00"}, {"at": "9:60"},
        {"at": "2031-13-02T18:00"}, {"at": "2031-02-30T18:00"}, {"at": "2020-01-01T00:00"}, {"at": "today 3:00"},
        {"at": "9999-12-31T23:59"}, {"at": "0001-01-01T00:00+14:00"},
        {"at": "0001-01-01T00:00+14:00", "tz": "UTC"}, {"at": "9999-12-31T23:59-14:00", "tz": "UTC"},
        {"at": "2031-05-02T18:00", "tz": "Europe/Viena"},
        {"at": "2031-05-02T18:00+05:00", "tz": "Europe/Vienna"}, {"at": "6pm"}, {"at": "monday 9:00"}, {"at": "in 0s"},
        {"every": "0"}, {"every": 0}, {"every": "0.5"}, {"every": 1.5}, {"every": "-5"}, {"every": "2 years"},
        {"every": "1h30"}, {"every": "400 days"}, {"every": "often"}, {"every": "10 m m"},
        {"cron": "* * * *"}, {"cron": "* * * * * *"}, {"cron": "60 * * * *"}, {"cron": "* * * * 8"}, {"cron": "@daily"},
        {"cron": "a b c d e"}, {"cron": "*/0 * * * *"}, {"cron": "5-1 * * * *"}, {"cron": "0 0 30 2 *"},
        {"cron": "1/ * * * *"},
        {"cron": "0 0 31 4 *"}, {"cron": "0 0 * * FRI-MON"}, {"cron": "0 0 */31 1 MON#5"},
        {"cron": ",".join(["1"] * 200) + " * * * *"},
        {"cron": "0 8 * * *", "tz": "CEST"}, {"cron": "0 8 * * *", "tz": "/etc/passwd"},
        {"cron": "0 8 * * *", "tz": "../UTC"}, {"cron": "0 8 * * *", "tz": "Europe"},
        {"cron": "0 8 * * *", "tz": "x" * 5000}, {"cron": "0 8 * * *", "tz": "a\0b"},
    ],
)  # fmt: skip
def test_an_ambiguous_time_is_refused_in_one_line(given):
    with pytest.raises(BadSchedule) as refused:
        parse_schedule(now=NOW, **given)
    assert "\n" not in str(refused.value)
    assert 20 < len(str(refused.value)) < 300


def test_a_misspelled_time_zone_is_answered_with_a_suggestion():
    for wrong, right in (("Europe/Viena", "Europe/Vienna"), ("tokyo", "Asia/Tokyo"), ("new york", "America/New_York")):
        with pytest.raises(BadSchedule, match=right):
            parse_schedule(cron="0 8 * * *", tz=wrong, now=NOW)


def test_a_time_span_may_be_given_in_seconds_and_has_a_minimum():
    assert parse_schedule(every=3600, now=NOW) == parse_schedule(every="3600", now=NOW) == Every(3600, int(NOW))
    assert parse_schedule(every="1", now=NOW + 0.2) == Every(1, int(NOW) + 1)
    assert parse_schedule(every="60", now=NOW, shortest=60) == Every(60, int(NOW))
    with pytest.raises(BadSchedule):
        parse_schedule(every="59", now=NOW, shortest=60)


@settings(max_examples=300)
@given(st.text(max_size=30), st.sampled_from(["", "UTC", "Europe/Vienna"]))
def test_the_parser_accepts_or_refuses_any_text(text, tz):
    for given_text in ({"at": text}, {"every": text}, {"cron": text}, {"cron": f"{text} * * * *"}):
        try:
            schedule = parse_schedule(now=NOW, tz=tz, **given_text)
        except BadSchedule:
            continue
        assert in_words(schedule)


def test_a_finished_schedule_has_no_next_slot():
    assert next_after(At(100), 99.5) == 100
    assert next_after(At(100), 100) is None
    assert next_after(Cron("0 0 29 2 *", "UTC"), NOW) == datetime(2028, 2, 29, tzinfo=UTC).timestamp()
    assert next_after(Cron("0 0 29 2 MON#5", "UTC"), NOW) is not None  # either of them
    assert next_after(Cron("0 0 * 2 MON#5", "UTC"), NOW) == datetime(2044, 2, 29, tzinfo=UTC).timestamp()


def test_schedules_are_described_in_words():
    assert in_words(Every(5400, 0)) == "every 1 h 30 min"
    assert in_words(Every(90061, 0)) == "every 1 d 1 h 1 min 1 s"
    assert in_words(At(int(NOW), "UTC")) == "once, Monday, 2026-06-15 12:00 (UTC)"
    assert in_words(Cron("0 8 * * 1-5", "UTC")) == "At 08:00 on Monday through Friday (0 8 * * 1-5, UTC)"
    rng = random.Random(1)
    for _ in range(300):
        assert in_words(Cron(an_expression(rng)[0], "UTC"))


def test_every_zone_of_this_machine_can_be_used():
    for name in sorted(available_timezones()):
        due = next_after(Cron("0 9 * * *", name), NOW)
        assert due is not None
        assert zone(name).wall(due).hour == 9
