"""Access to the web page: one-time links, logins with a token, and cookies that other pages and commands cannot use."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.config import Rule
from everloop.log import CallEnded
from everloop.server import access as access_module
from everloop.server.access import Access
from everloop.testing.openai_server import FakeOpenAI

from ..support.commands import environment, start, until
from .feeds import PageClient
from .serving import Serving, call, process, serving

ASK = (
    Rule(do="ask", tool="write_file"),
    Rule(do="allow", command="*", network=True, tainted=True),
)


@pytest.fixture
async def server(tmp_path: Path):
    async with serving(tmp_path, policy=ASK) as running:
        yield running


async def visit(server: Serving, **body: str) -> tuple[PageClient, dict[str, Any]]:
    """A browser of its own that has logged in."""
    client = PageClient(server.url, server.http)
    async with aiohttp.ClientSession() as browser, browser.post(f"{server.url}/api/login", json=body) as response:
        assert response.status == 200, await response.text()
        logged_in = await response.json()
        (cookie,) = response.cookies.values()
    client.headers = {"Cookie": f"{cookie.key}={cookie.value}", "X-Everloop-Page": logged_in["page_key"]}
    return client, {"body": logged_in, "cookie": cookie}


async def asked(server: Serving) -> int:
    """The position of a question that waits in the session `web:1` of `me`."""
    server.fake.calls(call("write_file", path="canary.txt", content="written"))
    agent = await server.owners.agent("me")
    await agent.process_direct("write it", "web:1", attended=True)
    info = await server.store.session("me", "web:1")
    assert info is not None
    assert info.parked
    return info.entries


async def is_parked(server: Serving) -> bool:
    info = await server.store.session("me", "web:1")
    assert info is not None
    return info.parked and not (server.owners.config.workspace / "canary.txt").exists()


async def test_a_link_logs_one_browser_in_as_the_user_of_this_machine(server: Serving):
    link = await server.server.access.new_link()
    client, found = await visit(server, link=link)
    assert found["body"]["owner"] == "me"
    cookie = found["cookie"]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
    assert (await client.api("GET", "sessions"))[0] == 200
    position = await asked(server)
    server.fake.reply("done")
    assert (await client.answer("web:1", position, True))[0] == 200
    await server.ended("web:1")
    assert (server.owners.config.workspace / "canary.txt").exists()
    anonymous = PageClient(server.url, server.http)
    status, body = await anonymous.api("POST", "login", {"link": link})
    assert (status, body["error"]["code"]) == (401, "not_logged_in")


async def test_a_link_works_once_across_all_servers_and_expires_after_minutes(
    server: Serving, monkeypatch: pytest.MonkeyPatch
):
    home, store = server.owners.config.home, server.store
    here, there = Access(store, home), Access(store, home)
    link = await here.new_link()
    assert sum(login is not None for login in await asyncio.gather(here.redeem(link), there.redeem(link))) == 1
    for wrong in ("", ".", "x.y.z", link.replace(".", "1.", 1), await Access(store, home / "other").new_link()):
        assert await here.redeem(wrong) is None
    late = await here.new_link()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + access_module.LINK_SECONDS + 1)
    assert await here.redeem(late) is None


async def test_a_token_logs_its_owner_in_until_it_is_revoked(server: Serving):
    eve = await server.client("eve")
    token = eve.headers["Authorization"].removeprefix("Bearer ")
    client, found = await visit(server, token=f" {token} ")
    assert found["body"]["owner"] == "eve"
    assert token not in found["cookie"].value
    server.fake.reply("hello")
    await client.say("web:1", "hi")
    await server.ended("web:1", "eve")
    assert [one["key"] for one in (await client.api("GET", "sessions"))[1]["sessions"]] == ["web:1"]
    (kept,) = await server.store.tokens("eve")
    await server.store.revoke_token(kept.id)
    assert (await client.api("GET", "sessions"))[0] == 401
    for wrong in ("", "ev_unknown", token):
        assert (await client.api("POST", "login", {"token": wrong}))[0] == 401
    scraper = await server.client("scraper", rights="admin")
    token = scraper.headers["Authorization"].removeprefix("Bearer ")
    assert (await client.api("POST", "login", {"token": token}))[0] == 401


async def test_a_cookie_needs_the_key_of_its_page_and_a_signature(server: Serving):
    """Browsers send a cookie to every server of its host, whatever the port: another one there must not use it."""
    client, _ = await visit(server, link=await server.server.access.new_link())
    other, _ = await visit(server, link=await server.server.access.new_link())
    position = await asked(server)
    cookie, page_key = client.headers["Cookie"], client.headers["X-Everloop-Page"]
    forged = re.sub(r"=(\d+)", lambda found: f"={int(found[1]) + 1}", cookie)
    for headers in (
        {"Cookie": cookie},
        {"X-Everloop-Page": page_key},
        {"Cookie": cookie, "X-Everloop-Page": "1"},
        {"Cookie": cookie, "X-Everloop-Page": other.headers["X-Everloop-Page"]},
        {"Cookie": forged, "X-Everloop-Page": page_key},
        {"Cookie": cookie.replace("everloop_", "everloop_1"), "X-Everloop-Page": page_key},
    ):
        thief = PageClient(server.url, server.http)
        thief.headers = headers
        assert (await thief.answer("web:1", position, True))[0] == 401
        assert (await thief.api("GET", "sessions"))[0] == 401
    assert await is_parked(server)


async def test_pages_of_other_origins_can_do_nothing(server: Serving):
    client, _ = await visit(server, link=await server.server.access.new_link())
    position = await asked(server)
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:9"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        body = {"question": position, "allow": True}
        assert (await client.api("POST", "sessions/web:1/answer", body, headers))[0] == 403
        link = await server.server.access.new_link()
        assert (await client.api("POST", "login", {"link": link}, headers))[0] == 403
    sent = {**client.headers, "Content-Type": "text/plain"}
    async with server.http.post(
        f"{server.url}/api/sessions/web:1/answer", data=json.dumps({"question": position, "allow": True}), headers=sent
    ) as response:
        assert response.status == 415
    assert await is_parked(server)


SCRIPT = """
import glob, json, os, sys, urllib.request
url, home, position = sys.argv[1:]
def post(path, body, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=10).read().decode()
    except Exception as error:
        return repr(error)
found = []
for name in glob.glob(home + "/*") + [home + "/page.key"]:
    try:
        found.append(open(name, "rb").read()[:80])
    except OSError as error:
        pass
print("reached", urllib.request.urlopen(url + "/healthz").status, "files", found)
answer = {"question": int(position), "allow": True}
print(post("/api/sessions/web:1/answer", answer))
print(post("/api/sessions/web:1/answer", answer, Authorization="Bearer x", Cookie="everloop_web=me"))
print(post("/api/sessions/web:1/messages", {"text": "y"}))
print(post("/api/login", {"link": "1.2.3"}))
for words in ("y", "a", "/approve", "/approve always"):
    for extra in ({}, {"Idempotency_Key": "k" + words}):
        said = {"messages": [{"role": "user", "content": words}]}
        print(post("/v1/chat/completions", said, X_Session="web:1", **extra))
"""


async def test_a_command_with_network_cannot_answer_its_own_question(server: Serving):
    position = await asked(server)
    home = server.owners.config.home
    await server.server.access.new_link()  # so that there is a key to steal
    (server.owners.config.workspace / "attack.py").write_text(SCRIPT)
    command = f"python3 attack.py {server.url} {home} {position}"
    server.fake.calls(call("exec", command=command, network=True))
    server.fake.reply("tried")
    agent = await server.owners.agent("me")
    await asyncio.wait_for(agent.process_direct("attack", "web:2", attended=True), 50)
    (ended,) = [one for one in await server.entries("web:2") if isinstance(one, CallEnded)]
    assert "reached 200 files []" in ended.content  # it ran, had the network, and could read nothing of the home
    assert await is_parked(server)


def test_the_key_is_private_and_two_processes_agree_on_it(tmp_path: Path):
    key = access_module._read_key(tmp_path / "home" / "page.key")
    assert access_module._read_key(tmp_path / "home" / "page.key") == key
    assert os.stat(tmp_path / "home" / "page.key").st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["page.key"]


async def test_serve_prints_a_link_that_works_and_a_cookie_outlives_the_server(tmp_path: Path):
    jar = aiohttp.CookieJar(unsafe=True)  # also for addresses
    async with FakeOpenAI() as fake, aiohttp.ClientSession(cookie_jar=jar) as browser:
        async with process(fake, tmp_path) as (first, url):
            lines = [(await asyncio.wait_for(first.stderr.readline(), 20)).decode() for _ in range(2)]
            found = re.fullmatch(r"everloop: open (\S+)/#link=(\S+) \(once, within ten minutes\)\n", lines[-1])
            assert found is not None, lines
            assert found[1] == url
            async with browser.post(f"{url}/api/login", json={"link": found[2]}) as response:
                assert response.status == 200
                page_key = (await response.json())["page_key"]
            port = url.rpartition(":")[2]
        async with process(fake, tmp_path, "--port", port) as (_, again):
            assert again == url
            headers = {"X-Everloop-Page": page_key}
            async with browser.get(f"{url}/api/sessions", headers=headers) as response:
                assert response.status == 200
            async with browser.post(f"{url}/api/logout", json={}, headers=headers) as response:
                assert response.status == 200
            async with browser.get(f"{url}/api/sessions", headers=headers) as response:
                assert response.status == 401


async def test_serve_opens_the_page_in_the_browser_on_request(tmp_path: Path):
    """The browser here is a program that records the address it is asked to open."""
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}.part && mv {seen}.part {seen}\n')
    browser.chmod(0o755)
    async with FakeOpenAI() as fake, process(fake, tmp_path, "--open", BROWSER=f"{browser} %s") as (_, url):
        await until(seen.exists)
        address, _, code = seen.read_text().partition("/#link=")
        assert address == url
        async with aiohttp.ClientSession() as http, http.post(f"{url}/api/login", json={"link": code}) as response:
            assert response.status == 200


async def test_everloop_link_prints_another_link(server: Serving):
    home, port = server.owners.config.home, server.url.rpartition(":")[2]
    env = environment(server.fake, EVERLOOP_HOME=str(home), EVERLOOP_STORE=str(home / "everloop.db"))
    made = await start("link", "--port", port, env=env, stdin=asyncio.subprocess.DEVNULL)
    printed, complaints = await asyncio.wait_for(made.communicate(), 40)
    assert (made.returncode, complaints) == (0, b"")
    address, _, code = printed.decode().strip().partition("/#link=")
    assert address == server.url
    client, _ = await visit(server, link=code)
    assert (await client.api("GET", "sessions"))[0] == 200


async def test_the_page_and_its_files_are_confined_compressed_and_revalidated(server: Serving):
    status, headers, _ = await asyncio.to_thread(get, server.url, "/", {"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    policy = headers["Content-Security-Policy"]
    for part in (
        "default-src 'none'",
        "script-src 'self'",
        "require-trusted-types-for 'script'",
        "trusted-types everloop-worker",
    ):
        assert part in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, _, rest = await asyncio.to_thread(get, server.url, "/", {"If-None-Match": headers["ETag"]})
    assert (status, rest) == (304, b"")
    for path in ("/web/../app.py", "/web/%2e%2e/app.py", "/web/nothing.js", "/web/", "/web//etc/passwd"):
        assert (await asyncio.to_thread(get, server.url, path, {}))[0] == 404
    await server.client("eve")  # from now on every other request needs a token
    assert (await asyncio.to_thread(get, server.url, "/", {}))[0] == 200
    assert (await asyncio.to_thread(get, server.url, "/v1/models", {}))[0] == 401


def get(url: str, path: str, headers: dict[str, str]) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()
