"""How much memory a command and all its processes use, where no control group counts it."""

from __future__ import annotations

import os
from contextlib import suppress

_PAGE = os.sysconf("SC_PAGE_SIZE")
_IN_MEMORY = ("tmp", "dev/shm")  # file systems of the sandbox that are kept in memory


def memory_in_use(pid: int, limit: int, *, namespaced: bool) -> tuple[int, int]:
    """(bytes, processes) of the processes below `pid`. `namespaced`: their /tmp is in memory too. Call it in a thread.

    Pages that processes share are counted for each of them first, which is quick; only if that exceeds the limit are
    they divided among those that share them.
    """
    pids = descendants(pid)
    files = _files_in_memory(pids[0]) if namespaced and pids else 0
    resident = sum(_resident(each) for each in pids) + files
    if resident <= limit:
        return resident, len(pids)
    return sum(_proportional(each) for each in pids) + files, len(pids)


def descendants(pid: int) -> list[int]:
    """The processes that a process and those it started have started, whichever of their threads did it."""
    found = _children(pid)
    for child in found:  # it grows while it is walked
        found += _children(child)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)


def _files_in_memory(pid: int) -> int:
    used = 0
    for name in _IN_MEMORY:
        with suppress(OSError):
            info = os.statvfs(f"/proc/{pid}/root/{name}")
            used += (info.f_blocks - info.f_bfree) * info.f_frsize
    return used
