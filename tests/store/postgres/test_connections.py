"""Addresses, passwords, schemas: errors are one line, and never contain the password."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from everloop.config.sources import DSN
from everloop.errors import StoreError
from everloop.store.postgres.connect import SCHEMA_LOCK, passwords
from everloop.store.postgres.store import PostgresStore
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import everloop, until

from .server import Server, name_of, own_server

OPENS = """
import asyncio, sys
from everloop.store.postgres.store import PostgresStore
async def main():
    store = PostgresStore(sys.argv[1])
    print(len(await store.sessions("me")))
    await store.close()
asyncio.run(main())
"""


@pytest.fixture
def canary() -> str:
    """A password that must appear nowhere."""
    return f"canary{secrets.token_hex(8)}"


@pytest.fixture
def empty(postgres: Server) -> Iterator[str]:
    """The address of a database without our tables."""
    name = f"empty_{os.getpid()}_{secrets.token_hex(3)}"
    postgres.sql(f"CREATE DATABASE {name} TEMPLATE template0")
    yield postgres.dsn(name)
    postgres.sql(f"DROP DATABASE {name} WITH (FORCE)")


async def refused(dsn: str) -> str:
    """Return the one line with which the library and the command refuse an address."""
    store = PostgresStore(dsn, patience=0.1)
    with pytest.raises(StoreError) as raised:
        await store.sessions("me")
    await store.close()
    done = await everloop("sessions", EVERLOOP_STORE=dsn)
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert len(str(raised.value).splitlines()) == 1
    return f"{raised.value} {done.err} {done.out}"


async def test_a_missing_server_is_one_line_without_the_password(canary):
    for host in ("127.0.0.1:1", "[::1]:1", "%2Ftmp%2Fnowhere"):
        said = await refused(f"postgresql://anna:{canary}@{host}/db")
        assert canary not in said
        assert "anna@" in said


async def test_a_wrong_password_is_one_line_without_it(postgres, database, canary):
    role = f"r{secrets.token_hex(4)}"
    postgres.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
    name = name_of(database)
    assert canary not in await refused(postgres.dsn(name, role, canary))
    hidden = postgres.dsn(name, role) + f"&password={canary}"
    assert canary not in await refused(hidden)
    postgres.sql(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}", database=name)
    store = PostgresStore(postgres.dsn(name, role, "right"))
    assert await store.sessions("me") == []
    await store.close()
    postgres.sql(f"DROP OWNED BY {role}", database=name)
    postgres.sql(f"DROP ROLE {role}")


async def test_a_missing_database_and_an_unauthorised_user_are_one_line(postgres, database, canary):
    await refused(postgres.dsn("nowhere"))
    role = f"r{secrets.token_hex(4)}"
    postgres.sql(f"CREATE ROLE {role} LOGIN PASSWORD '{canary}'")
    name = name_of(database)
    assert canary not in await refused(postgres.dsn(name, role, canary))
    postgres.sql(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:{}@host:port:port/db",
        "postgresql://me:{}@[half/db",
        "postgres://me:{}@host/db?nonsense=1",
        "postgresql://me:{}%zz@host/db",
        "postgresql:me:{}@host/db",
        "postgresql://me:a@{}@host/db",
        "postgresql://me:a/{}@host/db",
        "postgresql://me:1/{}@host/db",
        "postgresql://me:1?{}@host/db",
        "postgresql://me:{}#b@host/db",
        "postgresql://me:{}/b@host/db",
        "postgresql://me:{}",
        "postgresql://host:1/{}@host/db",
        "POSTGRESQL://me:{}@host:999999/db",
    ],
)
async def test_an_invalid_address_is_one_line_without_the_password(dsn, canary):
    dsn = dsn.format(canary)
    assert canary not in await refused(dsn)
    assert canary not in f"{DSN(dsn)} {DSN(dsn)!r}"


def test_the_password_is_recognised_in_every_notation(canary):
    assert passwords(f"postgresql://me:{canary}%40x@host/db") == [f"{canary}%40x", f"{canary}@x"]
    assert passwords(f"postgresql://me@host/db?user=x&password={canary}") == [canary]
    assert passwords("postgresql://me@host/db") == []


async def test_a_lost_server_is_logged_without_the_password(caplog, canary):
    with own_server() as server, server.database() as dsn:
        server.sql(f"CREATE ROLE anna SUPERUSER LOGIN PASSWORD '{canary}'")
        name = name_of(dsn)
        store = PostgresStore(server.dsn(name, "anna", canary), patience=0.2, lease_seconds=0.5)
        caplog.set_level(logging.DEBUG)
        await store.peer("x.1.1.1.1", lambda _: None).join()
        await asyncio.to_thread(server.stop)
        with pytest.raises(StoreError):
            await store.workers()
        await until(lambda: "no heartbeat" in caplog.text)
        await store.close()
        assert canary not in caplog.text
        await asyncio.to_thread(server.start)


async def test_without_the_extra_the_error_says_how_to_get_it():
    code = "import sys; sys.modules['psycopg'] = None; " + "exec(sys.stdin.read())"
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, "postgresql://x/y"], input=OPENS, capture_output=True, text=True
    )
    assert "everloop[postgres]" in run.stderr.splitlines()[-1]


async def test_several_processes_may_open_a_new_database_at_once(empty):
    tasks = [asyncio.create_subprocess_exec(sys.executable, "-c", OPENS, empty, stdout=-1, stderr=-1) for _ in range(4)]
    for process in await asyncio.gather(*tasks):
        out, err = await process.communicate()
        assert (out, err) == (b"0\n", b"")


async def test_a_process_that_comes_while_the_tables_are_created_waits_for_them(empty):
    store = PostgresStore(empty)
    with psycopg.connect(empty) as maker:
        maker.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
        opening = asyncio.create_task(store.sessions("me"))
        await asyncio.sleep(0.3)
        assert not opening.done()
    assert await opening == []
    await store.close()


async def test_the_database_of_a_newer_everloop_is_one_line_and_not_touched(postgres, database):
    name = name_of(database)
    postgres.sql("UPDATE everloop_schema SET version = 99", database=name)
    await refused(database)
    assert postgres.sql("SELECT version FROM everloop_schema", database=name) == [(99,)]


async def test_tables_are_created_in_the_addresss_schema(postgres, empty):
    name = name_of(empty)
    postgres.sql("CREATE SCHEMA own", database=name)
    store = PostgresStore(empty + "&options=-csearch_path%3Down")
    assert await store.sessions("me") == []
    assert await store.search("me", "x") == []
    await store.close()
    found = postgres.sql("SELECT DISTINCT schemaname FROM pg_tables WHERE tablename = 'session'", database=name)
    assert found == [("own",)]


async def test_one_address_switches_every_command(database):
    async with FakeOpenAI() as server:

        async def run(*arguments: str, **settings: Any) -> str:
            done = await everloop(*arguments, server=server, EVERLOOP_STORE=database, **settings)
            assert (done.status, done.err.count("\n") <= 3) == (0, True), done.err
            return done.out

        server.reply("forty-two")
        assert await run("run", "what is it?", "--session", "cli:a") == "forty-two\n"
        assert "cli:a" in await run("sessions")
        assert "forty-two" in await run("log", "--session", "cli:a")
        await run("fork", "cli:a@3", "--as", "cli:b")
        assert "cli:b" in await run("sessions")
        job = (await run("cron", "add", "tick", "--every", "1h")).split()[0]
        assert job in await run("cron", "list")
        await run("cron", "remove", job)
        assert (await run("token", "add", "laptop")).startswith("ev_")
        assert "laptop" in await run("token", "list")
        store = PostgresStore(database)
        turn = (await store.turns("me"))[-1].id
        await store.close()
        await run("replay", turn)
        server.reply("still forty-two")
        assert await run("run", "and now?", "--session", "cli:a") == "still forty-two\n"
        assert len(server.requests[-1].body["messages"]) > 3 if server.requests[-1].body else False


async def test_a_store_that_is_closed_and_reused_keeps_nothing_from_before(database):
    store = PostgresStore(database)
    crews: list[Any] = []
    for _ in range(3):
        await store.workers()
        crews.append(weakref.ref(store.connections._threads))
        await store.close()

    def gone() -> bool:
        gc.collect()
        return [crew() for crew in crews] == [None, None, None]

    await until(gone)  # a thread that is ending may still hold the last
