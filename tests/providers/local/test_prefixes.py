"""Saved states of a prompt's prefix if the disk or the folder fails: no leftovers take up space."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from everloop.providers.local import child
from everloop.providers.local.llama import LlamaError, Loading
from everloop.providers.local.prefixes import Prefixes
from everloop.providers.local.states import States

TEXT = "Be kind to every guest. " * 60


class Disk:
    """A model that has read everything, whose states go to a folder."""

    def __init__(self, folder: Path, full: bool = False) -> None:
        self._folder = folder
        self._full = full

    def idle_slots(self) -> list[int]:
        return [0]

    def read_prompt(self, *_: Any) -> tuple[int, int]:
        return 0, 400

    def save(self, _: int, file: str) -> None:
        (self._folder / file).write_bytes(bytes(5_000))
        if self._full:
            raise LlamaError({"code": 500, "message": "Unable to save slot"})


def prepared(model: Disk, states: States) -> dict[str, Any]:
    prefixes: Any = Prefixes
    found: dict[str, Any] = prefixes(model, states).prepare({"prompt": TEXT}, len(TEXT), True, lambda: False)
    return found


def test_a_state_truncated_by_a_full_disk_is_removed(tmp_path):
    states = States(tmp_path / "cache", "model")
    assert prepared(Disk(states.folder, full=True), states) == {"prefix_read": 400}
    assert list(states.folder.iterdir()) == []


def test_a_state_without_room_for_its_checksum_is_removed(tmp_path, monkeypatch):
    states = States(tmp_path / "cache", "model")

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert prepared(Disk(states.folder), states) == {"prefix_read": 400}
    assert list(states.folder.iterdir()) == []


def test_a_state_folder_of_another_user_costs_only_time(tmp_path, monkeypatch):
    class Loaded:
        version = "1"

        def __init__(self, _: Loading) -> None:
            pass

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(child, "Llama", Loaded)
    monkeypatch.setattr(Path, "chmod", refused)
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    output: Any = None
    model = child.Model(Loading(str(weights), 512, 1, 1, str(tmp_path / "cache")), output)
    assert model.prefixes.prepare({"prompt": TEXT}, len(TEXT), True, lambda: False) == {}
