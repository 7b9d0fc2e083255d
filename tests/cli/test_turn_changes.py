from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from everloop.cli.turn_changes import MOST_BYTES, Activity, TurnChanges, take_snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "sub" / "a.txt").write_text("before\n")
    return tmp_path / "work"


def now() -> Activity:
    return Activity(commands=[(time.time() - 60, time.time() + 60)])


def test_a_removed_file_comes_back_with_its_mode(folder):
    (folder / "run.sh").write_text("echo\n")
    (folder / "run.sh").chmod(0o755)
    before = take_snapshot(folder)
    (folder / "run.sh").unlink()
    changes = TurnChanges.between(folder, before, take_snapshot(folder, before), now())
    assert changes.undo() == (["run.sh"], [])
    assert (folder / "run.sh").read_text() == "echo\n"
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o755


def test_nothing_is_written_through_a_link_that_took_the_place_of_a_folder(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").unlink()
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to(outside)
    done, kept = TurnChanges.between(folder, before, take_snapshot(folder, before), now()).undo()
    assert done == []
    assert kept[0].startswith("sub/a.txt: ")
    assert list(outside.iterdir()) == []


def test_a_change_that_no_tool_and_no_command_made_is_not_the_turns(folder):
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").write_text("a person's\n")
    assert TurnChanges.between(folder, before, take_snapshot(folder, before), Activity()).changes == ()
    earlier = Activity(commands=[(time.time() - 90, time.time() - 80)])
    assert TurnChanges.between(folder, before, take_snapshot(folder, before), earlier).changes == ()


def test_a_file_that_was_too_large_to_be_kept_is_named(folder):
    (folder / "big").write_bytes(b"x" * (MOST_BYTES + 1))
    before = take_snapshot(folder)
    (folder / "big").write_bytes(b"y")
    done, kept = TurnChanges.between(folder, before, take_snapshot(folder, before), now()).undo()
    assert (done, kept) == ([], ["big: it was too large to be kept"])
    assert (folder / "big").read_bytes() == b"y"


def test_a_pipe_in_the_folder_does_not_stop_the_reading(folder):
    os.mkfifo(folder / "pipe")
    assert set(take_snapshot(folder).files) == {"sub/a.txt"}


def test_a_later_change_by_a_person_is_left_alone(folder):
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").write_text("the turn's\n")
    changes = TurnChanges.between(folder, before, take_snapshot(folder, before), now())
    (folder / "sub" / "a.txt").write_text("a person's\n")
    assert changes.undo() == ([], ["sub/a.txt: it was changed since, and is left alone"])
    assert (folder / "sub" / "a.txt").read_text() == "a person's\n"
