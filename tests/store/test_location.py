"""Which store belongs to a folder: decided by the identity that it keeps when it moves, not by its path or contents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everloop.store.location import Folder, Record, choose, find_own


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores"


def record(stores: Path, name: str, workspace: str, identity: str) -> Record:
    store = stores / f"{name}.db"
    store.touch()
    return Record(store, Path(workspace), identity)


def disk(*folders: Folder) -> Callable[[Path], Folder]:
    found = {folder.path: folder for folder in folders}
    return lambda path: found.get(path, Folder(path, "", exists=False))


def test_a_snapshot_next_to_its_original_has_its_own_store(stores):
    # A file system snapshot has the inodes and creation times of its original.
    original, snapshot = Folder(Path("/a/w"), "256-1.0", device=1), Folder(Path("/snap/w"), "256-1.0", device=2)
    first = record(stores, "first", "/a/w", "256-1.0")
    chosen = choose(snapshot, [first], stores, disk(original, snapshot))
    assert chosen.new
    assert chosen.earlier is None  # its folder is there
    second = record(stores, "zzz", "/snap/w", "256-1.0")
    for records in ([first, second], [second, first]):
        for look in (disk(original, snapshot), disk(original), disk(snapshot)):
            assert choose(original, records, stores, look).path == first.store
            assert choose(snapshot, records, stores, look).path == second.store


def test_another_mount_of_a_folder_is_the_same_folder(stores):
    folder, mounted = Folder(Path("/a/w"), "7-1.0", device=1), Folder(Path("/mnt/w"), "7-1.0", device=1)
    first = record(stores, "first", "/a/w", "7-1.0")
    assert choose(mounted, [first], stores, disk(folder, mounted)).path == first.store


def test_if_folders_cannot_be_distinguished_the_path_counts(stores):
    first = record(stores, "first", "/a/w", "")
    for identity in ("", "7-1.0"):
        here = Folder(Path("/a/w"), identity)
        assert choose(here, [first], stores, disk(here)).path == first.store


def test_the_most_recently_used_folder_is_asked_about(stores):
    records = [record(stores, name, f"/{name}/w", f"{n}-1.0") for n, name in enumerate(("a", "b", "c"))]
    for n, one in zip((1, 3, 2), records, strict=True):
        os.utime(one.store, (n, n))
    chosen = choose(Folder(Path("/new/w"), "9-1.0"), records, stores, disk())
    assert chosen.earlier == records[1]


def test_looking_for_a_vanished_folder_does_not_forget_its_identity(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "w"
    folder.mkdir()
    found = find_own(folder, home)
    found.claim()
    found.path.touch()
    folder.rename(tmp_path / "moved")
    find_own(folder, home).claim()
    assert find_own(tmp_path / "moved", home).path == found.path
    folder.mkdir()
    assert find_own(folder, home).path != found.path


OVERLAY = """
set -e
mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work,userxattr" "$1/merged" || exit 77
exec "$2" -c '
import pathlib, sys
from everloop.store.location import find_own
home, folder = pathlib.Path(sys.argv[1], "home"), pathlib.Path(sys.argv[1], "merged", "w")
first = find_own(folder, home)
first.claim()
first.path.touch()
(folder / "x").touch()  # the folder is copied up, and is made now
second = find_own(folder, home)
assert second.path == first.path and second.earlier is None, second
' "$1"
"""


def test_a_folder_of_a_container_image_keeps_its_identity_when_first_written_to(tmp_path):
    for name in ("lower/w", "upper", "work", "merged"):
        (tmp_path / name).mkdir(parents=True)
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", OVERLAY, "sh", str(tmp_path), sys.executable], capture_output=True, check=False
    )
    if done.returncode == 77 or b"unshare: " in done.stderr:
        pytest.skip("overlayfs cannot be mounted in a user namespace here")
    assert done.returncode == 0, done.stderr.decode()
