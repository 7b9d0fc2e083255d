"""openat2(2): the one call that opens a path and lets the kernel refuse what leads out of a folder."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import cache

BENEATH = 0x08  # nothing above or outside of the folder, by "..", an absolute path or a link
NO_SYMLINKS = 0x04  # no link at all
NO_MAGICLINKS = 0x02  # none of the links of /proc that lead to open files of a process
_NUMBER = 437  # the same on every architecture that Linux has been brought to since 2011
_TRIES = 64


class NoOpenat2(Exception):
    """The kernel has no openat2, or a filter hides it."""


def openat2(path: str, flags: int, folder: int, resolve: int) -> int:
    """Open a path below a folder's descriptor; an OSError as from `os.open`, EXDEV where it would lead out."""
    call = _system_call()
    raw = os.fsencode(path)
    if b"\0" in raw:  # C would read the path only up to there
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    for _ in range(_TRIES):
        descriptor, error = call(folder, raw, flags | os.O_CLOEXEC, resolve)
        if descriptor >= 0:
            return descriptor
        if error not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something was renamed meanwhile, so nothing is proved
            break
    raise OSError(error, os.strerror(error), path)


@cache
def _system_call() -> Callable[[int, bytes, int, int], tuple[int, int]]:
    """The call by ctypes, which is loaded on use, after a try on a path that exists everywhere."""
    if sys.platform != "linux":
        raise NoOpenat2
    import ctypes

    class How(ctypes.Structure):
        _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]

    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    size = ctypes.c_size_t(ctypes.sizeof(How))

    def call(folder: int, path: bytes, flags: int, resolve: int) -> tuple[int, int]:
        how = How(flags, 0, resolve)
        number = ctypes.c_long(_NUMBER)
        descriptor = system_call(number, ctypes.c_int(folder), ctypes.c_char_p(path), ctypes.byref(how), size)
        return descriptor, ctypes.get_errno()

    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        descriptor, _ = call(root, b".", os.O_PATH | os.O_CLOEXEC, BENEATH)
    finally:
        os.close(root)
    if descriptor < 0:  # ENOSYS of an old kernel, EPERM of an old container's filter
        raise NoOpenat2
    os.close(descriptor)
    return call
