"""A control group for one command where the runtime may make one: the only limit that also holds for root.

The kernel counts processes a user has with RLIMIT_NPROC, but never refuses root another one.
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


@lru_cache(maxsize=1)
def parent_group() -> str | None:
    """The folder in which groups can be made, or None. Call it in a thread."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.strip().split(":", 2) for line in file]
        with open("/proc/self/mounts") as file:
            mounts = [line.split(" ")[:4] for line in file]
    except OSError:
        return None
    return find_parent(lines, mounts)


def find_parent(groups: list[list[str]], mounts: list[list[str]]) -> str | None:
    """The nearest folder above (or of) our own group that hands the needed controllers down and lets us write.

    Under version 1 only processes are counted: its memory groups belong to whoever manages this machine.
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
    """A new group with these limits, or None if the kernel refuses after all. Call it in a thread."""
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
    """Whether a group, or those made in this folder, limits the memory of all its processes together."""
    if path is None:
        return False
    if os.path.exists(os.path.join(path, "memory.max")):
        return True
    with suppress(OSError), open(os.path.join(path, "cgroup.subtree_control")) as file:
        return "memory" in file.read().split()
    return False


def remove_group(path: str) -> None:
    """End whoever is still in the group, and take it away. Call it in a thread."""
    with suppress(OSError):
        _write(path, "pids.max", 0)  # nobody gets away by forking
    for pause in _PAUSES:
        time.sleep(pause)
        with suppress(OSError), open(os.path.join(path, "cgroup.procs")) as file:
            for pid in map(int, file):
                if pid > 1:  # 0 stands for a process of another namespace
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:
            continue  # who has just died is still counted; what stays is swept away at the next start


def _delegated(point: str, own: str) -> str | None:
    parts = [part for part in own.split("/") if part]
    for count in range(len(parts), -1, -1):
        folder = "/".join((point, *parts[:count]))
        with suppress(OSError), open(os.path.join(folder, "cgroup.subtree_control")) as file:
            if {"memory", "pids"} <= set(file.read().split()):
                return folder
    return None


def _sweep(folder: str) -> None:
    """Remove the empty groups of runtimes that were killed; one with somebody in it stays."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            pid = entry.name.removeprefix(_PREFIX).split("-")[0]
            if entry.name.startswith(_PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with suppress(OSError):
                    os.rmdir(entry.path)


def _write(path: str, name: str, value: int) -> None:
    with open(os.path.join(path, name), "w") as file:
        file.write(str(value))
