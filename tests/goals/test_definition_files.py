"""The agents of a workspace and of the package, whatever files the folder contains."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from everloop.goals.definitions import DefinitionError
from everloop.goals.files import MAX_FILE_BYTES, MAX_FILES, load_definitions, read_definitions
from everloop.sandbox.reach import Reach

CANARY = "canary-5512"


def put(folder: Path, name: str, text: str | None = None) -> Path:
    place = folder / "agents" / f"{name}.md"
    place.parent.mkdir(exist_ok=True)
    place.write_text(text if text is not None else f"---\nname: {name}\ndescription: Ours.\n---\nYou are {name}.\n")
    return place


def test_the_shipped_agents_are_available_without_a_folder(folder):
    assert set(load_definitions(folder)) == {"investigator", "researcher"}


def test_a_workspace_file_overrides_the_shipped_one(folder):
    put(folder, "researcher")
    put(folder, "gardener")
    found = load_definitions(folder)
    assert found["researcher"].description == "Ours."
    assert set(found) == {"gardener", "investigator", "researcher"}


def test_a_broken_file_hides_the_shipped_agent_of_its_name_and_no_other(folder, caplog):
    put(folder, "researcher", "---\nname: researcher\ndescription: x\ntool: [grep]\n---\nhi\n")
    put(folder, "gardener")
    found = read_definitions(Reach(folder))
    assert set(found.known) == {"gardener", "investigator"}
    with pytest.raises(DefinitionError, match=r'^agents/researcher.md:4: unknown key "tool" \(did you mean "tools"'):
        found.get("researcher")
    assert set(load_definitions(folder)) == {"gardener", "investigator"}
    assert [record.getMessage()[:23] for record in caplog.records] == ["agents/researcher.md:4:"]


def test_the_name_in_a_file_must_match_its_file_name(folder):
    put(folder, "gardener", "---\nname: other\ndescription: x\n---\nhi\n")
    with pytest.raises(DefinitionError, match=r'^agents/gardener.md:1: name is "other"'):
        read_definitions(Reach(folder)).get("gardener")


def test_a_missing_agent_is_reported_with_the_closest_name(folder):
    found = read_definitions(Reach(folder))
    with pytest.raises(DefinitionError, match='did you mean "investigator"'):
        found.get("investigater")
    with pytest.raises(DefinitionError, match="there are: investigator, researcher"):
        found.get("zzz")


def test_other_files_of_the_folder_are_ignored(folder):
    put(folder, "gardener")
    (folder / "agents" / "notes.txt").write_text("x")
    (folder / "agents" / ".hidden.md").write_text("x")
    assert set(load_definitions(folder)) == {"gardener", "investigator", "researcher"}


async def test_files_outside_the_workspace_are_not_read_through_a_link(folder, tmp_path):
    secret = tmp_path / "secret.md"
    secret.write_text(f"---\nname: spy\ndescription: {CANARY}\n---\n{CANARY}\n")
    put(folder, "gardener")
    (folder / "agents" / "spy.md").symlink_to(secret)
    found = await asyncio.to_thread(read_definitions, Reach(folder))
    assert CANARY not in repr(found)
    assert "spy" in found.broken
    assert "gardener" in found.known


def test_a_folder_that_links_outside_the_workspace_is_not_read(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "spy.md").write_text(f"---\nname: spy\ndescription: {CANARY}\n---\n{CANARY}\n")
    (folder / "agents").symlink_to(elsewhere)
    found = read_definitions(Reach(folder))
    assert CANARY not in repr(found)
    assert found.problem
    assert set(load_definitions(folder)) == {"investigator", "researcher"}


def test_pipes_folders_invalid_text_and_endless_files_are_broken_and_do_not_block(folder):
    put(folder, "gardener")
    agents = folder / "agents"
    os.mkfifo(agents / "pipe.md")
    (agents / "folder.md").mkdir()
    (agents / "endless.md").symlink_to("/dev/zero")
    (agents / "latin.md").write_bytes(b"---\nname: latin\ndescription: caf\xe9\n---\nhi\n")
    (agents / "big.md").write_text("---\nname: big\ndescription: x\n---\n" + "x" * MAX_FILE_BYTES)
    (agents / "odd name.md").write_text("---\nname: odd\ndescription: x\n---\nhi\n")
    found = read_definitions(Reach(folder))
    assert set(found.broken) == {"pipe", "folder", "endless", "latin", "big", "odd name"}
    assert found.broken["latin"].startswith("agents/latin.md:3: ")
    assert "gardener" in found.known


def test_the_number_of_files_is_limited(folder):
    for number in range(MAX_FILES + 1):
        put(folder, f"agent-{number:03}")
    found = read_definitions(Reach(folder))
    assert len(found.known) == MAX_FILES + 2
    assert found.problem
