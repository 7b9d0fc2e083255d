"""What a path given by a model may touch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everloop.sandbox.reach import FOLDER, OutOfReach, Reach
from everloop.tools.base import ToolError
from tests.support.desk import Desk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text("secret")
    return place


def content(reach: Reach, path: str) -> str:
    with reach.open(path) as opened:
        return os.read(opened.descriptor, 1000).decode()


def put(reach: Reach, path: str) -> str:
    with reach.target(path) as target:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        descriptor = os.open(target.name, flags, 0o666, dir_fd=target.folder)
        os.write(descriptor, b"new")
        os.close(descriptor)
        return target.real


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- restricted ----------------------------------------------------------------------------------------------------


def test_links_are_followed_if_they_stay_inside(folder):
    (folder / "sub").mkdir()
    (folder / "sub/a.txt").write_text("there")
    (folder / "relative").symlink_to("sub/../sub")
    (folder / "absolute").symlink_to(folder / "sub")
    (folder / "up").symlink_to("../workspace/sub")
    reach = Reach(folder)
    assert content(reach, "relative/a.txt") == "there"
    assert content(reach, "absolute/a.txt") == "there"
    assert content(reach, "up/a.txt") == "there"
    for way in ("relative", "absolute", "up"):
        assert put(reach, f"{way}/new.txt") == str(folder / "sub/new.txt")
        assert put(reach, f"{way}/new.txt") == str(folder / "sub/new.txt")
        assert put(reach, f"{way}/{way}/new.txt") == str(folder / "sub" / way / "new.txt")


def test_a_link_that_leads_out_is_refused_for_reading_and_writing(folder):
    (folder / "out").symlink_to("../outside")
    (folder / "file").symlink_to(folder.parent / "outside/secret.txt")
    reach, before = Reach(folder), open_descriptors()
    for path in ("out/secret.txt", "out", "file", "out/new.txt", "out/new/new.txt"):
        with pytest.raises(OutOfReach):
            content(reach, path)
        with pytest.raises(OutOfReach):
            put(reach, path)
    assert os.listdir(folder.parent / "outside") == ["secret.txt"]
    assert (folder.parent / "outside/secret.txt").read_text() == "secret"
    assert open_descriptors() == before


def test_a_workspace_that_is_a_link_can_be_named_by_both_paths(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)
    (folder / "a.txt").write_text("there")
    for path in ("a.txt", f"{link}/a.txt", f"{folder}/a.txt"):
        assert content(Reach(link), path) == "there"
        assert put(Reach(link), path.replace("a.txt", "b.txt")) == str(folder / "b.txt")


def test_a_loop_of_links_is_refused(folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    with pytest.raises(OutOfReach):
        content(Reach(folder), "a")


def test_a_deleted_file_is_missing_even_while_it_is_open(folder):
    (folder / "a (deleted)").write_text("there")
    assert content(Reach(folder), "a (deleted)") == "there"


def test_saved_outputs_can_be_read_and_not_written(folder):
    outputs = folder.parent / "outside"
    for place in (outputs, folder / "outputs"):
        place.mkdir(exist_ok=True)
        (place / "long.txt").write_text("long")
        reach = Reach(folder, outputs=place)
        assert content(reach, f"{place}/long.txt") == "long"
        for path in (f"{place}/long.txt", f"{place}/new.txt", f"{place}/new/new.txt"):
            with pytest.raises(OutOfReach):
                put(reach, path)
    (outputs / "link").symlink_to("/etc/passwd")
    with pytest.raises(OutOfReach):
        content(Reach(folder, outputs=outputs), f"{outputs}/link")


def test_an_approved_path_gives_access_to_nothing_it_links_to(folder):
    outside = folder.parent / "outside"
    reach = Reach(folder, approved=True)
    assert content(reach, "../outside/secret.txt") == "secret"
    assert put(reach, f"{outside}/deep/new.txt") == f"{outside}/deep/new.txt"
    (outside / "link").symlink_to("secret.txt")
    (folder.parent / "way").symlink_to("outside")
    for path in ("../outside/link", "../way/secret.txt"):
        with pytest.raises(OutOfReach, match=f"{outside}/secret.txt"):
            content(reach, path)
        with pytest.raises(OutOfReach, match=f"{outside}/secret.txt"):
            put(reach, path)
    with pytest.raises(OutOfReach):
        put(reach, "../way/new.txt")
    assert (outside / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize("approved", [False, True])
def test_protected_files_are_out_of_reach_by_every_path(folder, approved):
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text("secret")
    (folder / "way").symlink_to("home")
    (folder / "leaf").symlink_to("home/config.toml")
    reach = Reach(folder, approved=approved, protected=(home, folder.parent / "outside"))
    for path in ("home/config.toml", "way/config.toml", "leaf", f"{home}/config.toml", "../outside/secret.txt"):
        with pytest.raises(OutOfReach):
            content(reach, path)
    for path in ("home/config.toml", "way/new", "way/a/b", "leaf", "home/new", "../outside/new"):
        with pytest.raises(OutOfReach):
            put(reach, path)
    assert os.listdir(home) == ["config.toml"]
    assert os.listdir(folder.parent / "outside") == ["secret.txt"]


def test_a_folder_that_turns_into_a_link_while_folders_are_made_is_not_entered(folder, monkeypatch):
    make = os.mkdir

    def make_and_swap(name: str, mode: int = 0o777, *, dir_fd: int) -> None:
        make(name, mode, dir_fd=dir_fd)
        os.rmdir(name, dir_fd=dir_fd)
        os.symlink("../outside", name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_and_swap)
    with pytest.raises(OSError):
        put(Reach(folder), "new/file.txt")
    assert os.listdir(folder.parent / "outside") == ["secret.txt"]


@pytest.mark.parametrize("path", [".git/config", ".git/hooks/pre-commit", "sub/.git", "way/config", ".GIT/config"])
def test_files_that_control_the_users_git_are_written_only_with_approval(folder, path):
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("theirs")
    (folder / "way").symlink_to(".git")
    assert content(Reach(folder), ".git/config") == "theirs"
    with pytest.raises(OutOfReach):
        put(Reach(folder), path)
    assert (folder / ".git/config").read_text() == "theirs"
    assert os.listdir(folder / ".git") == ["config"]
    if path == "way/config":  # the user has seen this name, but not its target
        with pytest.raises(OutOfReach):
            put(Reach(folder, approved=True), path)
    else:
        put(Reach(folder, approved=True), path)
    put(Reach(folder, restricted=False), path)
    put(Reach(folder), "x.git/config")
    put(Reach(folder), ".gitignore")


def test_a_workspace_inside_a_git_folder_can_be_written(tmp_path):
    place = tmp_path / ".git/workspace"
    place.mkdir(parents=True)
    assert put(Reach(place), "a.txt") == f"{place}/a.txt"


def test_a_protected_folder_that_does_not_exist_yet_is_not_created(folder):
    with pytest.raises(OutOfReach):
        put(Reach(folder, protected=(folder / "home",)), "home/config.toml")
    assert os.listdir(folder) == []


def test_a_workspace_and_outputs_inside_a_protected_folder_remain_accessible(tmp_path):
    home = tmp_path / ".everloop"
    workspace, outputs = home / "workspace", home / "outputs"
    workspace.mkdir(parents=True)
    outputs.mkdir()
    for place in (home, workspace, outputs):
        (place / "a.txt").write_text("there")
    (workspace / "store.db").write_text("secret")
    reach = Reach(workspace, outputs=outputs, protected=(home, workspace / "store.db"))
    assert content(reach, "a.txt") == "there"
    assert content(reach, f"{outputs}/a.txt") == "there"
    assert put(reach, "new.txt") == f"{workspace}/new.txt"
    for path in ("../a.txt", "store.db"):
        with pytest.raises(OutOfReach):
            content(reach, path)
    with pytest.raises(OutOfReach):
        put(reach, "store.db")


def test_a_workspace_that_is_itself_protected_is_out_of_reach(folder):
    (folder / "config.toml").write_text("secret")
    with pytest.raises(OutOfReach):
        content(Reach(folder, protected=(folder,)), "config.toml")


@pytest.mark.parametrize("restricted", [True, False])
def test_the_guard_gets_the_real_path_and_can_refuse(folder, restricted):
    (folder / "a.txt").write_text("there")
    (folder / "link").symlink_to("a.txt")
    told: list[tuple[str, bool]] = []
    reach = Reach(folder, restricted, guard=lambda real, writing: told.append((real, writing)))
    content(reach, "link")
    put(reach, "link")
    put(reach, "new/b.txt")
    assert told == [(f"{folder}/a.txt", False), (f"{folder}/a.txt", True), (f"{folder}/new/b.txt", True)]

    def refuse(real: str, writing: bool) -> None:
        raise ToolError("no")

    reach = Reach(folder, restricted, guard=refuse)
    for path in ("link", "other/new.txt"):
        with pytest.raises((ToolError, FileNotFoundError)):
            content(reach, path)
        with pytest.raises(ToolError):
            put(reach, path)
    assert not (folder / "other").exists()
    assert (folder / "a.txt").read_text() == "new"


@pytest.mark.parametrize("restricted", [True, False])
def test_a_file_moved_during_path_resolution_is_not_replaced(folder, restricted):
    def swap(real: str, writing: bool) -> None:
        os.rename(folder / "b.txt", folder / "a.txt")

    (folder / "a.txt").write_text("a")
    (folder / "b.txt").write_text("b")
    with pytest.raises(OutOfReach):
        put(Reach(folder, restricted, guard=swap), "a.txt")
    assert (folder / "a.txt").read_text() == "b"


# --- not restricted, and where it cannot be ------------------------------------------------------------------------


def test_an_unrestricted_call_may_touch_whatever_the_system_allows(folder):
    (folder / "out").symlink_to("../outside")
    reach = Reach(folder, restricted=False, protected=(folder.parent / "outside",))
    assert content(reach, "out/secret.txt") == "secret"
    assert put(reach, "out/deep/new.txt") == str(folder.parent / "outside/deep/new.txt")
    with reach.open("/", FOLDER) as opened:
        assert opened.real == "/"


NO_OPENAT2 = """
import ctypes, os, struct, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
# A filter that answers ENOSYS to system call 437, as a kernel that does not know it.
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 437), (6, 0, 0, 0x50026), (6, 0, 0, 0x7fff0000)]
code = b"".join(struct.pack("HBBI", *line) for line in lines)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0
from everloop.sandbox.reach import Reach, OutOfReach
for restricted in (False, True):
    try:
        with Reach(Path(sys.argv[1]), restricted).open("a.txt") as opened:
            print(os.read(opened.descriptor, 100).decode())
    except OutOfReach as error:
        print("refused:", error)
"""


def test_a_kernel_without_openat2_is_reported_and_nothing_is_read_unconfined(folder):
    (folder / "a.txt").write_text("there")
    ran = subprocess.run(
        [sys.executable, "-c", NO_OPENAT2, folder], capture_output=True, text=True, timeout=30, check=True
    )
    first, second = ran.stdout.splitlines()
    assert first == "there"
    assert second.startswith("refused: ")
    assert "openat2" in second


# --- what the tools declare they would touch -----------------------------------------------------------------------


async def test_every_tool_declares_the_path_it_would_touch(folder):
    desk = Desk(folder)

    async def plans() -> dict[str, tuple[tuple[str, ...], bool]]:
        from everloop.tools.context import current

        current.set(desk.context)
        found = {tool.name: tool.plan({"path": "../x/./y"}) for tool in desk.registry}
        assert desk.registry.get("grep").plan({"pattern": "x"}).paths == (str(folder),)  # type: ignore[union-attr]
        return {name: (plan.paths, plan.writes) for name, plan in found.items()}

    told = await asyncio.create_task(plans())
    place = (str(folder.parent / "x/y"),)
    assert told == {name: (place, name in ("write_file", "edit_file")) for name in desk.registry.names}
    assert len(told) == 6
