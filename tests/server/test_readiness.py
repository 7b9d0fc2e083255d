"""GET /readyz: it says yes only while requests can be written down."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.testing.openai_server import FakeOpenAI

from ..store.postgres.fixtures import *  # noqa: F403
from ..store.postgres.server import Server, name_of
from .serving import Client, process, serving, text_of


async def is_ready(client: Client, expected: bool) -> None:
    """Wait until the server says so; an answer may be a second old."""
    async with asyncio.timeout(20):
        while (await client.get("/readyz"))[0] != (200 if expected else 503):
            await asyncio.sleep(0.1)


def forbid_growth(pid: int, _: Path) -> Callable[[], None]:
    """Let the process write nothing beyond the first page of any file."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    def allow() -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    return allow


def fill_disk(_: int, folder: Path) -> Callable[[], None]:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return filler.unlink


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "everloop", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("fill", [forbid_growth, fill_disk])
async def test_a_server_whose_disk_is_full_is_not_ready_until_there_is_space_again(
    request: Any, tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession, fill: Callable[..., Any]
):
    folder = request.getfixturevalue("small_disk") if fill is fill_disk else tmp_path
    async with process(fake, folder, EVERLOOP_WORKSPACE=str(tmp_path / "workspace")) as (made, url):
        client = Client(url, http)
        await is_ready(client, True)
        free = await asyncio.to_thread(fill, made.pid, folder)
        fake.reply("never heard")
        assert (await client.fails("x" * 300_000))[0] == 503
        await is_ready(client, False)
        assert (await client.get("/healthz"))[0] == 200
        await asyncio.to_thread(free)
        await is_ready(client, True)
        assert "never heard" in text_of(await client.ask("hi"))


async def test_a_server_whose_postgresql_refuses_writes_is_not_ready(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession, postgres: Server, database: str
):
    """As a hosted one does when its disk is full, and a standby after a failover."""
    name = name_of(database)

    def read_only(on: bool) -> None:
        postgres.sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {"on" if on else "off"}')
        others = f"datname = '{name}' AND pid <> pg_backend_pid()"
        postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")

    async with process(fake, tmp_path, EVERLOOP_STORE=database) as (_, url):
        client = Client(url, http)
        await is_ready(client, True)
        await asyncio.to_thread(read_only, True)
        await is_ready(client, False)
        await asyncio.to_thread(read_only, False)
        await is_ready(client, True)


async def test_one_write_answers_all_checks_within_a_second(tmp_path: Path):
    async with serving(tmp_path) as server:
        await is_ready(server, True)
        await asyncio.sleep(1.1)
        before = server.store.writer.commits  # type: ignore[attr-defined]
        statuses = [status for status, _ in await asyncio.gather(*(server.get("/readyz") for _ in range(50)))]
        assert statuses == [200] * 50
        assert server.store.writer.commits <= before + 2  # type: ignore[attr-defined]
