"""What a crash of PostgreSQL leaves: everything that was flushed, and a prefix of the rest.

The server's processes are killed at once, so whatever was only in its memory is gone. Its log writer is stopped where a
test must know that nothing is flushed unless a commit waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, tool
from everloop.config import Config
from everloop.config.sources import DSN
from everloop.errors import StoreError
from everloop.log import Call, CallEnded, Entry, ModelAnswered, TurnEnded, UserSaid
from everloop.runtime.durable_bus import DurableBus
from everloop.store.base import Spent
from everloop.store.location import store_at
from everloop.store.postgres.store import PostgresStore
from everloop.testing import ScriptedProvider, call
from everloop.tools.context import current_call
from tests.support.places import ROOT

from .server import Server, own_server


@pytest.fixture
def server() -> Iterator[Server]:
    with own_server() as made:
        yield made


@contextlib.asynccontextmanager
async def opened(dsn: str, **options: Any) -> AsyncIterator[PostgresStore]:
    # No other connection, and for a while no heartbeat, whose commits would flush those of the test.
    store = PostgresStore(dsn, connections=1, lease_seconds=200, **options)
    try:
        yield store
    finally:
        await store.close()


def said(text: str = "hi", chat: str = "1", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", chat, text, **options).addressed()


def stop_log_writer(server: Server) -> None:
    """From now on only commits flush the log: the heartbeat has done its first ones by then."""
    beats = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'WITH dead AS%' AND state = 'idle'"
    give_up = time.monotonic() + 20
    while not server.sql(beats):
        assert time.monotonic() < give_up
    ((pid,),) = server.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
    os.kill(pid, signal.SIGSTOP)


async def crash(server: Server) -> None:
    await asyncio.to_thread(server.crash)
    await asyncio.to_thread(server.start)


async def texts(store: PostgresStore, session: int) -> list[str]:
    return [_text(one.entry) for one in await store.read_log(session)]


def _text(entry: Entry) -> str:
    match entry:
        case UserSaid(content) | ModelAnswered(content):
            return str(content)
        case TurnEnded():
            return entry.text
        case _:
            return ""


ALL = ["hi", "one", "two"]


# ---------------------------------------------------------------------------------------------- what is flushed


@pytest.mark.parametrize(("flush", "always", "kept"), [(False, False, ["hi"]), (True, False, ALL), (False, True, ALL)])
async def test_a_crash_undoes_what_was_not_flushed_and_nothing_else(server, worker, flush, always, kept):
    with server.database() as dsn:
        async with opened(dsn, flush_always=always) as store:
            claim = await store.begin("me", "test:1", worker, said())
            assert claim is not None
            stop_log_writer(server)
            await store.append(claim, [ModelAnswered("one")], flush=False)
            await store.append(claim, [ModelAnswered("two")], flush=flush)
            assert await texts(store, claim.session) == ["hi", "one", "two"]  # all workers can read it
            await crash(server)
            assert await texts(store, claim.session) == kept


async def test_what_the_outside_world_has_seen_is_flushed(server, worker):
    with server.database() as dsn:
        async with opened(dsn) as store:
            store.heartbeat.start()
            stop_log_writer(server)
            row = await store.accept(said(chat="2", id="m"))
            claim = await store.begin("me", "test:1", worker, said())
            assert claim is not None
            await store.append(claim, [ModelAnswered("intent")])
            await crash(server)
            stop_log_writer(server)
            assert [one.id for one in await store.waiting("me", "test:2")] == [row.id]
            assert await texts(store, claim.session) == ["hi", "intent"]
            await store.finish(claim, [TurnEnded("answer", "bye")])
            await crash(server)
            assert (await store.incoming(claim.inbox[0])).done
            again = await store.begin("me", "test:1", worker, said("more"))
            assert again is not None
            assert again.fence > claim.fence


async def test_a_worker_that_outlives_the_crash_writes_again_what_was_undone(server, worker):
    with server.database() as dsn:
        async with opened(dsn) as store:
            claim = await store.begin("me", "test:1", worker, said())
            assert claim is not None
            steered = await store.accept(said("steered"))
            stop_log_writer(server)
            claim.spent.append(Spent("day", 3, 0.5))
            await store.append(claim, [ModelAnswered("one")], flush=False)
            await store.append(claim, [ModelAnswered("two"), UserSaid("steered")], [steered.id], flush=False)
            await crash(server)
            assert await texts(store, claim.session) == ["hi"]
            await store.append(claim, [ModelAnswered("three")], flush=False)
            assert await texts(store, claim.session) == ["hi", "one", "two", "steered", "three"]
            await crash(server)
            finished = await store.finish(claim, [TurnEnded("answer", "bye")])
            assert not finished.more  # the steered message is done with the turn
            assert await texts(store, claim.session) == ["hi", "one", "two", "steered", "three", "bye"]
            assert await store.spent("me", ["day"]) == {"day": (3, 0.5)}


async def test_a_log_that_cannot_be_completed_is_not_continued(server, worker):
    with server.database() as dsn:
        async with opened(dsn) as store:
            claim = await store.begin("me", "test:1", worker, said())
            assert claim is not None
            stop_log_writer(server)
            await store.append(claim, [ModelAnswered("one")], flush=False)
            claim.unflushed.clear()
            await crash(server)
            with pytest.raises(StoreError):
                await store.finish(claim, [TurnEnded("answer", "bye")])
            assert await texts(store, claim.session) == ["hi"]
            again = await store.begin("me", "test:1", worker)
            assert again is not None
            assert again.resumed


async def test_a_long_turn_that_only_reads_is_flushed_now_and_then(server, worker):
    with server.database() as dsn:
        async with opened(dsn) as store:
            claim = await store.begin("me", "test:1", worker, said())
            assert claim is not None
            for _ in range(20):
                await store.append(claim, [ModelAnswered("x" * 300_000)], flush=False)
                assert len(claim.unflushed) < 6


async def test_a_turn_that_only_reads_waits_for_the_disk_when_it_begins_and_when_it_ends(database, tmp_path):
    assert await flushes(database, tmp_path, "needed") == 2


async def test_the_setting_makes_every_step_wait(database, tmp_path):
    assert await flushes(database, tmp_path, "always") == 4


async def flushes(database: str, folder: Path, flush: Any) -> int:
    @tool(read_only=True)
    async def look() -> str:
        """Look."""
        return "a harbour"

    config = Config(store=DSN(database), home=folder / "home", flush=flush)
    store = store_at(config.store, config)
    assert isinstance(store, PostgresStore)
    written: list[str] = []
    async with AgentLoop(MessageBus(), ScriptedProvider(["hello", call("look"), "done"]), folder, store=store) as agent:
        agent.tools.register(look)
        await agent.process_direct("hi")
        submit = store.connections.submit

        def counted(kind: Any, work: Any, key: Any = None) -> Any:
            written.append(kind)
            return submit(kind, work, key)

        store.connections.submit = counted  # type: ignore[method-assign]
        assert await agent.process_direct("go") == "done"
    return written.count("writes")


# ---------------------------------------------------------------------------------------------- while turns run


def model(messages: list[dict[str, Any]], tools: Any) -> Any:
    """Looks twice, mails, or just answers, depending on the person's last message."""
    mine = [n for n, message in enumerate(messages) if message["role"] == "user"][-1]
    text, rounds = messages[mine]["content"], len(messages) - 1 - mine
    if "look" in text and rounds < 4:
        return call("look")
    if "mail" in text and rounds < 2:
        return call("mail", to="ada")
    return "done"


async def converse(dsn: str, folder: Path, first: int, chats: int) -> None:
    """Send messages in several chats until killed, and report what the outside world has seen."""
    witness = os.open(folder / "witness", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def saw(what: str) -> None:
        os.write(witness, f"{what}\n".encode())

    @tool(read_only=True)
    async def look() -> str:
        """Look."""
        return "a harbour"

    @tool
    async def mail(to: str) -> str:
        """Send a mail."""
        saw(f"mailed {current_call().idempotency_key}")
        return "sent"

    store = PostgresStore(dsn)
    bus = DurableBus(store)

    async def deliver() -> None:
        while True:
            answer = await bus.consume_outbound()
            saw(f"answered {answer.reply_to}{' again' if answer.repeat else ''}")
            with contextlib.suppress(StoreError):
                await bus.sent(answer)

    async def chat(number: int) -> None:
        for turn in range(first, 1_000_000):
            id = f"{number}.{turn}"
            text = f"{id} {('just talk', 'look around', 'mail her')[turn % 3]}"
            await bus.publish_inbound(InboundMessage("chat", "ada", str(number), text, id=id))
            saw(f"accepted {id}")
            await asyncio.sleep(0.01)
            if (folder / "stop").exists():
                return

    async with AgentLoop(bus, ScriptedProvider([model], repeat_last=True), folder, store=store) as agent:
        for one in (look, mail):
            agent.tools.register(one)
        running = asyncio.create_task(agent.run())
        delivering = asyncio.create_task(deliver())
        print("ready", flush=True)
        await asyncio.gather(*(chat(number) for number in range(chats)))
        while (now := await store.overview()).waiting or now.open_turns or now.unsent:
            await asyncio.sleep(0.05)
        delivering.cancel()
        agent.stop()
        await running


def conversation() -> None:
    dsn, folder, first = sys.argv[1:]
    asyncio.run(converse(dsn, Path(folder), int(first), 3))


@pytest.mark.parametrize("crashes", [3, pytest.param(24, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])])
async def test_no_promise_is_broken_by_crashes_of_the_database_while_turns_run(server, tmp_path, crashes):
    choice = random.Random(crashes)
    program = [sys.executable, "-c", f"from {__name__} import conversation; conversation()"]
    with server.database() as dsn:

        async def start(first: int) -> asyncio.subprocess.Process:
            made = await asyncio.create_subprocess_exec(
                *program, dsn, str(tmp_path), str(first), cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert made.stdout is not None
            assert await made.stdout.readline() == b"ready\n"
            return made

        process = await start(0)
        try:
            for number in range(crashes):
                seen = len(witnessed(tmp_path, "answered"))
                async with asyncio.timeout(50):
                    while len(witnessed(tmp_path, "answered")) < seen + 4:
                        await asyncio.sleep(0.02)
                await asyncio.sleep(choice.random() * 0.1)
                await asyncio.to_thread(server.crash)
                if number % 3 == 2:  # and the worker with it, as after a power loss
                    process.kill()
                    await process.wait()
                await asyncio.to_thread(server.start)
                if number % 3 == 2:
                    process = await start(1000 * (number + 1))
            (tmp_path / "stop").touch()
            async with asyncio.timeout(50):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert await breaches(dsn, tmp_path) == []


def witnessed(folder: Path, what: str) -> list[str]:
    try:
        lines = (folder / "witness").read_text().split("\n")
    except FileNotFoundError:
        return []
    return [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]


async def breaches(dsn: str, folder: Path) -> list[str]:
    """Return every broken promise."""
    found: list[str] = []
    answered: dict[str, list[str]] = {}
    for line in witnessed(folder, "answered"):
        id, _, again = line.partition(" ")
        answered.setdefault(id, []).append(again)
    found += [f"{id} was accepted" for id in witnessed(folder, "accepted") if id not in answered]
    found += [f"{id} was answered twice" for id, times in answered.items() if "" in times[1:]]
    mails = witnessed(folder, "mailed")
    found += [f"{key} was mailed twice" for key in mails if mails.count(key) > 1]
    async with opened(dsn) as store:
        for session in await store.sessions("me"):
            log = await store.read_log(session.id)
            if [one.seq for one in log] != list(range(1, len(log) + 1)):
                found.append(f"{session.key} has gaps")
            found += [f"{session.key}: {what}" for what in invalid([one.entry for one in log])]
    return found


def invalid(log: list[Entry]) -> list[str]:
    """Return what a model would not accept as a conversation, and messages that are out of order."""
    found: list[str] = []
    waiting: list[str] = []
    last = -1
    for entry in log:
        if isinstance(entry, UserSaid):
            number = int(str(entry.content).split(" ")[0].partition(".")[2])
            if number <= last:
                found.append(f"{number} after {last}")
            last = number
        elif isinstance(entry, ModelAnswered):
            found += [f"{id} has no result" for id in waiting]
            waiting = [one.id for one in entry.calls]
        elif isinstance(entry, CallEnded):
            if entry.id not in waiting:
                found.append(f"{entry.id} has two results, or no call")
            else:
                waiting.remove(entry.id)
        elif isinstance(entry, TurnEnded):
            found += [f"{id} has no result" for id in waiting]
            waiting = []
    return found


def test_the_check_finds_broken_promises():
    calls = (Call("a", "look", {}),)
    assert invalid([UserSaid("1.2 x"), UserSaid("1.1 x")])
    assert invalid([ModelAnswered("", calls), TurnEnded("answer", "")])
    assert invalid([ModelAnswered("", calls), CallEnded("a", "look", ""), CallEnded("a", "look", "")])
    assert not invalid(
        [UserSaid("1.1 x"), ModelAnswered("", calls), CallEnded("a", "look", ""), TurnEnded("answer", "")]
    )
