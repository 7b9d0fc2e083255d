"""A thread that can only read, and only in some places, and so can what it starts: Landlock, for single helpers.

Programs that walk a folder by names would follow a link that is swapped in under them. The kernel then refuses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache

from .landlock import ADD_RULE, CREATE_RULESET, EXECUTE, READ_DIR, READ_FILE, RESTRICT_SELF, abi, all_rights

_HANDLED = all_rights(1) & ~EXECUTE  # the first version is enough, and what the thread starts must run
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
    """Whether this kernel has Landlock turned on."""
    return abi() >= 1


def read_only(folder: int | None, program: str) -> None:
    """From now on this thread opens nothing but what is in a folder, a program and the libraries, and writes nothing.

    There is no way back: call it in a thread that ends soon. Other threads are not touched.
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
    """Whole words: C passes what it is given, and half a register would hold what was there before."""
    return [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
