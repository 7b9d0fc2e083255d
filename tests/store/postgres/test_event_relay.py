"""Events sent from process to process by NOTIFY: complete, in order, in few notices, and only to subscribers."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import psycopg
import pytest

from everloop.store.postgres import event_relay
from everloop.store.postgres.event_relay import NotifyRelay, SendQueue, pieces
from everloop.store.postgres.store import PostgresStore

from .proxy import proxied


def nobody(*_: object) -> None:
    """A callback that ignores its arguments."""


async def until(true: Any, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def _then(hear: Callable[[Any], None], listens: Callable[[], object], notices: Any) -> None:
    hear(notices)
    listens()


@asynccontextmanager
async def relays(*addresses: str) -> AsyncIterator[list[NotifyRelay]]:
    """The relay of a store for each address, all of them listening."""
    async with AsyncExitStack() as stack:
        stores = [PostgresStore(address) for address in addresses]
        for store in stores:
            stack.push_async_callback(store.close)
            listens, loop = asyncio.Event(), asyncio.get_running_loop()
            store.relay.bind()
            hear = store.heartbeat._subscriber
            assert hear is not None
            store.heartbeat.subscribe(partial(_then, hear, partial(loop.call_soon_threadsafe, listens.set)))
            store.heartbeat.start()
            async with asyncio.timeout(30):
                await listens.wait()  # and its relay has been notified of it
            store.heartbeat.subscribe(hear)
        yield [store.relay for store in stores]


async def followed(here: NotifyRelay, there: NotifyRelay, key: str = "k", owner: str = "ada") -> tuple[Any, list[Any]]:
    """A session that is served at one place and followed at another, and the events received there."""
    heard: list[Any] = []
    served = here.publish(owner, key, nobody, nobody)
    there.subscribe(owner, key, lambda data: heard.append(msgspec.json.decode(data)))
    await until(lambda: served.has_subscribers)
    return served, heard


async def test_events_of_a_session_arrive_where_it_is_followed_in_order(database):
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        for number in range(300):
            served.send(msgspec.json.encode(number))
            if number % 100 == 99:
                await asyncio.sleep(0.06)
        await until(lambda: len(heard) == 300)
        assert heard == list(range(300))


async def test_many_events_in_a_row_are_few_notices(database):
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as listening:
            await listening.execute(f"LISTEN everloop_{there.address}")
            for number in range(100):
                served.send(msgspec.json.encode(number))
                if number >= 80:
                    await asyncio.sleep(0.001)
            await until(lambda: len(heard) == 100)
            notices = [notice async for notice in listening.notifies(timeout=0.3)]
    assert len(notices) < 50  # at most one batch per pause, not one per word


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\n", "\x00", "\u2028"])
async def test_a_long_text_arrives_complete_whatever_its_characters(database, letter):
    text = letter * (100_000 // len(msgspec.json.encode(letter)))
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        served.send(msgspec.json.encode(text))
        served.send(msgspec.json.encode("after"))
        await until(lambda: len(heard) == 2)
        assert heard == [text, "after"]


def test_pieces_are_cut_between_characters_and_never_too_long():
    text = "a😀é" * 1000
    for size in (4, 5, 6, 7, 100):
        found = list(pieces(text.encode(), size))
        assert "".join(found) == text
        assert max(len(piece.encode()) for piece in found) <= size


async def test_sessions_and_owners_get_only_their_own_events(database):
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        _, of_another_key = await followed(here, there, key="other")
        _, of_another_owner = await followed(here, there, owner="bob")
        _, of_a_cunning_owner = await followed(here, there, owner='ada","k', key="")
        served.send(b'"canary"')
        await until(lambda: heard)
        await asyncio.sleep(0.1)
        assert heard == ["canary"]
        assert of_another_key == of_another_owner == of_a_cunning_owner == []


async def test_nothing_is_sent_to_a_subscriber_that_has_left(database):
    async with relays(database, database) as (here, there):
        served = here.publish("ada", "k", nobody, nobody)
        following = there.subscribe("ada", "k", nobody)
        await until(lambda: served.has_subscribers)
        following.close()
        await until(lambda: not served.has_subscribers)


async def test_a_subscriber_that_does_not_renew_is_forgotten(database, monkeypatch):
    monkeypatch.setattr(event_relay, "FORGET_SECONDS", 2.0)
    async with relays(database, database) as (here, there):
        served, _ = await followed(here, there)
        await until(lambda: not served.has_subscribers)
        assert not here._subscribers


async def test_a_subscriber_that_renews_is_not_forgotten(database, monkeypatch):
    monkeypatch.setattr(event_relay, "FORGET_SECONDS", 3.0)
    monkeypatch.setattr(event_relay, "RENEW_SECONDS", 0.3)
    async with relays(database, database) as (here, there):
        served, _ = await followed(here, there)
        for _ in range(20):
            await asyncio.sleep(0.2)
            assert served.has_subscribers


async def test_a_new_subscriber_is_announced_once_and_whenever_it_asks(database, monkeypatch):
    monkeypatch.setattr(event_relay, "RENEW_SECONDS", 0.1)
    asked: list[str] = []
    async with relays(database, database) as (here, there):
        here.publish("ada", "k", asked.append, nobody)
        following = there.subscribe("ada", "k", nobody)
        await until(lambda: asked)
        await asyncio.sleep(0.5)
        assert asked == [there.address]
        following.request_state()
        await until(lambda: len(asked) == 2)


async def test_the_worker_of_a_session_gets_requests_for_it_and_others_do_not(database):
    told: list[bytes] = []
    others: list[bytes] = []
    async with relays(database, database) as (here, there):
        here.publish("ada", "k", nobody, told.append)
        here.publish("bob", "k", nobody, others.append)
        there.send("ada", "k", b'"stop"')
        await until(lambda: told)
        await asyncio.sleep(0.05)
        assert told == [b'"stop"']
        assert others == []


async def test_after_a_lost_connection_it_asks_again_and_gets_events_again(database, tmp_path):
    asked: list[str] = []
    heard: list[bytes] = []
    async with proxied(database, tmp_path) as (proxy, through), relays(database, through) as (here, there):
        served = here.publish("ada", "k", asked.append, nobody)
        there.subscribe("ada", "k", heard.append)
        await until(lambda: asked)
        for transport in list(proxy._open):
            transport.abort()
        await until(lambda: len(asked) > 1)
        served.send(b'"again"')
        await until(lambda: heard)
        assert heard == [b'"again"']


async def test_the_queue_for_an_unavailable_server_is_bounded_and_the_newest_is_kept(database, monkeypatch):
    monkeypatch.setattr(event_relay, "WAITING_LIMIT", 10_000)
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        for number in range(1000):
            served.send(msgspec.json.encode([number, "x" * 100]))
        (post,) = here._queues.values()
        assert post._bytes <= 10_000
        await until(lambda: heard and heard[-1][0] == 999)
        assert len(heard) < 100


def test_one_batch_is_in_progress_at_a_time_and_everything_meanwhile_is_the_next():
    sent: list[list[str]] = []
    done: list[Callable[[], None]] = []

    def send(pieces: list[str], then: Callable[[], None]) -> None:
        sent.append(pieces)
        done.append(then)

    post = SendQueue(send, "me")
    for line in (b"a\n", b"b\n", b"c\n"):
        post.put(line)
        assert post.send()
    assert sent == [["me 0 1\na\n"]]
    done.pop()()
    assert sent[1:] == [["me 0 1\nb\nc\n"]]
    done.pop()()
    assert not post.send()


async def test_an_event_that_was_lost_in_part_is_not_delivered(database):
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        line = f'{served.topic} "canary"'
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as stranger:
            for payload in (f"x 1 2\n{line}\n", f"x 2 2\n{line}\n", "y 0 3\n", f"y 2 3\n{line}\n", f"y 2 3\n{line}\n"):
                await stranger.execute("SELECT pg_notify(%s, %s)", (f"everloop_{there.address}", payload))
        served.send(b'"whole"')
        await until(lambda: heard)
        assert heard == ["whole"]


async def test_an_unknown_notice_is_ignored(database):
    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as stranger:
            for payload in ("{", '{"what":1}', '{"what":"new","address":"x"}'):
                await stranger.execute("SELECT pg_notify('everloop', %s)", (payload,))
            for payload in ("", "a", "a b c\n", f"{here.address} 5 9\nlate", "\n\n"):
                await stranger.execute("SELECT pg_notify(%s, %s)", (f"everloop_{there.address}", payload))
        served.send(b'"still here"')
        await until(lambda: heard)
        assert heard == ["still here"]


async def test_nothing_is_kept_of_sessions_without_subscribers(database):
    async with relays(database, database) as (here, there):
        for number in range(50):
            there.subscribe("ada", f"k{number}", nobody).close()
        served, _ = await followed(here, there, "last")
        assert list(here._subscribers) == [served.topic]


async def test_one_turn_that_cannot_be_announced_silences_no_other(database):
    def broken() -> None:
        raise ValueError("no words for it")

    async with relays(database, database) as (here, there):
        served, heard = await followed(here, there)
        here.before_batch(broken)
        served.send(b'"canary"')
        await until(lambda: heard == ["canary"])


async def test_a_process_with_more_than_a_thousand_open_files_listens_again_after_a_lost_connection(database, tmp_path):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    opened: list[int] = []
    try:
        async with proxied(database, tmp_path) as (proxy, through), relays(database, through) as (here, there):
            served, heard = await followed(here, there)
            while not opened or opened[-1] < 1100:  # as many clients' connections would be
                opened.append(os.dup(0))
            asked: list[str] = []
            served.on_subscriber = asked.append
            for transport in list(proxy._open):
                transport.abort()
            await until(lambda: asked)
            served.send(b'"canary"')
            await until(lambda: "canary" in heard)
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


async def test_what_waits_behind_a_batch_in_progress_is_not_sent_after_the_end(database):
    store, go = PostgresStore(database), threading.Event()
    relay = store.relay
    store.connections.submit("reads", lambda _: go.wait(20), ("relay", "everloop_there"))
    relay.send_to("there", "topic", b'"one"')
    await until(lambda: relay.batches == 1)
    relay.send_to("there", "topic", b'"two"')
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    assert relay.batches == 1
    assert store.connections._threads is None  # nothing would end its threads and close their connections


async def test_a_process_that_begins_to_listen_learns_of_earlier_subscribers(database: str) -> None:
    early, late = PostgresStore(database), PostgresStore(database)
    try:
        early.relay.subscribe("ada", "k", lambda data: None)
        found = asyncio.Event()
        late.relay.publish("ada", "k", lambda address: found.set(), lambda data: None)
        await asyncio.sleep(0.5)  # its announcement has gone by
        assert not found.is_set()
        late.heartbeat.start()
        async with asyncio.timeout(8):  # before it announces itself again, every ten seconds
            await found.wait()
    finally:
        await early.close()
        await late.close()
