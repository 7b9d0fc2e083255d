"""`store_pool`: reads and writes through a real PgBouncer in transaction mode, with only the heartbeat connected
directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.config import Config
from everloop.config.sources import DSN
from everloop.errors import ConfigError, StoreError
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.location import store_at
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.connect import SETTINGS
from everloop.store.postgres.store import PostgresStore
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import everloop

from .pgbouncer import PgBouncer, pgbouncer
from .server import Server, name_of

# Counted by the role's session, not by the name of the application, which a pooler may set for its clients.
CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"


@pytest.fixture(scope="module")
def pooler(postgres: Server) -> Iterator[PgBouncer]:
    with pgbouncer(postgres.folder) as made:
        yield made


async def turn(store: PostgresStore, worker: str, chat: str, text: str) -> None:
    message = InboundMessage("test", "user", chat, text, id=f"{chat} {text}").addressed()
    claim = await store.begin("me", f"test:{chat}", worker, message)
    assert claim is not None
    await store.append(claim, [ModelAnswered(f"so {text}")], flush=False)
    await store.finish(claim, [TurnEnded("answer", text)], [OutboundMessage("test", chat, text)])


async def test_turns_through_the_pooler_are_whole_and_a_listener_is_woken(database, pooler, worker):
    store = PostgresStore(database, pool=pooler.dsn(name_of(database)))
    woken = asyncio.Event()
    peer = store.peer(worker, lambda _: woken.set(), takes_work=True)
    await peer.join()

    async def chat(name: str) -> None:
        for number in range(8):
            await turn(store, worker, name, str(number))

    await asyncio.gather(*(chat(f"c{number}") for number in range(12)))
    for number in range(12):
        info = await store.session("me", f"test:c{number}")
        assert info is not None
        log = await store.read_log(info.id)
        assert [one.entry.text for one in log if isinstance(one.entry, TurnEnded)] == [str(n) for n in range(8)]
    assert len(await store.take_outgoing(worker, 1000)) == 96
    woken.clear()
    await store.wake()
    async with asyncio.timeout(30):
        await woken.wait()
    assert await store.search("me", "so") != []
    await peer.leave()
    await store.close()


async def test_many_stores_have_the_pools_connections_and_one_each(postgres, database, pooler):
    """Eight processes of nine connections would have 72."""
    name = name_of(database)
    stores = [PostgresStore(database, pool=pooler.dsn(name)) for _ in range(8)]
    workers = [new_worker() for _ in stores]
    peers = [store.peer(worker, lambda _: None, takes_work=True) for store, worker in zip(stores, workers, strict=True)]
    for peer in peers:
        await peer.join()
    most = 0

    async def chats(number: int) -> None:
        nonlocal most
        for _ in range(3):
            await asyncio.gather(*(turn(stores[number], workers[number], f"{number}-{n}", str(_)) for n in range(10)))
            most = max(most, (await asyncio.to_thread(postgres.sql, CONNECTED, name))[0][0])

    await asyncio.gather(*(chats(number) for number in range(len(stores))))
    assert most <= 6 + len(stores)
    for peer in peers:
        await peer.leave()
    await asyncio.gather(*(store.close() for store in stores))
    for one in workers:
        retire(one)


async def test_no_statement_is_prepared_in_a_backend_that_the_pooler_lends(database, pooler, worker):
    """The next transaction would look for it in another backend."""
    store = PostgresStore(database, pool=pooler.dsn(name_of(database)))
    for number in range(10):  # psycopg prepares statements that it has run five times
        await turn(store, worker, "c", str(number))
        await store.sessions("me")

    def names(db: psycopg.Connection[tuple[str]]) -> list[str]:
        return [name for (name,) in db.execute("SELECT name FROM pg_prepared_statements").fetchall()]

    looks = await asyncio.gather(*(store.connections.submit("reads", names) for _ in range(20)))
    assert {name for look in looks for name in look} == set()
    await store.close()


async def test_each_session_of_the_pool_begins_with_the_timeouts(postgres, database, pooler, worker):
    store = PostgresStore(database, pool=pooler.dsn(name_of(database)))
    await turn(store, worker, "c", "0")
    await store.close()
    shown = ", ".join(f"current_setting('{name}')" for name in SETTINGS)
    fresh = postgres.sql(f"SELECT {shown}", database=name_of(database))  # a session in which nothing has been set
    assert fresh == [tuple(SETTINGS.values())]


async def test_a_pooler_of_another_database_is_one_line(postgres, database, pooler):
    with postgres.database() as other:
        store = PostgresStore(database, pool=pooler.dsn(name_of(other)), patience=0.1)
        with pytest.raises(StoreError, match="does not lead to the tables") as raised:
            await store.sessions("me")
        assert "\n" not in str(raised.value)
        await store.close()


async def test_a_missing_pooler_is_one_line_without_the_password(database):
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_POOL": "postgresql://anna:canary1@127.0.0.1:1/db"}
    done = await everloop("sessions", **settings)
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert "canary1" not in done.err


async def test_a_pooler_that_is_killed_and_comes_back_fails_no_call(postgres, database, worker):
    with pgbouncer(postgres.folder) as pooler:
        store = PostgresStore(database, pool=pooler.dsn(name_of(database)))
        await turn(store, worker, "c0", "first")
        counts = {f"c{number}": 1 if number == 0 else 0 for number in range(6)}
        over = False

        async def chat(name: str) -> None:
            while not over:
                await turn(store, worker, name, f"{counts[name]}")
                counts[name] += 1

        chats = [asyncio.create_task(chat(name)) for name in counts]
        for _ in range(3):
            seen = sum(counts.values())
            async with asyncio.timeout(30):
                while sum(counts.values()) < seen + 12:
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(pooler.kill)
            await asyncio.sleep(0.2)
            await asyncio.to_thread(pooler.start)
        over = True
        await asyncio.gather(*chats)
        for name, count in counts.items():
            info = await store.session("me", f"test:{name}")
            assert info is not None
            log = await store.read_log(info.id)
            ends = [one.entry.text for one in log if isinstance(one.entry, TurnEnded)]
            assert ends == [("first" if name == "c0" and not n else str(n)) for n in range(count)]
        await store.close()


def test_the_pool_of_the_settings_belongs_to_their_store(tmp_path):
    store, pool = "postgresql://u@h/d", "postgresql://u@h:6432/d"
    (tmp_path / "config.toml").write_text(f'store = "{store}"\nstore_pool = "{pool}"\n')
    config = Config.load(home=tmp_path, env={})
    assert config.store_pool == DSN(pool)
    opened = store_at(config.store, config)
    assert isinstance(opened, PostgresStore)
    assert opened.pool == config.store_pool
    assert Config.load({"store": "postgresql://elsewhere/db"}, home=tmp_path, env={}).store_pool is None
    other = store_at("postgresql://elsewhere/db", config)
    assert isinstance(other, PostgresStore)
    assert other.pool is None


def test_an_invalid_pool_address_is_one_line_that_does_not_show_it(tmp_path):
    (tmp_path / "config.toml").write_text('store_pool = "pgbouncer://anna:canary1@h/d"\n')
    with pytest.raises(ConfigError, match="store_pool must be a `postgresql://` address") as raised:
        Config.load(home=tmp_path, env={})
    assert "canary1" not in str(raised.value)


async def test_a_command_uses_the_pool(postgres, database, pooler):
    async with FakeOpenAI() as server:
        server.reply("forty-two")
        settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_POOL": pooler.dsn(name_of(database))}
        done = await everloop("run", "what is it?", server=server, **settings)
        assert (done.status, done.out) == (0, "forty-two\n"), done.err
        told = (await everloop("doctor", "--json", server=server, **settings)).json["checks"]
        assert "through the pooler postgresql://" in next(one["found"] for one in told if one["name"] == "store")
