"""Web push: from a turn of the page, over the outbox, to a push service that decrypts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.base import make_channel
from everloop.channels.push import Subscription, Subscriptions
from everloop.channels.runner import ChannelRunner
from everloop.config import ChannelConfig, Rule
from everloop.errors import ConfigError
from everloop.store.tokens import hash_of, new_token
from everloop.tools.web.fetch import Fetcher, NotPublic
from everloop.tools.web.urls import parse_url

from ..support.commands import until
from ..support.push_service import Browser, PushService, push_service
from .feeds import PageClient, page_client, said
from .serving import Serving, call, serving

ASK = (Rule(do="ask", tool="write_file", why="files are dear"),)
SECRET = "the combination is 7193"


def push_config(service: PushService, **options: Any) -> ChannelConfig:
    host = service.origin.removeprefix("http://")
    return ChannelConfig(name="push", options={"contact": "mailto:me@example.org", "private_hosts": [host], **options})


@contextlib.asynccontextmanager
async def pushing(
    folder: Path, service: PushService, options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Serving]:
    """A server with the channel of web push at work."""
    config = push_config(service, **(options or {}))
    async with serving(folder, channels=(config,), **settings) as server:
        channel, own = await asyncio.to_thread(make_channel, config, server.store)
        running = asyncio.create_task(ChannelRunner(server.store, [(config, channel, own)]).run())
        try:
            yield server
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def subscribed(client: PageClient, service: PushService) -> Browser:
    """A browser that the client's page has subscribed."""
    _, state = await client.api("GET", "push")
    assert state["enabled"]
    service.key = state["key"]
    browser = service.browser()
    assert (await client.api("POST", "push/subscribe", browser.subscription))[0] == 200
    return browser


async def settled(server: Serving) -> None:
    """Wait until everything in the outbox has been sent or given up."""

    async def unsent() -> int:
        return (await server.store.overview()).unsent

    async with asyncio.timeout(30):
        while await unsent():
            await asyncio.sleep(0.02)


async def test_questions_and_ends_are_notified_without_message_texts(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service, policy=ASK) as server:
        ada = await page_client(server, "ada")
        browser = await subscribed(ada, service)
        server.fake.calls(call("write_file", path="note.txt", content=SECRET))
        server.fake.reply(SECRET)
        feed = await ada.feed("web:1")
        await ada.say("web:1", SECRET)
        page = await feed.read(lambda page: page.state.get("parked") is True)
        (asked,) = await browser.has(1)
        assert (asked["title"], asked["session"]) == ("A question waits for you", "web:1")
        assert browser.headers[0]["Urgency"] == "high"
        await ada.answer("web:1", page.question, True)
        _, ended = await browser.has(2)
        feed.close()
        assert (ended["title"], ended["session"]) == ("A turn has ended", "web:1")
        assert asked["tag"] != ended["tag"]
        assert "7193" not in str(browser.told)
        await settled(server)
        assert await server.store.dead_letters() == []


async def test_message_texts_are_notified_only_if_the_settings_allow_it(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service, {"content": True}) as server:
        ada = await page_client(server, "ada")
        browser = await subscribed(ada, service)
        assert (await ada.api("GET", "push"))[1]["content"] is True
        server.fake.reply("The beans\nare wet.")
        await said(ada, "web:1", "Water them")
        (told,) = await browser.has(1)
        assert told["body"].endswith("The beans are wet.")


async def test_each_owner_is_notified_of_their_own_turns_and_a_revoked_login_of_none(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service) as server:
        ada, eve = await page_client(server, "ada"), await page_client(server, "eve")
        adas, eves = await subscribed(ada, service), await subscribed(eve, service)
        token = new_token()
        made = await server.store.add_token("ada-phone", "ada", hash_of(token))
        phone = await subscribed(PageClient(server.url, server.http, token), service)
        server.fake.reply("one")
        await said(ada, "web:1", "go")
        await adas.has(1)
        await phone.has(1)
        await settled(server)
        assert eves.told == []
        assert (await eve.api("POST", "push/unsubscribe", {"endpoint": adas.endpoint}))[0] == 200
        await server.store.revoke_token(made.id)
        server.fake.reply("two")
        await said(ada, "web:1", "again")
        await adas.has(2)
        await settled(server)
        assert (len(phone.told), len(eves.told)) == (1, 0)
        assert (await ada.api("GET", "push"))[1]["subscriptions"] == 1  # the revoked one is gone


async def test_a_vanished_browser_is_forgotten_and_a_failing_service_is_retried(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service) as server:
        ada = await page_client(server, "ada")
        gone, missing, well, failing = [await subscribed(ada, service) for _ in range(4)]
        gone.answers, missing.answers, failing.answers = [410], [404], [500]
        server.fake.reply("one")
        await said(ada, "web:1", "go")
        first, again = await failing.has(2)
        assert first == again  # with the same tag, which a browser shows once
        await settled(server)
        assert (len(gone.told), len(missing.told), len(well.told)) == (1, 1, 1)
        assert (await ada.api("GET", "push"))[1]["subscriptions"] == 2
        assert await server.store.dead_letters() == []


async def test_nothing_is_notified_while_a_page_is_visible(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service) as server:
        ada, eve = await page_client(server, "ada"), await page_client(server, "eve")
        browser = await subscribed(ada, service)
        for client, page, visible in ((ada, "laptop", True), (ada, "phone", False), (eve, "hers", True)):
            assert (await client.api("POST", "push/visible", {"page": page, "visible": visible}))[0] == 200
        server.fake.reply("one")
        await said(ada, "web:1", "go")
        await settled(server)
        assert browser.told == []
        await ada.api("POST", "push/visible", {"page": "laptop", "visible": False})  # eve still looks at hers
        server.fake.reply("two")
        await said(ada, "web:1", "again")
        await browser.has(1)


async def test_stopped_turns_and_turns_of_other_clients_are_not_notified(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service) as server:
        ada = await page_client(server, "ada")
        browser = await subscribed(ada, service)
        server.fake.reply("over the API")
        await ada.ask("hi")
        server.fake.reply("never", delay=600)
        feed = await ada.feed("web:1")
        await ada.say("web:1", "go")
        await until(lambda: len(server.fake.requests) == 2)
        await ada.api("POST", "sessions/web:1/stop", {})
        await feed.read(lambda page: "end" in page.kinds)
        feed.close()
        await settled(server)
        assert browser.told == []


async def test_only_public_https_addresses_are_contacted(tmp_path: Path):
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.close()

    canary = await asyncio.start_server(hear, "127.0.0.1", 0)
    port = canary.sockets[0].getsockname()[1]
    async with push_service() as service, pushing(tmp_path, service) as server:
        ada = await page_client(server, "ada")
        browser = await subscribed(ada, service)
        for endpoint in (f"http://127.0.0.1:{port}/x", "http://push.example.org/x", "file:///etc/passwd", "x" * 3000):
            wrong = {**browser.subscription, "endpoint": endpoint}
            assert (await ada.api("POST", "push/subscribe", wrong))[0] == 400
        for keys in ({"p256dh": "AAAA"}, {"auth": "AAAA"}, {"p256dh": browser.subscription["auth"]}):
            assert (await ada.api("POST", "push/subscribe", {**browser.subscription, **keys}))[0] == 400
        subscriptions = Subscriptions(server.store)
        keys = {name: browser.subscription[name] for name in ("p256dh", "auth")}
        for scheme in ("http", "https"):  # as if they had got in
            await subscriptions.add(Subscription("ada", f"{scheme}://127.0.0.1:{port}/x", at=0.0, **keys))
        server.fake.reply("one")
        await said(ada, "web:1", "go")
        await browser.has(1)
        await settled(server)
        assert [one.endpoint for one in await subscriptions.of("ada")] == [browser.endpoint]

        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        fetcher = Fetcher(ports=(port,), resolve=resolve)
        with pytest.raises(NotPublic):  # a public name that leads back here
            await fetcher.post(parse_url(f"https://push.example.org:{port}/x"), b"body", {})
    assert heard == []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)  # the canary would have heard it
    writer.write(b"works")
    await writer.drain()
    assert await reader.read() == b""
    writer.close()
    canary.close()
    assert heard == [b"works"]


async def test_all_servers_of_a_store_have_one_key_and_a_server_without_push_says_so(tmp_path: Path):
    async with push_service() as service, pushing(tmp_path, service) as server:
        keys = await asyncio.gather(*(Subscriptions(server.store).public_key() for _ in range(4)))
        assert len(set(keys)) == 1
    async with serving(tmp_path / "other") as without:
        ada = await page_client(without, "ada")
        assert (await ada.api("GET", "push"))[1]["enabled"] is False
        status, body = await ada.api("POST", "push/visible", {"page": "x", "visible": True})
        assert (status, "[channels.push]" in str(body)) == (409, True)
    for options, wrong in (({}, "contact"), ({"contact": "me"}, "mailto:"), ({"contact": "mailto:a@b", "x": 1}, "x")):
        with pytest.raises(ConfigError, match=wrong):
            await asyncio.to_thread(make_channel, ChannelConfig(name="push", options=options))
