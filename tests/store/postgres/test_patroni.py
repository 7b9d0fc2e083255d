"""The cluster of deploy/ha, run by its own files: Patroni promotes the standby, and nothing is lost or doubled.

The machines are network namespaces, so that a machine can be lost without a word, and packets between two of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support import machines
from tests.support.machines import Machine

from .failover_load import load
from .patroni import Cluster, cluster

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network,
    pytest.mark.timeout(0),
    pytest.mark.platform("network namespaces need Linux and root"),
    pytest.mark.skipif(bool(machines.available()), reason=machines.available()),
]
TIMES = 3
SLACK = 1.0  # seconds after the promotion until everything goes on
DAMAGES: dict[str, tuple[Callable[[Machine], None], Callable[[Machine], None]]] = {
    "killed": (Machine.kill, lambda machine: None),
    "lost": (Machine.lose, Machine.mend),
    "frozen": (Machine.freeze, Machine.thaw),
    "cut": (Machine.cut, Machine.mend),
}


@pytest.fixture(scope="module")
def machines_of_ha() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def ha(machines_of_ha: Cluster) -> Cluster:
    machines_of_ha.wait(machines_of_ha.is_whole, "what the test before has damaged")
    machines_of_ha.renew_database()
    return machines_of_ha


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pooled"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_nothing_is_lost_or_doubled_when_patroni_fails_over(ha, damage, pooled, capsys):
    fail, mend = DAMAGES[damage]
    async with load(ha.dsn, ha.pool if pooled else None) as work:
        for _ in range(TIMES):
            await work.until(20)
            primary = await asyncio.to_thread(ha.primary)
            standby = ha.other(primary)
            work.measure()
            began = time.monotonic()
            await asyncio.to_thread(fail, primary)
            detection = await asyncio.to_thread(ha.wait_for_promotion, standby) - began
            await work.until(30)
            waited = work.longest
            await asyncio.to_thread(mend, primary)
            if not primary.processes():
                await asyncio.to_thread(ha.start, primary.name)
            await work.until(30)  # beside a primary that comes back
            await asyncio.to_thread(ha.wait, ha.is_whole, "the old primary to follow the new one")
            with capsys.disabled():
                print(f"{damage}: promoted after {detection:.1f} s, longest wait {waited:.1f} s", end="; ")
            assert waited <= detection + SLACK
        with capsys.disabled():
            print(f"{len(work.said)} messages, {len(work.fences)} fences, {len(work.errors)} errors")
    assert await asyncio.to_thread(work.problems, ha, "everloop") == []
    assert work.errors == []


async def test_a_network_cut_between_primary_and_standby_stops_work_until_patroni_lets_the_primary_continue(ha, capsys):
    """Both still reach etcd, so nothing is promoted. Commits wait for the standby until it is given up."""
    async with load(ha.dsn) as work:
        for _ in range(TIMES):
            await work.until(20)
            primary = await asyncio.to_thread(ha.primary)
            standby = ha.other(primary)
            work.measure()
            await asyncio.to_thread(primary.cut_from, standby)
            await work.until(40)
            waited = work.longest
            await asyncio.to_thread(primary.mend_to, standby)
            await asyncio.to_thread(ha.wait, ha.is_whole, "the standby to be back")
            assert await asyncio.to_thread(ha.primary) is primary
            with capsys.disabled():
                print(f"standby cut off: longest wait {waited:.1f} s", end="; ")
    assert await asyncio.to_thread(work.problems, ha, "everloop") == []
    assert work.errors == []
    assert waited < 30
