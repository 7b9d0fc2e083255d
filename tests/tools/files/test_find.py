"""find_files and grep, with ripgrep and without."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest

from everloop.tools.base import ToolError
from everloop.tools.files import find
from tests.support.commands import until
from tests.support.desk import Desk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    for name, text in {
        "a.py": "import os\nprint('hello')\n",
        "src/b.py": "def hello():\n    return 1\n\n\ndef world():\n    return hello()\n",
        "src/deep/er/c.txt": "Hello there\n",
        ".hidden": "hello\n",
        ".git/config": "hello\n",
        "node_modules/x/index.js": "hello\n",
        "src/__pycache__/b.pyc": "hello\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.fixture(params=["ripgrep", "python", "unrestricted ripgrep", "unrestricted python"])
def desk(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The tools with each search backend."""
    assert shutil.which("rg"), "ripgrep is not installed"
    if "python" in request.param:
        monkeypatch.setenv("PATH", str(folder.parent))
    return Desk(folder, restricted="unrestricted" not in request.param)


# --- grep ----------------------------------------------------------------------------------------------------------


async def test_matches_have_path_and_line_number_and_are_sorted_by_name(desk):
    assert (await desk("grep", pattern="hello")).split("\n") == [
        ".hidden:1:hello", "a.py:2:print('hello')", "src/b.py:1:def hello():", "src/b.py:6:    return hello()"
    ]  # fmt: skip


async def test_case_globs_plain_text_and_context_are_options(desk):
    assert await desk("grep", pattern="HELLO T", ignore_case=True) == "src/deep/er/c.txt:1:Hello there"
    assert await desk("grep", pattern="hello", glob="a.*") == "a.py:2:print('hello')"
    assert await desk("grep", pattern="hello", glob="src/**/*.{py,txt}") == (
        "src/b.py:1:def hello():\nsrc/b.py:6:    return hello()"
    )
    assert ".py" not in await desk("grep", pattern="hello", glob="!*.py")
    assert await desk("grep", pattern="hello()", literal=True, path="src") == (
        "src/b.py:1:def hello():\nsrc/b.py:6:    return hello()"
    )
    assert await desk("grep", pattern="hello", path="src", context=1) == (
        "src/b.py:1:def hello():\nsrc/b.py:2-    return 1\n--\nsrc/b.py:5-def world():\nsrc/b.py:6:    return hello()"
    )


async def test_paths_in_the_result_can_be_passed_to_other_tools(desk, folder):
    for path in ("src", "./src/", str(folder / "src"), "src/deep/.."):
        assert (await desk("grep", pattern="world", path=path)) == "src/b.py:5:def world():"
        assert (await desk("find_files", pattern="c.txt", path=path)) == "src/deep/er/c.txt"


async def test_a_single_file_can_be_searched(desk):
    assert await desk("grep", pattern="return", path="src/b.py", context=1) == (
        "src/b.py:1-def hello():\nsrc/b.py:2:    return 1\nsrc/b.py:3-\n"
        "--\nsrc/b.py:5-def world():\nsrc/b.py:6:    return hello()"
    )


async def test_ignored_folders_are_searched_if_the_path_names_them(desk):
    assert await desk("grep", pattern="hello", path=".git") == ".git/config:1:hello"
    assert await desk("find_files", pattern="*", path="node_modules") == "node_modules/x/index.js"


async def test_an_empty_result_says_so(desk):
    assert await desk("grep", pattern="nowhere to be found") == "(no line matches)"
    assert await desk("find_files", pattern="*.rs") == "(no file matches)"


@pytest.mark.parametrize("pattern", ["--files", "-e", "--pre=touch x", "-f/etc/passwd"])
async def test_a_pattern_is_never_read_as_an_option(desk, folder, pattern):
    (folder / "options").write_text(f"{pattern}\n")
    assert await desk("grep", pattern=pattern) == f"options:1:{pattern}"
    assert await desk("grep", pattern="options", path="options", glob="--pre=touch") == "(no line matches)"
    assert not (folder / "x").exists()


async def test_a_configuration_file_for_ripgrep_is_not_read(desk, folder, monkeypatch):
    (folder / "rc").write_text("--files-with-matches\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(folder / "rc"))
    assert await desk("grep", pattern="world") == "src/b.py:5:def world():"


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "", "a\0b", "x" * 6000])
async def test_an_invalid_pattern_is_explained(desk, pattern):
    assert "pattern" in await desk.fails("grep", pattern=pattern)


async def test_binary_large_and_special_files_are_skipped(desk, folder, monkeypatch):
    monkeypatch.setattr(find, "MAX_FILE_BYTES", 1000)
    (folder / "binary").write_bytes(b"\0\0hello\n")
    (folder / "big").write_text("hello\n" + "x" * 1000)
    (folder / "wide").write_bytes("hello\n".encode("utf-16"))
    (folder / "link").symlink_to("a.py")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe")
    found = await desk("grep", pattern="hello", path=".", glob="/[blpw]*")
    assert found == "wide:1:hello"
    assert "only regular files" in await desk.fails("grep", pattern="x", path="pipe")


async def test_long_lines_and_many_results_are_truncated(desk, folder, monkeypatch):
    monkeypatch.setattr(find, "MAX_MATCHES", 7)
    monkeypatch.setattr(find, "MAX_FOUND", 7)
    (folder / "many").mkdir()
    for number in range(20):
        (folder / f"many/{number:02}").write_text("needle " + "x" * 5000 + "\n")
    found = (await desk("grep", pattern="needle")).split("\n")
    assert [line.split(":")[0] for line in found[:-1]] == [f"many/{number:02}" for number in range(7)]
    assert all(len(line) < 700 for line in found)
    assert found[-1].startswith("[only the first 7 lines")
    names = (await desk("find_files", pattern="many/*")).split("\n")
    assert names[:-1] == [f"many/{number:02}" for number in range(7)]
    assert names[-1].startswith("[only the first 7 lines")
    monkeypatch.setattr(find, "MAX_FOUND", 20)
    assert len((await desk("find_files", pattern="many/*")).split("\n")) == 20


async def test_long_output_is_cut_at_a_line_end(desk, folder, monkeypatch):
    monkeypatch.setattr(find, "MAX_OUTPUT", 1000)
    (folder / "many").write_text("needle\n" * 300)
    *lines, last = (await desk("grep", pattern="needle")).split("\n")
    assert set(lines[:1] + [line.split(":")[2] for line in lines]) == {"many:1:needle", "needle"}
    assert last.startswith("[only the first")


async def test_a_hostile_pattern_times_out_without_side_effects(desk, folder, monkeypatch):
    monkeypatch.setattr(find, "SECONDS", 1.0)
    (folder / "a.txt").write_text("a" * 40 + "!\n")
    start = time.monotonic()
    said = await desk("grep", pattern="(a+)+$", path="a.txt")
    assert time.monotonic() - start < 20
    assert said.startswith("(no line matches)")


async def test_a_stopped_search_leaves_no_process(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder.parent))
    desk = Desk(folder)
    (folder / "a.txt").write_text("a" * 40 + "!\n")
    task = asyncio.create_task(desk("grep", pattern="(a+)+$", path="a.txt"))
    children: set[str] = set()
    while not children:
        await asyncio.sleep(0.01)
        children = processes()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not processes())


def processes() -> set[str]:
    """The search processes started by this test that are still running."""
    found = set()
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            try:
                if "searcher.py" in Path(f"/proc/{child}/cmdline").read_text():
                    found.add(child)
            except OSError:
                continue
    return found


async def test_the_guard_is_asked_for_each_file_that_would_be_shown(desk):
    def guard(real: str, writing: bool) -> None:
        assert not writing
        if real.endswith(("b.py", ".hidden")):
            raise ToolError("no")

    guarded = desk.with_context(guard=guard)
    assert await guarded("grep", pattern="hello") == "a.py:2:print('hello')"
    assert await guarded("find_files", pattern="*.py") == "a.py"


async def test_the_guard_sees_a_name_with_a_newline_as_one_name(desk, folder):
    (folder / "a.py").unlink()
    (folder / "secret\na.py").write_text("hello\n")

    def guard(real: str, writing: bool) -> None:
        if "secret" in real:
            raise ToolError("no")

    assert await desk("find_files", pattern="*a.py") == r'"secret\na.py"'
    assert await desk("grep", pattern="hello", glob="*a.py") == r'"secret\na.py":1:hello'
    assert r'"secret\na.py"  6 B' in (await desk("list_dir")).split("\n")
    guarded = desk.with_context(guard=guard)
    assert await guarded("find_files", pattern="*a.py") == "(no file matches)"
    assert await guarded("grep", pattern="hello", glob="*a.py") == "(no line matches)"


async def test_ripgreps_note_about_a_binary_file_is_not_part_of_a_name(desk, folder):
    (folder / "late").write_bytes(b"hello\n" + b"x\n" * 100_000 + b"\0\n")
    lines = (await desk("grep", pattern="hello", context=1)).split("\n")
    assert {"a.py:2:print('hello')", "src/b.py:1:def hello():"} <= set(lines)


async def test_protected_folders_are_skipped(desk, folder):
    own = desk.with_context(protected=(folder / "src/deep", folder / "a.py"))
    found = await own("grep", pattern="hello", ignore_case=True)
    names = await own("find_files", pattern="**")
    if desk.context.restricted:
        assert found.split("\n") == [".hidden:1:hello", "src/b.py:1:def hello():", "src/b.py:6:    return hello()"]
        assert names.split("\n") == [".hidden", "src/b.py"]
    else:
        assert "src/deep/er/c.txt" in found
        assert "src/deep/er/c.txt" in names


async def test_the_search_falls_back_if_ripgrep_does_not_start(folder, monkeypatch):
    programs = folder.parent / "programs"
    programs.mkdir()
    for script in ("#!/nowhere/sh\n", f"#!/bin/sh\necho {folder}/a.py:1:wrong\nexit 127\n", "\x7fELF nonsense"):
        (programs / "rg").write_text(script)
        (programs / "rg").chmod(0o755)
        monkeypatch.setenv("PATH", str(programs))
        assert await Desk(folder)("grep", pattern="world") == "src/b.py:5:def world():"


async def test_a_program_in_the_workspace_is_not_used_as_ripgrep(folder, monkeypatch):
    (folder / "rg").write_text(f"#!/bin/sh\ntouch {folder.parent}/escaped\n")
    (folder / "rg").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    await Desk(folder)("grep", pattern="hello")
    assert not (folder.parent / "escaped").exists()


# --- find_files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a.py", "src/b.py"]),
        ("**/*.py", ["a.py", "src/b.py"]),
        ("src/*", ["src/b.py"]),
        ("src/**", ["src/b.py", "src/deep/er/c.txt"]),
        ("src/**/c.txt", ["src/deep/er/c.txt"]),
        ("./src/*.py", ["src/b.py"]),
        ("/src/*.py", ["src/b.py"]),
        ("?.py", ["a.py", "src/b.py"]),
        ("[!a].py", ["src/b.py"]),
        ("*.{txt,md}", ["src/deep/er/c.txt"]),
        ("[", ["["]),
        ("{", ["(no file matches)"]),
        ("!*", ["(no file matches)"]),
    ],
)
async def test_globs_mean_what_people_expect(folder, pattern, found):
    if pattern == "[":
        (folder / "[").touch()
    assert (await Desk(folder)("find_files", pattern=pattern)).split("\n") == found


async def test_names_of_all_kinds_are_found_and_links_are_not_followed(folder):
    (folder / "new\nline é").touch()
    os.close(os.open(bytes(folder) + b"/bad\xff", os.O_CREAT))
    (folder / "loop").symlink_to(".")
    desk = Desk(folder)
    assert "é" in await desk("find_files", pattern="new*")
    assert (await desk("find_files", pattern="bad*")).startswith("bad")
    assert await desk("find_files", pattern="loop/**") == "(no file matches)"
    assert "is not a folder" in await desk.fails("find_files", pattern="*", path="a.py")
    assert "does not exist" in await desk.fails("find_files", pattern="*", path="nope")


async def test_a_hostile_glob_ends_in_time(folder, monkeypatch):
    monkeypatch.setattr(find, "SECONDS", 1.0)
    (folder / ("a" * 200)).touch()
    start = time.monotonic()
    said = await Desk(folder)("find_files", pattern="*a" * 60 + "b")
    assert time.monotonic() - start < 20
    assert "stopped after 1 seconds" in said


async def test_a_search_through_many_files_does_not_block_the_loop(tmp_path):
    place = tmp_path / "workspace"
    for number in range(100):
        (place / f"{number:03}").mkdir(parents=True)
        for file in range(50):
            (place / f"{number:03}/{file:03}").write_text("x\n")
    desk = Desk(place)
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - start)

    ticking = asyncio.create_task(tick())
    began = time.monotonic()
    assert await desk("grep", pattern="needle") == "(no line matches)"
    assert await desk("find_files", pattern="needle") == "(no file matches)"
    took = time.monotonic() - began
    ticking.cancel()
    gaps.sort()
    # A search in the loop would block it about half of the time; on a busy machine everything takes longer.
    assert gaps[len(gaps) * 9 // 10] < max(0.05, took / 10), "the loop was blocked"
