"""A killed chat or `run`: a worker on the same machine resumes its turn at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.store.base import Store
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI

from ..server.serving import call, worker
from ..store.postgres.fixtures import *  # noqa: F403
from ..support.commands import environment, start, until

LEASE = "[worker]\nlease_seconds = 3600\n"  # longer than any test, so that waiting for it fails


@pytest.fixture(params=["sqlite", "postgres"])
def settings(request: Any, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config.toml").write_text(LEASE)
    (tmp_path / "workspace").mkdir()
    return {} if request.param == "sqlite" else {"EVERLOOP_STORE": request.getfixturevalue("database")}


@contextlib.asynccontextmanager
async def in_a_call(fake: FakeOpenAI, folder: Path, settings: dict[str, str], *arguments: str) -> AsyncIterator[Any]:
    """A chat (without arguments) or another command whose turn is in an endless tool call."""
    fake.calls(call("exec", command="touch begun; sleep 600"))
    home = {"EVERLOOP_HOME": str(folder), "EVERLOOP_WORKSPACE": str(folder / "workspace")}
    stdin = asyncio.subprocess.DEVNULL if arguments else asyncio.subprocess.PIPE
    process = await start(*arguments, env=environment(fake, **home, **settings), stdin=stdin)
    try:
        if not arguments:
            process.stdin.write(b"go\n")
        await until((folder / "workspace" / "begun").exists)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def works(fake: FakeOpenAI, folder: Path, settings: dict[str, str]) -> None:
    """Wait until the worker has answered a message, and thus seen all existing work."""
    fake.reply("I work")
    store: Store = PostgresStore(settings["EVERLOOP_STORE"]) if settings else SQLiteStore(folder / "everloop.db")
    before = len(fake.requests)
    try:
        await store.accept(InboundMessage("test", "user", "other", "hi", reply=False).addressed())
        await store.wake()
        await until(lambda: len(fake.requests) > before)
    finally:
        await store.close()


async def goes_on(fake: FakeOpenAI) -> None:
    """Wait until the interrupted call is reported to the model."""
    before = len(fake.requests)
    await until(lambda: len(fake.requests) > before)
    assert "outcome unknown" in str(fake.requests[-1].body)


@pytest.mark.parametrize("arguments", [(), ("run", "go")], ids=["chat", "run"])
async def test_a_worker_resumes_the_turn_of_a_killed_process_at_once(
    tmp_path: Path, settings: dict[str, str], arguments: tuple[str, ...]
):
    async with FakeOpenAI() as fake, worker(fake, tmp_path, **settings):
        await works(fake, tmp_path, settings)
        async with in_a_call(fake, tmp_path, settings, *arguments) as process:
            fake.reply("done")
            process.kill()
            await goes_on(fake)


async def test_a_worker_that_starts_later_resumes_it_too(tmp_path: Path, settings: dict[str, str]):
    async with (
        FakeOpenAI() as fake,
        in_a_call(fake, tmp_path, settings, "run", "go") as process,
        worker(fake, tmp_path, **settings),
    ):
        await works(fake, tmp_path, settings)
        fake.reply("done")
        process.kill()
        await goes_on(fake)
