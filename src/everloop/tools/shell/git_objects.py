"""Whether a text stood in a git repository's history before some time: then `git checkout` may put it into place."""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress

from ...sandbox.folders import FolderTree, lstat, opened_folder

_MAGIC = b"\xfftOc\x00\x00\x00\x02"
_FANOUT = 8
_NAMES = _FANOUT + 256 * 4


def is_older_blob(tree: FolderTree, path: str, data: bytes, time: int) -> bool:
    """Whether the repository that a file lies in had this text before `time` (nanoseconds).

    The change times of its object files tell: a command cannot set them.
    """
    folder = os.path.dirname(path)
    while not tree.has(os.path.join(folder, ".git")):
        if not folder:
            return False
        folder = os.path.dirname(folder)
    name = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    objects = os.path.join(folder, ".git", "objects")
    return _is_loose(tree.root, objects, name.hexdigest(), time) or _is_packed(tree.root, objects, name.digest(), time)


def _is_loose(root: str, objects: str, name: str, time: int) -> bool:
    with opened_folder(root, os.path.join(objects, name[:2])) as folder:
        info = lstat(folder, name[2:]) if folder is not None else None
        return info is not None and info.st_ctime_ns < time


def _is_packed(root: str, objects: str, name: bytes, time: int) -> bool:
    with opened_folder(root, os.path.join(objects, "pack")) as folder:
        for index in os.listdir(folder) if folder is not None else ():
            if folder is None or not index.endswith(".idx"):
                continue
            info = lstat(folder, index)
            if info is None or info.st_ctime_ns >= time:
                continue
            with suppress(OSError, struct.error):
                descriptor = os.open(index, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                try:
                    if _is_listed(descriptor, name):
                        return True
                finally:
                    os.close(descriptor)
    return False


def _is_listed(index: int, name: bytes) -> bool:
    """Search a pack's index (version 2): counts by the first byte, then all names in order."""
    head = os.pread(index, _NAMES, 0)
    if not head.startswith(_MAGIC):
        return False
    counts = struct.unpack(">256I", head[_FANOUT:])
    low, high = counts[name[0] - 1] if name[0] else 0, counts[name[0]]
    while low < high:
        middle = (low + high) // 2
        found = os.pread(index, 20, _NAMES + 20 * middle)
        if found == name:
            return True
        low, high = (middle + 1, high) if found < name else (low, middle)
    return False
