"""`everloop sessions`: titles and deletion, and what the service removes on its own."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing

import pytest

from everloop.bus import InboundMessage
from everloop.cli.serve import at_work
from everloop.cli.session_list import Listed, Totals
from everloop.cli.terminal import session_lines
from everloop.config import Config
from everloop.log import ModelAnswered, Request, TurnEnded
from everloop.store import deletion
from everloop.store.base import SessionInfo
from everloop.store.peers import new_worker, retire
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI
from everloop.tools.registry import keep_output, outputs_folder
from tests.support.commands import environment, everloop, start, terminal, until


async def said(server: FakeOpenAI, key: str, text: str) -> None:
    server.reply(f"About {text}.")
    assert (await everloop("run", "--session", key, text, server=server)).status == 0


# ---------------------------------------------------------------------------------------------- deletion


async def test_yes_deletes_a_session_everywhere(server, home):
    await said(server, "cli:birds", "the heron")
    await said(server, "cli:kept", "the stork")
    saved = await asyncio.to_thread(keep_output, outputs_folder(home, "me", "cli:birds"), "long", b"canary")
    await everloop("cron", "add", "look again", "--every", "1h", "--session", "cli:birds", server=server)
    done = await everloop("sessions", "delete", "heron", "--yes", server=server)
    assert done.status == 0
    assert done.lines == [
        "Deleted cli:birds “the heron”: 1 turn, 3 entries of the log, 1 message.",
        "1 scheduled job will write to it again: `everloop cron list` shows the jobs.",
    ]
    assert not saved.exists()
    listed = await everloop("sessions", "--json", server=server)
    assert [json.loads(line)["key"] for line in listed.lines] == ["cli:kept"]
    for gone in (("show",), ("export",), ("delete", "--yes")):
        done = await everloop("sessions", gone[0], "cli:birds", *gone[1:], server=server)
        assert (done.status, done.out) == (2, "")
        assert 'no session has the key or title "cli:birds"' in done.err
    assert "heron" not in (await everloop("log", "--all", server=server)).out


async def test_without_yes_and_without_a_terminal_nothing_is_deleted(server):
    await said(server, "cli:birds", "the heron")
    done = await everloop("sessions", "delete", "cli:birds", server=server)
    assert done.status == 2
    assert "would be deleted for good: pass --yes" in done.err
    assert "the heron" in (await everloop("sessions", server=server)).out


@pytest.mark.parametrize(("key", "status"), [("y", 0), ("n", 1), ("", 1)])
async def test_at_a_terminal_it_asks_first(server, key, status):
    await said(server, "cli:birds", "the heron")
    async with terminal("sessions", "delete", "cli:birds", server=server) as screen:
        await screen.shows("It cannot be undone. [y/N]")
        screen.type(f"{key}\r")
        await screen.shows("Deleted cli:birds" if status == 0 else "Nothing is deleted.")
        assert await screen.ends() == status
    assert ("the heron" in (await everloop("sessions", server=server)).out) == (status != 0)


async def test_a_session_with_a_running_turn_is_refused(server):
    server.hang(60)
    running = await start(
        "run", "--session", "cli:birds", "the heron", env=environment(server), stdin=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: server.requests)
        done = await everloop("sessions", "delete", "cli:birds", "--yes", server=server)
        assert done.status == 2
        assert "cli:birds is running" in done.err
    finally:
        running.kill()
        await running.communicate()
    assert (await everloop("sessions", "delete", "cli:birds", "--yes", server=server)).status == 0


# ---------------------------------------------------------------------------------------------- titles


async def test_titles_are_kept_in_the_store_and_those_of_earlier_versions_are_migrated(server, home):
    await said(server, "cli:birds", "the heron")
    await said(server, "cli:kept", "the stork")
    titles = {str(home / "everloop.db"): {"cli:birds": "Old", "cli:gone": "x"}, "elsewhere.db": {"cli:birds": "Not"}}
    (home / "titles.json").write_text(json.dumps(titles))
    await everloop("sessions", "rename", "cli:kept", "New", server=server)
    listed = (await everloop("sessions", server=server)).out
    assert "Old" in listed
    assert "New" in listed
    assert json.loads((home / "titles.json").read_text()) == {"elsewhere.db": {"cli:birds": "Not"}}
    with closing(sqlite3.connect(home / "everloop.db")) as db:
        assert set(db.execute("SELECT key, title FROM session")) == {("cli:birds", "Old"), ("cli:kept", "New")}
    await everloop("sessions", "rename", "cli:birds", "", server=server)
    assert "the heron" in (await everloop("sessions", server=server)).out


async def test_the_model_titles_an_idle_chat_and_the_tokens_are_counted(server, home):
    server.reply("Herons eat fish.")
    server.reply("“Feeding Herons”.")
    async with terminal(server=server, EVERLOOP_TITLES="model", columns=120) as screen:
        await screen.ready()
        screen.type("what do herons eat?\r")
        await screen.shows("· Feeding Herons ·")
        with closing(sqlite3.connect(home / "everloop.db")) as db:
            (usage,) = db.execute("SELECT naming_usage FROM session").fetchone()
            (answer,) = db.execute("SELECT data FROM entry WHERE kind = 'answer'").fetchone()
        read, written = (
            json.loads(usage)[name] + json.loads(answer)["usage"][name]
            for name in ("prompt_tokens", "completion_tokens")
        )
        assert json.loads(usage)["prompt_tokens"] > 0
        screen.type("/cost\r")
        await screen.shows(f"{read:,} tokens read, {written} written")
        screen.type("\x04")
        assert await screen.ends() == 0
    asked = server.requests[1].body
    assert asked["messages"][0]["content"].startswith("You name conversations.")
    assert "what do herons eat?" in asked["messages"][1]["content"]
    assert "tools" not in asked
    (listed,) = [json.loads(line) for line in (await everloop("sessions", "--json", server=server)).lines]
    assert (listed["title"], listed["input_tokens"], listed["output_tokens"]) == ("Feeding Herons", read, written)


async def test_a_busy_chat_is_not_titled_and_its_next_turn_does_not_wait(server):
    server.reply("First.")
    server.hang(60)  # the call for a title
    async with terminal(server=server, EVERLOOP_TITLES="model") as screen:
        await screen.ready()
        screen.type("one\r")
        await screen.shows("First.")
        await until(lambda: len(server.requests) == 2)
        assert "You name conversations" in str(server.requests[1].body)
        server.reply("Second.")
        screen.type("two\r")
        await screen.shows("Second.")
    assert len([one for one in server.requests if "You name conversations" not in str(one.body)]) == 2


# ---------------------------------------------------------------------------------------------- old requests


@pytest.mark.parametrize(("keep", "is_kept"), [("1h", False), ("", True)])
async def test_a_service_removes_old_requests_and_their_saved_data(home, monkeypatch, tmp_path, keep, is_kept):
    monkeypatch.setattr(deletion, "FIRST_SECONDS", 0.0)
    store = SQLiteStore(tmp_path / "store.db")
    for id in ("old", "new"):
        worker = new_worker()
        message = InboundMessage("api", "client", id, "hi", session=f"api:{id}", request=Request())
        claim = await store.begin("me", f"api:{id}", worker, message)
        assert claim is not None
        await store.finish(claim, [ModelAnswered("yes"), TurnEnded("answer", "yes")])
        retire(worker)
    saved = await asyncio.to_thread(keep_output, outputs_folder(home, "me", "api:old"), "long", b"canary")
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
        db.execute("UPDATE session SET updated_at = ? WHERE key = 'api:old'", (time.time() - 7200,))
    (tmp_path / "w").mkdir()
    config = Config(
        base_url="http://127.0.0.1:1/v1", model="m", workspace=tmp_path / "w", keep_requests=keep, home=home
    )
    looked = asyncio.Event()
    step = store.prune_requests

    async def prune_requests(*given):
        found = await step(*given)
        looked.set()
        return found

    monkeypatch.setattr(store, "prune_requests", prune_requests)
    async with at_work(config, store, drain=1.0):
        if is_kept:
            await asyncio.sleep(0.2)
            assert not looked.is_set()
        else:
            async with asyncio.timeout(30):
                await looked.wait()
                while saved.exists():
                    await asyncio.sleep(0.01)
        assert [info.key for info in await store.sessions("me")] == (["api:new", "api:old"] if is_kept else ["api:new"])
    assert saved.exists() == is_kept


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_long_title_is_truncated_so_that_a_session_fits_one_line(columns):
    info = SessionInfo(1, "me", "cli:direct", 9, 0, time.time() - 100, time.time() - 100, None, None)
    (line,) = session_lines([Listed(info, "word " * 40, Totals(turns=12))], Config(), columns)
    assert columns - 10 < len(line) <= columns
    assert line.endswith("…  12 turns · 1 minute ago · cli:direct")
