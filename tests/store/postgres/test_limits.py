"""Limits that apply to all servers and workers of a store: a day's budget, and one firing per slot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.bus import InboundMessage
from everloop.cron.jobs import Job
from everloop.cron.service import CronService
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.postgres.store import PostgresStore
from everloop.testing import FakeOpenAI
from tests.server.serving import Client
from tests.support.commands import environment, start

READY = re.compile(r"everloop: (?:serving on (\S+)|worker \d+ is ready)")
HERE: dict[str, Any] = {"channel": "test", "chat_id": "7"}


class Company:
    """Servers and workers with the same settings."""

    def __init__(self, folder: Path, env: dict[str, str], stack: contextlib.AsyncExitStack) -> None:
        self.folder = folder
        self._env = env
        self._stack = stack

    async def start(self, *arguments: str) -> tuple[Any, str]:
        """A process that is ready, and its address if it has one."""
        process = await start(*arguments, env=self._env, stdin=asyncio.subprocess.DEVNULL)
        self._stack.push_async_callback(_end, process)
        async with asyncio.timeout(30):
            found = READY.match((await process.stderr.readline()).decode())
        assert found is not None
        return process, found[1] or ""


async def _end(process: Any) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(keep_bodies=False) as running:
        yield running


@pytest.fixture
async def store(database: str) -> AsyncIterator[PostgresStore]:
    made = PostgresStore(database)
    yield made
    await made.close()


@pytest.fixture
async def company(tmp_path: Path, database: str, fake: FakeOpenAI) -> AsyncIterator[Company]:
    home = tmp_path / "shared"
    home.mkdir()
    env = environment(
        fake, EVERLOOP_HOME=str(home), EVERLOOP_STORE=database, EVERLOOP_MODEL="tools-0x1-d150-n40",
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        yield Company(home, env, stack)


async def answered(store: PostgresStore) -> tuple[list[int], list[str]]:
    """Return (the tokens of every model call, how every turn ended), as in the logs."""
    tokens: list[int] = []
    ends: list[str] = []
    for info in await store.sessions("me", 1000):
        for one in await store.read_log(info.id):
            if isinstance(one.entry, ModelAnswered):
                tokens.append(one.entry.usage["total_tokens"])
            elif isinstance(one.entry, TurnEnded):
                ends.append(one.entry.reason)
    return tokens, ends


async def until(condition: Any, seconds: float = 40) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def used(store: PostgresStore) -> int:
    """Return what is counted for the day."""
    sql = "SELECT coalesce(sum(tokens), 0) FROM spent WHERE scope LIKE 'day %%'"
    return int((await store.connections.submit("reads", lambda db: db.execute(sql, ()).fetchone()))[0])


# ---------------------------------------------------------------------------------------------- budgets


async def test_a_days_budget_is_exceeded_by_no_more_than_the_calls_in_progress_in_all_processes(
    company: Company, store: PostgresStore, fake: FakeOpenAI
):
    budget, sessions, each = 60_000, 6, 5
    (company.folder / "config.toml").write_text(f"[budget]\nday_tokens = {budget}\n")
    starting = [company.start("worker") for _ in range(2)] + [company.start("serve", "--port", "0") for _ in range(2)]
    urls = [url for _, url in await asyncio.gather(*starting) if url]
    messages = itertools.product(range(each), range(sessions))
    for number, chat in messages:
        said = InboundMessage("test", "user", str(chat), f"mark:{chat}.{number}", reply=False)
        await store.accept(said.addressed())
    await store.wake()
    async with aiohttp.ClientSession() as http:
        clients = [Client(url, http) for url in urls]

        async def asks(client: Client, times: int) -> list[int]:
            return [await _status(client) for _ in range(times)]

        told = await asyncio.gather(*(asks(client, 12) for client in clients for _ in range(2)))

        async def all_over() -> bool:
            _, ends = await answered(store)
            return len(ends) == sessions * each + 48

        await until(all_over)
        tokens, ends = await answered(store)
        at_once = sessions + len(told)  # a session runs one turn at a time, and a client asks one thing at a time
        assert {status for one in told for status in one} == {200, 429}
        assert await used(store) == sum(tokens)  # every answer was counted
        assert set(ends) == {"answer", "budget"}
        assert sum(tokens) > budget - max(tokens)  # it was there to be used
        assert sum(tokens) <= budget + at_once * max(tokens)
        before = len(fake.requests)
        assert [await _status(client) for client in clients] == [429, 429]
        assert len(fake.requests) == before == len(tokens)


async def test_one_after_another_over_several_servers_exceed_a_budget_by_one_answer_at_most(
    company: Company, store: PostgresStore, fake: FakeOpenAI
):
    budget = 20_000
    (company.folder / "config.toml").write_text(f"[budget]\nday_tokens = {budget}\n")
    started = await asyncio.gather(*(company.start("serve", "--port", "0") for _ in range(3)))
    async with aiohttp.ClientSession() as http:
        clients = [Client(url, http) for _, url in started]
        statuses = []
        for client in itertools.islice(itertools.cycle(clients), 30):
            statuses.append(await _status(client))
            if statuses[-1] == 429:
                break
        assert [await _status(client) for client in clients] == [429] * 3
    tokens, _ = await answered(store)
    assert statuses == [200] * len(tokens) + [429]
    assert len(tokens) >= 3
    assert sum(tokens[:-1]) <= budget
    assert sum(tokens) <= budget + max(tokens)
    assert len(fake.requests) == len(tokens)


async def _status(client: Client) -> int:
    async with client.post({"messages": [{"role": "user", "content": "hi"}]}) as response:
        await response.read()
        return int(response.status)


# ---------------------------------------------------------------------------------------------- scheduled work


async def test_four_workers_fire_each_slot_once_despite_being_killed(
    company: Company, store: PostgresStore, fake: FakeOpenAI
):
    service, began = CronService(store), int(time.time())
    jobs = [await service.add(f"mark:job{number}", every="1s", **HERE, session=f"t:{number}") for number in range(3)]
    workers = [process for process, _ in await asyncio.gather(*(company.start("worker") for _ in range(4)))]
    for number in range(12):
        await service.add(f"mark:once{number}", at=f"in {1 + number // 3}s", **HERE, session=f"o:{number}")
    for victim in (0, 1, 2):
        await asyncio.sleep(1.1 + 0.13 * victim)
        workers[victim].send_signal(signal.SIGKILL if victim != 1 else signal.SIGTERM)
        await workers[victim].wait()
    workers[0], _ = await company.start("worker")

    async def slots(job: Job) -> list[int]:
        return sorted(int(id.rpartition(":")[2]) for id in await _fired(store, "") if f":{job.id}:" in id)

    async def came() -> bool:
        often = [len(await slots(job)) for job in jobs]
        return len(await _fired(store, "once")) == 12 and min(often) >= 3

    await until(came)
    for job in jobs:
        assert await service.remove(job.id)
    ids = await _fired(store, "")
    assert len(set(ids)) == len(ids)
    for job in jobs:
        assert (await slots(job))[0] >= began

    async def none_open() -> bool:
        sql = "SELECT count(*) FROM inbox WHERE state <> 'done'"
        return (await store.connections.submit("reads", lambda db: db.execute(sql).fetchone())) == (0,)

    await until(none_open)
    _, ends = await answered(store)
    assert ends == ["answer"] * len(ids)  # each firing was handled, once


async def _fired(store: PostgresStore, word: str) -> list[str]:
    """Return the ids of all messages that were ever fired, with the word in their text."""
    sql = "SELECT message_id FROM inbox WHERE message_id LIKE 'cron:%%' AND data LIKE %s"
    rows = await store.connections.submit("reads", lambda db: db.execute(sql, (f"%mark:{word}%",)).fetchall())
    return [row[0] for row in rows]
