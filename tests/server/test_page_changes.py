"""What turns changed, its undoing, the archive and completion over the page's API: who may do it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.cli.turn_changes import Snapshots
from everloop.config import Rule

from .feeds import PageClient, page_client, said
from .serving import Serving, call, serving

POLICY = (
    Rule(do="deny", tool="read_file", path="secret.md", why="it is secret"),
    Rule(do="deny", tool="write_file", path="fixed.md", why="it stays"),
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, policy=POLICY) as running:
        yield running


async def changed(server: Serving, ada: PageClient, command: str) -> Path:
    """A turn whose command changes files."""
    workspace = server.workspace("ada")
    server.fake.calls(call("exec", command=command))
    server.fake.reply("done")
    await said(ada, "web:1", "change it")
    return workspace


async def test_a_file_hidden_by_the_policy_is_not_shown_and_a_fixed_one_not_undone(server: Serving):
    ada = await page_client(server, "ada")
    workspace = await changed(server, ada, "echo canary-word > secret.md; echo b > open.md; echo c > fixed.md")
    status, body = await ada.api("GET", "sessions/web:1/changes")
    assert status == 200
    files = {one["path"]: one for one in body["files"]}
    assert (files["open.md"]["before"], files["open.md"]["after"]) == (None, "b\n")
    assert "secret" in files["secret.md"]["note"]
    assert "canary-word" not in str(body)
    status, body = await ada.api("POST", "sessions/web:1/undo", {})
    assert (status, body["error"]["code"]) == (403, "not_allowed")
    assert (workspace / "open.md").exists()


async def test_a_turn_is_undone_once_and_by_its_owner_alone(server: Serving):
    ada, eve = await page_client(server, "ada"), await page_client(server, "eve")
    workspace = await changed(server, ada, "echo b > open.md")
    for path in ("changes", "undo"):
        method = "GET" if path == "changes" else "POST"
        assert (await eve.api(method, f"sessions/web:1/{path}", None if method == "GET" else {}))[0] == 404
    assert (workspace / "open.md").exists()
    assert await ada.api("POST", "sessions/web:1/undo", {}) == (200, {"restored": ["open.md"], "kept": []})
    assert not (workspace / "open.md").exists()
    assert (await ada.api("POST", "sessions/web:1/undo", {}))[1]["error"]["code"] == "nothing_changed"
    assert (await ada.api("GET", "sessions/web:1/changes"))[1] == {"files": []}


async def test_a_session_is_archived_by_its_owner_alone(server: Serving):
    ada, eve = await page_client(server, "ada"), await page_client(server, "eve")
    server.fake.reply("hello")
    await said(ada, "web:1", "hi")
    assert (await eve.api("POST", "sessions/web:1/archive", {"archived": True}))[0] == 404
    assert (await ada.api("POST", "sessions/web:1/archive", {"archived": True}))[0] == 200
    assert (await ada.api("GET", "sessions"))[1]["sessions"] == []
    (found,) = (await ada.api("GET", "sessions?archived=1"))[1]["sessions"]
    assert (found["key"], found["archived"]) == ("web:1", True)
    assert (await ada.api("GET", "search?q=hello"))[1]["found"][0]["session"] == "web:1"
    server.fake.reply("again")
    await said(ada, "web:1", "hi again")
    assert [one["key"] for one in (await ada.api("GET", "sessions"))[1]["sessions"]] == ["web:1"]


async def test_files_are_completed_within_the_workspace_and_named_ones_obey_the_policy(server: Serving):
    ada, eve = await page_client(server, "ada"), await page_client(server, "eve")
    workspace = await changed(server, ada, "mkdir beds; echo x > beds/roses.md; echo canary-word > secret.md")
    assert (workspace / "beds" / "roses.md").exists()
    assert (await ada.api("GET", "files/matching?q=brs"))[1] == {"paths": ["beds/roses.md"]}
    assert (await eve.api("GET", "files/matching?q=brs"))[1] == {"paths": []}
    assert (await ada.api("GET", f"files/matching?q={'x' * 300}"))[0] == 400
    assert "stop" in [one["name"] for one in (await ada.api("GET", "commands"))[1]["commands"]]
    server.fake.reply("seen")
    await ada.say("web:2", "look at @secret.md and @beds/roses.md and @../../me")
    await server.ended("web:2", "ada")
    assert "canary-word" not in str(server.seen()[-1])
    assert server.seen()[-1]["content"].endswith("and @../../me\n[attachment: beds/roses.md]")


def rewritten(path: Path, text: str) -> None:
    """Change a file so that nothing but its content tells it."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_unchanged_files_are_not_read_again_for_the_next_message(server: Serving):
    ada = await page_client(server, "ada")
    workspace = server.workspace("ada")
    workspace.mkdir(parents=True, exist_ok=True)
    for name in ("same.md", "other.md"):
        (workspace / name).write_text("first")
    server.fake.reply("hello")
    await said(ada, "web:1", "hi")
    rewritten(workspace / "same.md", "later")  # were it read again, this would be seen
    (workspace / "other.md").write_text("later, and longer")
    server.fake.calls(call("exec", command="echo end > same.md; echo end > other.md"))
    server.fake.reply("done")
    await said(ada, "web:2", "change them")
    files = {one["path"]: one["before"] for one in (await ada.api("GET", "sessions/web:2/changes"))[1]["files"]}
    assert files == {"same.md": "first", "other.md": "later, and longer"}


def test_recorded_workspaces_are_bounded(tmp_path: Path):
    snapshots = Snapshots(most=10)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("12345678")
        snapshots.take(tmp_path / name)
    for name in ("b", "a"):
        rewritten(tmp_path / name / "file", "87654321")
    kept = {name: snapshots.take(tmp_path / name).files["file"].content for name in ("b", "a")}
    assert kept == {"b": b"12345678", "a": b"87654321"}  # the older one was forgotten, and is read again
