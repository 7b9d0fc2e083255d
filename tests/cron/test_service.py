"""Scheduled work: each slot fires once, in whichever process and whatever happened meanwhile."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.cron import service as module
from everloop.cron.schedules import Every
from everloop.cron.service import MAX_JOBS, CronService
from everloop.errors import EverloopError
from everloop.store.base import Timer
from everloop.store.sqlite import SQLiteStore

from .clock import NOW, Clock

HERE: dict[str, Any] = {"channel": "test", "chat_id": "7"}


async def inbox(store: SQLiteStore) -> list[InboundMessage]:
    """Every message that was ever fired, in order."""
    found = []
    for owner in ("me", "you"):
        for info in await store.sessions(owner):
            found += [row.message for row in await store.waiting(owner, info.key)]
    return sorted(found, key=lambda message: str(message.id))


async def fired_slots(store: SQLiteStore) -> list[int]:
    return sorted(int(str(message.id).rpartition(":")[2]) for message in await inbox(store))


@asynccontextmanager
async def serving(*services: CronService) -> AsyncIterator[list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    tasks = [asyncio.create_task(one.serve(lambda owner, key: told.append((owner, key)))) for one in services]
    try:
        yield told
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def until(condition: Any) -> None:
    async with asyncio.timeout(25):  # less than `POLL_SECONDS`, so that polling alone is too late
        while not condition():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------- jobs


async def test_a_firing_is_a_message_in_the_chat_that_created_the_job(service, store, clock):
    job = await service.add("water", every="10m", **HERE, session="cli:work", may_schedule=True)
    assert await service.fire_due() == NOW + 600
    assert await inbox(store) == []
    clock.now += 600
    assert await service.fire_due() == NOW + 1200
    (message,) = await inbox(store)
    assert (message.channel, message.chat_id, message.session_key) == ("test", "7", "cli:work")
    assert (message.content, message.sender_id, message.owner) == ("water", "cron", "me")
    assert message.id == f"cron:{job.id}:{int(NOW) + 600}"
    assert message.cron is not None
    assert (message.cron.job, message.cron.may_schedule) == (job.id, True)
    assert job.id in message.cron.note
    assert not message.attended
    assert message.reply


async def test_a_job_is_stored_unchanged(service, store, clock):
    for given in (
        {"at": "2031-05-02T18:00", "tz": "Asia/Tokyo"},
        {"every": "1h30m"},
        {"cron": "0 8 * * 1-5", "tz": "UTC"},
    ):
        job = await service.add("x", **given, **HERE, session="a:b", name="n", may_schedule=True)
        (kept,) = await CronService(store, clock=clock).list()
        assert kept == job
        assert len(job.id) == 8
        assert int(job.id, 16) >= 0
        assert (kept.session_key, kept.name, kept.may_schedule) == ("a:b", "n", True)
        assert await service.remove(job.id)
        assert not await service.remove(job.id)
    assert await service.list() == []


async def test_a_job_without_a_session_works_in_that_of_its_chat(service):
    assert (await service.add("x", every="1h", **HERE)).session_key == "test:7"


async def test_the_list_shows_the_next_and_the_last_slot_of_a_job(service, clock):
    await service.add("b", every="1h", **HERE)
    await service.add("a", cron="30 8 * * *", tz="UTC", **HERE)
    first, second = await service.list()
    assert (first.message, first.next_due, first.last_fired) == ("a", NOW + 1800, None)
    assert (second.message, second.next_due, second.last_fired) == ("b", NOW + 3600, None)
    clock.now += 3 * 86400 + 1800 + 5
    await service.fire_due()
    jobs = {job.message: job for job in await service.list()}
    assert jobs["a"].last_fired == NOW + 3 * 86400 + 1800
    assert jobs["a"].next_due == NOW + 4 * 86400 + 1800
    assert jobs["b"].last_fired == NOW + 3 * 86400
    assert jobs["b"].next_due == NOW + 3 * 86400 + 3600


async def test_owners_do_not_see_or_touch_each_others_jobs(service, store, clock):
    mine = await service.add("mine", every="1h", **HERE)
    yours = await service.add("yours", every="1h", **HERE, owner="you")
    assert [job.message for job in await service.list()] == ["mine"]
    assert [job.message for job in await service.list("you")] == ["yours"]
    assert not await service.remove(yours.id)
    assert not await service.run(yours.id)
    assert not await service.remove(mine.id, "you")
    clock.now += 3600
    await service.fire_due()
    assert {(message.owner, message.content) for message in await inbox(store)} == {("me", "mine"), ("you", "yours")}


@pytest.mark.parametrize("message", ["", "  \n", "x" * 4001])
async def test_the_length_of_a_message_is_limited(service, message):
    with pytest.raises(EverloopError):
        await service.add(message, every="1h", **HERE)
    assert await service.list() == []


async def test_the_number_of_jobs_is_limited_per_owner(service):
    for number in range(MAX_JOBS):
        await service.add(f"job {number}", every="1h", **HERE)
    with pytest.raises(EverloopError):
        await service.add("one more", every="1h", **HERE)
    assert len({job.id for job in await service.list()}) == MAX_JOBS
    await service.add("his", every="1h", **HERE, owner="you")


async def test_concurrent_additions_stay_within_the_limit(service):
    work = [service.add(f"job {number}", every="1h", **HERE) for number in range(MAX_JOBS + 20)]
    found = await asyncio.gather(*work, return_exceptions=True)
    assert sum(isinstance(one, EverloopError) for one in found) == 20
    assert len(await service.list()) == MAX_JOBS


async def test_a_repeated_call_adds_one_job_and_another_call_with_the_same_id_adds_another(service, monkeypatch):
    first = await service.add("x", at="in 1h", **HERE, key="turn/call")
    service.clock.now += 60
    assert await service.add("x", at="in 1h", **HERE, key="turn/call") == first
    other = await service.add("x", at="in 1h", **HERE, key="turn/other")
    same_key = await service.add("x", at="in 1h", **HERE, key="turn/call", owner="you")
    assert len({first.id, other.id, same_key.id}) == 3
    # Two calls whose ids happen to be the same: the first job stays, the second gets another id.
    (timer,) = [one for one in await service.store.timers() if one.id == other.id]
    await service.store.set_timer(Timer("me", first.id, timer.due_at, timer.data))
    again = await service.add("y", at="in 1h", **HERE, key="turn/call")
    assert again.id not in (first.id, other.id)
    assert sorted(job.message for job in await service.list()) == ["x", "x", "y"]


async def test_running_a_job_leaves_its_schedule_alone(service, store, clock):
    job = await service.add("x", at="in 1h", **HERE)
    async with serving(service) as told:
        await asyncio.sleep(0)  # it starts to serve
        assert await service.run(job.id)
        assert await service.run(job.id)
        assert told == [("me", "test:7")] * 2
    assert len({message.id for message in await inbox(store)}) == 2
    assert await service.list() == [job]
    clock.now += 3600
    await service.fire_due()
    assert len(await inbox(store)) == 3
    assert await service.list() == []
    assert not await service.run(job.id)


# ---------------------------------------------------------------------------------------------- missed and moved


async def test_the_missed_slots_of_a_recurring_job_fire_once_as_the_latest(service, store, clock):
    await service.add("x", every="10m", **HERE)
    await service.add("y", cron="0 * * * *", tz="UTC", **HERE)
    clock.now += 10 * 3600 + 90
    assert await service.fire_due() == NOW + 10 * 3600 + 600
    assert await fired_slots(store) == [NOW + 10 * 3600] * 2
    await service.fire_due()
    assert len(await inbox(store)) == 2


@pytest.mark.parametrize(
    ("missed", "late", "comes"), [("run", 86400, True), ("drop", 86400, False), ("drop", 30, True)]
)
async def test_a_missed_one_shot_job_fires_once_or_is_dropped_by_setting(store, clock, missed, late, comes):
    service = CronService(store, clock=clock, missed=missed)
    await service.add("x", at="in 1h", **HERE)
    clock.now += 3600 + late
    assert await service.fire_due() is None
    assert await service.fire_due() is None
    assert await fired_slots(store) == ([NOW + 3600] if comes else [])
    assert await service.list() == []


async def test_a_recurring_job_is_never_dropped(store, clock):
    service = CronService(store, clock=clock, missed="drop")
    await service.add("x", every="1h", **HERE)
    clock.now += 86400
    await service.fire_due()
    assert len(await inbox(store)) == 1
    assert len(await service.list()) == 1


def test_the_setting_for_missed_work_has_two_values(store):
    with pytest.raises(ValueError, match="maybe"):
        CronService(store, missed="maybe")  # type: ignore[arg-type]


async def test_setting_the_clock_back_fires_nothing_twice(service, store, clock):
    await service.add("x", every="10m", **HERE)
    await service.add("y", cron="*/10 * * * *", tz="UTC", **HERE)
    for move in (600, -300, 300, -599, 599, 10, -10, 600):
        clock.now += move
        await service.fire_due()
    assert await fired_slots(store) == sorted([NOW + 600, NOW + 1200] * 2)


async def test_a_slot_fires_once_even_if_its_timer_was_set_back(service, store, clock):
    job = await service.add("x", every="10m", **HERE)
    (timer,) = await store.timers()
    clock.now += 600
    await service.fire_due()
    await store.set_timer(timer)  # as from a copy of the store, or by hand
    await service.fire_due()
    assert [message.id for message in await inbox(store)] == [f"cron:{job.id}:{int(NOW) + 600}"]


async def test_a_removed_job_does_not_fire(service, store, clock):
    job = await service.add("x", every="10m", **HERE)
    await service.remove(job.id)
    clock.now += 6000
    await service.fire_due()
    assert await inbox(store) == []


# ---------------------------------------------------------------------------------------------- many services


async def test_many_services_on_one_store_fire_each_slot_once(store, clock, tmp_path):
    stores = [SQLiteStore(tmp_path / "store.db") for _ in range(3)]
    services = [CronService(one, clock=clock) for one in (store, *stores)]
    for number in range(10):
        await services[0].add(f"job {number}", every="10m", **HERE)
    for _ in range(5):
        clock.now += 600
        await asyncio.gather(*(service.fire_due() for service in services for _ in range(2)))
    found = await inbox(store)
    assert len(found) == 50
    assert len({message.id for message in found}) == 50
    for one in stores:
        await one.close()


SERVER = """
import asyncio, sys
from everloop.cron.service import CronService
from everloop.store.sqlite import SQLiteStore

async def main():
    service = CronService(SQLiteStore(sys.argv[1]))
    print("ready", flush=True)
    await service.serve(lambda owner, key: print("fired", flush=True))

asyncio.run(main())
"""


@pytest.mark.may_block
async def test_processes_killed_at_any_moment_neither_lose_nor_duplicate_a_firing(store, tmp_path):
    began = int(time.time())
    service = CronService(store)
    jobs = [await service.add(f"job {number}", every="1s", **HERE) for number in range(3)]
    for number in range(24):
        last = await service.add(f"once {number:02}", at=f"in {1 + number // 4}s", **HERE)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path / "store.db")], stdout=subprocess.PIPE, text=True
        )

    running = [start(), start()]
    try:
        for turn in range(4):
            victim = running[0]
            assert victim.stdout is not None
            assert await asyncio.to_thread(victim.stdout.readline) == "ready\n"
            await asyncio.sleep(1.0 + 0.13 * turn)
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            running = [*running[1:], start()]
        async with asyncio.timeout(20):
            texts: list[str] = []
            while any(texts.count(job.message) < 4 for job in jobs):
                await asyncio.sleep(0.05)
                texts = [message.content for message in await inbox(store)]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    await asyncio.sleep(max(0.0, last.next_due - time.time()) + 0.01)
    await service.fire_due()
    found = await inbox(store)
    assert len({message.id for message in found}) == len(found)
    once = sorted(message.content for message in found if message.content.startswith("once"))
    assert once == [f"once {number:02}" for number in range(24)]
    for job, kept in zip(jobs, sorted(await service.list(), key=lambda job: job.message), strict=True):
        assert isinstance(job.schedule, Every)
        slots = [int(str(message.id).rpartition(":")[2]) for message in found if message.content == job.message]
        assert len(slots) >= 4
        assert all((slot - job.schedule.anchor) % 1 == 0 and slot > began for slot in slots)
        assert max(slots) == kept.last_fired  # a firing and the move of its timer are one write


# ---------------------------------------------------------------------------------------------- serving


async def test_the_service_sleeps_until_the_next_slot(store):
    service = CronService(store)
    async with serving(service) as told:
        began = time.time()
        job = await service.add("x", at="in 1s", **HERE)
        await until(lambda: told)
        assert 0 <= time.time() - job.next_due < 25
        assert time.time() > began + 0.9
        await service.add("y", every="1s", **HERE)
        await until(lambda: len(told) >= 3)
    assert set(told) == {("me", "test:7")}


async def test_the_service_does_not_poll(store, clock, monkeypatch):
    service = CronService(store, clock=clock)
    looks = 0
    look = store.timers

    async def counted(owner: str | None = None, limit: int | None = None) -> list[Timer]:
        nonlocal looks
        looks += owner is None
        return await look(owner, limit)

    monkeypatch.setattr(store, "timers", counted)
    await service.add("far", every="1h", **HERE)
    await store.set_timer(Timer("you", "heartbeat", NOW - 5, {}))  # one that is not fired here
    await store.set_timer(Timer("me", "0badf00d", NOW - 5, {"message": 5}))
    async with serving(service):
        for number in (1, 2):
            await until(lambda: looks == number)  # noqa: B023 - it is waited for here
            await asyncio.sleep(0.5)
            assert looks == number
            service.changed()


async def test_a_job_that_another_process_added_is_seen_after_a_while(store, tmp_path, monkeypatch):
    assert module.POLL_SECONDS == 30
    monkeypatch.setattr(module, "POLL_SECONDS", 0.3)
    other = SQLiteStore(tmp_path / "store.db")
    await CronService(store).add("far", every="1h", **HERE)
    async with serving(CronService(store)) as told:
        await asyncio.sleep(0.1)
        await CronService(other).add("x", at="in 1s", **HERE)
        await until(lambda: told)
    await other.close()


async def test_two_concurrent_services_announce_each_firing_once(store, tmp_path):
    other = SQLiteStore(tmp_path / "store.db")
    service = CronService(store)
    await service.add("x", every="1s", **HERE)
    async with serving(service, CronService(other)) as told:
        await until(lambda: len(told) >= 3)
        async with asyncio.timeout(20):
            while len(told) != len(await inbox(store)):  # one may be on disk but not announced yet
                await asyncio.sleep(0.01)
    await other.close()


async def test_a_damaged_job_is_reported_once_and_does_not_stop_the_others(service, store, clock, caplog):
    await service.add("sound", every="10m", **HERE)
    base = {"message": "m", "channel": "c", "chat_id": "d", "first": NOW}
    damaged: list[dict[str, Any]] = [
        {}, {"message": 5}, base, {**base, "every": 0, "anchor": 5}, {**base, "cron": "* * *"},
        {**base, "cron": "0 8 * * *", "tz": "Nowhere/Land"}, {**base, "at": "soon"}, {**base, "every": 5},
    ]  # fmt: skip
    for number, data in enumerate(damaged):
        await store.set_timer(Timer("me", f"bad{number}", NOW, data))
    with caplog.at_level(logging.ERROR):
        assert await service.fire_due() == NOW + 600
        clock.now += 600
        await service.fire_due()
        await service.list()
    assert [message.content for message in await inbox(store)] == ["sound"]
    assert [job.message for job in await service.list()] == ["sound"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert all(said.count(f"remove bad{number}") == 1 for number in range(len(damaged)))
    assert await service.remove("bad0")
    assert len(await store.timers()) == len(damaged)


async def test_a_damaged_job_among_many_does_not_cause_polling(service, store, clock, monkeypatch):
    monkeypatch.setattr(module, "BATCH_SIZE", 3)
    await store.set_timer(Timer("me", "bad", NOW, {}))
    for _ in range(5):
        await service.add("sound", every="10m", **HERE)
    assert await service.fire_due() == NOW + 600
    clock.now += 600
    while await service.fire_due() == clock.now:  # not all at once
        pass
    assert len(await inbox(store)) == 5
    assert await service.fire_due() == NOW + 1200


async def test_a_temporarily_unwritable_store_does_not_end_the_service(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.2)
    service = CronService(SQLiteStore(tmp_path / "store.db", lock_seconds=0.2))
    await service.add("x", at="in 1s", **HERE)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")  # before it serves: the job may be due by now
        async with serving(service) as told:
            await until(lambda: caplog.records)
            assert told == []
            database.execute("COMMIT")
            await until(lambda: told)
    assert len(await inbox(store)) == 1
    await service.store.close()


async def test_the_service_ends_when_cancelled_and_can_serve_again(store):
    service = CronService(store)
    async with serving(service):
        await asyncio.sleep(0.05)
    async with serving(service) as told:
        await service.add("x", at="in 1s", **HERE)
        await until(lambda: told)


async def test_a_timer_with_invalid_json_does_not_stop_the_others(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    service = CronService(store)
    await service.add("good", every="1h", channel="test", chat_id="1")
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("INSERT INTO timer (owner, id, due_at, data) VALUES ('me', 'broken', 5.0, 'no json')")
    db.close()
    assert [job.message for job in await service.list()] == ["good"]
    assert await service.fire_due() is not None
    await store.close()


async def test_a_paused_job_does_not_fire_and_is_due_again_at_its_next_slot(service: CronService, clock: Clock):
    job = await service.add("water", every="1h", channel="cli", chat_id="x")
    clock.now += 3600
    await service.fire_due()
    assert await service.pause(job.id)
    (paused,) = await service.list()
    assert (paused.paused, paused.last_fired) == (True, NOW + 3600)
    clock.now += 10 * 3600 + 60
    await service.fire_due()
    assert len(await service.store.waiting("me", "cli:x")) == 1
    assert await service.run(job.id)  # a user may still run it
    assert len(await service.store.waiting("me", "cli:x")) == 2
    assert await service.resume(job.id)
    (resumed,) = await service.list()
    assert (resumed.paused, resumed.next_due) == (False, NOW + 12 * 3600)
    clock.now = resumed.next_due
    await service.fire_due()
    assert len(await service.store.waiting("me", "cli:x")) == 3
    assert not await service.pause("unknown")
    assert not await service.resume("unknown")


async def test_a_job_whose_only_time_passed_while_it_was_paused_is_not_resumed(service: CronService, clock: Clock):
    job = await service.add("water", at="in 20 minutes", channel="cli", chat_id="x")
    await service.pause(job.id)
    clock.now += 3600
    with pytest.raises(EverloopError, match="its time passed"):
        await service.resume(job.id)
    assert (await service.list())[0].paused
    assert await service.remove(job.id)
