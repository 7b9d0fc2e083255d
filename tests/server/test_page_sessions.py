"""The page's sessions: lists, messages, stop, answers, search, forks, exports, titles and pictures."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

from everloop.config import Rule
from everloop.log import CallEnded, CallsDecided, TurnEnded, UserSaid

from .feeds import Page, PageClient, is_over, page_client, said
from .serving import Serving, call, serving
from .test_page_files import PIXEL

SECRET = "sk-abcdefghijklmnopqrstuvwxyz"
ASK = (Rule(do="ask", tool="write_file", why="files are dear"),)


@pytest.fixture
async def server(tmp_path: Path):
    async with serving(tmp_path, policy=ASK) as running:
        yield running


async def get(client: PageClient, path: str) -> tuple[int, bytes, str]:
    async with client.http.get(f"{client.url}/api/{path}", headers=client.headers) as response:
        return response.status, await response.read(), response.headers["Content-Type"]


async def asked(server: Serving, client: PageClient, key: str = "web:1") -> Page:
    """A session whose turn waits for a person's answer."""
    server.fake.calls(call("write_file", path="note.txt", content="hello"))
    server.fake.reply("done")
    feed = await client.feed(key)
    await client.say(key, "write it")
    page = await feed.read(lambda page: page.state.get("parked") is True)
    feed.close()
    return page


async def after(client: PageClient, page: Page, key: str = "web:1") -> Page:
    feed = await client.feed(key, page)
    await feed.read(is_over)
    feed.close()
    return page


async def test_sessions_have_titles_and_states(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    page = Page()
    await ada.say("web:idle", "What is\nin the garden?")
    await after(ada, page, "web:idle")
    server.fake.reply("fine")
    await ada.say("web:named", "hello")
    await after(ada, Page(), "web:named")
    await server.store.set_title("ada", "web:named", "A name")
    server.fake.reply("", status=500)
    await ada.say("web:fails", "fail please")
    await after(ada, Page(), "web:fails")
    await asked(server, ada, "web:waits")
    server.fake.replies.clear()
    server.fake.reply("slow", tokens=["s", "low"], delay=30)
    await ada.say("web:runs", "run " * 100)
    feed = await ada.feed("web:runs")
    await feed.read(lambda page: page.state.get("turn") is not None)
    status, body = await ada.api("GET", "sessions")
    assert status == 200
    found = {one["key"]: (one["title"], one["state"]) for one in body["sessions"]}
    assert found.pop("web:runs")[1] == "running"
    assert found == {
        "web:idle": ("What is in the garden?", "idle"),
        "web:named": ("A name", "idle"),
        "web:waits": ("write it", "waiting"),
        "web:fails": ("fail please", "failed"),
    }
    assert body["questions"] == 1
    assert body["sessions"][0]["key"] == "web:runs"  # the latest first
    assert len(body["sessions"][0]["title"]) == 80
    status, body = await ada.api("POST", "sessions/web:runs/stop", {})
    assert (status, body) == (200, {"stopped": True})
    await feed.read(is_over)
    feed.close()
    assert (await ada.api("POST", "sessions/web:runs/stop", {}))[1] == {"stopped": False}


async def test_an_owner_sees_only_their_own_sessions(server: Serving, ada: PageClient):
    page = await asked(server, ada)
    eve = await page_client(server, "eve")
    listed = (await eve.api("GET", "sessions"))[1]
    assert (listed["sessions"], listed["questions"]) == ([], 0)
    assert (await eve.api("GET", "search?q=write"))[1] == {"found": []}
    assert (await ada.api("GET", "search?q=write"))[1]["found"][0]["text"] == "write it"
    assert (await eve.api("GET", "sessions/web:1/log"))[0] == 404
    feed = await eve.feed("web:1")
    assert (await feed.read(lambda page: bool(page.state))).entries == {}
    feed.close()
    assert (await eve.answer("web:1", page.question, True))[0] == 409
    assert (await eve.api("POST", "sessions/web:1/stop", {}))[1] == {"stopped": False}
    assert not (server.workspace("ada") / "note.txt").exists()
    assert (await ada.api("GET", "sessions"))[1]["questions"] == 1


async def test_a_question_is_allowed_once(server: Serving, ada: PageClient):
    page = await asked(server, ada)
    assert "write_file" in page.entries[page.question]["question"]
    assert "/approve" not in page.entries[page.question]["question"]
    assert (await ada.answer("web:1", page.question, True))[0] == 200
    assert (await ada.answer("web:1", page.question, True))[0] == 409
    await after(ada, page)
    assert (server.workspace("ada") / "note.txt").read_text() == "hello"
    (decided,) = [one for one in await server.entries("web:1", "ada") if isinstance(one, CallsDecided)]
    assert (decided.allowed, decided.by, decided.always) == (True, "ada", False)


async def test_a_question_is_denied_with_a_note_for_the_model(server: Serving, ada: PageClient):
    page = await asked(server, ada)
    assert (await ada.answer("web:1", page.question, False, note="not on a Sunday"))[0] == 200
    await after(ada, page)
    assert not (server.workspace("ada") / "note.txt").exists()
    (ended,) = [one for one in await server.entries("web:1", "ada") if isinstance(one, CallEnded)]
    assert (ended.status, "not on a Sunday" in ended.content) == ("denied", True)


async def test_always_allows_it_for_the_rest_of_the_session(server: Serving, ada: PageClient):
    page = await asked(server, ada)
    assert (await ada.answer("web:1", page.question, True, always=True))[0] == 200
    await after(ada, page)
    server.fake.calls(call("write_file", path="note.txt", content="another"))
    server.fake.reply("done")
    await ada.say("web:1", "and another one")
    feed = await ada.feed("web:1", page)
    await feed.read(lambda page: page.kinds.count("end") == 2)
    feed.close()
    assert (server.workspace("ada") / "note.txt").read_text() == "another"
    assert page.kinds.count("asked") == 1


async def test_only_the_displayed_question_is_answered(server: Serving, ada: PageClient):
    page = await asked(server, ada)
    for wrong in (page.question - 1, page.question + 1, 0):
        assert (await ada.answer("web:1", wrong, True))[0] == 409
    assert not (server.workspace("ada") / "note.txt").exists()


async def test_a_message_is_accepted_once_however_often_it_is_sent(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    for _ in range(3):
        await ada.say("web:1", "go", id="m1")
    page = await after(ada, Page())
    await ada.say("web:1", "go", id="m1")
    assert page.kinds == ["user", "answer", "end"]
    assert len(server.fake.requests) == 1


async def test_a_message_steers_the_running_turn_or_waits_behind_it(server: Serving, ada: PageClient):
    server.fake.calls(call("exec", command="until [ -e go ]; do sleep 0.02; done"))
    server.fake.reply("I see")
    server.fake.reply("second")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "go")
    await feed.read(lambda page: any(event.name == "tool" for event in page.events))
    await ada.say("web:1", "and look left", busy="steer")
    await ada.say("web:1", "later")
    page = await feed.read(lambda page: [one["text"] for one in page.state["waiting"]] == ["and look left", "later"])
    (server.workspace("ada") / "go").touch()
    await feed.read(lambda page: page.kinds.count("end") == 2 and is_over(page))
    feed.close()
    said = [one["text"] for one in page.entries.values() if one["kind"] == "user"]
    assert said == ["go", "and look left", "later"]
    assert page.kinds.index("end") > [one.get("text") for one in page.entries.values()].index("and look left")
    assert page.state["waiting"] == []


async def test_commands_are_answered_and_a_word_answers_a_question(server: Serving, ada: PageClient):
    assert "/stop" in (await ada.say("web:1", "/help"))["reply"]
    assert (await ada.say("web:1", "/approve"))["reply"] == "There is no open question."
    assert (await ada.api("GET", "sessions"))[1]["sessions"] == []
    page = await asked(server, ada)
    assert (await ada.say("web:1", "y"))["reply"] == "Approved."
    await after(ada, page)
    assert (server.workspace("ada") / "note.txt").exists()


async def test_reading_and_writing_need_more_than_being_on_this_machine(tmp_path: Path):
    """A command with network comes from this machine, too."""
    async with serving(tmp_path, policy=ASK) as server:
        local = PageClient(server.url, server.http)
        server.fake.calls(call("write_file", path="note.txt", content="hello"))
        agent = await server.owners.agent("me")
        await agent.process_direct("write it", "web:1", attended=True)
        for method, path, body in (
            ("GET", "sessions", None),
            ("GET", "search?q=x", None),
            ("GET", "sessions/web:1/feed", None),
            ("GET", "sessions/web:1/log", None),
            ("POST", "sessions/web:1/messages", {"text": "y"}),
            ("POST", "sessions/web:1/stop", {}),
            ("POST", "sessions/web:1/answer", {"question": 3, "allow": True}),
        ):
            assert (await local.api(method, path, body))[0] == 401
        await asyncio.sleep(0.1)
        info = await server.store.session("me", "web:1")
        assert info is not None
        assert info.parked
        assert not (server.owners.config.workspace / "note.txt").exists()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {}),
        ("messages", {"text": " "}),
        ("messages", {"text": 1}),
        ("messages", {"text": "x", "unknown": 1}),
        ("messages", {"text": "x", "busy": "wait"}),
        ("messages", {"text": "x", "id": "i" * 201}),
        ("answer", {"allow": True}),
        ("answer", {"question": 1, "allow": "yes"}),
        ("stop", [1]),
    ],
)
async def test_an_invalid_body_is_refused(ada: PageClient, path: str, body: object):
    assert (await ada.api("POST", f"sessions/web:1/{path}", body))[0] == 400


async def test_keys_may_have_slashes_and_internal_sessions_are_read_only(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    await ada.say("a%2Fb%3F:c", "go")
    page = await after(ada, Page(), "a%2Fb%3F:c")
    assert page.kinds == ["user", "answer", "end"]
    assert (await ada.api("GET", "sessions"))[1]["sessions"][0]["key"] == "a/b?:c"
    await server.store.note("ada", "sub:1", [UserSaid("work"), TurnEnded("answer", "done")])
    assert [one["key"] for one in (await ada.api("GET", "sessions"))[1]["sessions"]] == ["a/b?:c"]
    assert (await ada.api("GET", "sessions/sub:1/log"))[0] == 200
    assert (await ada.api("POST", "sessions/sub:1/messages", {"text": "do evil"}))[0] == 400
    assert (await ada.api("GET", f"sessions/{'k' * 201}/log"))[0] == 400


async def test_messages_count_against_the_rate_limit(tmp_path: Path):
    async with serving(tmp_path, requests_per_minute=1) as server:
        ada = await page_client(server, "ada")
        server.fake.reply("fine")
        await ada.say("web:1", "go")
        assert (await ada.api("POST", "sessions/web:1/messages", {"text": "go"}))[0] == 429


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


async def test_pictures_of_messages_and_results_are_sent_to_their_owner(tmp_path: Path):
    async with serving(tmp_path) as server:
        ada = await page_client(server, "ada")
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
