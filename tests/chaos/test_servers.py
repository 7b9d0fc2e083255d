"""Two servers on one store, killed at random while clients ask and repeat unanswered requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.providers.base import ToolCallRequest
from everloop.testing.openai_server import FakeOpenAI, Reply

from ..server.serving import Client, process, text_of

CLIENTS, MESSAGES = 10, 5
SECONDS = 16.0  # in which servers are killed


class Writes(FakeOpenAI):
    """A model that has a command record each message's mark, which is not safe to repeat, and then answers."""

    def _scripted(self, body: dict[str, Any], marker: str, round: int) -> Reply:
        if round:
            return Reply(text=f"done:{marker}", delay=0.02)
        command = f"sleep 0.1; echo {marker} >> runs.txt; sleep 0.1"
        return Reply(calls=[ToolCallRequest(f"call-{marker}", "exec", {"command": command})])


@dataclass
class Servers:
    """Two addresses, either of which may be down; and what has happened."""

    urls: list[str | None] = field(default_factory=lambda: [None, None])
    counts: Counter[str] = field(default_factory=Counter)
    over: bool = False

    async def keep_up(self, number: int, fake: FakeOpenAI, home: Path, until: float) -> None:
        """Start a server, kill it after a while, and restart it; the last one stays until all requests are answered."""
        while not self.over:
            async with process(fake, home) as (_, url):
                self.urls[number] = url
                lives = random.uniform(0.1, 2.5) if time.monotonic() < until else 60.0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(lives):
                        while not self.over:
                            await asyncio.sleep(0.05)
                self.urls[number] = None
            self.counts["kills"] += not self.over

    async def ask(self, http: aiohttp.ClientSession, name: str, mark: str) -> str:
        """Return the answer, requested as often as necessary from any available server; sometimes it disconnects."""
        headers = {"X-Session": name, "Idempotency-Key": mark}
        while True:
            self.counts["tries"] += 1
            if (url := random.choice(self.urls)) is None:
                await asyncio.sleep(0.05)
                continue
            patience = random.choice([0.05, 10.0, 10.0, 10.0])
            try:
                async with asyncio.timeout(patience):
                    async with Client(url, http).post(_body(mark), headers) as response:
                        body: Any = await response.json()
                        if response.status == 200:
                            return text_of(body)
                        self.counts[f"status {response.status}"] += 1
            except TimeoutError:
                self.counts["hung up" if patience < 1 else "no answer in ten seconds"] += 1
            except (aiohttp.ClientError, ConnectionError):
                self.counts["cut off"] += 1
            await asyncio.sleep(random.uniform(0.0, 0.1))


def _body(mark: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"mark:{mark} write it down"}]}


@pytest.mark.chaos
async def test_a_repeated_request_gets_one_answer_and_no_unsafe_call_runs_twice(tmp_path: Path):
    servers = Servers()
    asked = {f"c{client}": [f"c{client}m{number}" for number in range(MESSAGES)] for client in range(CLIENTS)}

    async def converse(http: aiohttp.ClientSession, name: str) -> None:
        for mark in asked[name]:
            answer = await servers.ask(http, name, mark)
            assert answer == f"done:{mark}"
            assert await servers.ask(http, name, mark) == answer  # once more, at any server
            await asyncio.sleep(random.uniform(0.0, 2 * SECONDS / MESSAGES))

    async with Writes() as fake, aiohttp.ClientSession() as http:
        until = time.monotonic() + SECONDS
        running = [asyncio.create_task(servers.keep_up(number, fake, tmp_path, until)) for number in range(2)]
        try:
            async with asyncio.timeout(50):
                await asyncio.gather(*(converse(http, name) for name in asked))
        finally:
            servers.over = True
            await asyncio.gather(*running, return_exceptions=True)
    marks = [mark for one in asked.values() for mark in one]
    done = Counter((tmp_path / "workspace/runs.txt").read_text().split())
    with contextlib.closing(sqlite3.connect(tmp_path / "everloop.db")) as database:
        rows = database.execute("SELECT message_id, reason, state FROM inbox").fetchall()
    answered = Counter(id.split(":")[3] for id, reason, _ in rows if reason == "answer")
    hung_up = {id.split(":")[3] for id, reason, _ in rows if reason == "cancelled"}
    print(f"{len(marks)} messages: {dict(servers.counts)}; {sum(done.values())} commands, {len(rows)} turns")
    assert servers.counts["kills"] >= 4
    assert max(done[mark] for mark in marks if mark not in hung_up) == 1  # a stopped turn is run again
    assert answered == Counter(marks)
    assert {state for _, _, state in rows} == {"done"}
