"""Hears of the deaths of processes on this machine, by their pidfd: nothing is polled for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from .workers import of_this_machine, process_of


class Deaths:
    """Calls `died` when the process of a watched worker ends."""

    def __init__(self, died: Callable[[str], None]) -> None:
        self._died = died
        self._watched: dict[str, int] = {}  # worker → pidfd

    def watch(self, worker: str) -> None:
        if worker in self._watched or not of_this_machine(worker) or process_of(worker) == os.getpid():
            return
        try:
            fd = os.pidfd_open(process_of(worker))
        except (OSError, AttributeError):  # gone already, or not Linux
            return
        self._watched[worker] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, worker)

    def close(self) -> None:
        for worker in list(self._watched):
            self._forget(worker)

    def _ended(self, worker: str) -> None:
        self._forget(worker)
        self._died(worker)

    def _forget(self, worker: str) -> None:
        fd = self._watched.pop(worker)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
