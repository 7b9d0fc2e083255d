"""The runner: one poller per account, order, approvals, and no needless work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, OutboundMessage
from everloop.channels import access, runner
from everloop.channels.access import PairedPeer
from everloop.channels.base import Attachment, Can, Inbox, Later, Never, Options, Part, Received
from everloop.channels.links import LinkStore, unlink, unpair
from everloop.channels.runner import ChannelRunner
from everloop.config import ChannelConfig, Config, Rule
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


async def keep(owner: str, name: str, data: bytes) -> str:
    """Keep no file."""
    return name


CONFIG = config_of({"name": "line", "allow": ["anna"]})


@asynccontextmanager
async def at_work(
    store: Store, line: Line, meters: Meters | None = None, config: ChannelConfig = CONFIG, **more: Any
) -> AsyncIterator[ChannelRunner]:
    runner = ChannelRunner(store, [(config, line, Options("line", {}))], None, meters, **more)
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


async def test_a_message_is_accepted_once_however_often_it_arrives(opened: Any) -> None:
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


class SlowFile:
    """A file whose network delivers nothing before it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_come = asyncio.Event()

    async def read(self, limit: int) -> bytes:
        self.asked += 1
        await self.may_come.wait()
        return b"x"

    def of(self, sender: str, id: str, number: int = 1) -> Received:
        files = number * (Attachment("a.txt", self.read),)
        return Received(id=id, chat=sender, sender=sender, text="here", files=files)


@asynccontextmanager
async def with_slow_files(tmp_path: Path) -> AsyncIterator[tuple[SQLiteStore, Inbox, SlowFile]]:
    """A running account with the paired peer eve, and a file that arrives when the test lets it."""
    store, line = SQLiteStore(tmp_path / "store.db"), Line()
    await store.set_channel_state("line", "peer:eve", msgspec.json.encode(PairedPeer("eve", "", 0.0)).decode())
    async with at_work(store, line, save=keep):
        await until(lambda: line.inbox)
        assert line.inbox is not None
        yield store, line.inbox, SlowFile()
    await store.close()


async def test_files_that_never_arrive_delay_others_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "FETCH_SECONDS", 0.3)
    async with with_slow_files(tmp_path) as (store, inbox, file):
        async with asyncio.timeout(20):
            for number in range(3):
                await inbox.accept(file.of("eve", f"e{number}", 3))
            await inbox.accept(Received(id="a", chat="anna", sender="anna", text="hello"))
        assert file.asked == 1
        file.may_come.set()
        await inbox.accept(file.of("anna", "b"))  # whose own files still come
        taken, note = await store.waiting("me", "line:eve"), "[a.txt took too long to fetch, and was not taken.]"
        assert [row.message.content.count(note) for row in taken] == [3, 3, 3]
        assert [row.message.media != [] for row in await store.waiting("me", "line:anna")] == [False, True]


async def test_a_person_cannot_fill_the_disk(tmp_path: Path) -> None:
    """They have ten times the size of the largest file in ten minutes."""
    store, line, kept = SQLiteStore(tmp_path / "store.db"), Line(), dict[str, int]()

    async def save(owner: str, name: str, data: bytes) -> str:
        kept[name] = len(data)
        return name

    async def read(limit: int) -> bytes:
        return bytes(min(limit + 1, 900_000))

    config = replace(CONFIG, media_mb=1)
    async with at_work(store, line, save=save, config=config):
        await until(lambda: line.inbox)
        assert line.inbox is not None
        files = tuple(Attachment(f"{number}.bin", read) for number in range(4))
        for number in range(5):
            await line.inbox.accept(Received(id=f"m{number}", chat="1", sender="anna", text="", files=files))
    assert 9_000_000 < sum(kept.values()) <= 10_000_000
    last = (await store.waiting("me", "line:1"))[-1].message
    assert (last.media, last.content.count("came after too many others, and was not taken.]")) == ([], 4)
    await store.close()


async def test_a_person_who_is_unpaired_while_their_files_are_fetched_gets_no_answer(tmp_path: Path) -> None:
    async with with_slow_files(tmp_path) as (store, inbox, file):
        coming = asyncio.create_task(inbox.accept(file.of("eve", "m1")))
        await until(lambda: file.asked)
        assert await unpair(store, CONFIG, Line.can, "eve")
        file.may_come.set()
        assert not await coming
        assert await store.waiting("me", "line:eve") == []


async def test_a_message_whose_files_come_after_its_link_was_ended_is_of_its_own_session(tmp_path: Path) -> None:
    async with with_slow_files(tmp_path) as (store, inbox, file):
        await inbox.accept(Received(id="m1", chat="anna", sender="anna", text="/link"))
        (code,) = (await LinkStore(store, "me").read()).codes
        await inbox.accept(Received(id="m2", chat="eve", sender="eve", text=f"/link {code.code}"))
        coming = asyncio.create_task(inbox.accept(file.of("eve", "m3")))
        await until(lambda: file.asked)
        assert await unlink(store, CONFIG, Line.can, "eve")
        file.may_come.set()
        assert await coming
        assert await store.waiting("me", "line:anna") == []
        assert len(await store.waiting("me", "line:eve")) == 1


async def test_a_connection_that_delivered_something_is_replaced_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(runner, "MAX_DELAY", 3600.0)

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
