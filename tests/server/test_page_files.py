"""Files, memory and skills over the page's API: what the policy and the confinement let through, told by canaries."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from everloop.config import Rule

from .feeds import PageClient, is_over, page_client
from .serving import Serving, serving

CANARY = "canary-7d1f"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RULES = (Rule(do="deny", path="private/**", why="private"), Rule(do="ask", tool="write_file", path="skills/**"))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, policy=RULES) as running:
        yield running


@pytest.fixture
async def ada(server: Serving) -> PageClient:
    client = await page_client(server, "ada")
    assert (await client.api("GET", "jobs"))[0] == 200  # her workspace is made with her agent
    return client


def workspace(server: Serving, owner: str = "ada") -> Path:
    return server.workspace(owner)


async def get(client: PageClient, what: str, path: str) -> tuple[int, Any]:
    return await client.api("GET", f"{what}?path={quote(path, safe='')}")


async def download(client: PageClient, path: str) -> tuple[int, bytes, dict[str, str]]:
    address = f"{client.url}/api/files/data?path={quote(path, safe='')}"
    async with client.http.get(address, headers=client.headers) as response:
        return response.status, await response.read(), dict(response.headers)


async def test_a_folder_is_listed_and_files_are_read_and_downloaded(server: Serving, ada: PageClient):
    folder = workspace(server)
    (folder / "notes").mkdir()
    (folder / "a.txt").write_text("hello <b>you</b>\n")
    (folder / "b.bin").write_bytes(b"\0\1\2" * 100_000)
    (folder / "c.png").write_bytes(PIXEL)
    (folder / "d").symlink_to("a.txt")
    status, body = await get(ada, "files", ".")
    found = [(one["name"], one["kind"], one["size"]) for one in body["entries"]]
    assert status == 200
    assert found[:1] == [("notes", "folder", found[0][2])]
    assert found[1:4] == [("a.txt", "file", 17), ("b.bin", "file", 300_000), ("c.png", "file", len(PIXEL))]
    assert found[4][:2] == ("d", "link")
    status, body = await get(ada, "files/text", "a.txt")
    assert (status, body["text"], body["cut"]) == (200, "hello <b>you</b>\n", False)
    assert (await get(ada, "files/text", "d"))[1]["text"] == "hello <b>you</b>\n"
    assert (await get(ada, "files/text", "b.bin"))[1]["text"] is None
    assert (await get(ada, "files/text", "c.png"))[1]["picture"] is True
    status, data, headers = await download(ada, "b.bin")
    assert (status, data) == (200, b"\0\1\2" * 100_000)
    assert headers["Content-Disposition"] == "attachment; filename*=UTF-8''b.bin"
    assert headers["Content-Type"] == "application/octet-stream"
    assert "sandbox" in headers["Content-Security-Policy"]
    assert (await get(ada, "files", "missing"))[0] == 404
    assert (await get(ada, "files/text", "notes"))[0] == 400
    assert (await get(ada, "files", "a.txt"))[0] == 400


async def test_no_path_leads_out_of_the_workspace(server: Serving, ada: PageClient, tmp_path: Path):
    eve = await page_client(server, "eve")
    assert (await eve.api("GET", "jobs"))[0] == 200
    outside = tmp_path / "outside"
    outside.mkdir()
    folder, home = workspace(server), server.owners.config.home
    for secret in (outside / "secret.md", workspace(server, "eve") / "secret.md", home / "secret.md"):
        secret.write_text(CANARY)
    (folder / "to_file").symlink_to(outside / "secret.md")
    (folder / "to_folder").symlink_to(outside)
    (folder / "to_eve").symlink_to("../../eve/workspace")
    (folder / "memory").symlink_to(outside)
    (folder / "uploads").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    hidden = [
        "../../eve/workspace/secret.md", "../../../secret.md", "..", "../..", "/", str(outside), "to_file", "to_folder",
        "to_folder/secret.md", "to_eve", "to_eve/secret.md", str(outside / "secret.md"), "notes/../../../../secret.md",
        "memory/secret.md", "uploads/secret.md", "/etc/passwd", "~/secret.md", "/proc/self/environ", "pipe",
        str(home / "secret.md"), str(home / "everloop.db"), str(home / "page.key"), "a\0b", "./../../eve/workspace",
    ]  # fmt: skip
    for path in hidden:
        for what in ("files", "files/text", "memory/text"):
            status, body = await get(ada, what, path)
            assert status in (400, 403, 404), (what, path, body)
            assert CANARY not in str(body)
            assert "root:" not in str(body)
            assert "secret.md" not in str(body.get("entries"))
        status, data, _ = await download(ada, path)
        assert status in (400, 403, 404), path
        assert CANARY.encode() not in data
    before = sorted(outside.iterdir())
    for path in ("memory/secret.md", "memory/new.md", "../x.md", "skills/../../../x.md", str(outside / "new.md")):
        status, body = await ada.api("POST", "memory", {"path": path, "text": "taken", "digest": ""})
        assert status in (400, 403, 404, 409), (path, body)
    for name in ("x.txt", "../../x.txt", "/etc/x"):
        body = {"name": name, "data": base64.b64encode(b"taken").decode()}
        assert (await ada.api("POST", "files/uploads", body))[0] == 403
    assert sorted(outside.iterdir()) == before
    assert (outside / "secret.md").read_text() == CANARY
    for path in hidden:
        status, _ = await ada.api("POST", "sessions/web:1/messages", {"text": "see", "media": [path]})
        assert status in (400, 403, 404), path
    assert server.fake.requests == []


async def test_the_machines_user_stays_in_the_workspace_even_without_restriction(tmp_path: Path):
    (tmp_path / "secret.md").write_text(CANARY)
    async with serving(tmp_path, restrict_to_workspace=False) as server:
        await server.client("first")
        me = PageClient(server.url, server.http)
        me.headers = server.headers
        (server.owners.config.workspace / "link").symlink_to(tmp_path / "secret.md")
        for path in (str(tmp_path / "secret.md"), "link", "../../secret.md"):
            assert (await get(me, "files/text", path))[0] == 403


async def test_the_policy_applies_to_the_page(server: Serving, ada: PageClient):
    folder = workspace(server)
    (folder / "private").mkdir()
    (folder / "private" / "a.md").write_text(CANARY)
    (folder / "link.md").symlink_to("private/a.md")
    for path in ("private/a.md", "link.md", "private"):
        for what in ("files", "files/text"):
            status, body = await get(ada, what, path)
            assert status in (400, 403), (what, path, body)
            assert CANARY not in str(body)
        assert (await download(ada, path))[0] in (400, 403)
    skill = folder / "skills" / "tea" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: tea\ndescription: How tea is made.\n---\nBoil water.\n")
    digest = (await get(ada, "memory/text", "skills/tea/SKILL.md"))[1]["digest"]
    body = {"path": "skills/tea/SKILL.md", "text": "changed", "digest": digest}
    status, answer = await ada.api("POST", "memory", body)  # no person can be asked for it here
    assert (status, answer["error"]["code"]) == (403, "not_allowed")
    assert "Boil water" in skill.read_text()


async def test_memory_is_read_and_changed_and_skills_are_listed(server: Serving, ada: PageClient):
    folder = workspace(server)
    status, body = await ada.api("GET", "memory")
    kinds = {one["name"]: (one["kind"], one["editable"]) for one in body["files"]}
    assert status == 200
    assert kinds["MEMORY.md"] == ("memory", True)
    assert kinds["git"] == ("skill", False)
    shipped = next(one["path"] for one in body["files"] if one["name"] == "git")
    assert "git" in (await get(ada, "memory/text", shipped))[1]["text"]
    assert (await ada.api("POST", "memory", {"path": shipped, "text": "x", "digest": ""}))[0] == 403
    status, saved = await ada.api("POST", "memory", {"path": "memory/MEMORY.md", "text": "- tea\n", "digest": ""})
    assert (status, (folder / "memory" / "MEMORY.md").read_text()) == (200, "- tea\n")
    (folder / "memory" / "MEMORY.md").write_text("- coffee\n")
    late = {"path": "memory/MEMORY.md", "text": "- milk\n", "digest": saved["digest"]}
    assert (await ada.api("POST", "memory", late))[0] == 409
    assert (folder / "memory" / "MEMORY.md").read_text() == "- coffee\n"
    read = (await get(ada, "memory/text", "memory/MEMORY.md"))[1]
    assert read["text"] == "- coffee\n"
    assert (await ada.api("POST", "memory", {**late, "digest": read["digest"]}))[0] == 200
    for path in ("notes.md", "memory/x.sh", "AGENTS.md"):
        assert (await ada.api("POST", "memory", {"path": path, "text": "x", "digest": ""}))[0] == 403
        assert not (folder / path).exists()


async def test_an_uploaded_picture_and_a_file_reach_the_model(server: Serving, ada: PageClient):
    paths = []
    for name, data in (("rose.png", PIXEL), ("../notes of\n mine.txt", b"secret notes")):
        body = {"name": name, "data": base64.b64encode(data).decode()}
        status, made = await ada.api("POST", "files/uploads", body)
        assert (status, made["size"]) == (200, len(data))
        assert (workspace(server) / made["path"]).read_bytes() == data
        paths.append(made["path"])
    assert paths[1].endswith("-notes-of-mine.txt")
    server.fake.reply("A rose.")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "What is this?", media=paths)
    page = await feed.read(is_over)
    feed.close()
    said = server.seen()[-1]["content"]
    assert said[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert said[1]["text"].startswith("What is this?")
    assert paths[1] in said[1]["text"]
    assert "What is this?" in page.entries[1]["text"]
    assert (await ada.api("POST", "files/uploads", {"name": "x", "data": "no base64!"}))[0] == 400
