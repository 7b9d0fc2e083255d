"""Files that must not be read as skills: links that lead outside, pipes, the runtime's own files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from everloop.sandbox.reach import Reach
from tests.support.skill_bench import settle

CANARY = "canary-5f2c"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    (place / "tea").mkdir(parents=True)
    text = f"---\nname: tea\ndescription: {CANARY}\nalways: true\n---\n{CANARY}\n"
    (place / "SKILL.md").write_text(text)
    (place / "tea/SKILL.md").write_text(text)
    (place / f"{CANARY}").mkdir()
    (place / f"{CANARY}/SKILL.md").write_text(text)
    return place


@pytest.mark.parametrize("link", ["skills", "skills/tea", "skills/tea/SKILL.md"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_leads_out_of_reach_is_not_read(bench, outside, link, absolute):
    bench.add("good")
    place = bench.folder / link
    if link == "skills":
        place.rename(bench.folder / "old")
    place.parent.mkdir(exist_ok=True)
    target = outside / {"skills": "", "skills/tea": "tea", "skills/tea/SKILL.md": "SKILL.md"}[link]
    place.symlink_to(target if absolute else os.path.relpath(target, place.parent))
    for _ in range(2):
        said = bench.prompt + (bench.load("tea") or "") + "".join(bench.skills.problems())
        assert CANARY not in said
        assert bench.skills.problems()
    settle()
    assert CANARY in "".join(bench.skills.blocks(Reach(bench.folder, restricted=False)))
    assert CANARY not in bench.prompt


def test_a_link_redirected_outside_later_is_not_read(bench, outside):
    bench.add("tea", body="inside").rename(bench.folder / "inside.md")
    link = bench.folder / "skills/tea/SKILL.md"
    link.symlink_to("../../inside.md")
    settle()
    assert "- tea: What tea is for." in bench.prompt
    assert "inside" in (bench.load("tea") or "")
    link.unlink()
    link.symlink_to(outside / "SKILL.md")
    assert CANARY not in bench.prompt + (bench.load("tea") or "")


def test_the_runtimes_own_files_inside_the_workspace_are_not_read(bench, outside):
    own = bench.folder / "own"
    own.mkdir()
    (own / "SKILL.md").write_text((outside / "SKILL.md").read_text())
    (bench.folder / "skills").mkdir()
    (bench.folder / "skills/tea").symlink_to("../own")
    bench.reach = Reach(bench.folder, protected=(own,))
    assert CANARY not in bench.prompt + (bench.load("tea") or "")


@pytest.mark.parametrize("restricted", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "sparse", "loop", "nowhere"])
def test_special_files_do_not_block_the_reader(bench, kind, restricted):
    bench.add("good")
    file = bench.folder / "skills/tea/SKILL.md"
    file.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 1 << 40)
    else:
        file.symlink_to({"endless": "/dev/zero", "loop": "SKILL.md", "nowhere": "missing"}[kind])
    bench.reach = Reach(bench.folder, restricted=restricted)
    start = time.monotonic()
    assert "- good: What good is for." in bench.prompt
    bench.load("tea")
    assert time.monotonic() - start < 20
    assert len(bench.skills.problems()) == (kind != "nowhere")


def test_nothing_is_taken_out_of_a_pipe(bench, outside):
    file = bench.folder / "skills/tea/SKILL.md"
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    pipe = os.open(file, os.O_RDWR | os.O_NONBLOCK)
    text = (outside / "SKILL.md").read_bytes()
    os.write(pipe, text)
    assert CANARY not in bench.prompt + (bench.load("tea") or "")
    assert os.read(pipe, 1000) == text
    os.close(pipe)


def test_a_file_in_place_of_the_folder_is_reported(bench):
    (bench.folder / "skills").write_text("x")
    assert bench.blocks == []
    assert len(bench.skills.problems()) == 1
