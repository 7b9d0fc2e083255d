"""The view of the workspace that calls and their results give."""

from __future__ import annotations

from typing import Any

import pytest

from everloop.tools.workspace_view import Call, WorkspaceView, view_of

LISTED = Call("list_dir", {"path": "."}, "nets/\nmemory/\npike.md  1 kB\ncarp.md  2 kB")
READ = Call("read_file", {"path": "./pike.md"}, "     1\tdepth = 3\n     2\tbait = worm")


def workspace_view(*calls: Call) -> WorkspaceView:
    return view_of(calls)


def test_a_listing_adds_files_and_folders_and_touches_none() -> None:
    there = workspace_view(LISTED)
    assert list(there.files) == ["pike.md", "carp.md"]
    assert (there.folders, there.listed, there.focus) == (["nets"], True, "")


def test_the_file_of_the_last_call_is_the_one_touched_last() -> None:
    there = workspace_view(LISTED, READ, Call("append", {"path": "carp.md", "text": "hook"}, "(no output)"))
    assert there.touched == ["pike.md", "carp.md"]
    assert (there.focus, there.last, there.last_edit) == ("carp.md", "append", "hook")


@pytest.mark.parametrize(
    ("tool", "arguments", "texts"),
    [
        ("append", {"text": "hook = 2"}, {"pike.md": ["depth = 3", "bait = worm", "hook = 2"]}),
        ("remove_line", {"text": "bait"}, {"pike.md": ["depth = 3"]}),
        ("edit_file", {"old_text": "3", "new_text": "4"}, {"pike.md": ["depth = 4", "bait = worm"]}),
        ("write_file", {"content": "new\n"}, {"pike.md": ["new"]}),
        ("move", {"to": "nets/"}, {"nets/pike.md": ["depth = 3", "bait = worm"]}),
        ("delete", {}, {}),
    ],
)
def test_the_text_of_a_file_is_known_after_a_change(
    tool: str, arguments: dict[str, Any], texts: dict[str, Any]
) -> None:
    there = workspace_view(READ, Call(tool, {"path": "pike.md", **arguments}, "(no output)"))
    assert there.texts == texts
    assert set(there.files) == set(texts)


def test_a_copy_knows_its_original() -> None:
    there = workspace_view(READ, Call("copy", {"path": "pike.md", "to": "old.md"}, "(no output)"))
    assert (there.copies, there.focus) == ({"old.md": "pike.md"}, "old.md")
    assert there.texts["old.md"] == there.texts["pike.md"]


@pytest.mark.parametrize(
    ("call", "files", "focus"),
    [
        (
            Call("grep", {"pattern": "depth"}, "nets/eel.md:3:depth = 1\ncarp.md:1:depth 2"),
            ["nets/eel.md", "carp.md"],
            "",
        ),
        (Call("find_files", {"pattern": "*.md"}, "nets/eel.md\ncarp.md"), ["nets/eel.md", "carp.md"], ""),
        (Call("exec", {"command": "sort < in > out.txt"}, "(no output)"), ["out.txt"], "out.txt"),
        (Call("exec", {"command": "echo eel.md"}, "eel.md"), [], ""),
        (Call("read_file", {"path": "gone.md"}, "error: gone.md does not exist."), [], ""),
        (Call("read_file", {"path": 3}, "text"), [], ""),
    ],
)
def test_a_result_adds_files_and_a_failed_call_none(call: Call, files: list[str], focus: str) -> None:
    there = workspace_view(call)
    assert (list(there.files), there.focus) == (files, focus)


def test_a_new_folder_comes_last() -> None:
    assert workspace_view(LISTED, Call("exec", {"command": "mkdir -p ponds/"}, "(no output)")).folders == [
        "nets",
        "ponds",
    ]
