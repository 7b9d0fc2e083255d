"""`everloop model`: the real command, with a pipe and at a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everloop.cli.setup import ProgressBar
from everloop.providers.local.catalogue import CATALOGUE, DEFAULT, LARGER, role
from everloop.providers.local.progress import Progress
from tests.support.commands import Done, environment, everloop, finished, start, terminal, until
from tests.support.places import DOCS

from .servers import BYTES, CARD, OTHER, Answer, Server, serving, write_catalogue

HUB = "/hub/tiny-q4.gguf"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub with the model `tiny`, and a command line that knows it."""
    with serving() as running:
        running.gives(HUB, Answer(BYTES))
        path = write_catalogue(tmp_path / "catalogue.json", replace(CARD, hub=f"{running.url}{HUB}"))
        monkeypatch.setenv("EVERLOOP_TEST_CATALOGUE", str(path))
        monkeypatch.setattr(
            "tests.support.commands.COMMAND", (sys.executable, str(Path(__file__).parent / "program.py"))
        )
        yield running


async def model(*arguments: str, **settings: str) -> Done:
    return await finished(await start("model", *arguments, env=environment(None, **settings)))


def models() -> Path:
    return Path(os.environ["EVERLOOP_HOME"]) / "models"


def is_one_error(done: Done, *parts: str) -> None:
    assert (done.status, done.out) == (2, "")
    lines = done.err.splitlines()
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]


async def test_a_model_is_pulled_found_listed_and_removed(server):
    assert "not there" in (await model("list")).out
    is_one_error(await model("path", "tiny"), "everloop model pull tiny")
    pulled = await model("pull", "tiny")
    assert (pulled.status, pulled.out) == (0, f"{models() / CARD.file}\n")
    assert (models() / CARD.file).read_bytes() == BYTES
    assert (await model("path", "tiny")).out == pulled.out
    listed = json.loads((await model("list", "--json")).out)
    assert (listed["name"], listed["state"], listed["path"]) == ("tiny", "there", pulled.out.strip())
    assert (await model("remove", "tiny")).status == 0
    assert {path.name for path in models().iterdir()} == {".tiny.lock"}
    is_one_error(await model("remove", "tiny"))


async def test_the_list_has_every_model_with_its_size_and_licence_and_marks_the_default():
    lines = (await everloop("model", "list")).lines[1:]
    assert [line.split()[0] for line in lines] == list(CATALOGUE)
    assert all("Apache-2.0" in line and " MB " in line for line in lines)
    assert [line.split()[0] for line in lines if "default" in line] == [DEFAULT, LARGER]


def test_the_docs_page_lists_every_model_of_the_catalogue():
    page = (DOCS / "local-model.md").read_text()
    for card in CATALOGUE.values():
        about = card.about + role(card)
        row = f"| `{card.name}` | `{card.file}` | {card.size / 1e6:.0f} MB | {card.licence} | {about} |"
        assert row in page, f"docs/local-model.md must have: {row}"


async def test_listing_models_and_showing_a_path_need_no_network(server):
    await model("list")
    await model("list", "--check")
    await model("path", "tiny")
    assert server.requests == []
    assert not models().exists()


async def test_a_check_reads_the_files_again_and_pulls_a_damaged_one_again(server):
    path = Path((await model("pull", "tiny")).out.strip())
    at = path.stat().st_mtime_ns
    path.write_bytes(OTHER)
    os.utime(path, ns=(at, at))
    assert json.loads((await model("list", "--json")).out)["state"] == "there"
    checked = await model("list", "--check", "--json")
    assert (checked.status, json.loads(checked.out)["state"]) == (2, "damaged")
    assert len(checked.err.splitlines()) == 1
    path.touch()
    assert (await model("pull", "tiny")).status == 0
    assert path.read_bytes() == BYTES


async def test_a_partial_download_is_listed_as_such_and_removed(server):
    server.gives(HUB, Answer(BYTES, cut=200_000), Answer(status=404))
    failed = await model("pull", "tiny")
    assert (failed.status, failed.out) == (2, "")
    assert "49% there" in (await model("list")).out
    assert json.loads((await model("list", "--json")).out)["state"] == "partly"
    assert (await model("remove", "tiny")).status == 0
    assert {path.name for path in models().iterdir()} == {".tiny.lock"}


@pytest.mark.parametrize("action", ["pull", "path", "remove"])
async def test_an_unknown_name_is_one_line_with_the_known_names(server, action):
    is_one_error(await model(action, "tinny"), '"tiny"')


@pytest.mark.parametrize("action", ["pull", "path"])
async def test_a_persons_own_gguf_file_is_named_by_its_path(server, tmp_path, action):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF and whatever")
    assert (await model(action, str(mine))).out == f"{mine}\n"
    mine.write_bytes(b"<html>")
    is_one_error(await model(action, str(mine)), str(mine))
    mine.unlink()
    is_one_error(await model(action, str(mine)), str(mine))
    is_one_error(await model(action, str(tmp_path)), str(tmp_path))


async def test_a_persons_own_files_are_never_removed(server, tmp_path):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(BYTES)
    is_one_error(await model("remove", str(mine)))
    is_one_error(await model("remove", "tiny", EVERLOOP_WEIGHTS=str(mine)), str(mine))
    assert mine.read_bytes() == BYTES


async def test_a_file_in_the_settings_is_used_and_the_folder_may_differ(server, tmp_path):
    mine = tmp_path / "weights"
    mine.mkdir()
    (mine / CARD.file).write_bytes(BYTES)
    assert (await model("pull", "tiny", EVERLOOP_WEIGHTS=str(mine))).out == f"{mine / CARD.file}\n"
    assert server.requests == []
    shared = tmp_path / "shared"
    assert (await model("pull", "tiny", EVERLOOP_MODELS=str(shared))).out == f"{shared / CARD.file}\n"


async def test_a_model_that_is_being_pulled_is_not_removed(server):
    server.gives(HUB, Answer(BYTES, hold=100_000))
    process = await start("model", "pull", "tiny", env=environment())
    part = models() / f".{CARD.file}.part"
    await until(lambda: part.exists() and part.stat().st_size >= 100_000)
    is_one_error(await model("remove", "tiny"), str(process.pid))
    server.go_on.set()
    assert (await finished(process)).status == 0


async def test_a_pipe_gets_a_few_plain_lines(server):
    server.gives(HUB, Answer(BYTES, slow=0.03))
    done = await model("pull", "tiny")
    assert 1 <= len(done.err.splitlines()) <= 3
    assert "\r" not in done.err
    assert "\x1b" not in done.err


async def test_a_terminal_gets_a_bar_with_bytes_rate_and_time_left(server):
    server.gives(HUB, Answer(BYTES, slow=0.2))
    async with terminal("model", "pull", "tiny") as seen:
        await seen.sees("MB/s")
        await seen.sees("left")
        await seen.sees("100%")
        await seen.sees("[##########]")
        assert await seen.ends() == 0
    assert "[##" in seen.text
    assert f"of {CARD.size / 1e6:.1f} MB" in seen.text


def test_the_bar_leaves_out_what_does_not_fit_and_cuts_no_word():
    now = Progress("download", 500_000_000, 1_117_000_000, "the package registry")
    bar = ProgressBar("qwen2.5-coder-1.5b", io.StringIO())
    bar.show(now)
    assert bar._line(now, 120).endswith("[####......]  45% 500 MB of 1117 MB from the package registry")
    assert bar._line(now, 75).endswith("[####......]  45% 500 MB of 1117 MB")
    assert bar._line(now, 50) == "qwen2.5-coder-1.5b:  45% 500 MB of 1117 MB"


async def test_ctrl_c_at_a_terminal_stops_it_with_130(server):
    server.gives(HUB, Answer(BYTES, hold=100_000), Answer(BYTES))
    async with terminal("model", "pull", "tiny") as seen:
        await seen.sees("from the hub")
        part = models() / f".{CARD.file}.part"
        await until(lambda: part.stat().st_size >= 100_000)
        seen.type("\x03")
        assert await seen.ends() == 130
    assert (await model("pull", "tiny")).status == 0
    assert server.ranges == [None, "bytes=100000-"]
