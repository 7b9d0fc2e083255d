"""The deadline: it passes, stands still while somebody is asked, and can be waited for."""

from __future__ import annotations

import asyncio

import pytest

from everloop.goals.clock import Deadline


class Time:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_the_time_of_pauses_does_not_count():
    now = Time()
    clock = Deadline(10, now)
    now.at += 4
    with clock.paused():
        now.at += 1000
        assert clock.remaining == 6
        assert not clock.expired
    now.at += 5
    assert clock.remaining == 1
    now.at += 1
    assert clock.expired


def test_pauses_that_overlap_count_once():
    now = Time()
    clock = Deadline(10, now)
    first, second = clock.paused(), clock.paused()
    first.__enter__()
    now.at += 100
    second.__enter__()
    now.at += 100
    first.__exit__(None, None, None)
    now.at += 100
    assert clock.remaining == 10
    second.__exit__(None, None, None)
    now.at += 3
    assert clock.remaining == 7


def test_time_that_was_up_before_a_pause_stays_up():
    now = Time()
    clock = Deadline(1, now)
    now.at += 2
    with clock.paused():
        assert clock.expired


async def test_waiting_ends_when_the_time_is_up():
    clock = Deadline(0.05)
    async with asyncio.timeout(20):
        await clock.passed()
    assert clock.expired


async def test_waiting_goes_on_over_a_pause():
    clock = Deadline(1)
    waiting = asyncio.create_task(clock.passed())
    await asyncio.sleep(0)
    with clock.paused():
        await asyncio.sleep(1.2)
        assert not waiting.done()
    assert clock.remaining == pytest.approx(1, abs=0.9)
    async with asyncio.timeout(20):
        await waiting


async def test_waiting_for_a_clock_that_stands_still_begins_when_it_goes_on():
    clock = Deadline(1)
    with clock.paused():
        waiting = asyncio.create_task(clock.passed())
        await asyncio.sleep(1.2)
        assert not waiting.done()
    async with asyncio.timeout(20):
        await waiting
