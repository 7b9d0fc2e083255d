"""The runner: one poller per account, order, approvals, and no needless work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, OutboundMessage
from everloop.channels import runner
from everloop.channels.base import Attachment, Can, Inbox, Later, Never, Options, Part, Received
from everloop.channels.runner import ChannelRunner
from everloop.config import Config, Rule
from everloop.observability.metrics import Meters
from everloop.store.base import Store
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import config_of, running
from tests.store.conftest import opened as opened
from tests.store.postgres.fixtures import database as database
from tests.store.postgres.fixtures import postgres as postgres

from .hooks import HookNetwork
from .says import until


class Line:
    """A channel whose network is a list."""

    can = Can(text=1000)

    def __init__(self) -> None:
        self.name = "line"
        self.sent: list[Part] = []
        self.pollers = 0
        self.slow: set[str] = set()  # chats that have to wait
        self.refused: set[str] = set()
        self.inbox: Inbox | None = None

    async def receive(self, inbox: Inbox) -> None:
        self.pollers += 1
        self.inbox = inbox
        try:
            await asyncio.Event().wait()
        finally:
            self.pollers -= 1
            self.inbox = None

    async def send(self, part: Part, key: str) -> str:
        if part.chat in self.refused:
            raise Never("no")
        if part.chat in self.slow:
            raise Later(0.02)
        self.sent.append(part)
        return key

    async def show(self, chat: str, key: str, text: str) -> None: ...


@asynccontextmanager
async def at_work(store: Store, line: Line, meters: Meters | None = None) -> AsyncIterator[ChannelRunner]:
    config = config_of({"name": "line", "allow": ["anna"]})
    runner = ChannelRunner(store, [(config, line, Options("line", {}))], None, meters)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def post(store: Store, chat: str, text: str) -> None:
    from everloop.channels.access import tell

    await tell(store, "line", "me", chat, text, text)


async def test_an_account_has_one_poller_and_the_next_takes_over(opened: Any) -> None:
    line = Line()
    first, second = await opened(), await opened()
    async with at_work(second, line):
        await until(lambda: line.pollers == 1)
        async with at_work(first, line):
            await post(first, "1", "hello")
            await until(lambda: line.sent)
            assert line.pollers == 1
        assert line.pollers == 1
    async with at_work(first, line):
        await until(lambda: line.pollers == 1)
        async with at_work(second, line) as other:
            holder = (await first.holders())["channel:line"]
            assert holder != other.worker
            await post(second, "1", "again")
            await until(lambda: len(line.sent) == 2)
    assert [part.text for part in line.sent] == ["hello", "again"]
    assert await first.holders() == {}


async def test_a_waiting_worker_takes_the_lease_when_it_is_released(opened: Any) -> None:
    one, two = Line(), Line()
    first, second = await opened(), await opened()
    async with at_work(first, one):
        await until(lambda: one.pollers == 1)
        waiting = at_work(second, two)
        await waiting.__aenter__()
        await asyncio.sleep(0)
    await until(lambda: two.pollers == 1)
    assert one.pollers == 0
    await waiting.__aexit__(None, None, None)


async def test_a_waiting_chat_delays_no_other_and_keeps_its_order(opened: Any) -> None:
    store, line = await opened(), Line()
    line.slow.add("slow")
    for number in range(3):
        await post(store, "slow", f"slow {number}")
    for number in range(3):
        await post(store, "quick", f"quick {number}")
    async with at_work(store, line):
        await until(lambda: len(line.sent) == 3)
        assert [part.chat for part in line.sent] == ["quick"] * 3
        line.slow.clear()
        await until(lambda: len(line.sent) == 6)
    assert [part.text for part in line.sent if part.chat == "slow"] == ["slow 0", "slow 1", "slow 2"]
    assert [part.text for part in line.sent if part.chat == "quick"] == ["quick 0", "quick 1", "quick 2"]
    assert not any(part.repeat for part in line.sent)


async def test_a_message_is_accepted_once_however_often_it_comes(opened: Any) -> None:
    store, line = await opened(), Line()
    async with at_work(store, line):
        await until(lambda: line.inbox)
        assert line.inbox is not None
        for _ in range(3):
            await line.inbox.accept(Received(id="m1", chat="1", sender="anna", text="hello"))
    async with at_work(store, line):  # without the first one's memory
        await until(lambda: line.inbox)
        assert line.inbox is not None
        await line.inbox.accept(Received(id="m1", chat="1", sender="anna", text="hello"))
    assert len(await store.waiting("me", "line:1")) == 1


async def test_a_message_with_very_many_files_describes_them_briefly(tmp_path: Path) -> None:
    store, line = SQLiteStore(tmp_path / "store.db"), Line()

    async def read(limit: int) -> bytes:
        raise AssertionError("no file is kept here")

    files = tuple(Attachment(f"{number}.txt", read) for number in range(50_000))
    async with at_work(store, line):
        await until(lambda: line.inbox)
        assert line.inbox is not None
        await line.inbox.accept(Received(id="m1", chat="1", sender="anna", text="look", files=files))
    (taken,) = await store.waiting("me", "line:1")
    assert "[49980 more files were attached, and not taken.]" in taken.message.content
    assert len(taken.message.content) < 5_000
    await store.close()


async def test_a_connection_that_delivered_something_is_replaced_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(runner, "LONGEST_DELAY", 3600.0)

    class Breaks(Line):
        """A network that drops the connection after each message."""

        async def receive(self, inbox: Inbox) -> None:
            self.pollers += 1
            await inbox.accept(Received(id=f"m{self.pollers}", chat="1", sender="anna", text="hello"))
            raise OSError("the connection ended")

    store, line = SQLiteStore(tmp_path / "store.db"), Breaks()
    async with at_work(store, line):
        await until(lambda: line.pollers >= 40)  # with growing pauses it would take years
    await store.close()


async def test_outcomes_of_messages_are_counted(tmp_path: Path) -> None:
    store, line, meters = SQLiteStore(tmp_path / "store.db"), Line(), Meters()
    async with at_work(store, line, meters):
        await until(lambda: line.inbox)
        assert line.inbox is not None
        await line.inbox.accept(Received(id="m1", chat="1", sender="anna", text="hello"))
        await line.inbox.accept(Received(id="m2", chat="1", sender="eve", text="hello"))
        line.refused.add("2")
        await post(store, "2", "never")
        await post(store, "1", "hi")

        def counted() -> list[str]:
            lines = [one for one in meters.lines() if one.startswith("everloop_channel_messages_total{")]
            return sorted(one.partition("outcome=")[2] for one in lines)

        await until(lambda: counted() == ['"dead"} 1', '"sent"} 1', '"taken"} 1'])
    await store.close()


async def test_a_question_is_answered_in_the_chat_and_only_by_admitted_people(tmp_path: Path) -> None:
    async with HookNetwork().running() as network:
        network.settings["groups"] = ["open"]
        model = ScriptedProvider([call("write_file", path="canary.txt", content="x"), "Written."])
        asks = (Rule(do="ask", tool="write_file"),)
        async with running(network.settings, tmp_path, model, policy=asks):
            await network.say("open", "write it", group=True, mentioned=True)
            await until(lambda: network.heard("open"))
            await network.say("open", "yes", sender="eve", group=True, mentioned=True)
            await network.say("open", "/approve", sender="eve", group=True, mentioned=True)
            await network.say("1", "/status")
            await until(lambda: network.heard("1"))
            assert not (tmp_path / "canary.txt").exists()
            await network.say("open", "yes", group=True, mentioned=True)
            await until(lambda: (tmp_path / "canary.txt").exists())


@pytest.mark.parametrize("is_left", [False, True])
async def test_the_answer_of_a_terminals_turn_is_left_to_the_channel(tmp_path: Path, is_left: bool) -> None:
    """A process without channels may take a chat network's turn, and the terminal's job may write there."""
    store = SQLiteStore(tmp_path / "store.db")
    config = Config(home=tmp_path, workspace=tmp_path, channels=(config_of({"name": "line", "allow": ["anna"]}),))
    message = InboundMessage("line", "anna", "1", "hello", id="line:m1")
    if is_left:  # by a process that died after writing the answer
        await store.answer(message, [OutboundMessage("line", "1", "hi")])
    bus, agent_store = MessageBus(), SQLiteStore(tmp_path / "store.db")
    loop = AgentLoop(bus, ScriptedProvider(["hi"]), tmp_path, store=agent_store, config=config)
    run = asyncio.create_task(loop.run())
    line = Line()
    try:
        if not is_left:
            await bus.publish_inbound(message)
        async with at_work(store, line):
            await until(lambda: line.sent)
    finally:
        loop.stop()
        await run
        await loop.close()
        await agent_store.close()
        await store.close()
    assert [(part.text, part.repeat) for part in line.sent] == [("hi", False)]
    assert bus.outbound_size == 0


def test_a_network_is_imported_only_when_it_is_configured() -> None:
    code = (
        "import sys, everloop.cli.serve\n"
        "assert not [name for name in sys.modules if name.startswith('everloop.channels')]\n"
        "from everloop.channels.base import make_channel\n"
        "from everloop.config import ChannelConfig\n"
        "make_channel(ChannelConfig(name='telegram', options={'token': '1:x'}))\n"
        "loaded = {name for name in sys.modules if name.startswith('everloop.channels.')}\n"
        "assert not loaded & {f'everloop.channels.{name}' for name in ('irc', 'email', 'webhook')}, loaded\n"
        "assert 'aiohttp' not in sys.modules and 'imaplib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
