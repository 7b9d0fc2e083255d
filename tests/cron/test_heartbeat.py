"""The heartbeat: tasks in a file, checked periodically, and silence if there is nothing to report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.bus import HEARTBEAT, NOTHING_TO_SAY, CronOrigin, InboundMessage
from everloop.cron.heartbeat import MAX_TASKS, Heartbeat, heartbeat_message
from everloop.cron.service import CronService
from everloop.store.base import Timer
from everloop.store.sqlite import SQLiteStore
from tests.support.places import ROOT

from .clock import NOW

TEMPLATE = ROOT / "src/everloop/cli/workspace/HEARTBEAT.md"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "HEARTBEAT.md"
    file.write_text("- [ ] water the beans\n")
    return file


def heart(service: CronService, file: Path, every: float = 600) -> Heartbeat:
    return Heartbeat(service, file.read_text, every, "test", "7")


async def inbox(store: SQLiteStore, key: str = "test:7") -> list[InboundMessage]:
    return [row.message for row in await store.waiting("me", key)]


# ---------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "text",
    [
        "", "\n \n", "# Tasks\n\n## Later\n", "<!-- water\nthe beans -->\n",
        "- [x] done\n* [X] done too\n1. [x] and this\n",
        "---\n***\n", "- [ ]\n- \n*\n", "<!-- never closed\n- [ ] water\n",
        "- [x] done\n  - how it was done\n    in two lines\n",
        "#\n######\n",
    ],
)  # fmt: skip
def test_a_file_without_tasks_gives_no_message(text):
    assert heartbeat_message(text) is None


def test_the_file_that_init_makes_has_no_tasks():
    assert heartbeat_message(TEMPLATE.read_text()) is None


@pytest.mark.parametrize(
    ("text", "tasks", "others"),
    [
        ("- [ ] water the beans\n- [x] mow", ["- [ ] water the beans"], ["mow"]),
        ("# Garden\nWater the beans.", ["Water the beans."], ["Garden"]),
        ("water <!-- not now --> beans", ["water  beans"], ["not now"]),
        ("- [x] a\n  - b\n- c\n  - d", ["- c", "  - d"], ["a", "- b"]),
        ("- [x] a\n\n  - b\n\nc", ["c"], ["- b"]),
        ("#beans is no heading", ["#beans is no heading"], []),
        ("1. first\r\n2. second", ["1. first", "2. second"], []),
        ("-[x] unclear", ["-[x] unclear"], []),
    ],
)
def test_the_message_has_the_open_tasks_and_nothing_else_of_the_file(text, tasks, others):
    message = heartbeat_message(text)
    assert message is not None
    assert "\n".join(tasks) in message
    assert NOTHING_TO_SAY in message
    given_tasks = message.split("\n\n")[1]
    assert not any(other in given_tasks for other in others)


def test_a_long_file_is_truncated_with_a_note():
    message = heartbeat_message("\n".join(f"- task {number}" for number in range(5000)))
    assert message is not None
    assert len(message) < MAX_TASKS + 600
    assert "There is more" in message


@given(st.text())
def test_the_heartbeat_file_may_have_any_text(text):
    message = heartbeat_message(text)
    assert message is None or NOTHING_TO_SAY in message


@pytest.mark.parametrize(
    "answer", [NOTHING_TO_SAY, f" {NOTHING_TO_SAY}\n", f"`{NOTHING_TO_SAY}`", f"**{NOTHING_TO_SAY}**."]
)
def test_an_answer_of_only_the_silence_word_is_not_sent(answer):
    assert CronOrigin(HEARTBEAT).is_silent(answer)
    assert not CronOrigin("j1").is_silent(answer)


@pytest.mark.parametrize(
    "answer", ["", "OK", f"{NOTHING_TO_SAY}, but the beans are dry", f"The beans. {NOTHING_TO_SAY}"]
)
def test_any_other_answer_is_sent(answer):
    assert not CronOrigin(HEARTBEAT).is_silent(answer)


# ---------------------------------------------------------------------------------------------- firing


async def test_the_heartbeat_fires_in_its_chat_with_the_current_tasks(service, store, clock, file):
    await heart(service, file).start()
    file.write_text("- feed the cat\n")
    assert await service.fire_due() == NOW + 600
    clock.now += 600
    assert await service.fire_due() == NOW + 1200
    (message,) = await inbox(store)
    assert "feed the cat" in message.content
    assert "beans" not in message.content
    assert (message.channel, message.chat_id, message.sender_id) == ("test", "7", "cron")
    assert message.id == f"cron:heartbeat:{int(NOW) + 600}"
    assert message.cause == CronOrigin("heartbeat", may_schedule=False)
    assert not message.attended


async def test_without_tasks_it_stays_silent_and_fires_again_later(service, store, clock, file):
    await heart(service, file).start()
    file.write_text("# Nothing\n")
    for step in range(1, 4):
        clock.now = NOW + 600 * step + 1
        assert await service.fire_due() == NOW + 600 * (step + 1)
    assert await store.sessions("me") == []
    file.write_text("- water\n")
    assert await service.fire_due() == NOW + 2400  # that slot was checked
    assert await store.sessions("me") == []
    clock.now += 600
    await service.fire_due()
    assert len(await inbox(store)) == 1


async def test_a_missing_file_does_not_stop_it(service, store, clock, file):
    await heart(service, file).start()
    file.unlink()
    clock.now += 600
    assert await service.fire_due() == NOW + 1200
    file.write_text("- water\n")
    clock.now += 600
    await service.fire_due()
    assert len(await inbox(store)) == 1


async def test_after_a_restart_it_continues_and_missed_slots_fire_once(service, store, clock, file):
    await heart(service, file).start()
    clock.now += 6010
    again = CronService(store, clock=clock)
    await heart(again, file).start()
    assert await again.fire_due() == NOW + 6600
    assert [message.id for message in await inbox(store)] == [f"cron:heartbeat:{int(NOW) + 6000}"]
    await heart(again, file).start()
    await again.fire_due()
    assert len(await inbox(store)) == 1


async def test_a_changed_interval_or_a_damaged_timer_starts_over(service, store, clock, file):
    await heart(service, file).start()
    clock.now += 100
    await heart(service, file, every=60).start()
    assert await service.fire_due() == NOW + 160
    for damaged in ({}, {"every": "x"}, {"every": 0, "anchor": 0}):
        await store.set_timer(Timer("me", "heartbeat", NOW, damaged))
        assert await service.fire_due() is None
        await heart(service, file, every=60).start()
        assert await service.fire_due() == NOW + 160


async def test_several_services_fire_each_beat_once(service, store, clock, file, tmp_path):
    stores = [SQLiteStore(tmp_path / "store.db") for _ in range(2)]
    services = [service, *(CronService(one, clock=clock) for one in stores)]
    for one in services:
        await heart(one, file).start()
    for _ in range(5):
        clock.now += 600
        await asyncio.gather(*(one.fire_due() for one in services for _ in range(2)))
    found = await inbox(store)
    assert len(found) == len({message.id for message in found}) == 5
    for one in stores:
        await one.close()


async def test_a_service_without_a_heartbeat_leaves_its_timer_alone(service, store, clock, file):
    await heart(service, file).start()
    clock.now += 600
    await CronService(store, clock=clock).fire_due()
    assert await inbox(store) == []
    await service.fire_due()
    assert len(await inbox(store)) == 1


async def test_a_stopped_heartbeat_does_not_fire(service, store, clock, file):
    beating = heart(service, file)
    await beating.start()
    await beating.stop()
    clock.now += 6000
    await service.fire_due()
    assert await inbox(store) == []
    assert await store.timers() == []


async def test_the_heartbeat_is_independent_of_jobs(service, store, clock, file, caplog):
    await heart(service, file).start()
    job = await service.add("x", every="10m", channel="test", chat_id="8")
    assert await service.list() == [job]
    assert not await service.remove("heartbeat")
    assert not await service.run("heartbeat")
    clock.now += 600
    await service.fire_due()
    assert len(await inbox(store)) == len(await inbox(store, "test:8")) == 1
    assert not caplog.records


async def test_the_service_does_not_fire_another_owners_heartbeat(service, store, clock, file):
    theirs = Timer("you", "heartbeat", NOW - 5, {"every": 60, "anchor": int(NOW) - 65})
    await store.set_timer(theirs)
    await heart(service, file).start()
    await service.fire_due()
    assert theirs in await store.timers()
    assert await store.sessions("you") == []


async def test_the_heartbeat_fires_while_the_service_runs(store, file):
    services = [CronService(store), CronService(store)]
    told: list[str] = []
    serving = [asyncio.create_task(one.serve(lambda owner, key: told.append(key))) for one in services]
    for one in services:
        await heart(one, file, every=1).start()
    async with asyncio.timeout(25):  # one may be on disk but not announced yet
        while len(told) < 3 or len(told) != len(await inbox(store)):
            await asyncio.sleep(0.02)
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    assert set(told) == {"test:7"}


@pytest.mark.parametrize("every", [0, 0.5, -1, float("inf"), float("nan")])
def test_the_interval_is_bounded(service, file, every):
    with pytest.raises(ValueError, match="heartbeat"):
        heart(service, file, every)
