"""Forks, exports, titles and pictures of sessions over the page's API."""

from __future__ import annotations

import base64

from .feeds import PageClient, is_over, page_client, said
from .serving import Serving, call
from .test_page_files import PIXEL

SECRET = "sk-abcdefghijklmnopqrstuvwxyz"


async def get(client: PageClient, path: str) -> tuple[int, bytes, str]:
    async with client.http.get(f"{client.url}/api/{path}", headers=client.headers) as response:
        return response.status, await response.read(), response.headers["Content-Type"]


async def test_a_fork_has_the_entries_before_it_and_continues_separately(server: Serving, ada: PageClient):
    for text in ("one", "two"):
        server.fake.reply(f"answer to {text}")
        page = await said(ada, "web:1", text)
    asked = next(seq for seq, one in page.entries.items() if one.get("text") == "two")
    server.fake.reply("another answer")
    status, retried = await ada.api("POST", "sessions/web:1/fork", {"until": asked})  # the turn is under way there
    assert status == 200
    feed = await ada.feed(retried["key"])
    copy = await feed.read(lambda page: is_over(page) and len(page.kinds) == 6)
    feed.close()
    assert copy.text == "answer to oneanother answer"
    status, forked = await ada.api("POST", "sessions/web:1/fork", {"until": asked - 1})  # at the end of a turn
    feed = await ada.feed(forked["key"])
    copy = await feed.read(lambda page: bool(page.state))
    feed.close()
    assert (status, copy.text, copy.state["turn"]) == (200, "answer to one", None)
    assert (await ada.api("GET", "sessions/web:1/log"))[1]["entries"][-1]["seq"] == max(page.entries)
    eve = await page_client(server, "eve")
    assert (await eve.api("POST", "sessions/web:1/fork", {"until": 1}))[0] == 404
    for until in (0, -1, 99):
        assert (await ada.api("POST", "sessions/web:1/fork", {"until": until}))[0] == 400


async def test_an_export_has_the_conversation_without_secrets(server: Serving, ada: PageClient):
    server.fake.reply(f"The key is {SECRET}.")
    await said(ada, "web:1", "<b>tell</b>")
    for form, sign in (("md", "## You"), ("jsonl", '"kind"'), ("html", "&lt;b&gt;tell")):
        status, data, kind = await get(ada, f"sessions/web:1/export?format={form}")
        assert (status, kind) == (200, "application/octet-stream")
        assert SECRET not in data.decode()
        assert "[secret]" in data.decode()
        assert sign in data.decode() or form == "jsonl"
    assert (await get(ada, "sessions/web:1/export?format=exe"))[0] == 400
    eve = await page_client(server, "eve")
    assert (await get(eve, "sessions/web:1/export"))[0] == 404


async def test_pictures_of_messages_and_results_are_sent_to_their_owner(server: Serving, ada: PageClient):
    body = {"name": "a.png", "data": base64.b64encode(PIXEL).decode()}
    path = (await ada.api("POST", "files/uploads", body))[1]["path"]
    server.fake.calls(call("read_file", path=path))
    server.fake.reply("a pixel")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "look", media=[path])
    page = await feed.read(is_over)
    feed.close()
    assert (page.entries[1]["text"], page.entries[1]["images"]) == ("look", 1)
    result = next(seq for seq, one in page.entries.items() if one["kind"] == "result")
    assert page.entries[result]["images"] == 1
    for seq in (1, result):
        status, data, kind = await get(ada, f"sessions/web:1/pictures/{seq}/0")
        assert (status, kind) == (200, "image/png")
        assert data.startswith(b"\x89PNG")
    for place in ("1/1", "2/0", "99/0", "0/0"):
        assert (await get(ada, f"sessions/web:1/pictures/{place}"))[0] == 404
    assert (await get(ada, "sessions/web:1/pictures/x/0"))[0] == 400
    eve = await page_client(server, "eve")
    assert (await get(eve, "sessions/web:1/pictures/1/0"))[0] == 404


async def test_a_session_is_renamed_and_deleted(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    await said(ada, "web:1", "hello")
    status, body = await ada.api("POST", "sessions/web:1/title", {"title": "The  garden\n"})
    listed = (await ada.api("GET", "sessions"))[1]
    assert (status, body) == (200, {"title": "The garden"})
    assert [one["title"] for one in listed["sessions"]] == ["The garden"]
    eve = await page_client(server, "eve")
    assert (await eve.api("POST", "sessions/web:1/title", {"title": "mine"}))[0] == 404
    assert (await eve.api("POST", "sessions/web:1/delete", {}))[0] == 404
    assert (await ada.api("POST", "sessions/web:1/delete", {}))[1] == {"deleted": True}
    assert (await ada.api("GET", "sessions"))[1]["sessions"] == []
    assert (await ada.api("GET", "sessions/web:1/log"))[0] == 404
