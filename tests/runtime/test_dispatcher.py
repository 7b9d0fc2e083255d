"""Which session's turn this process starts next, and that no message is stranded when a session changes hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.log import CallsAsked, TurnEnded
from everloop.runtime.dispatcher import Dispatcher
from everloop.runtime.session import WAITS, Session
from everloop.store.base import Busy, Claim
from everloop.store.peers import new_worker, retire
from everloop.store.sqlite import SQLiteStore

from ..support.commands import until


def said(text: str) -> InboundMessage:
    return InboundMessage("test", "user", "one", text, reply=False).addressed()


class Host:
    """A host that ignores all notifications."""

    def __init__(self) -> None:
        self.worker = new_worker()

    async def run_claim(self, claim: Claim, session: Session) -> str:
        raise NotImplementedError

    def system_prompt(self) -> str:
        return ""

    def on_held(self, worker: str, awaited: bool) -> None: ...

    def on_handoff(self, session: int | None) -> None: ...

    def on_unclaimed_answer(self, row: int) -> None: ...

    def on_message_behind_question(self, message: InboundMessage) -> None: ...


class Desk(Host):
    """A dispatcher that echoes messages, and the store that it shares with another worker."""

    def __init__(self, store: SQLiteStore) -> None:
        super().__init__()
        self.store = store
        self.other = new_worker()
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.held: set[str] = set()  # messages whose turns wait for `go`
        self.dispatcher = Dispatcher(store, self)

    async def run_claim(self, claim: Claim, session: Session) -> str:
        text = claim.message.content
        if text in self.held:
            self.held.discard(text)
            self.reached.set()
            await self.go.wait()
        finished = await self.store.finish(claim, [TurnEnded("answer", text)])
        session.again |= finished.more
        return text


@pytest.fixture
async def desk(tmp_path) -> AsyncIterator[Desk]:
    store = SQLiteStore(tmp_path / "store.db")
    made = Desk(store)
    yield made
    await made.dispatcher.stop()
    retire(made.worker)
    retire(made.other)
    await store.close()


async def test_messages_for_a_taken_over_turn_are_answered_although_it_has_ended(desk):
    """As after a frozen process: another one has ended the turn and does not know the messages since."""
    desk.held.add("one")
    first = await desk.dispatcher.submit(said("one"))
    await asyncio.wait_for(desk.reached.wait(), 20)
    await desk.store.release_all(desk.dispatcher.worker)
    claim = await desk.store.begin("me", "test:one", desk.other)
    assert claim is not None
    await desk.store.finish(claim, [TurnEnded("answer", "by another")])
    second = await desk.dispatcher.submit(said("two"))
    desk.go.set()
    assert await asyncio.wait_for(second, 20) == "two"
    assert await asyncio.wait_for(first, 20) == "by another"


async def test_a_session_released_while_still_reported_as_held_is_claimed(desk, monkeypatch):
    row = await desk.store.accept(said("one"))
    claim = await desk.store.begin("me", "test:one", desk.other)
    assert claim is not None
    begin = desk.store.begin
    late, go = asyncio.Event(), asyncio.Event()

    async def slow(*given: Any) -> Any:
        try:
            return await begin(*given)
        except Busy:
            late.set()
            await go.wait()
            raise

    monkeypatch.setattr(desk.store, "begin", slow)
    desk.dispatcher.kick("me", "test:one")
    await asyncio.wait_for(late.wait(), 20)
    await desk.store.release(claim)
    await desk.dispatcher.scan()  # as the other worker's notification causes
    go.set()
    await over(desk, row.id)


async def over(desk: Desk, row: int) -> None:
    async with asyncio.timeout(20):
        while not await desk.store.over([row]):
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_while_notified_of_a_question_does_not_affect_others(desk):
    await desk.store.accept(said("may I?"))
    claim = await desk.store.begin("me", "test:one", desk.other)
    assert claim is not None
    await desk.store.park(claim, [CallsAsked(("1",), "may I?")])
    row = await desk.store.accept(said("patient"))
    patient = desk.dispatcher.follow(row.id, row.message)
    hasty = await desk.dispatcher.submit(said("hasty"))
    hasty.cancel()
    await until(lambda: desk.dispatcher.session("me", "test:one") is None)
    assert not patient.done()
    assert await (await desk.dispatcher.submit(said("another"))) == WAITS


async def test_a_client_that_leaves_before_its_session_is_claimed_follows_no_turn(desk):
    assert await desk.store.begin("me", "test:one", desk.other, said("one")) is not None
    followed: dict[str, list[int]] = {"stays": [], "leaves": []}
    for client, rows in followed.items():
        answer = await desk.dispatcher.submit(said("two"), on_elsewhere=rows.append)
        if client == "leaves":
            answer.cancel()
        await until(lambda: desk.dispatcher.session("me", "test:one") is None)
    assert len(followed["stays"]) == 1
    assert followed["leaves"] == []


async def test_a_process_that_ends_with_its_answer_leaves_the_next_message_to_the_process_that_waits_for_it(desk):
    told: list[int | None] = []
    desk.on_handoff = told.append
    desk.dispatcher.run_only_awaited()
    earlier = await desk.store.accept(said("earlier"))
    desk.held.add("own")
    own = await desk.dispatcher.submit(said("own"))
    await asyncio.wait_for(desk.reached.wait(), 20)
    later = await desk.store.accept(said("later"))  # by another process
    desk.go.set()
    assert await asyncio.wait_for(own, 20) == "own"
    await until(lambda: desk.dispatcher.session("me", "test:one") is None)
    assert await desk.store.over([earlier.id, later.id]) == [earlier.id]  # the own one was behind it
    assert told == [later.session]
    await desk.dispatcher.scan()
    await until(lambda: desk.dispatcher.session("me", "test:one") is None)
    claim = await desk.store.begin("me", "test:one", desk.other)
    assert claim is not None
    assert claim.message.content == "later"
    assert not claim.resumed
    assert told == [later.session]


@pytest.mark.parametrize(("meant", "stopped"), [(None, True), ("t1", True), (5, True), ("t2", False), (6, False)])
async def test_a_stop_for_one_turn_stops_no_other(desk, meant, stopped):
    """Also if that turn has just started, and the stop names the inbox row that opened it."""
    told: list[str] = []

    class Running:
        id = "t1"

        def stop(self, reason: str, text: str) -> None:
            told.append(reason)

    turn: Any = Running()
    session = desk.dispatcher._start("me", "test:one")
    session.state.turn, session.state.rows = turn, [5]
    session.stop("cancelled", "Stopped.", meant)
    assert bool(told) is stopped
