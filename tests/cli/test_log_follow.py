"""The parts of `everloop log --follow`: being notified of writes, and reading new entries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop import InboundMessage
from everloop.cli import file_watch as watching
from everloop.cli import log as following
from everloop.cli.file_watch import FileWatch
from everloop.cli.log import Cost, Query, SessionEvent
from everloop.config import Config
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.peers import new_worker
from everloop.store.sqlite import SQLiteStore


@pytest.mark.parametrize("told_by_the_kernel", [True, False])
async def test_creating_and_writing_a_file_notify_the_watcher(tmp_path, monkeypatch, told_by_the_kernel):
    if not told_by_the_kernel:
        monkeypatch.setattr(watching._Inotify, "open", lambda: None)
    path = tmp_path / "not" / "yet" / "there.db"
    watch = FileWatch(path)
    await watch.start()
    try:
        assert not await write_seen(watch)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"one")
        while await write_seen(watch):
            pass
        for _ in range(2):
            with path.with_name("there.db-wal").open("ab") as log:
                log.write(b"more")
            assert await write_seen(watch, 20)
        (path.parent / "other.txt").write_text("not ours")
        while await write_seen(watch):  # left over from the earlier writes
            pass
        (path.parent / "other.txt").write_text("not ours either")
        assert not await write_seen(watch)
    finally:
        await watch.close()


async def test_it_polls_when_no_inotify_watch_is_available(tmp_path, monkeypatch):
    def used_up(self: Any, folder: Path) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(watching._Inotify, "watch", used_up)
    watch = FileWatch(tmp_path / "a.db")
    await watch.start()
    (tmp_path / "a.db").write_text("x")
    assert await write_seen(watch, 20)
    await watch.close()


async def write_seen(watch: FileWatch, seconds: float = 3 * watching.STEP_SECONDS) -> bool:
    try:
        await asyncio.wait_for(watch.changed(), seconds)
    except TimeoutError:
        return False
    return True


async def test_an_active_session_is_read_although_many_others_began_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "RECENT", 1)
    store = SQLiteStore(tmp_path / "store.db")
    seen: list[SessionEvent] = []
    follower = following.Follower(store, Query("me", every=True), seen.append, Cost(store, Config()))
    await follower.begin(everything=True)
    worker = new_worker()
    claims = []
    for key in ("my:old", "my:new"):
        claim = await store.begin("me", key, worker, InboundMessage("my", "ada", key[3:], "hi"))
        assert claim is not None
        claims.append(claim)
        await follower.look()
    await store.append(claims[0], [ModelAnswered("yes")])
    await follower.look()
    assert (seen[-1].session, seen[-1].activity.event) == ("my:old", "model_answered")
    await store.finish(claims[0], [TurnEnded("answer", "yes")])
    await follower.look()
    await follower.look()
    assert [told.activity.event for told in seen if told.session == "my:old"] == [
        "request", "model_called", "model_answered", "turn_ended",
    ]  # fmt: skip
    await store.close()


@pytest.mark.parametrize("everything", [True, False])
async def test_every_session_active_since_the_last_read_is_read(tmp_path, monkeypatch, everything):
    monkeypatch.setattr(following, "RECENT", 2)
    store = SQLiteStore(tmp_path / "store.db")
    seen: list[SessionEvent] = []
    follower = following.Follower(store, Query("me", every=True), seen.append, Cost(store, Config()))
    worker = new_worker()

    async def work(numbers: range) -> None:
        for number in numbers:
            claim = await store.begin("me", f"my:{number}", worker, InboundMessage("my", "ada", str(number), "hi"))
            assert claim is not None
            await store.finish(claim, [TurnEnded("answer", "yes")])

    await work(range(5))
    await follower.begin(everything)
    if everything:
        assert {told.session for told in seen} == {f"my:{number}" for number in range(5)}
    seen.clear()
    await work(range(3, 20))
    await follower.look()
    assert {told.session for told in seen} == {f"my:{number}" for number in range(3, 20)}
    seen.clear()
    await follower.look()
    assert not seen
    await store.close()


@pytest.mark.parametrize("first", [True, False])
async def test_events_written_while_a_turns_beginning_is_read_are_shown_once(tmp_path, monkeypatch, first):
    store = SQLiteStore(tmp_path / "store.db")
    claim = await store.begin("me", "my:one", new_worker(), InboundMessage("my", "ada", "one", "hi"))
    assert claim is not None
    seen: list[SessionEvent] = []
    wanted = Query("me", turn=claim.turn)
    follower = following.Follower(store, wanted, seen.append, Cost(store, Config()))
    read_turn = store.read_turn

    async def ends_meanwhile(session: int, first_seq: int) -> Any:
        before = await read_turn(session, first_seq)
        await store.finish(claim, [ModelAnswered("yes"), TurnEnded("answer", "yes")])
        return await read_turn(session, first_seq) if first else before

    monkeypatch.setattr(store, "read_turn", ends_meanwhile)
    await follower.begin(everything=False)
    await follower.look()
    assert [told.activity.event for told in seen] == ["request", "model_called", "model_answered", "turn_ended"]
    assert follower.done
    await store.close()


class Early:
    """A watcher that reports a write once, before it is readable, as the kernel does while a commit waits for a slow
    disk."""

    def __init__(self, write: Callable[[], Awaitable[None]]) -> None:
        self._write = write
        self._calls = 0

    async def start(self) -> None:
        pass

    async def changed(self) -> None:
        self._calls += 1
        if self._calls == 2:  # the reader has read, and found nothing
            await self._write()
        if self._calls > 1:
            await asyncio.Event().wait()

    def close(self) -> None:
        pass


async def test_a_write_reported_before_it_is_readable_is_shown(tmp_path):
    config = Config(home=tmp_path, store=tmp_path / "store.db")
    store = SQLiteStore(tmp_path / "store.db")
    claim = await store.begin("me", "my:one", new_worker(), InboundMessage("my", "ada", "one", "hi"))
    assert claim is not None

    async def write() -> None:
        await store.finish(claim, [ModelAnswered("yes"), TurnEnded("answer", "yes")])

    seen: list[SessionEvent] = []
    watch: Any = Early(write)
    tell: Any = seen.append
    async with asyncio.timeout(20):  # following a turn ends with it
        assert await following._follow(config, Query("me", turn=claim.turn), tell, watch) == 0
    assert [told.activity.event for told in seen] == ["request", "model_called", "model_answered", "turn_ended"]
    await store.close()
