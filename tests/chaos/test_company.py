"""Workers and servers on one PostgreSQL, disturbed in every way at random, while clients and a channel use them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.cron.service import CronService
from everloop.runtime.durable_bus import DurableBus
from everloop.store.postgres.store import PostgresStore

from ..crash.checker import violations
from ..crash.company import LEASE, named
from ..crash.forge import Forge
from ..crash.history import History, seen_in
from ..crash.witness import read_postgres
from ..store.postgres.server import Server
from .clients import HttpClient, Publisher
from .company import REFUSED, Company, company
from .test_at_random import model_process

# Each kind of disturbance, and how often it occurs: quick ones occur more often.
KINDS = {
    "kill worker": 1,
    "kill server": 1,
    "kill channel": 3,
    "end worker": 1,
    "end server": 1,
    "freeze worker": 1,
    "freeze server": 1,
    "cut all": 2,
    "cut before": 4,
    "cut after": 6,
    "restart fast": 1,
    "restart immediate": 1,
}
TOKEN_SECONDS = 0.02  # between two words of an answer, so that streams are interrupted midway


@dataclass
class Load:
    """So many messages over so many sessions, and what happens to the company meanwhile."""

    messages: int
    sessions: int
    disturbances: list[str] = field(default_factory=list)
    patience: float = 120.0
    seed: int = 0
    pause: float = 0.0  # seconds between two messages of a client
    every: int = 4  # seconds between two slots of a job; a process that is later than that on a busy machine skips one
    lease: float = LEASE

    def shares(self) -> list[int]:
        """Return how many messages each session has."""
        return [self.messages // self.sessions + (n < self.messages % self.sessions) for n in range(self.sessions)]


class Chaos:
    """A company under load, and what disturbs it."""

    def __init__(self, company: Company, load: Load) -> None:
        self.company = company
        self.load = load
        self.random = random.Random(load.seed)
        self.counts: Counter[str] = Counter()
        self.clients: list[HttpClient] = []
        self.jobs: dict[str, float] = {}
        self.answered = 0
        self.publisher: Publisher | None = None
        self._frozen: set[asyncio.Task[None]] = set()

    @property
    def progress(self) -> int:
        return self.answered + (self.publisher.delivered if self.publisher is not None else 0)

    async def run(self) -> bool:
        """Run everything at once; return True if all work was done in time."""
        store = PostgresStore(named(self.company.dsn), lease_seconds=self.load.lease)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            try:
                cron = CronService(store)
                await self._schedule(cron)
                await self.company.start()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._use(http, DurableBus(store)))
                    group.create_task(self._disturb())
                for job in self.jobs:
                    await cron.remove(job)
                return await self.company.rest(self.load.patience)
            finally:
                await store.close()

    async def _schedule(self, cron: CronService) -> None:
        for number in range(2):
            job = await cron.add(f"tick {number}", every=self.load.every, channel="test", chat_id=f"job{number}")
            self.jobs[job.id] = self.load.every

    async def _use(self, http: aiohttp.ClientSession, bus: DurableBus) -> None:
        publisher = self.publisher = Publisher(bus, self.company.folder, f"{self.load.seed} channel")
        counting = asyncio.create_task(publisher.count())
        work = []
        for number, share in enumerate(self.load.shares()):
            if number % 2:
                work.append(publisher.feed(f"chat{number}", share, ahead=20))
            else:
                client = HttpClient(http, f"http{number}", self.company.urls, f"{self.load.seed} {number}")
                self.clients.append(client)
                work.append(client.converse(share, self._one_more, self.load.pause))
        try:
            await asyncio.gather(*work)
        finally:
            counting.cancel()

    def _one_more(self) -> None:
        self.answered += 1

    async def _disturb(self) -> None:
        """Return everything that is to happen, spread over the run."""
        for number, kind in enumerate(self.load.disturbances):
            while self.progress < (number + 0.3) * self.load.messages / (len(self.load.disturbances) + 1):
                await asyncio.sleep(0.02)
            await asyncio.sleep(self.random.random() * 0.1)
            await self._do(kind)
            self.counts[kind] += 1
        if self._frozen:
            await asyncio.wait(self._frozen)

    async def _do(self, kind: str) -> None:
        what, _, whom = kind.partition(" ")
        if what == "restart":
            # Unavailable for longer than a lease: no worker could renew it, and that makes none dead.
            await self.company.restart_postgres(whom, away=self.load.lease if whom == "immediate" else 0.0)
            return
        if what == "roll":
            for one in self.company.of("worker", "server"):
                await one.again(signal.SIGTERM)
                self.counts[f"end {one.kind}"] += 1
            return
        there = self.company.of(whom) if what != "cut" else self.company.of("worker", "server", "channel")
        while not there:
            await asyncio.sleep(0.1)
            there = self.company.of(whom)
        busy = await self.company.holders() if what in ("kill", "end", "freeze") else set()
        one = self.random.choice([one for one in there if one.pid in busy] or there)
        if what == "cut" and whom == "all":
            one.proxy.cut_all()
        elif what == "cut":
            one.proxy.cut = "before" if whom == "before" else "after"
        elif what == "freeze":
            task = asyncio.create_task(one.freeze(self.load.lease * self.random.uniform(1.3, 2.0)))
            self._frozen.add(task)
            task.add_done_callback(self._frozen.discard)
            await asyncio.sleep(0)
        else:
            await one.again(signal.SIGKILL if what == "kill" else signal.SIGTERM)

    def history(self, requests: list[Any]) -> History:
        company, publisher = self.company, self.publisher
        assert publisher is not None
        history = read_postgres(company.dsn, seen_in(company.folder, requests))
        history.acknowledged = publisher.acknowledged
        history.published = publisher.published
        history.clients = [asked for client in self.clients for asked in client.record]
        history.killed, history.ended = set(company.ended), company.ended
        history.jobs, history.outages = self.jobs, company.outages
        said = company.said()
        history.refused = said.count(REFUSED)
        history.complaints = [line for line in said.splitlines() if "Traceback" in line or "Error" in line]
        return history

    def figures(self, history: History, seconds: float) -> str:
        count = self.counts
        return (
            f"company: {len(history.messages)} messages, {len(history.logs)} sessions, "
            f"{count['kill worker'] + count['kill server'] + count['kill channel']} kills, "
            f"{count['freeze worker'] + count['freeze server']} stops, "
            f"{count['end worker'] + count['end server']} drained, "
            f"{count['cut all'] + count['cut before'] + count['cut after']} cuts, "
            f"{count['restart fast'] + count['restart immediate']} restarts, {history.takeovers} take-overs, "
            f"{history.repeats} repeats, {history.refused} refused writes, {history.interrupted} interrupted calls, "
            f"{len(history.hung_up)} hung up, {sum(one.resumed for one in history.clients)} streams resumed, "
            f"{seconds:.1f} s (seed {self.load.seed})"
        )


async def run_company(
    forge: Forge, folder: Path, load: Load, *, workers: int = 4, servers: int = 2, on: Server | None = None
) -> tuple[Chaos, History, str]:
    """Run the load; return the history, what is left behind, and figures."""
    began = time.monotonic()
    options: dict[str, Any] = {"workers": workers, "servers": servers, "on": on, "lease": load.lease}
    async with model_process(TOKEN_SECONDS) as url, company(forge, folder, url, **options) as made:
        chaos = Chaos(made, load)
        at_rest = await chaos.run()
        await made.close()
        async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/_log") as answer:
            requests = await answer.json()
        history = chaos.history(requests)
    assert at_rest, f"still at work after {load.patience} s: {violations(history)[:10]}"
    return chaos, history, chaos.figures(history, time.monotonic() - began)


def seed_of() -> int:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"chaos: CHAOS_SEED={seed}")
    return seed


def every_kind(seed: int, times: int) -> list[str]:
    """Return every kind of disturbance, so many times each, in the seed's order."""
    kinds = [kind for kind, often in KINDS.items() for _ in range(often * times)]
    random.Random(seed).shuffle(kinds)
    return kinds


async def company_test(
    forge: Forge, folder: Path, capfd: pytest.CaptureFixture[str], messages: int, sessions: int, times: int
) -> None:
    seed = seed_of()
    load = Load(messages, sessions, every_kind(seed, times), seed=seed)
    chaos, history, figures = await run_company(forge, folder, load)
    with capfd.disabled():
        print(f"\n{figures}", file=sys.stderr)
    assert violations(history) == []
    assert sum(chaos.counts.values()) == len(load.disturbances)
    assert len({message.content for message in history.messages}) > messages * 0.8
    assert history.takeovers > 0


@pytest.mark.timeout(400)
async def test_hundreds_of_messages_survive_whatever_happens_to_workers_servers_and_the_store(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await company_test(forge, tmp_path, capfd, messages=150, sessions=20, times=1)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_thousands_of_messages_survive_whatever_happens_to_workers_servers_and_the_store(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await company_test(forge, tmp_path, capfd, messages=2400, sessions=120, times=8)
