"""Worker ids, and whether a worker is alive.

A worker on this machine is identified by its process id *and* start time (process ids are reused), and its death is
seen on its pidfd: neither needs a heartbeat or a poll.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path

_numbers = itertools.count(1)
_here: set[str] = set()


def new_worker() -> str:
    """A name for a worker of this process: `<machine boot>.<pid namespace>.<pid>.<start time>.<number>`."""
    worker = f"{_PLACE}.{os.getpid()}.{_my_start_time()}.{next(_numbers)}"
    _here.add(worker)
    return worker


def retire(worker: str) -> None:
    """The worker has ended, though its process runs on."""
    _here.discard(worker)


def alive(worker: str) -> bool:
    """Whether the worker may still write. One that cannot be checked from here counts as alive."""
    boot, namespace, pid, started, _number = worker.split(".")
    if f"{boot}.{namespace}" != _PLACE:
        return boot == _PLACE.split(".")[0]  # after a restart of the machine, no worker of before is left
    if int(pid) == os.getpid() and started == _my_start_time():
        return worker in _here
    return _start_time(int(pid)) == started


def gone(worker: str) -> bool:
    """Whether the worker is known to have ended. That is never known of one on another machine."""
    return of_this_machine(worker) and not alive(worker)


def of_this_machine(worker: str) -> bool:
    """Whether the worker's process can be checked from here."""
    return worker.startswith(f"{_PLACE}.")


def of_this_process(worker: str) -> bool:
    return worker.startswith(f"{_PLACE}.{os.getpid()}.{_my_start_time()}.")


def process_of(worker: str) -> int:
    return int(worker.split(".")[2])


class ExitWatcher:
    """Calls `exited` when the process of a watched worker ends."""

    def __init__(self, exited: Callable[[str], None]) -> None:
        self._exited = exited
        self._watched: dict[str, int] = {}  # worker → pidfd

    def watch(self, worker: str) -> None:
        if worker in self._watched or not of_this_machine(worker) or process_of(worker) == os.getpid():
            return
        try:
            fd = os.pidfd_open(process_of(worker))
        except (OSError, AttributeError):  # it has ended already, or this is not Linux
            return
        self._watched[worker] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, worker)

    def close(self) -> None:
        for worker in list(self._watched):
            self._forget(worker)

    def _ended(self, worker: str) -> None:
        self._forget(worker)
        self._exited(worker)

    def _forget(self, worker: str) -> None:
        fd = self._watched.pop(worker)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # not Linux: one boot, one namespace
        boot, namespace = "local", "0"
    return f"{boot}.{namespace}"


def _my_start_time() -> str:
    global _me
    if _me[0] != os.getpid():  # this is a fork
        _me = (os.getpid(), _start_time(os.getpid()))
    return _me[1]


def _start_time(pid: int) -> str:
    """When the process began, in ticks since boot; "" when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The name, in parentheses, may hold spaces and parentheses of its own.
            fields = stat.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie no longer writes
    except (FileNotFoundError, ProcessLookupError):  # the second: it died between being opened and being read
        if os.path.isdir("/proc/self"):
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "0"


# Read at import, so that nothing is read in an event loop.
_PLACE = _place()
_me = (os.getpid(), _start_time(os.getpid()))
