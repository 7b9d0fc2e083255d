"""A lock that allows one pull of a model at a time, across all processes of the machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .partial_file import disk_error


@contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file. While another process holds it, call `busy` with its process id, which waits or raises.

    The kernel releases the lock when its holder dies.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise disk_error(error, path.parent) from None
    try:
        while not _taken(descriptor):
            busy(os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "?")
        with suppress(OSError):  # a full disk: other processes do not see who holds the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
