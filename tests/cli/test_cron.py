"""`everloop cron`: the real command, on a store with or without a running service."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from everloop.cron.service import CronService
from everloop.store.peers import new_worker, retire
from everloop.store.sqlite import SQLiteStore

from ..support.commands import Done, everloop

HERE: dict[str, Any] = {"channel": "cli", "chat_id": "direct"}


def the_store() -> SQLiteStore:
    return SQLiteStore(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db")


async def cron(*arguments: str) -> Done:
    return await everloop("cron", *arguments)


async def test_a_job_is_added_listed_and_removed(tmp_path):
    added = await cron("add", "water the beans", "--every", "90m")
    assert added.status == 0
    id, told = added.lines
    assert len(id) == 8
    assert "every 1 h 30 min" in told
    assert "everloop worker" in told
    listed = await cron("list")
    assert (listed.status, len(listed.lines)) == (0, 2)
    assert all(part in listed.lines[1] for part in (id, "cli:direct", "every 1 h 30 min", "water the beans"))
    assert (await cron("remove", id)).status == 0
    after = await cron("list")
    assert (after.status, after.out) == (0, "")


async def test_the_list_as_json_is_complete():
    await cron("add", "one\nline \x1b[31m", "--cron", "0 8 * * 1-5", "--tz", "Europe/Vienna", "--session", "cli:work")
    done = await cron("list", "--json")
    assert done.json.keys() == {
        "id", "schedule", "next_due", "last_fired", "session", "channel", "chat_id", "message", "name", "deliver"
    }  # fmt: skip
    assert (done.json["session"], done.json["channel"], done.json["chat_id"]) == ("cli:work", "cli", "work")
    assert done.json["message"] == "one\nline \x1b[31m"
    assert "Europe/Vienna" in done.json["schedule"]
    assert done.json["next_due"] > time.time()
    assert done.json["last_fired"] is None
    table = await cron("list")
    assert "\x1b" not in table.out
    assert len(table.lines) == 2


async def test_run_puts_the_message_into_the_inbox_now():
    id = (await cron("add", "water", "--at", "2031-05-02T18:00")).lines[0]
    assert (await cron("run", id)).status == 0
    store = the_store()
    (row,) = await store.waiting("me", "cli:direct")
    assert (row.message.content, row.message.sender_id, row.message.attended) == ("water", "cron", False)
    assert [job.id for job in await CronService(store).list()] == [id]
    await store.close()


async def test_an_unambiguous_id_prefix_is_enough_to_run_a_job():
    store = the_store()
    jobs = [await CronService(store).add("water", at="2031-05-02T18:00", **HERE) for _ in range(20)]
    ids = [job.id for job in jobs]
    beginning = next(id[:1] for id in ids if sum(other.startswith(id[:1]) for other in ids) > 1)
    assert (await cron("run", beginning)).status == 2
    assert (await cron("run", ids[0][:-1])).status == 0
    rows = await store.waiting("me", "cli:direct")
    assert [row.message.cron and row.message.cron.job for row in rows] == [ids[0]]
    await store.close()


async def test_the_workers_of_the_store_are_woken():
    store, worker = the_store(), new_worker()
    woken = 0

    def changed(_: object) -> None:
        nonlocal woken
        woken += 1

    neighbours = store.peer(worker, changed)
    await neighbours.join()
    for arguments in (("add", "x", "--every", "1h"), ("run", "")):
        before = woken
        jobs = await CronService(store).list()
        await cron(*(one or jobs[0].id for one in arguments))
        async with asyncio.timeout(20):
            while woken == before:
                await asyncio.sleep(0.01)
    await neighbours.leave()
    retire(worker)
    await store.close()


async def test_a_running_service_fires_a_job_added_by_the_command(monkeypatch):
    store = the_store()
    service = CronService(store)
    told: list[str] = []
    monkeypatch.setattr("everloop.cron.service.POLL_SECONDS", 0.3)
    serving = asyncio.create_task(service.serve(lambda owner, key: told.append(key)))
    await cron("add", "water", "--every", "1s", "--session", "cli:work")
    async with asyncio.timeout(20):
        while not told:
            await asyncio.sleep(0.02)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert set(told) == {"cli:work"}
    await store.close()


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("add",), ("add", "x"), ("add", "x", "--at", "soon"), ("add", "x", "--every", "0"),
        ("add", "", "--every", "1h"),
        ("add", "x", "--every", "1h", "--at", "18:00"), ("add", "x", "--cron", "* * *"),
        ("add", "x" * 4001, "--every", "1h"),
        ("add", "x", "--cron", "0 8 * * *", "--tz", "Nowhere"), ("add", "x", "--every", "1h", "--session", " "),
        ("remove",), ("remove", "1a2b3c4d"), ("run", "1a2b3c4d"), ("remove", "a\nb"), ("nonsense",), ("list", "more"),
    ],
    ids=lambda arguments: "-".join(arguments)[:40] or "nothing",
)  # fmt: skip
async def test_each_error_is_one_line(arguments):
    done = await cron(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("everloop: ")


async def test_listing_without_a_store_prints_nothing_and_creates_none(tmp_path):
    done = await cron("list", "--store", str(tmp_path / "none.db"))
    assert (done.status, done.out) == (0, "")
    assert done.err
    assert (await cron("remove", "1a2b3c4d", "--store", str(tmp_path / "none.db"))).status == 2
    assert not (tmp_path / "none.db").exists()


async def test_no_model_is_needed():
    assert (await everloop("cron", "add", "x", "--every", "1h", EVERLOOP_MODEL="")).status == 0
