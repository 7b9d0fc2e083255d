"""The Landlock backend: the file rules that the launcher enforces, and read-only threads for helper programs."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

from .confinement import Confinement
from .reach import within

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system call numbers, the same on every architecture
NEEDED = 3  # older versions cannot prevent truncation
SIGNALS_SCOPED = 6
_ASK_VERSION = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_FOLDER_RIGHTS = (1 << 3) | (((1 << 14) - 1) & ~((1 << 4) - 1))  # list, remove, create, link: only for folders
_IOCTL_DEVICE = 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
_KERNEL_FILES = (
    "cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "swaps", "uptime", "version", "vmstat", "sys/kernel",
    "sys/vm", "sys/fs", "sys/net/core/somaxconn",
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")


@lru_cache(maxsize=1)
def abi() -> int:
    """Return the Landlock ABI version of this kernel; 0 if it is missing or disabled."""
    if platform.system() != "Linux":
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    version: int = library.syscall(CREATE_RULESET, None, 0, _ASK_VERSION)
    return max(version, 0)


def all_rights(version: int) -> int:
    """Return all file rights of an ABI version. Handling all of them means that only granted access is possible."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


def rules(world: Confinement, private: str, version: int) -> list[tuple[str, int]]:
    """Return (path, rights) pairs for a command; `private` is its temporary folder. Call it in a thread.

    A right on a folder applies to everything below it and cannot be revoked there. So where part of the workspace is
    hidden or read-only, rights are granted on its siblings one by one, and no new file can be created next to it.
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
    """Yield the paths that together cover a folder except for the paths in `kept`."""
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


# ------------------------------------------------------------------------------------------- read-only threads

_HANDLED = all_rights(1) & ~EXECUTE  # ABI 1 is enough; the thread must be able to start a program
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_LIBRARIES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/dev/null",
    "/nix/store",
)


class _Ruleset(ctypes.Structure):
    _fields_ = [("handled_access_fs", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def available() -> bool:
    """Return whether Landlock is available and enabled."""
    return abi() >= 1


def read_only(folder: int | None, program: str) -> None:
    """Restrict this thread to reading a folder, a program and the system libraries; it can write nothing.

    A helper that walks a folder by path could be led out by a link swapped in meanwhile; the kernel then refuses. This
    cannot be undone: call it in a thread that ends soon. Other threads are not affected.
    """
    ruleset = _Ruleset(_HANDLED)
    rules = _check(_call(CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0))
    try:
        if folder is not None:
            _allow(rules, folder, READ_FILE | READ_DIR)
        for path in (program, *_LIBRARIES):
            _allow_path(rules, path)
        _check(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _check(_call(RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _allow_path(rules: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _allow(rules, place, READ_FILE | (READ_DIR if os.path.isdir(path) else 0))
    finally:
        os.close(place)


def _allow(rules: int, place: int, access: int) -> None:
    beneath = _Beneath(access, place)
    _check(_call(ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(beneath), 0))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc().syscall(ctypes.c_long(number), *_words(arguments))
    return result


def _words(arguments: Sequence[object]) -> list[object]:
    """Pass integers as full machine words: with a C int, half of the register would be undefined."""
    return [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
