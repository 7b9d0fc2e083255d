"""The failover tests find broken code: with each of these faults planted, the corresponding test soon fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everloop.config.sources import DSN
from everloop.store.postgres import connect, connections
from everloop.store.postgres.connect import Primary
from everloop.store.postgres.heartbeat import Heartbeat

from . import failover_load, test_failover
from .failover_load import load
from .standby import Pair
from .test_failover import machines as machines
from .test_failover import name as name
from .test_failover import servers as servers

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
SECONDS = 60.0  # until a test has failed, on a busy machine
Test = Callable[[Pair, str, pytest.CaptureFixture[str], pytest.MonkeyPatch], Awaitable[None]]


def acknowledge_before_the_standby_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(connect.SETTINGS, "synchronous_commit", "local")


def take_a_visible_commit_for_done(patch: pytest.MonkeyPatch) -> None:
    read = "SELECT number, result FROM lane WHERE id = %s AND (true OR %s = %s)"
    outcome = connections.Connections._outcome

    def look(self: Any, state: Any, give_up: float) -> Any:
        connection = self._connection(state)
        row = connection.execute(read, (state.name, 0, 0)).fetchone()
        return row[1:] if row is not None and row[0] == state.number else outcome(self, state, give_up)

    patch.setattr(connections.Connections, "_outcome", look)


def use_a_primary_of_an_earlier_timeline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Primary, "_is_latest", lambda self, connection: True)


def stay_with_a_primary_that_lost_its_standby(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Primary, "has_changed", lambda self: False)


def wait_for_a_silent_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heartbeat, "_watch", lambda self, stop, primary: None)
    start = Primary.__init__

    def init(self: Primary, dsn: DSN, break_all: Callable[[], None]) -> None:
        start(self, dsn, lambda: None)  # a thread that has just connected elsewhere does not tell the others

    patch.setattr(Primary, "__init__", init)


async def an_acknowledged_message_is_lost(
    servers: Pair, name: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> None:
    """As `test_nothing_is_lost_or_doubled…`, with a standby that is away."""
    async with load(servers.dsn(name)) as work:
        await work.until(20)
        await asyncio.to_thread(servers.standby.crash)
        said = len(work.said)
        while len(work.said) < said + 10:  # with the real code, none is acknowledged
            await asyncio.sleep(0.02)
        await asyncio.to_thread(servers.primary.crash)
        await asyncio.to_thread(servers.standby.start)
        await asyncio.to_thread(servers.promote)
        await work.until(10)
    assert await asyncio.to_thread(work.problems, servers.primary, name) == []


async def visible(servers: Pair, name: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
    await test_failover.test_a_commit_that_is_visible_and_not_replicated_is_not_acknowledged(servers, name)


async def connected(servers: Pair, name: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
    await test_failover.test_a_process_that_is_still_connected_to_the_old_primary_finds_the_new_one(servers, name)


async def cut(servers: Pair, name: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
    test = test_failover.test_a_primary_behind_a_cut_network_is_given_up_and_passed_over_when_it_is_back
    await test(servers, name, 1, capsys, patch)


async def frozen(servers: Pair, name: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
    test = test_failover.test_a_frozen_primary_that_returns_has_lost_and_doubled_nothing
    await test(servers, name, 1, capsys, patch)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (acknowledge_before_the_standby_has_it, an_acknowledged_message_is_lost),
        (take_a_visible_commit_for_done, visible),
        (use_a_primary_of_an_earlier_timeline, cut),
        (stay_with_a_primary_that_lost_its_standby, connected),
        (wait_for_a_silent_server, frozen),
        (wait_for_a_silent_server, cut),
    ],
)
async def test_a_planted_fault_is_found(servers, name, capsys, monkeypatch, fault, test):
    monkeypatch.setattr(failover_load, "UNTIL_SECONDS", 12.0)
    fault(monkeypatch)
    began = time.monotonic()
    with pytest.raises((AssertionError, TimeoutError)) as found:
        await test(servers, name, capsys, monkeypatch)
    seconds = time.monotonic() - began
    reason = (str(found.value) or found.type.__name__).splitlines()[0]
    with capsys.disabled():
        print(f"{fault.__name__}, {test.__name__}: {reason[:80]}, after {seconds:.0f} s")
    assert seconds < SECONDS
