"""What a channel costs: nothing while it is idle, and one write before the model is asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop import LLMProvider, LLMResponse
from everloop.channels.base import make_channel
from everloop.channels.runner import ChannelRunner
from everloop.store.sqlite import SQLiteStore
from everloop.testing.channels import config_of, running

from .hooks import HookNetwork
from .networks import NETWORKS
from .says import found, until

SOON = 10.0  # seconds
MEBIBYTE = 1 << 20


@contextlib.contextmanager
def elsewhere(kind: str) -> Iterator[dict[str, Any]]:
    """A network in a thread of its own, so that its work is not counted; its settings."""
    there, done = threading.Event(), threading.Event()
    settings: dict[str, Any] = {}

    async def serve() -> None:
        try:
            made = NETWORKS[kind]()
            if kind == "discord":
                made.interval = 600_000  # between heartbeats; the first one comes at any time before that
            async with made.running() as network:
                settings.update(network.settings)
                there.set()
                await asyncio.to_thread(done.wait)
        finally:
            there.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert there.wait(60)
        yield settings
    finally:
        done.set()
        thread.join(60)


@contextlib.asynccontextmanager
async def connected(store: SQLiteStore, kind: str, name: str, settings: dict[str, Any]) -> AsyncIterator[None]:
    """An idle channel."""
    config = config_of({**settings, "name": name, "network": kind})
    channel, options = await asyncio.to_thread(make_channel, config)
    task = asyncio.create_task(ChannelRunner(store, [(config, channel, options)]).run())

    async def works() -> bool:
        return '"error":""' in (await store.channel_state(name)).get("status", "").replace(" ", "")

    try:
        await found(works)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def due_soon() -> list[str]:
    loop: Any = asyncio.get_running_loop()
    timers = [one for one in loop._scheduled if not one.cancelled() and one.when() < loop.time() + SOON]
    return [str(one) for one in timers]


@pytest.mark.parametrize("kind", NETWORKS)
async def test_an_idle_channel_waits_without_timers_and_uses_little_memory(kind: str, tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    with elsewhere(kind) as first, elsewhere(kind) as second:
        async with connected(store, kind, "one", first):  # the library is loaded
            gc.collect()
            tracemalloc.start()
            try:
                async with connected(store, kind, "two", second):
                    gc.collect()
                    taken, _ = tracemalloc.get_traced_memory()
                    await until(lambda: not due_soon())
            finally:
                tracemalloc.stop()
    await store.close()
    assert taken < MEBIBYTE


class Notes(LLMProvider):
    """Records how often the store had written when the model was asked."""

    default_model = "notes"

    def __init__(self) -> None:
        self.writes = 0
        self.seen: list[int] = []

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        self.seen.append(self.writes)
        return LLMResponse("ok")


async def test_a_message_waits_for_two_writes_before_the_model_is_asked(tmp_path: Path) -> None:
    """The inbox row and the turn: there is no other wait on the way."""
    notes = Notes()
    async with HookNetwork().running() as hook, running(hook.settings, tmp_path, notes) as store:

        def count(what: str) -> None:
            notes.writes += what == "before"

        store.writer.commit_hooks.add(count)
        for number in range(1, 8):
            notes.writes = 0
            await hook.say("1", f"message {number}")
            await until(lambda: len(hook.heard("1")) == number)  # noqa: B023
    # Late writes of the previous answer may come in between, but not each time.
    assert min(notes.seen) <= 2


def test_each_network_loads_only_its_own_code() -> None:
    """Neither modules of other networks nor libraries that only they need are imported."""
    code = (
        "import sys\n"
        "import everloop.channels.runner\n"
        "def loaded():\n"
        "    return {name for name in sys.argv[1:] if f'everloop.channels.{name}' in sys.modules}\n"
        "for number, name in enumerate(sys.argv[1:]):\n"
        "    assert loaded() == set(sys.argv[1 : number + 1]), (name, loaded())\n"
        "    assert 'aiohttp' not in sys.modules or loaded() & {'discord', 'webhook'}, name\n"
        "    assert not {'imaplib', 'smtplib'} & set(sys.modules) or 'email' in loaded(), name\n"
        "    __import__(f'everloop.channels.{name}')\n"
    )
    networks = ("telegram", "slack", "irc", "xmpp", "email", "discord", "webhook")
    done = subprocess.run([sys.executable, "-c", code, *networks], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
