"""What a command may do with files when the kernel's Landlock is the wall: rules that the launcher puts in force."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Sequence
from functools import lru_cache

from .confinement import Confinement
from .paths import within

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
NEEDED = 3  # before it, a file out of reach could still be cut to nothing
SIGNALS_SCOPED = 6
_ASK_VERSION = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_FOLDER_RIGHTS = (1 << 3) | (((1 << 14) - 1) & ~((1 << 4) - 1))  # list, remove, make, refer: only folders take these
_IOCTL_DEVICE = 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
_KERNEL_FILES = (
    "cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "swaps", "uptime", "version", "vmstat", "sys/kernel",
    "sys/vm", "sys/fs", "sys/net/core/somaxconn",
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")


@lru_cache(maxsize=1)
def abi() -> int:
    """The version of Landlock in this kernel; 0 if there is none or it is off."""
    if platform.system() != "Linux":
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    version: int = library.syscall(CREATE_RULESET, None, 0, _ASK_VERSION)
    return max(version, 0)


def all_rights(version: int) -> int:
    """Every right over files that this version knows, so that what no rule grants is refused."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


def rules(world: Confinement, private: str, version: int) -> list[tuple[str, int]]:
    """(path, rights) for a command; `private` is its own folder for temporary files. Call it in a thread.

    A right that is granted on a folder holds for all below it and cannot be taken back there. So where something
    in the workspace is hidden or frozen, rights are granted on its neighbours one by one, and nothing new can be
    made beside it.
    """
    change = all_rights(version) & ~_IOCTL_DEVICE
    granted = [(path, READ) for path in world.readable if not _crosses(path, world.hidden)]
    granted += [(path, change) for path in (*world.writable, private) if not _crosses(path, world.hidden)]
    granted += [(path, READ) for path in _around(world.workspace, world.hidden)]
    granted += [(path, change) for path in _around(world.workspace, (*world.hidden, *world.frozen))]
    if world.outputs is not None:
        granted.append((world.outputs, READ_FILE | READ_DIR))
    granted += [(f"/dev/{name}", READ_FILE | WRITE_FILE) for name in _DEVICES]
    granted += [(f"/proc/{name}", READ_FILE | READ_DIR) for name in _KERNEL_FILES]
    return [
        (path, rights if os.path.isdir(path) else rights & ~_FOLDER_RIGHTS)
        for path, rights in granted
        if os.path.exists(path)
    ]


def _around(folder: str, kept: Sequence[str]) -> Iterable[str]:
    """The paths that together make up a folder without what is kept out of it."""
    if folder in kept:
        return
    if not any(within(path, folder) for path in kept):
        yield folder
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink():
                yield from _around(entry.path, kept)


def _crosses(path: str, hidden: Sequence[str]) -> bool:
    place = os.path.realpath(path)
    return any(within(place, secret) or within(secret, place) for secret in hidden)
