"""Owners in several databases behind one address: the directory leads each request to the database of its owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest

from everloop.bus import InboundMessage
from everloop.cli.databases import Databases
from everloop.cli.serve import page_services
from everloop.config import Config
from everloop.config.sources import DSN
from everloop.errors import OwnerMoved, StoreError
from everloop.log import UserSaid, decode_entry
from everloop.observability.metrics import Meters
from everloop.providers.factory import make_provider
from everloop.runtime.agent import agent_of
from everloop.runtime.owners import Owners
from everloop.server import placement
from everloop.store.base import Timer
from everloop.store.history_check import check_history
from everloop.store.postgres import directory as directories
from everloop.store.postgres.directory import Directory, Place, owner_row
from everloop.store.postgres.move_owner import move_owner
from everloop.store.postgres.store import PostgresStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from ..store.postgres.fixtures import database as database
from ..store.postgres.fixtures import postgres as postgres
from ..store.postgres.pgbouncer import pgbouncer
from ..store.postgres.proxy import proxied
from ..store.postgres.server import Server, name_of
from ..support.commands import everloop, until
from .serving import CHAT, Client, process, text_of

SCRIPT = "tools-0x1"  # the model answers done:<marker>
MARKED = re.compile(r"mark:([\w.]+)")


@pytest.fixture
def other(postgres: Server) -> Iterator[str]:
    with postgres.database() as dsn:
        yield dsn


async def add_token(dsn: str, owner: str) -> str:
    token, store = new_token(), PostgresStore(dsn)
    await store.add_token(owner, owner, hash_of(token))
    await store.close()
    return token


def logged(postgres: Server, dsn: str, owner: str) -> dict[str, list[str]]:
    """The marks of the messages in an owner's logs, by session, in their order."""
    query = (
        "SELECT s.key, e.data FROM entry e JOIN session s ON s.id = e.session WHERE s.owner = %s ORDER BY s.key, seq"
    )
    found: dict[str, list[str]] = {}
    for key, data in postgres.sql(query, owner, database=name_of(dsn)):
        entry = decode_entry(data)
        if isinstance(entry, UserSaid) and (mark := MARKED.search(str(entry.content))):
            found.setdefault(key, []).append(mark[1])
    return found


def sessions_in(postgres: Server, dsn: str, owner: str) -> int:
    return int(postgres.sql("SELECT count(*) FROM session WHERE owner = %s", owner, database=name_of(dsn))[0][0])


class Talk:
    """A client that sends numbered messages one after another, and repeats unanswered ones."""

    def __init__(self, urls: list[str], http: aiohttp.ClientSession, token: str, session: str) -> None:
        self.clients = [Client(url, http, token) for url in urls]
        self.session = session
        self.answered: list[str] = []
        self.refused: list[tuple[str, ...]] = []

    async def run(self, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            mark = f"{self.session}.{number}"
            client = self.clients[number % len(self.clients)]
            headers = {"X-Session": self.session, "Idempotency-Key": mark}
            async with client.post({"messages": [{"role": "user", "content": f"mark:{mark}"}]}, headers) as response:
                body = await response.json()
                if response.status == 503:
                    self.refused.append(
                        (response.headers["Retry-After"], body["error"]["code"], body["error"]["message"])
                    )
                    continue
                assert response.status == 200, (mark, response.status, body)
                assert text_of(body) == f"done:{mark}"
            self.answered.append(mark)
            number += 1
            await asyncio.sleep(0.05)


async def test_an_owner_is_moved_under_traffic_there_and_back_and_nothing_is_lost_or_doubled(
    postgres, database, other, tmp_path
):
    """Two servers, two databases. Every answered message is in the log once, in order, and only in the owner's
    database."""
    anna, bob = await add_token(database, "anna"), await add_token(database, "bob")
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_DIRECTORY": database, "EVERLOOP_MODEL": SCRIPT}
    async with FakeOpenAI() as fake, contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls = []
        for name in ("one", "two"):
            _, url = await stack.enter_async_context(process(fake, tmp_path / name, **settings))
            urls.append(url)
        over = asyncio.Event()
        talks = [Talk(urls[n % 2 :] + urls[: n % 2], http, anna, f"s{n}") for n in range(3)]
        talks.append(Talk(urls, http, bob, "b"))
        running = [asyncio.create_task(talk.run(over)) for talk in talks]

        async def more(number: int) -> None:
            wanted = [len(talk.answered) + number for talk in talks]
            async with asyncio.timeout(60):
                while any(len(talk.answered) < least for talk, least in zip(talks, wanted, strict=True)):
                    for task in running:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.02)

        await more(3)
        for source, target in ((database, other), (other, database)):
            done = await everloop("move", "anna", source, target, EVERLOOP_HOME=str(tmp_path), **settings)
            assert (done.status, done.err) == (0, "")
            assert f"The directory {DSN(database)} names {DSN(target)} for anna." in done.out
            await more(3)
            assert sessions_in(postgres, source, "anna") == 0
        over.set()
        await asyncio.gather(*running)
        found = logged(postgres, database, "anna")
        assert sorted(found.values()) == sorted(talk.answered for talk in talks[:3])
        assert sessions_in(postgres, other, "anna") == 0
        assert sessions_in(postgres, other, "bob") == 0
        assert [*logged(postgres, database, "bob").values()] == [talks[3].answered]
        assert talks[3].refused == []  # no other owner notices
        asked = Counter(MARKED.findall(json.dumps(one.body))[-1] for one in fake.requests)
        assert {mark for mark, count in asked.items() if count > 1} == set()  # no turn ran twice
        for dsn in (database, other):
            assert check_history(partial(postgres.sql, database=name_of(dsn))).violations == []


# ---------------------------------------------------------------------------------------------- one server, in here


class Placed:
    """A server with a directory that runs here."""

    def __init__(self, url: str, http: aiohttp.ClientSession, databases: Databases) -> None:
        self.url = url
        self.http = http
        self.databases = databases

    def client(self, token: str) -> Client:
        return Client(self.url, self.http, token)


@contextlib.asynccontextmanager
async def placed(folder: Path, fake: FakeOpenAI, dsn: str) -> AsyncIterator[Placed]:
    config = Config(
        home=folder,
        workspace=folder / "workspace",
        base_url=fake.base_url,
        model=SCRIPT,
        retries=0,
        port=0,
        drain_seconds=5.0,
        store=DSN(dsn),
        store_directory=DSN(dsn),
    )
    await asyncio.to_thread(config.workspace.mkdir, parents=True, exist_ok=True)
    owners = Owners(config, PostgresStore(dsn), make_provider(config), agent_of)
    databases = Databases(config, owners, Meters(), page_services)
    work = asyncio.create_task(owners.run())
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        try:
            (url,) = await databases.start()
            yield Placed(url, http, databases)
        finally:
            await databases.stop(0.0, asyncio.Event())
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await owners.close()


async def test_a_request_waits_for_the_end_of_a_move_and_then_gets_a_503(database, tmp_path, monkeypatch):
    anna, bob = await add_token(database, "anna"), await add_token(database, "bob")
    async with FakeOpenAI() as fake, placed(tmp_path, fake, database) as server:
        client = server.client(anna)
        assert text_of(await client.ask("mark:1")) == "done:1"
        with owner_row("anna", DSN(database)) as entry:
            await asyncio.to_thread(entry.hold, DSN(database), 60.0)
            await until(lambda: server.databases._directory._cache["anna"][1] == -math.inf)  # it was notified
            asked = asyncio.create_task(client.ask("mark:2"))
            assert text_of(await server.client(bob).ask("mark:b")) == "done:b"
            assert not asked.done()
            await asyncio.to_thread(entry.unhold)
            assert text_of(await asked) == "done:2"
            monkeypatch.setattr(placement, "HOLD_SECONDS", 0.2)
            await asyncio.to_thread(entry.hold, DSN(database), 60.0)
            await until(lambda: server.databases._directory._cache["anna"][1] == -math.inf)
            async with client.post({"messages": [{"role": "user", "content": "mark:3"}]}) as response:
                body = await response.json()
            assert (response.status, response.headers["Retry-After"]) == (503, "2")
            assert body["error"]["code"] == "owner_moving"
        assert [MARKED.findall(json.dumps(one.body)) for one in fake.requests] == [["1"], ["b"], ["2"]]


async def test_a_server_that_missed_the_notification_of_a_move_finds_the_owner(postgres, database, other, tmp_path):
    """The directory changes without a notification: what the server keeps of it is outdated, and the token gone."""
    anna = await add_token(database, "anna")
    async with FakeOpenAI() as fake, placed(tmp_path, fake, database) as server:
        client = server.client(anna)
        kept = {"X-Session": "kept"}
        assert text_of(await client.ask("mark:1", kept)) == "done:1"
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
        put = "INSERT INTO owner_place (owner, store, changed_at) VALUES ('anna', %s, 1)"
        await asyncio.to_thread(postgres.sql, put, other, database=name_of(database))
        assert text_of(await client.ask("mark:2", kept)) == "done:2"
    assert [*logged(postgres, other, "anna").values()] == [["1", "2"]]
    assert sessions_in(postgres, database, "anna") == 0


async def test_a_request_that_arrives_before_a_move_and_writes_after_it_is_answered_once(
    postgres, database, other, tmp_path
):
    """Its token is checked in the old database, then the owner moves, then its body arrives."""
    anna = await add_token(database, "anna")
    async with FakeOpenAI() as fake, placed(tmp_path, fake, database) as server:
        assert text_of(await server.client(anna).ask("mark:1")) == "done:1"
        body = json.dumps({"messages": [{"role": "user", "content": "mark:2"}]}).encode()
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {anna}\r\nConnection: close\r\n"
        head += f"X-Session: late\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:5])
        await until(lambda: server.databases.server.database.guard.running == 1)
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), directory=DSN(database))
        writer.write(body[5:])
        async with asyncio.timeout(30):
            answer = (await reader.read()).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 200"), answer
        assert "done:2" in answer
        assert [MARKED.findall(json.dumps(one.body)) for one in fake.requests] == [["1"], ["2"]]
    assert sessions_in(postgres, database, "anna") == 0
    assert ["2"] in logged(postgres, other, "anna").values()


async def test_a_request_that_waits_in_the_database_that_its_owner_leaves_is_ended(
    postgres, database, other, tmp_path, monkeypatch
):
    """A feed of the page, for example: its client comes back and is led to the new database."""
    monkeypatch.setattr(placement, "LEAVE_SECONDS", 0.2)
    anna = await add_token(database, "anna")
    async with FakeOpenAI() as fake, placed(tmp_path, fake, database) as server:
        client = server.client(anna)
        await client.ask("mark:1", {"X-Session": "kept"})
        (session,) = (await client.get("/api/sessions"))[1]["sessions"]
        path = f"/api/sessions/{session['key']}/feed?after=0"
        async with server.http.get(server.url + path, headers=client.headers) as feed:
            assert feed.status == 200
            await feed.content.readline()
            await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), directory=DSN(database))
            async with asyncio.timeout(30):
                with contextlib.suppress(aiohttp.ClientError):
                    while await feed.content.readany():
                        pass
        async with server.http.get(server.url + path, headers=client.headers) as feed:
            assert feed.status == 200
            assert b"mark:1" in await feed.content.readuntil(b"mark:1")


async def test_a_token_is_required_whatever_database_has_one(database, other, tmp_path):
    """A person of this machine is trusted only while no token exists, and one may exist in another database."""
    await add_token(other, "anna")
    async with FakeOpenAI() as fake, placed(tmp_path, fake, database) as server:
        status, error = await Client(server.url, server.http).fails("hi")
        assert (status, error["code"]) == (401, "no_api_key")
        status, _ = await server.client("ev_unknown").fails("hi")
        assert status == 401
        assert fake.requests == []


async def test_a_login_with_a_token_of_any_database_opens_the_page(database, other, tmp_path):
    anna = await add_token(other, "anna")
    with owner_row("anna", DSN(database)) as entry:
        await asyncio.to_thread(entry.put, DSN(other))
    async with FakeOpenAI() as fake, placed(tmp_path, fake, database) as server:
        async with server.http.post(f"{server.url}/api/login", json={"token": anna}) as response:
            assert response.status == 200, await response.text()
            page_key = (await response.json())["page_key"]
        async with server.http.get(f"{server.url}/api/sessions", headers={"X-Everloop-Page": page_key}) as response:
            assert (response.status, (await response.json())["sessions"]) == (200, [])


# ---------------------------------------------------------------------------------------------- the mark


async def test_the_database_that_an_owner_has_left_accepts_nothing_of_theirs(postgres, database, other):
    await add_token(database, "anna")
    store = PostgresStore(database)
    message = InboundMessage("test", "user", "1", "hi", owner="anna").addressed()
    await store.accept(message)
    await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    with pytest.raises(OwnerMoved, match="anna has moved to"):
        await store.accept(message)
    with pytest.raises(OwnerMoved):
        await store.begin("anna", message.session_key, "0123456789ab.1.1.1.1", message)
    with pytest.raises(OwnerMoved):
        await store.set_timer(Timer("anna", "t", 1.0, {}))
    with pytest.raises(OwnerMoved):
        await store.add_token("again", "anna", "0" * 64)
    with pytest.raises(OwnerMoved):
        await store.grant("anna", "test:1", ["exec"])
    await store.accept(InboundMessage("test", "user", "1", "hi", owner="bob").addressed())
    await store.close()
    for table in ("session", "inbox", "timer", "token", "session_grant"):
        query = f"SELECT count(*) FROM {table} WHERE owner = 'anna'"
        assert postgres.sql(query, database=name_of(database)) == [(0,)], table


async def test_a_message_that_arrives_during_the_pause_is_moved_or_refused(postgres, database, other):
    """Sessions that come into being while the owner is locked wait for the end of the move."""
    await add_token(database, "anna")
    store = PostgresStore(database)
    asked: list[asyncio.Task[Any]] = []
    loop = asyncio.get_running_loop()

    def accept(chat: str) -> None:
        message = InboundMessage("test", "user", chat, "hi", owner="anna").addressed()
        asked.append(loop.create_task(store.accept(message)))

    def during() -> None:
        loop.call_soon_threadsafe(accept, "new")
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
        give_up = time.monotonic() + 30
        while postgres.sql(waits, name_of(database)) == [(0,)]:
            assert time.monotonic() < give_up, "it does not wait"
            time.sleep(0.02)

    await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), during)
    with pytest.raises(OwnerMoved):
        await asked[0]
    await store.close()
    assert sessions_in(postgres, database, "anna") == 0


async def test_an_interrupted_move_holds_requests_until_it_is_completed(postgres, database, other):
    """At the commit of the old database, the directory does not know which of the two has the owner."""
    await add_token(database, "anna")
    name, where = name_of(database), DSN(database)
    postgres.sql(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'cut off'; END$$", database=name
    )
    at_commit = "AFTER DELETE ON token DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION no()"
    postgres.sql(f"CREATE CONSTRAINT TRIGGER no {at_commit}", database=name)
    with pytest.raises(StoreError, match="cut off"):
        await asyncio.to_thread(move_owner, "anna", where, DSN(other), directory=where)
    directory = Directory(where)
    assert (await directory.place("anna")).held
    postgres.sql("DROP TRIGGER no ON token", database=name)
    await asyncio.to_thread(move_owner, "anna", where, DSN(other), directory=where)
    assert await directory.place("anna", fresh=True) == Place(DSN(other), False)
    # Cut off before the directory was changed, it is completed as well.
    postgres.sql("UPDATE owner_place SET store = %s, held_until = 'infinity'", database, database=name)
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_DIRECTORY": database}
    done = await everloop("move", "anna", database, other, **settings)
    assert (done.status, done.out.splitlines()[0]) == (0, f"All rows had arrived in {DSN(other)} before.")
    assert await directory.place("anna", fresh=True) == Place(DSN(other), False)
    await directory.close()


async def test_a_failed_move_holds_no_requests(database, other):
    await add_token(database, "anna")

    def fail() -> None:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="the disk is full"):
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), fail, directory=DSN(database))
    directory = Directory(DSN(database))
    assert await directory.place("anna") == Place(DSN(database), False)
    await directory.close()


# ---------------------------------------------------------------------------------------------- the directory


async def test_the_directory_is_read_again_after_a_notification_or_a_while(postgres, database, other, monkeypatch):
    monkeypatch.setattr(directories, "CACHE_SECONDS", 1e6)  # longer than this machine has been up
    directory, where = Directory(DSN(database)), name_of(database)
    assert await directory.place("anna") == Place(None)
    await until(lambda: directory._listener is not None and directory._listener.listens)
    await directory.place("anna")
    put = "INSERT INTO owner_place (owner, store, changed_at) VALUES ('anna', %s, 1)"
    await asyncio.to_thread(postgres.sql, put, other, database=where)
    assert await directory.place("anna") == Place(None)  # kept
    changed = asyncio.Event()
    directory.watch(lambda owner: changed.set() if owner == "anna" else None)
    await asyncio.to_thread(postgres.sql, "SELECT pg_notify('everloop_directory', 'anna')", database=where)
    async with asyncio.timeout(30):
        await changed.wait()
    assert await directory.place("anna") == Place(DSN(other))
    assert await directory.databases() == [DSN(other)]
    monkeypatch.setattr(directories, "CACHE_SECONDS", 0.0)
    await asyncio.to_thread(postgres.sql, "DELETE FROM owner_place", database=where)
    assert await directory.place("anna") == Place(None)
    await directory.close()


async def test_an_owner_stays_in_the_last_known_database_while_the_directory_is_unavailable(
    postgres, database, other, tmp_path, monkeypatch
):
    with owner_row("anna", DSN(database)) as entry:
        await asyncio.to_thread(entry.put, DSN(other))
    async with proxied(database, tmp_path) as (_, through):
        directory = Directory(DSN(through), patience=0.1)
        assert (await directory.place("anna")).store is not None
    monkeypatch.setattr(directories, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(directories, "UNNOTIFIED_SECONDS", 0.0)
    assert (await directory.place("anna")).store is not None
    with pytest.raises(StoreError):
        await directory.place("bob")
    await directory.close()


def test_addresses_are_kept_without_passwords():
    given = DSN("postgres://u:p%40w@h1,h2:5433/d?sslmode=require&password=x")
    assert given.without_password == "postgresql://u@h1,h2:5433/d?sslmode=require"
    directory = DSN("postgresql://u:secret@dir/d")
    for address in ("postgresql://u@h/d?sslmode=require", "postgresql://h/d?sslmode=require"):
        assert DSN(address).with_password_of(directory).secret == "postgresql://u:secret@h/d?sslmode=require"
    assert DSN("postgresql://v@h/d").with_password_of(directory).secret == "postgresql://v@h/d"
    asked = DSN("postgresql://u@dir/d?password=secret")
    assert DSN("postgresql://u@h/d").with_password_of(asked).secret == "postgresql://u@h/d?password=secret"


async def test_a_database_with_another_password_than_the_directory_is_refused(database, other):
    target = other.replace("postgres@", "postgres:canary@")
    with pytest.raises(StoreError, match="use the same ones") as raised:
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(target), directory=DSN(database))
    assert "canary" not in str(raised.value)


async def test_a_directory_without_a_postgresql_store_is_one_line(database, tmp_path):
    settings = {"EVERLOOP_STORE_DIRECTORY": database, "EVERLOOP_HOME": str(tmp_path), "EVERLOOP_MODEL": SCRIPT}
    async with FakeOpenAI() as fake:
        done = await everloop("serve", "--port", "0", server=fake, **settings)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("everloop: store_directory:"), done.err


async def test_tokens_are_made_listed_and_revoked_in_the_database_of_their_owner(postgres, database, other, tmp_path):
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_DIRECTORY": database, "EVERLOOP_HOME": str(tmp_path)}
    put = await everloop("directory", "anna", other, **settings)
    assert (put.status, put.out) == (0, f"anna is in {DSN(other)}.\n")
    for owner, dsn in (("anna", other), ("bob", database)):
        made = await everloop("token", "add", owner, **settings)
        assert made.status == 0, made.err
        assert postgres.sql("SELECT owner FROM token", database=name_of(dsn)) == [(owner,)]
    listed = await everloop("token", "list", "--json", **settings)
    assert sorted(json.loads(line)["owner"] for line in listed.lines) == ["anna", "bob"]
    shown = await everloop("directory", **settings)
    assert shown.lines == [f"anna  {DSN(other)}", f"All others are in {DSN(database)}."]
    revoked = await everloop("token", "revoke", "anna", **settings)
    assert revoked.out == "Revoked anna of anna.\n"
    refused = await everloop("directory", "bob", other, **settings)
    assert (refused.status, len(refused.err.splitlines())) == (2, 1)
    assert "everloop move" in refused.err


async def test_an_owners_database_is_reached_through_its_own_pooler(postgres, database, other, tmp_path):
    """`store_pool` is only for the database that the settings name."""
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_DIRECTORY": database, "EVERLOOP_MODEL": SCRIPT}
    with pgbouncer(postgres.folder) as pooler:
        pool = pooler.dsn(name_of(other))

        def clients() -> int:
            """How many the pooler has for the owner's database; its console takes no prepared statements."""
            with psycopg.connect(pooler.dsn("pgbouncer"), autocommit=True, prepare_threshold=None) as console:
                shown = console.cursor(binary=False).execute("SHOW CLIENTS")
                assert shown.description is not None
                column = [one.name for one in shown.description].index("database")
                return sum(row[column] == name_of(other) for row in shown.fetchall())

        for arguments in (["anna", other], ["--pool", other, pool]):
            done = await everloop("directory", *arguments, **settings)
            assert (done.status, done.err) == (0, "")
        done = await everloop("directory", **settings)
        assert f"Servers reach {DSN(other)} through {DSN(pool)}." in done.out
        token = await add_token(other, "anna")
        await until(lambda: clients() == 0)
        async with (
            FakeOpenAI() as fake,
            aiohttp.ClientSession() as http,
            process(fake, tmp_path, **settings) as (_, url),
        ):
            client = Client(url, http, token)
            await asyncio.gather(*(client.ask(f"mark:{n}", {"X-Session": f"s{n}"}) for n in range(4)))
            assert clients() > 0
            assert sessions_in(postgres, other, "anna") == 4
            assert sessions_in(postgres, database, "anna") == 0
    done = await everloop("directory", "--no-pool", other, **settings)
    assert done.out.strip() == f"Servers that open {DSN(other)} from now on reach it directly."
    assert "through" not in (await everloop("directory", **settings)).out


async def test_a_pooler_of_another_database_or_of_the_store_itself_is_refused_in_one_line(postgres, database, other):
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_DIRECTORY": database}
    with pgbouncer(postgres.folder) as pooler:
        wrong, own = pooler.dsn(name_of(database)), pooler.dsn(name_of(database))
        cases = {
            ("--pool", other, wrong): "does not lead to the tables",
            ("--pool", database, own): "as store_pool",
            ("anna", "--pool", other, own): "name no owner",
            ("--pool", other, "pgbouncer:6432"): "are postgresql:// addresses",
        }
        for arguments, why in cases.items():
            done = await everloop("directory", *arguments, **settings)
            assert done.status == 2, arguments
            assert why in done.err
            assert len(done.err.splitlines()) == 1


async def test_an_unreachable_address_is_not_added_to_the_directory(postgres, database, other):
    """It would be known by its requests alone, which could not be answered."""
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_STORE_DIRECTORY": database}
    cases = {
        ("anna", postgres.dsn("nowhere")): "does not exist",
        ("anna", "postgresql://u:canary@h:port:5/x"): "is not the address of a PostgreSQL database",
        ("anna", "postgresql://u:canary@h/x y"): "is not the address of a PostgreSQL database",
        ("--pool", other, "postgresql://u:canary@h/x y"): "is not the address of a PostgreSQL database",
        ("--no-pool", "postgresql://u:canary@h:port:5/x"): "is not the address of a PostgreSQL database",
    }
    for arguments, why in cases.items():
        done = await everloop("directory", *arguments, **settings)
        assert (done.status, len(done.err.splitlines())) == (2, 1), done
        assert why in done.err
        assert "canary" not in done.err
    assert (await everloop("directory", "--json", **settings)).out == ""
