"""Resource limits for a command as a whole: a control group where one can be created, otherwise polling.

A control group is also the only process limit that applies to root: the kernel does not enforce RLIMIT_NPROC for it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import suppress
from functools import lru_cache

from .confinement import Limits

_PREFIX = "everloop-"
_PAUSES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_counter = itertools.count(1)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_IN_MEMORY = ("tmp", "dev/shm")  # tmpfs mounts of the sandbox


@lru_cache(maxsize=1)
def parent_group() -> str | None:
    """Return the folder in which groups can be created, or None. Call it in a thread."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.strip().split(":", 2) for line in file]
        with open("/proc/self/mounts") as file:
            mounts = [line.split(" ")[:4] for line in file]
    except OSError:
        return None
    return find_parent(lines, mounts)


def find_parent(groups: list[list[str]], mounts: list[list[str]]) -> str | None:
    """Return the nearest writable ancestor of our own group (or that group) that delegates the needed controllers.

    Under cgroup v1 only the process count is limited: its memory hierarchy is not delegated to users.
    """
    for _, point, kind, options in mounts:
        names = options.split(",")
        if kind == "cgroup2":
            own = next((path for number, _, path in groups if number == "0"), "/")
            folder = _delegated(point, own)
        elif kind == "cgroup" and "pids" in names:
            own = next((path for _, kinds, path in groups if "pids" in kinds.split(",")), "/")
            folder = point + own.rstrip("/")
        else:
            continue
        if folder is not None and os.access(folder, os.W_OK):
            _sweep(folder)
            return folder
    return None


def make_group(folder: str, limits: Limits) -> str | None:
    """Create a group with these limits, or return None if the kernel refuses. Call it in a thread."""
    path = os.path.join(folder, f"{_PREFIX}{os.getpid()}-{next(_counter)}")
    try:
        os.mkdir(path)
    except OSError:
        return None
    try:
        _write(path, "pids.max", limits.processes)
        if os.path.exists(os.path.join(path, "memory.max")):
            _write(path, "memory.max", limits.memory_mb * 2**20)
            with suppress(OSError):
                _write(path, "memory.swap.max", 0)
                _write(path, "memory.oom.group", 1)
    except OSError:
        os.rmdir(path)
        return None
    return path


def limits_memory(path: str | None) -> bool:
    """Return whether a group, or groups created in this folder, limit the total memory of their processes."""
    if path is None:
        return False
    if os.path.exists(os.path.join(path, "memory.max")):
        return True
    with suppress(OSError), open(os.path.join(path, "cgroup.subtree_control")) as file:
        return "memory" in file.read().split()
    return False


def remove_group(path: str) -> None:
    """Kill the remaining processes of a group and remove it. Call it in a thread."""
    with suppress(OSError):
        _write(path, "pids.max", 0)  # no process can escape by forking
    for pause in _PAUSES:
        time.sleep(pause)
        with suppress(OSError), open(os.path.join(path, "cgroup.procs")) as file:
            for pid in map(int, file):
                if pid > 1:  # 0 means a process in another PID namespace
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:
            continue  # a process that has just died still counts; leftovers are removed at the next start


def _delegated(point: str, own: str) -> str | None:
    parts = [part for part in own.split("/") if part]
    for count in range(len(parts), -1, -1):
        folder = "/".join((point, *parts[:count]))
        with suppress(OSError), open(os.path.join(folder, "cgroup.subtree_control")) as file:
            if {"memory", "pids"} <= set(file.read().split()):
                return folder
    return None


def _sweep(folder: str) -> None:
    """Remove the empty groups of runtimes that were killed. Groups with processes in them stay."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            pid = entry.name.removeprefix(_PREFIX).split("-")[0]
            if entry.name.startswith(_PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with suppress(OSError):
                    os.rmdir(entry.path)


def _write(path: str, name: str, value: int) -> None:
    with open(os.path.join(path, name), "w") as file:
        file.write(str(value))


# --------------------------------------------------------------------------------------- memory without a group


def memory_in_use(pid: int, limit: int, *, namespaced: bool) -> tuple[int, int]:
    """Return (bytes, processes) for all descendants of `pid`. Call it in a thread.

    With `namespaced`, include the in-memory file systems of their sandbox. Resident sizes are summed first, which is
    quick but counts shared pages several times; only above the limit are the proportional sizes read.
    """
    pids = descendants(pid)
    files = _files_in_memory(pids[0]) if namespaced and pids else 0
    resident = sum(_resident(each) for each in pids) + files
    if resident <= limit:
        return resident, len(pids)
    return sum(_proportional(each) for each in pids) + files, len(pids)


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, including children that other threads than the main one started."""
    found = _children(pid)
    for child in found:  # the list grows during the iteration
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
            info = os.statvfs(os.path.join("/proc", str(pid), "root", name))  # the file system as the process sees it
            used += (info.f_blocks - info.f_bfree) * info.f_frsize
    return used
