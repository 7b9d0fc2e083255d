"""Inbox rows that cannot be decoded are set aside, and everything else continues; with both stores."""

from __future__ import annotations

import logging

import pytest

from everloop.actions import Idle, next_action
from everloop.errors import StoreError
from everloop.log import Call, CallEnded, CallsBegun, ModelAnswered, TurnEnded
from everloop.store.base import Store
from everloop.store.sqlite import SQLiteStore

from .steps import begun, finish, log_of, message
from .test_outbox import change, say, taken

TORN = "UPDATE inbox SET data = '{\"channel\":\"te' WHERE data LIKE '%{}%'"
DAMAGES = ["torn", "not UTF-8"]


async def damage(store: Store, text: str, how: str = "torn") -> None:
    sql = TORN.replace("{}", text)
    if how == "not UTF-8":  # PostgreSQL stores no such text
        broken = "CAST(x'7b22ff22' AS TEXT)" if isinstance(store, SQLiteStore) else "'{\"'"
        sql = f"UPDATE inbox SET data = {broken} WHERE data LIKE '%{text}%'"
    await change(store, sql)


async def set_aside(store: Store) -> int:
    return (await store.overview()).damaged_incoming


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("cannot be decoded" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("how", DAMAGES)
async def test_a_waiting_row_that_cannot_be_decoded_is_set_aside_and_the_others_are_answered(store, me, caplog, how):
    for text in ("one", "two", "three"):
        await store.accept(message(text))
    await store.accept(message("elsewhere", chat="2"))
    await damage(store, "two", how)
    answered = []
    while (claim := await store.begin("me", "test:1", me)) is not None:
        answered.append(claim.message.content)
        await finish(store, claim)
    assert answered == ["one", "three"]
    assert await store.ready(me) == [("me", "test:2")]
    assert await set_aside(store) == 1
    assert warnings(caplog) == 1


async def test_a_message_is_begun_despite_a_damaged_one_before_it(store, me):
    row = await store.accept(message("one"))
    await damage(store, "one")
    claim = await begun(store, me, "two")
    assert claim.message.content == "two"
    assert claim.accepted not in (None, row.id)
    await finish(store, claim)
    assert await store.begin("me", "test:1", me) is None


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["message", "urgent"])
async def test_reading_waiting_rows_sets_a_damaged_one_aside(store, me, caplog, kind, how):
    for text in ("one", "two"):
        await store.accept(message(text), kind)
    await damage(store, "one", how)
    for _ in range(2):
        if kind == "urgent":
            rows = await store.urgent(me)
            assert [row.message.content for row in (await store.look(me))[1]] == ["two"]
        else:
            rows = await store.waiting("me", "test:1")
        assert [row.message.content for row in rows] == ["two"]
        assert [row.message.content for row in await store.unfinished("me", "test")] == ["two"]
    assert await set_aside(store) == 1
    assert warnings(caplog) == 1


async def test_a_damaged_command_is_set_aside(store, me):
    await store.accept(message("/new"), "command")
    await store.accept(message("two"))
    await damage(store, "/new")
    claim = await store.begin("me", "test:1", me)
    assert claim is not None
    assert (claim.message.content, claim.command) == ("two", False)


@pytest.mark.parametrize("under_way", ["said", "called", "begun"])
async def test_an_interrupted_turn_whose_message_is_damaged_ends_and_the_next_one_begins(store, me, other, under_way):
    claim = await begun(store, me, "one", id="m1")
    if under_way != "said":
        await store.append(
            claim, [ModelAnswered(None, (Call("a", "exec"), Call("b", "exec"))), CallEnded("a", "x", "")]
        )
    if under_way == "begun":
        await store.append(claim, [CallsBegun(("b",))])
    await store.accept(message("two"))
    await store.release(claim)
    await damage(store, "m1")
    following = await store.begin("me", "test:1", other)
    assert following is not None
    assert following.message.content == "two"
    entries = await log_of(store)
    before = entries[: following.first_seq - 1]
    assert isinstance(before[-1], TurnEnded)
    assert before[-1].reason == "error"
    assert next_action(before) == Idle()
    results = {entry.id: entry.status for entry in before if isinstance(entry, CallEnded)}
    assert results == ({} if under_way == "said" else {"a": "ok", "b": "interrupted"})
    (turn,) = [turn for turn in await store.turns("me") if turn.id == claim.turn]
    assert (turn.reason, turn.ended_at is not None) == ("error", True)
    assert await set_aside(store) == 1


async def test_an_undecodable_message_after_a_damaged_turn_is_set_aside_too(store, me, other):
    claim = await begun(store, me, "one", id="m1")
    await store.release(claim)
    await damage(store, "m1")
    broken = message("two")
    broken.sender_id = 5  # type: ignore[assignment]  # it is written as it is, and not read again
    assert await store.begin("me", "test:1", other, broken, "message") is None
    following = await store.begin("me", "test:1", other, message("three"), "message")
    assert following is not None
    assert following.message.content == "three"
    assert await set_aside(store) == 2


async def test_a_turn_missing_from_the_log_leaves_nothing_there_when_its_message_is_damaged(store, me, other):
    claim = await begun(store, me, "one", media=["a.png"])
    assert await log_of(store) == []  # the worker reads the picture first
    await store.release(claim)
    await damage(store, "a.png")
    assert await store.begin("me", "test:1", other) is None
    assert await log_of(store) == []
    assert await store.ready(other) == []


async def test_a_message_repeated_under_its_id_repairs_its_row(store, me):
    first = await store.accept(message("one", id="m1"))
    await damage(store, "m1")
    assert await store.waiting("me", "test:1") == []
    again = await store.accept(message("one", id="m1"))
    assert (again.id, again.done) == (first.id, False)
    assert await set_aside(store) == 0
    claim = await store.begin("me", "test:1", me)
    assert claim is not None
    assert claim.message.content == "one"


async def test_a_repaired_row_is_answered(store, me):
    await store.accept(message("one"))
    data = '{"channel":"test","sender_id":"user","chat_id":"1","content":"back"}'
    await damage(store, "one")
    assert await store.begin("me", "test:1", me) is None
    await change(store, f"UPDATE inbox SET damaged = NULL, state = 'new', data = '{data}'")
    claim = await store.begin("me", "test:1", me)
    assert claim is not None
    assert claim.message.content == "back"


async def test_requesting_a_damaged_row_is_an_error_in_one_line(store, me):
    row = await store.accept(message("one", id="m1"))
    await damage(store, "m1")
    for look in (store.incoming(row.id), store.find("me", "m1")):
        with pytest.raises(StoreError, match=f"row {row.id} of the inbox is damaged"):
            await look


async def test_an_outgoing_row_that_is_not_even_text_is_set_aside(store, me, other, caplog):
    await say(store, me, "one", "two")
    broken = "CAST(x'7b22ff22' AS TEXT)" if isinstance(store, SQLiteStore) else "'{\"'"
    await change(store, f"UPDATE outbox SET data = {broken} WHERE data LIKE '%one%'")
    with caplog.at_level(logging.WARNING):
        assert await taken(store, other) == ["two"]
    assert (await store.overview()).damaged == 1


async def test_the_turn_that_a_message_opened_is_found_by_its_id(store, me):
    await store.accept(message("waits", id="later", chat="2"))
    assert await store.turn_of("me", "later") is None  # no turn yet
    claim = await begun(store, me, "first", id="m1")
    assert await store.turn_of("me", "m1") == (claim.session, claim.first_seq)
    assert await store.turn_of("you", "m1") is None
    assert await store.turn_of("me", "unknown") is None
