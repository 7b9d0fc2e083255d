"""Owners: each token's sessions, memory and workspace are its own."""

from __future__ import annotations

import asyncio
import datetime
import sqlite3
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from everloop.bus import InboundMessage
from everloop.config import Config, McpServer, Rule
from everloop.errors import StoreError
from everloop.providers.factory import make_provider
from everloop.runtime.agent import agent_of
from everloop.runtime.owners import Owners
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI

from ..support.commands import environment, everloop, start
from .serving import Client, Serving, call, process, serving, text_of
from .test_life import until

CANARY = "canary-7f3a"
ODD = Path(__file__).parents[1] / "mcp_servers/odd.py"


async def test_each_owner_works_in_a_workspace_of_its_own(server: Serving):
    ada, bob = await server.client("ada"), await server.client("bob")
    server.fake.calls(call("write_file", path="secret.txt", content=CANARY))
    server.fake.reply("written")
    await ada.ask("write")
    assert (server.workspace("ada") / "secret.txt").read_text() == CANARY
    ways = [
        call("read_file", "c1", path="secret.txt"),
        call("read_file", "c2", path=str(server.workspace("ada") / "secret.txt")),
        call("read_file", "c3", path="../../ada/workspace/secret.txt"),
        call("exec", "c4", command=f"cat {server.workspace('ada')}/secret.txt ../../ada/workspace/* /*/owners/*/*/*"),
        call("grep", "c5", pattern="canary", path=str(server.workspace("ada"))),
    ]
    server.fake.calls(*ways)
    server.fake.reply("nothing")
    await bob.ask("steal")
    assert len([message for message in server.seen() if message["role"] == "tool"]) == len(ways)
    assert CANARY not in str(server.seen())
    server.fake.reply("nothing")
    await server.ask("and I, who own the machine?")
    assert CANARY not in str(server.seen())


async def test_a_session_key_belongs_to_its_owner(server: Serving):
    ada, bob = await server.client("ada"), await server.client("bob")
    same = {"X-Session": "work", "Idempotency-Key": "k"}
    server.fake.reply("noted")
    await ada.ask(f"the word is {CANARY}", same)
    server.fake.reply("what word?")
    assert text_of(await bob.ask("what is the word?", same)) == "what word?"
    assert CANARY not in str(server.seen())


async def test_memory_of_one_owner_is_not_found_by_another(server: Serving):
    ada, bob = await server.client("ada"), await server.client("bob")
    server.fake.calls(call("remember", text=f"The word is {CANARY}."))
    server.fake.reply("kept")
    await ada.ask("remember it")
    server.fake.calls(call("memory_search", query=CANARY.partition("-")[0]))
    server.fake.reply("nothing")
    await bob.ask("what do you know?")
    assert CANARY not in str(server.seen())
    server.fake.reply("yes")
    await ada.ask("do you remember?")
    assert CANARY in str(server.seen())


async def test_two_tokens_of_one_owner_share_everything(server: Serving):
    one, two = await server.client("laptop", "ada"), await server.client("phone", "ada")
    server.fake.reply("noted")
    await one.ask(f"the word is {CANARY}", {"X-Session": "work"})
    server.fake.reply("yes")
    await two.ask("which word?", {"X-Session": "work"})
    assert CANARY in str(server.seen())


async def test_another_owner_is_restricted_to_the_workspace_even_if_the_person_is_not(tmp_path: Path):
    outside = tmp_path / "outside.txt"
    outside.write_text(CANARY)
    async with serving(tmp_path, restrict_to_workspace=False) as server:
        ada = await server.client("ada")
        server.fake.calls(call("read_file", path=str(outside)), call("exec", "c2", command=f"cat {outside}"))
        server.fake.reply("no")
        await ada.ask("read it")
        assert CANARY not in str(server.seen())


async def test_each_owner_has_a_separate_budget(tmp_path: Path):
    async with serving(tmp_path, day_tokens=3_000_000) as server:
        ada, bob = await server.client("ada"), await server.client("bob")
        server.fake.reply("hi", body=None)
        await ada.ask("hi")
        spent = {owner: await server.store.spent(owner, [_today()]) for owner in ("ada", "bob", "me")}
        assert spent["ada"]
        assert not spent["bob"]
        assert not spent["me"]
        server.fake.reply("hi")
        await bob.ask("hi")


async def test_an_owner_without_budget_is_told_so(tmp_path: Path):
    async with serving(tmp_path, turn_tokens=100) as server:
        ada = await server.client("ada")
        _, error = await ada.fails("hi")
        assert error["code"] == "insufficient_quota"
        assert "100 tokens" in error["message"]
        assert not server.fake.requests


def _today() -> str:
    import time

    return time.strftime("day %Y-%m-%d")


async def test_a_revoked_token_is_refused_from_the_next_request_on(
    tmp_path: Path,
):
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http:
        made = await everloop("token", "add", "ada", server=fake, EVERLOOP_HOME=str(tmp_path))
        assert made.status == 0
        token = made.out.split()[-1]
        async with process(fake, tmp_path) as (_, url):
            ada = Client(url, http, token)
            fake.reply("hello")
            await ada.ask("hi")
            revoked = await everloop("token", "revoke", "ada", server=fake, EVERLOOP_HOME=str(tmp_path))
            assert revoked.status == 0
            status, error = await ada.fails("hi")
            assert (status, error["code"]) == (401, "invalid_api_key")
        assert len(fake.requests) == 1


async def test_a_worker_finishes_an_owners_turn_in_the_owners_workspace(tmp_path: Path):
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http:
        made = await everloop("token", "add", "ada", server=fake, EVERLOOP_HOME=str(tmp_path))
        fake.hang(60)
        async with process(fake, tmp_path) as (server, url):
            asking = asyncio.create_task(
                Client(url, http, made.out.split()[-1]).ask("go", {"X-Session": "s", "Idempotency-Key": "k"})
            )
            await until(lambda: fake.requests)
            server.kill()
            await server.wait()
            with pytest.raises(aiohttp.ClientError):
                await asking
        fake.calls(call("write_file", path="here.txt", content="x"))
        fake.reply("done")
        worker = await start("worker", env=environment(fake, EVERLOOP_HOME=str(tmp_path)))
        try:
            await until((tmp_path / "owners/ada/workspace/here.txt").exists, 20)
            await until(lambda: len(fake.requests) == 3)
        finally:
            worker.terminate()
            await worker.wait()
        assert not (tmp_path / "workspace/here.txt").exists()


async def test_another_owner_does_not_learn_later_what_the_model_server_said(
    server: Serving, caplog: pytest.LogCaptureFixture
):
    """Not in the next turn of a session, not by a command, not from a sub-agent, and not by searching."""
    place = server.fake.base_url.split("/")[2]
    for client, own in ((await server.client("ada"), False), (server, True)):
        asked = len(server.fake.requests)
        work = {"X-Session": "work"}
        server.fake.reply("hello " * 2_000)
        await client.ask("hi", work)
        server.fake.fail(401, f"the key {CANARY} is wrong")
        assert (await client.fails("hi", work))[0] == 502
        server.fake.fail(401, f"the key {CANARY} is wrong")
        told = [text_of(await client.ask("/compact", work))]
        server.fake.calls(call("spawn", "c1", task="try", wait=True), call("memory_search", "c2", query="key wrong"))
        server.fake.fail(401, f"the key {CANARY} is wrong")
        server.fake.reply("done")
        await client.ask("what was that?", work)
        seen = str([told, [request.body for request in server.fake.requests[asked:]]])
        assert (CANARY in seen, place in seen) == (own, own)
    assert CANARY in caplog.text


async def test_another_owner_does_not_learn_where_the_model_is(server: Serving):
    ada = await server.client("ada")
    for client in (ada, server):
        server.fake.fail(401, f"the key {CANARY} is wrong")
        status, error = await client.fails("hi")
        assert status == 502
        assert (CANARY in error["message"]) == (client is server)
        assert (server.fake.base_url.split("/")[2] in error["message"]) == (client is server)


OPENED = {
    "restrict_to_workspace": False,
    "sandbox": "off",
    "environment": ("RED_KEY",),
    "message_to": ("cli:*",),
    "policy": (Rule(do="allow", tainted=True),),
    "mcp": (McpServer(name="odd", command=sys.executable, args=(str(ODD), "plain", "ready")),),
}


async def test_another_owner_gets_no_access_that_the_person_has_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RED_KEY", CANARY)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "secret.txt").write_text(CANARY)
    opened = {**OPENED, "readable": (str(shared),), "writable": (str(shared),)}
    async with serving(tmp_path, **opened) as server:
        ways = [
            call("exec", "c1", command=f"cat {shared}/secret.txt"),
            call("exec", "c2", command='echo "$RED_KEY"'),
            call("exec", "c3", command=f"echo x > {shared}/written-$$"),
            call("message", "c4", content="from another", channel="cli", chat_id="direct"),
            call("web_fetch", "c5", url=f"{server.fake.base_url}/models"),
        ]
        for client, own in ((await server.client("ada"), False), (server, True)):
            server.fake.calls(*ways)
            server.fake.reply("done")
            await client.ask("go")
            results = [str(message["content"]) for message in server.seen() if message["role"] == "tool"]
            assert len(results) == len(ways)
            assert (CANARY in str(results)) == own
            assert len(list(shared.glob("written-*"))) == own
            body = server.fake.requests[-1].body
            assert body is not None
            assert any("odd" in tool["function"]["name"] for tool in body["tools"]) == own
            rows = await server.store.take_outgoing("somebody", chat=("cli", "direct"))
            assert [row.message.content for row in rows] == ["from another"] * own


async def test_other_owners_cannot_reach_the_persons_private_network(tmp_path: Path):
    fetched: list[str] = []

    async def take(request: web.Request) -> web.Response:
        fetched.append(request.path)
        return web.Response(text=CANARY)

    app = web.Application()
    app.router.add_get("/{name}", take)
    async with TestServer(app) as site, serving(tmp_path, private_hosts=(f"127.0.0.1:{site.port}",)) as server:
        for client, name in ((await server.client("ada"), "ada"), (server, "me")):
            address = str(site.make_url(f"/{name}"))
            server.fake.calls(call("web_fetch", url=address))
            server.fake.reply("done")
            await client.ask(f"open {address}")
    assert fetched == ["/me"]


async def test_an_owners_jobs_and_sub_agents_use_the_owners_workspace_in_every_process(tmp_path: Path):
    async with serving(tmp_path) as server:
        ada = await server.client("ada")
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=4)
        server.fake.calls(call("cron", action="add", message="write the file", at=soon.isoformat()))
        server.fake.reply("later")
        await ada.ask("go", {"X-Session": "work"})
        server.fake.calls(call("write_file", path="one.txt", content="x"))
        server.fake.reply("written")
        await until(lambda: len(server.fake.requests) == 4)
        server.fake.calls(call("spawn", task="write another", wait=True))
        server.fake.calls(call("write_file", path="two.txt", content="x"))
        server.fake.reply("written")
        server.fake.reply("it has")
        await ada.ask("go", {"X-Session": "work"})
        assert {"one.txt", "two.txt"} <= {path.name for path in server.workspace("ada").iterdir()}
        assert not list(server.owners.config.workspace.glob("*.txt"))
        owners = {info.owner for owner in ("me", "ada") for info in await server.store.sessions(owner)}
        assert owners == {"ada"}


async def test_a_temporarily_unreadable_store_ends_no_server(tmp_path: Path):
    """An owner whose agent has not started yet still gets it once the store can be read again."""

    class Sick(SQLiteStore):
        sick = asked = 0

        async def ready(self, worker: str, owner: str | None = None) -> list[tuple[str, str]]:
            if self.sick and owner is None:
                self.asked += 1
                raise StoreError("the disk is full")
            return await super().ready(worker, owner)

    async with FakeOpenAI() as fake:
        config = Config(home=tmp_path, workspace=tmp_path, base_url=fake.base_url, model="scripted", retries=0)
        store, provider = Sick(tmp_path / "store.db"), make_provider(config)
        owners = Owners(config, store, provider, agent_of)
        running = asyncio.create_task(owners.run())
        await until(lambda: store.path.exists())
        store.sick = 1
        async with asyncio.timeout(20):
            while not store.asked:
                await store.wake()
                await asyncio.sleep(0.05)
        store.sick = 0
        fake.reply("hello")
        await store.accept(InboundMessage("api", "ada", "work", "hi", owner="ada").addressed())
        await store.wake()
        await until(lambda: fake.requests)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await owners.close()
        await provider.close()
        await store.close()


async def test_a_full_disk_is_reported_to_other_owners_without_its_path_and_recovered_from(server: Serving):
    ada = await server.client("ada")
    server.fake.reply("hello")
    await ada.ask("hi")

    def full(when: str) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    assert isinstance(server.store, SQLiteStore)
    unhook = server.store.writer.commit_hooks.add(full)
    for client in (ada, server):
        status, error = await client.fails("hi")
        assert status == 503
        assert (str(server.owners.config.home) in error["message"]) == (client is server)
    unhook()
    for client in (ada, server):
        server.fake.reply("hello again")
        assert text_of(await client.ask("hi")) == "hello again"
