"""The threads behind the lanes: each takes what waits in one place, does it, and looks for the next."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Literal

from ..jobs import Job

if TYPE_CHECKING:
    from .connecting import Connection

Kind = Literal["writes", "reads", "aside"]
BATCH = 64  # writes in one transaction


class Local:
    """What a thread keeps for itself: its connection, its name in the database, and the number of its transaction."""

    __slots__ = ("connection", "known", "name", "number")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.name = secrets.token_hex(8)
        self.known = False  # the name is in the database
        self.number = 0


class Crew:
    """The threads, from the first job to the end."""

    def __init__(self, size: int, run: Callable[[list[Job], Local], None], before: Crew | None) -> None:
        self._size = size
        self._run = run
        self._before = before
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._ended = False
        self._ready: deque[Hashable] = deque()  # places with work that no thread is at
        self._waiting: dict[Hashable, deque[Job]] = {}  # by place; there from its first job until it is idle again
        self._changed = threading.Condition()

    def put(self, job: Job, place: Hashable) -> None:
        with self._changed:
            place = place if place is not None else object()  # on its own: beside everything else
            if place in self._waiting:
                self._waiting[place].append(job)
                return
            self._waiting[place] = deque([job])
            self._ready.append(place)
            if len(self._ready) > self._idle and len(self._threads) < self._size:
                name = f"everloop-postgres-{len(self._threads) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        if self._before is not None:
            self._before.join()
        local = Local()
        for place, jobs in self._taken():
            self._run(jobs, local)
            with self._changed:
                if self._waiting[place]:
                    self._ready.append(place)
                    self._changed.notify()
                else:
                    del self._waiting[place]
        if local.connection is not None:
            local.connection.close()

    def _taken(self) -> Iterator[tuple[Hashable, list[Job]]]:
        """The jobs of one place after another, as many of one kind as go into a transaction."""
        while True:
            with self._changed:
                while not self._ready:
                    if self._ended:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                place = self._ready.popleft()
                waiting = self._waiting[place]
                jobs = [waiting.popleft()]
                while waiting and waiting[0].kind == jobs[0].kind and len(jobs) < BATCH:
                    jobs.append(waiting.popleft())
            yield place, jobs
