"""The cluster of deploy/ha, run from its own files: Patroni promotes the standby, and nothing is lost or doubled.

The machines are network namespaces, so that a machine can be lost silently, as can packets between two of them.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg
import pytest

from tests.support import machines
from tests.support.machines import Machine
from tests.support.places import ROOT

from .failover_load import load
from .patroni import DATABASES, ETCD, Cluster, cluster

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network,
    pytest.mark.timeout(1800),
    pytest.mark.platform("network namespaces need Linux and root"),
    pytest.mark.skipif(bool(machines.available()), reason=machines.available()),
]
TIMES = 3
LEASE = 25.0  # seconds: more than the `ttl` of patroni.yml
SLACK = 1.0  # seconds after the promotion until everything continues
SILENCE = 15.0  # seconds that Patroni may need to switch from an etcd that does not respond to another one
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
    machines_of_ha.wait(machines_of_ha.has_all_etcd, "what the test before has damaged")
    machines_of_ha.renew_database()
    return machines_of_ha


def test_the_health_check_and_the_pages_monitoring_work_as_written(ha):
    page = (ROOT / "docs" / "failover.md").read_text()
    for name in DATABASES:
        machine, env = ha.net.machines[name], ha.files.environment(name)
        inside = ["ip", "netns", "exec", machine.namespace]
        _, *check = ha.files.services[name]["healthcheck"]["test"]
        healthy = partial(subprocess.call, [*inside, *check], env=env, stderr=subprocess.DEVNULL)
        ha.wait(lambda healthy=healthy: healthy() == 0, f"{name} to be healthy")
        (command,) = re.findall(r"`(patronictl [^`]+)`", page)
        command = command.replace("/etc/patroni.yml", str(ha.files.folder / name / "patroni.yml"))
        told = subprocess.run(
            [*inside, *command.split()], env=env, check=True, timeout=60, capture_output=True, text=True
        )
        assert re.search(r"Leader .*Sync Standby|Sync Standby .*Leader", told.stdout.replace("\n", " ")), told.stdout
    assert "`SHOW POOLS`" in page
    address = re.sub(r"/everloop$", "/pgbouncer", ha.pool)
    with psycopg.connect(address, autocommit=True, prepare_threshold=None) as console:
        names = [column.name for column in console.execute("SHOW POOLS").description or ()]
    assert {"cl_waiting", "maxwait"} <= set(names)


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
            await work.until(30)  # next to a primary that comes back
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


@pytest.mark.parametrize("damage", ["killed", "lost", "frozen", "cut"])
async def test_work_continues_without_one_of_the_three_etcd_and_a_primary_is_replaced_then(ha, damage, capsys):
    """Each of them once: one of them leads the others."""
    fail, mend = DAMAGES[damage]
    async with load(ha.dsn) as work:
        for number, name in enumerate(ETCD):
            etcd = ha.net.machines[name]
            await work.until(20)
            primary = await asyncio.to_thread(ha.primary)
            work.measure()
            await asyncio.to_thread(fail, etcd)
            await asyncio.sleep(LEASE)  # the primary would have lost its place by then
            await work.until(40)
            assert await asyncio.to_thread(ha.primary) is primary
            waited = work.longest
            with capsys.disabled():
                print(f"{name} {damage}: longest wait {waited:.1f} s", end="; ")
            assert waited < (SLACK if damage == "killed" else SILENCE)
            if number == len(ETCD) - 1:
                await asyncio.to_thread(primary.kill)
                await asyncio.to_thread(ha.wait_for_promotion, ha.other(primary))
                await work.until(30)
                await asyncio.to_thread(ha.start, primary.name)
            await asyncio.to_thread(mend, etcd)
            if not etcd.processes():
                await asyncio.to_thread(ha.start, name)
            await asyncio.to_thread(ha.wait, ha.is_whole, "the cluster to be whole")
            await asyncio.to_thread(ha.wait, ha.has_all_etcd, f"{name} to be back")
    assert await asyncio.to_thread(work.problems, ha, "everloop") == []
    assert work.errors == []
