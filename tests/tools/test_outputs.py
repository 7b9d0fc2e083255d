"""Long results are saved within limits: per text, per session, and for all sessions."""

from __future__ import annotations

import os

import pytest

from everloop.tools import registry
from everloop.tools.registry import keep_output, outputs_folder


@pytest.fixture
def folder(tmp_path):
    return outputs_folder(tmp_path, "me", "cli:direct")


def test_a_text_is_saved_where_only_its_session_finds_it(tmp_path, folder):
    place = keep_output(folder, "exec-call/../x", "long täxt".encode())
    assert place.parent == folder
    assert place.read_text() == "long täxt"
    assert outputs_folder(tmp_path, "me", "cli:other") != folder
    assert outputs_folder(tmp_path, "you", "cli:direct") != folder
    assert folder.stat().st_mode & 0o077 == 0


def test_a_text_is_cut_at_its_limit(folder, monkeypatch):
    monkeypatch.setattr(registry, "MAX_BYTES", 10)
    assert keep_output(folder, "a", b"x" * 50).stat().st_size == 10


def test_the_oldest_texts_of_a_session_go_first(folder, monkeypatch):
    monkeypatch.setattr(registry, "MAX_FILES", 3)
    for number in range(6):
        os.utime(keep_output(folder, f"text{number}", b"x"), (number, number))
    assert sorted(path.name for path in folder.iterdir()) == ["text3.txt", "text4.txt", "text5.txt"]


def test_the_saved_bytes_of_a_session_are_limited(folder, monkeypatch):
    monkeypatch.setattr(registry, "MAX_BYTES", 100)
    monkeypatch.setattr(registry, "MAX_SESSION_BYTES", 250)
    for number in range(9):
        os.utime(keep_output(folder, f"text{number}", b"x" * 100), (number, number))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 250


def test_the_least_recently_used_sessions_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "MAX_SESSIONS", 3)
    for number in range(6):
        folder = outputs_folder(tmp_path, "me", f"cli:{number}")
        keep_output(folder, "text", b"x")
        os.utime(folder, (number + 1, number + 1))
    left = {path.name for path in (tmp_path / "outputs").iterdir()}
    assert left == {outputs_folder(tmp_path, "me", f"cli:{number}").name for number in (3, 4, 5)}
