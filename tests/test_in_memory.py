"""The tests' temporary files are in memory if there is room for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from .support.in_memory import MEMORY, ROOM, is_fit, keep_in_memory

pytestmark = [
    pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no such folder"),
    pytest.mark.platform("only Linux has files in memory without being asked"),
]


def system(free: int, flags: int = 0) -> os.statvfs_result:
    block = 4096
    return os.statvfs_result((block, block, 0, 0, free // block, 0, 0, 0, flags, 255))


def test_a_file_system_is_fit_if_it_has_room_and_may_run_programs():
    assert is_fit(system(ROOM))
    assert is_fit(system(ROOM, os.ST_NOSUID | os.ST_NODEV))
    assert not is_fit(system(ROOM - 4096))
    assert not is_fit(system(ROOM, os.ST_NOEXEC))


def test_a_fit_folder_is_used_by_this_process_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not is_fit(os.statvfs(tmp_path)):
        pytest.skip("there is no room")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.delenv("TMPDIR", raising=False)
    keep_in_memory(tmp_path / "missing")
    assert "TMPDIR" not in os.environ
    keep_in_memory(tmp_path)
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(tmp_path)


def test_a_folder_that_a_person_has_chosen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", "/chosen")
    monkeypatch.setenv("TMPDIR", "/chosen")
    keep_in_memory(tmp_path)
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == "/chosen"
