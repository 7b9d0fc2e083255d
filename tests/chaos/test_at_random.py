"""Workers and a sender that are killed at random while messages arrive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop import InboundMessage
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore

from ..crash.checker import violations
from ..crash.forge import Child, Forge
from ..crash.history import History, read
from ..crash.scene import KILLED

PLANS = ["", "", "", "s", "s", "n", "sn", "w", "s.n", "nw.s", "aa"]
WORKERS = 3


@contextlib.asynccontextmanager
async def model_process(token_delay: float = 0.0) -> AsyncIterator[str]:
    """The model in a process of its own, so that it does not slow the test down."""
    command = (sys.executable, "-m", "tests.crash.model", str(token_delay))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


class Chaos:
    """Workers and a sender that are killed and restarted while messages are published."""

    def __init__(self, forge: Forge, folder: Path, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.forge = forge
        self.folder = folder
        self.url = url
        self.published: dict[str, list[str]] = {}
        self.count = 0
        self.killed: set[int] = set()
        self.kills = 0
        self.sender_kills = 0
        self._db: sqlite3.Connection | None = None
        self.workers = [self.start_worker() for _ in range(WORKERS)]
        self.sender = forge.start("sender", folder=str(folder))

    def start_worker(self) -> Child:
        return self.forge.start("worker", folder=str(self.folder), url=self.url)

    def plan(self, messages: int, sessions: int) -> list[InboundMessage]:
        """Return each session's messages in order, the sessions interleaved."""
        chats = [self.random.randrange(sessions) for _ in range(messages - sessions)] + list(range(sessions))
        made = []
        for number, chat in enumerate(chats):
            plan = self.random.choice(PLANS)
            content = "/new" if self.random.random() < 0.02 else f"mark:{number}.{plan}" if plan else f"mark:{number}"
            made.append(InboundMessage("test", "me", str(chat), content, id=str(number)))
        return made

    async def feed(self, bus: DurableBus, messages: list[InboundMessage], at_once: int) -> None:
        """Publish in order, at most so many messages ahead of the answers."""
        for start in range(0, len(messages), 10):
            while self.count - self.scalar("SELECT count(*) FROM outbox") > at_once:
                await asyncio.sleep(0.01)
            chats: dict[str, list[InboundMessage]] = {}
            for message in messages[start : start + 10]:
                chats.setdefault(message.chat_id, []).append(message)
            await asyncio.gather(*(self.feed_chat(bus, some) for some in chats.values()))

    async def feed_chat(self, bus: DurableBus, messages: list[InboundMessage]) -> None:
        for message in messages:
            await bus.publish_inbound(message)
            self.published.setdefault(message.chat_id, []).append(message.id or "")
            self.count += 1

    async def kill(self, messages: int, kills: int) -> None:
        """Kill a worker so many times, spread over the run; sometimes the sender as well."""
        for number in range(kills):
            while self.count < (number + 0.5) * messages / (kills + 1):
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.random.random() * 0.1)
            victim = self.random.randrange(WORKERS)
            await self.end(self.workers[victim])
            self.kills += 1
            self.workers[victim] = self.start_worker()
            if self.random.random() < 0.3:
                await self.end(self.sender)
                self.sender_kills += 1
                self.sender = self.forge.start("sender", folder=str(self.folder))

    async def end(self, child: Child) -> None:
        self.killed.add(await asyncio.wrap_future(child.pid))
        await child.kill()
        assert await child.wait() == KILLED

    async def rest(self, seconds: float) -> bool:
        """Wait until everything is answered and sent."""
        give_up = time.monotonic() + seconds
        busy = (
            "SELECT (SELECT count(*) FROM inbox WHERE state <> 'done')"
            " + (SELECT count(*) FROM outbox WHERE sent_at IS NULL)"
        )
        while self.scalar(busy):
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.02)
        return True

    def scalar(self, sql: str) -> int:
        self._db = self._db or sqlite3.connect(self.folder / "store.db", isolation_level=None)
        return int(self._db.execute(sql).fetchone()[0])

    async def close(self) -> None:
        """Tell the workers to end; check that they do so cleanly."""
        for worker in self.workers:
            await worker.kill(signal.SIGTERM)
        assert [await worker.wait() for worker in self.workers] == [0] * WORKERS
        await self.end(self.sender)
        if self._db is not None:
            self._db.close()


async def run_chaos(
    forge: Forge, folder: Path, *, messages: int, sessions: int, kills: int, seed: int, patience: float
) -> tuple[Chaos, History]:
    async with model_process() as url:
        store = SQLiteStore(folder / "store.db")
        await store.sessions("me")
        chaos = Chaos(forge, folder, url, seed)
        bus = DurableBus(store)
        plan = chaos.plan(messages, sessions)
        await asyncio.gather(chaos.feed(bus, plan, at_once=80), chaos.kill(messages, kills))
        at_rest = await chaos.rest(patience)
        await store.close()
        await chaos.close()
        async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/_log") as answer:
            requests = await answer.json()
    history = read(folder, requests)
    history.acknowledged = [message.id or "" for message in plan]
    history.published = chaos.published
    history.killed = chaos.killed
    assert at_rest, f"still at work after {patience} s: {violations(history)[:10]}"
    return chaos, history


async def chaos_test(forge: Forge, folder: Path, capfd: pytest.CaptureFixture[str], **size: Any) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"chaos: CHAOS_SEED={seed}")
    began = time.monotonic()
    chaos, history = await run_chaos(forge, folder, seed=seed, **size)
    seconds = time.monotonic() - began
    with capfd.disabled():
        print(
            f"\nchaos: {len(history.messages)} messages, {len(history.logs)} sessions, {chaos.kills} workers and"
            f" {chaos.sender_kills} senders killed, {history.takeovers} take-overs, {history.repeats} repeats,"
            f" {history.interrupted} interrupted calls, {len(history.requests)} model calls,"
            f" {seconds:.1f} s (seed {seed})",
            file=sys.stderr,
        )
    assert violations(history) == []
    assert len(history.messages) == size["messages"]
    assert len(history.logs) == size["sessions"]
    assert chaos.kills == size["kills"]
    assert history.takeovers > 0


@pytest.mark.timeout(400)
async def test_hundreds_of_messages_survive_workers_killed_at_random(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await chaos_test(forge, tmp_path, capfd, messages=300, sessions=30, kills=10, patience=120)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_ten_thousand_messages_survive_workers_killed_at_random(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await chaos_test(forge, tmp_path, capfd, messages=10_000, sessions=500, kills=200, patience=300)
