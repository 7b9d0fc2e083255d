"""A message sent through one process reaches the turn that another one runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.log import CallEnded, TurnEnded, UserSaid
from everloop.server.sse import RESTARTED
from everloop.testing import FakeOpenAI

from ..crash.forge import Forge
from ..crash.history import History, lines
from ..crash.model import planned
from ..crash.scene import say
from ..server.serving import CHAT, Client, Streamed
from ..store.postgres.server import Server
from .channel import held, started, until
from .company import Company, company
from .test_company_checker import left, publish

ASKS = '[[policy]]\ndo = "ask"\ntool = "asked"\n'
STEERS = '[agent]\nbusy = "steer"\n'


@pytest.fixture
def start(forge: Forge, tmp_path: Path, model: FakeOpenAI, postgres: Server) -> Any:
    @contextlib.asynccontextmanager
    async def started_company(workers: int, servers: int, settings: str = "") -> AsyncIterator[Company]:
        options: dict[str, Any] = {"workers": workers, "servers": servers, "on": postgres, "settings": settings}
        options["lease"] = 30.0  # none is to end
        async with company(forge, tmp_path, model.base_url, **options) as made:
            await made.start()
            yield made

    return started_company


def ends(history: History) -> list[TurnEnded]:
    return [place.entry for log in history.logs.values() for place in log if isinstance(place.entry, TurnEnded)]


def runs(folder: Path, what: str = "start") -> int:
    return sum(run["what"] == what for run in lines(folder / "runs"))


def answers(folder: Path) -> list[str]:
    return [line["content"] for line in lines(folder / "answers")]


async def test_a_stop_from_a_channel_reaches_the_turn_of_a_worker(
    start: Any, model: FakeOpenAI, tmp_path: Path
) -> None:
    async with start(workers=1, servers=0) as made:
        with held(tmp_path):
            await publish(made, say("m1", "l.l.l.l"))
            await until(started(tmp_path))
            await publish(made, {**say("m2"), "content": "/stop"})
            assert await made.rest(30)
        history = left(made, model)
    assert [end.reason for end in ends(history)] == ["cancelled"]
    assert runs(tmp_path) < 4
    assert runs(tmp_path, "end") < runs(tmp_path)  # the tool was stopped too


@pytest.mark.parametrize("runner", ["worker", "server"])
async def test_a_stop_through_the_api_of_a_server_reaches_the_turn_of_another_process(
    start: Any, model: FakeOpenAI, tmp_path: Path, runner: str
) -> None:
    async with start(workers=int(runner == "worker"), servers=2) as made, aiohttp.ClientSession() as http:
        one, other = (Client(url, http) for url in made.urls())
        with held(tmp_path):
            if runner == "worker":  # or one of the servers; both are asked
                await publish(made, say("m1", "l.l.l.l"))
                asking, key = None, "test:a"
            else:
                asking, key = asyncio.create_task(one.fails("mark:m1.l.l.l.l", {"X-Session": "a"})), "a"
            await until(started(tmp_path))
            said = await other.ask("/stop", {"X-Session": key})
            assert "Stopped" in said["choices"][0]["message"]["content"]
            assert await made.rest(30)
        if asking is not None:
            status, _ = await asking
            assert status != 200
        history = left(made, model)
    assert [end.reason for end in ends(history)] == ["cancelled"]
    assert runs(tmp_path) < 4


async def test_a_message_from_another_process_steers_the_running_turn(
    start: Any, model: FakeOpenAI, tmp_path: Path
) -> None:
    async with start(workers=1, servers=0, settings=STEERS) as made:
        with held(tmp_path):
            await publish(made, say("m1", "l.l.l"))
            await until(started(tmp_path))
            await publish(made, say("m2"))
        assert await made.rest(30)
        history = left(made, model)
    (log,) = history.logs.values()
    assert [place.entry.content for place in log if isinstance(place.entry, UserSaid)] == ["mark:m1.l.l.l", "mark:m2"]
    assert len(ends(history)) == 1
    assert runs(tmp_path) < 3  # the second message had another plan, which the turn adopted at its next round


async def test_an_approval_reaches_the_turn_that_another_process_ran(
    start: Any, model: FakeOpenAI, tmp_path: Path
) -> None:
    async with start(workers=1, servers=0, settings=ASKS) as made:
        await publish(made, say("m1", "p"))
        await until(lambda: any("May I do" in one for one in answers(tmp_path)))
        await publish(made, {**say("m2"), "content": "/approve"})
        assert await made.rest(30)
        history = left(made, model)
    results = [place.entry for log in history.logs.values() for place in log if isinstance(place.entry, CallEnded)]
    assert [result.status for result in results] == ["ok"]
    assert sum("done:m1.p" in one for one in answers(tmp_path)) == 1
    assert runs(tmp_path) == 1


async def test_a_stream_whose_server_was_frozen_past_its_lease_repeats_nothing(
    forge: Forge, tmp_path: Path, postgres: Server
) -> None:
    """It continues with the turn that another process has taken over, after what it has already shown."""
    streamed = Streamed()
    async with (
        planned(token_delay=0.5, keep_bodies=False) as model,
        company(forge, tmp_path, model.base_url, workers=1, servers=1, on=postgres, lease=3.0) as made,
        aiohttp.ClientSession() as http,
    ):
        await made.start()
        (server,) = made.of("server")
        body = {"messages": [{"role": "user", "content": "mark:m1"}], "stream": True}
        async with http.post(server.url + CHAT, json=body, headers={"X-Session": "a"}) as response:
            assert response.status == 200, await response.text()
            while not streamed.text:
                line = await response.content.readline()
                assert line, "the stream ended at once"
                streamed.take(line.decode().removesuffix("\n"))
            await server.freeze_until_robbed()
            async for line in response.content:
                streamed.take(line.decode().removesuffix("\n"))
        assert await made.rest(30)
        history = left(made, model)
    assert history.takeovers == 1
    assert [end.text for end in ends(history)] == [streamed.text.rpartition(RESTARTED)[2]]
