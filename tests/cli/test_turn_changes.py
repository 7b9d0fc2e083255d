from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from everloop.cli import turn_changes
from everloop.cli.turn_changes import MAX_BYTES, Activity, SavedTurns, TurnChanges, take_snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "sub" / "a.txt").write_text("before\n")
    return tmp_path / "work"


def now() -> Activity:
    return Activity(commands=[(time.time() - 60, time.time() + 60)])


def test_a_removed_file_is_restored_with_its_mode(folder):
    (folder / "run.sh").write_text("echo\n")
    (folder / "run.sh").chmod(0o755)
    before = take_snapshot(folder)
    (folder / "run.sh").unlink()
    changes = TurnChanges.between(folder, before, take_snapshot(folder, before), now())
    assert changes.undo() == (["run.sh"], [])
    assert (folder / "run.sh").read_text() == "echo\n"
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o755


def test_nothing_is_written_through_a_link_that_replaced_a_folder(folder, tmp_path):
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


def test_a_change_made_by_no_tool_or_command_does_not_belong_to_the_turn(folder):
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").write_text("a person's\n")
    assert TurnChanges.between(folder, before, take_snapshot(folder, before), Activity()).changes == ()
    earlier = Activity(commands=[(time.time() - 90, time.time() - 80)])
    assert TurnChanges.between(folder, before, take_snapshot(folder, before), earlier).changes == ()


def test_whether_commands_ran_is_recorded_and_saved(folder, tmp_path):
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").write_text("after\n")
    after = take_snapshot(folder, before)
    by_tool = TurnChanges.between(folder, before, after, Activity(written={"sub/a.txt"}))
    by_command = TurnChanges.between(folder, before, after, now())
    saved = SavedTurns(tmp_path, folder, "cli:direct")
    saved.save([by_tool, by_command])
    assert [turn.ran_commands for turn in (by_tool, by_command)] == [False, True]
    assert [turn.ran_commands for turn in saved.load()] == [False, True]


def test_a_file_too_large_to_be_saved_is_named(folder):
    (folder / "big").write_bytes(b"x" * (MAX_BYTES + 1))
    before = take_snapshot(folder)
    (folder / "big").write_bytes(b"y")
    done, kept = TurnChanges.between(folder, before, take_snapshot(folder, before), now()).undo()
    assert (done, kept) == ([], ["big: it was too large to be kept"])
    assert (folder / "big").read_bytes() == b"y"


def test_a_named_pipe_in_the_folder_does_not_block_the_scan(folder):
    os.mkfifo(folder / "pipe")
    assert set(take_snapshot(folder).files) == {"sub/a.txt"}


def test_a_later_change_by_the_user_is_kept(folder):
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").write_text("the turn's\n")
    changes = TurnChanges.between(folder, before, take_snapshot(folder, before), now())
    (folder / "sub" / "a.txt").write_text("a person's\n")
    assert changes.undo() == ([], ["sub/a.txt: it has changed since, and is left alone"])
    assert (folder / "sub" / "a.txt").read_text() == "a person's\n"


# ---------------------------------------------------------------------------------------------- after a restart


def changed(folder: Path, text: str) -> TurnChanges:
    """A turn that writes a file."""
    before = take_snapshot(folder)
    (folder / "sub" / "a.txt").write_text(text)
    return TurnChanges.between(folder, before, take_snapshot(folder, before), now())


def test_another_process_can_undo_saved_turns_one_after_another(folder, tmp_path):
    turns = [changed(folder, "first\n"), changed(folder, "second\n")]
    saved = SavedTurns(tmp_path / "home", folder, "cli:direct")
    saved.save(turns)
    assert saved.path.stat().st_mode & 0o777 == 0o600
    assert saved.path.parent.stat().st_mode & 0o777 == 0o700
    assert SavedTurns(tmp_path / "home", folder, "cli:other").load() == []
    loaded = SavedTurns(tmp_path / "home", folder, "cli:direct").load()
    assert loaded == turns
    for turn, left in ((loaded[1], "first\n"), (loaded[0], "before\n")):
        assert turn.undo() == (["sub/a.txt"], [])
        assert (folder / "sub" / "a.txt").read_text() == left
    saved.save([])
    assert not saved.path.exists()


def test_saved_changes_are_limited_by_turns_bytes_and_sessions(folder, tmp_path, monkeypatch):
    saved = SavedTurns(tmp_path / "home", folder, "cli:direct")
    turns = [changed(folder, f"{n}\n") for n in range(turn_changes.SAVED_TURNS + 3)]
    saved.save(turns)
    assert saved.load() == turns[-turn_changes.SAVED_TURNS :]
    monkeypatch.setattr(turn_changes, "SAVED_BYTES", 1_000)
    saved.save([changed(folder, "x" * 2_000), small := changed(folder, "y")])
    assert saved.load() == []  # the last turn's own before-image is too large
    saved.save([small, changed(folder, "z")])
    assert [change.after.content for turn in saved.load() for change in turn.changes if change.after] == [b"z"]
    monkeypatch.setattr(turn_changes, "SAVED_SESSIONS", 3)
    for n in range(6):
        SavedTurns(tmp_path / "home", folder, f"cli:{n}").save([changed(folder, str(n))])
    assert len(list(saved.path.parent.iterdir())) == 3


def test_with_a_damaged_file_nothing_can_be_undone(folder, tmp_path):
    saved = SavedTurns(tmp_path / "home", folder, "cli:direct")
    saved.save([changed(folder, "new\n")])
    saved.path.write_bytes(saved.path.read_bytes()[:-5])
    assert saved.load() == []
