"""Who a worker is, and whether it still lives.

A worker on this machine is known by its process id *and* its start time (ids are used again), so its death is
known at once and needs no heartbeat.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

_numbers = itertools.count(1)
_here: set[str] = set()


def new_worker() -> str:
    """A name for a worker of this process: `<machine boot>.<pid namespace>.<pid>.<start time>.<number>`."""
    worker = f"{_place()}.{os.getpid()}.{_start_time(os.getpid())}.{next(_numbers)}"
    _here.add(worker)
    return worker


def retire(worker: str) -> None:
    """The worker has ended though its process goes on."""
    _here.discard(worker)


def alive(worker: str) -> bool:
    """Whether the worker may still write. One that cannot be judged from here counts as alive."""
    boot, namespace, pid, started, _number = worker.split(".")
    if f"{boot}.{namespace}" != _place():
        return boot == _place().split(".")[0]  # this machine was started again since: nobody is left
    if int(pid) == os.getpid() and started == _start_time(os.getpid()):
        return worker in _here
    return _start_time(int(pid)) == started


def process_of(worker: str) -> int:
    return int(worker.split(".")[2])


def _place() -> str:
    global _known_place
    if _known_place is None:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
            namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        except OSError:  # not Linux: one boot, one namespace
            boot, namespace = "local", "0"
        _known_place = f"{boot}.{namespace}"
    return _known_place


_known_place: str | None = None


def _start_time(pid: int) -> str:
    """When the process began, in ticks since boot; "" when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The name, in parentheses, may hold spaces and parentheses of its own.
            fields = stat.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie writes nothing any more
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "0"
