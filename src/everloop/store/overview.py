"""What a store looks like from outside: its workers, the leases they hold, what waits, and what nobody works on."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 100  # of each list; the counts beside them are true
PATIENCE = 10.0  # seconds that work may be free beside a living worker before it counts as stuck


@dataclass(slots=True, frozen=True)
class WorkerSeen:
    """A living worker. A process may have several: one that runs turns, and others that send or only hear."""

    id: str
    process: int  # its process id, on whatever machine it runs
    held: int  # sessions that it holds
    silent: float  # seconds since it was heard of; 0 where its process is seen
    takes_work: bool  # it is called when there is work; else it does only its own, as a chat in a terminal does

    @property
    def place(self) -> str:
        """The same for all workers of one process."""
        return self.id.rpartition(".")[0]


@dataclass(slots=True, frozen=True)
class Lease:
    """A session in the hands of a living worker."""

    owner: str
    key: str
    worker: str


@dataclass(slots=True, frozen=True)
class Unheld:
    """A session with work that no living worker holds."""

    owner: str
    key: str
    since: float  # when the work came in, the session was last at work, or its worker was last heard of


@dataclass(slots=True, frozen=True)
class Overview:
    """All owners' work at one moment, by the store's own clock. Lists are the first hundred, the oldest first."""

    at: float
    sessions: int  # in PostgreSQL, where there are more than ten thousand, about so many
    workers: tuple[WorkerSeen, ...]  # all that live
    leases: tuple[Lease, ...]
    held: int  # leases in all
    unheld: tuple[Unheld, ...]
    unheld_count: int
    waited_out: int  # of these, the ones that have been so for longer than `PATIENCE`
    waiting: int  # messages that no turn has taken
    oldest_waiting: float | None  # when the oldest of them came in
    open_turns: int  # that are run, or were cut off
    parked_turns: int  # that wait for a person's word
    unsent: int  # rows of the outbox
    oldest_unsent: float | None
    damaged: int = 0  # rows of the outbox that were set aside because they could not be decoded
    lost_commits: int = 0  # commits that were missing when the store was opened, the last time that happened
    lost_at: float | None = None  # when that was noticed

    @property
    def processes(self) -> int:
        """Processes that take work."""
        return len({worker.place for worker in self.workers if worker.takes_work})

    @property
    def stuck(self) -> int:
        """Sessions with work that nobody will do. With nobody who takes work that is all that no one holds; beside a
        living worker only what has been so for longer than it takes to be noticed."""
        return self.waited_out if self.processes else self.unheld_count

    def stuck_sessions(self) -> list[Unheld]:
        """The first of the stuck ones."""
        patience = PATIENCE if self.processes else -1.0
        return [one for one in self.unheld if self.at - one.since > patience]

    @property
    def waiting_seconds(self) -> float:
        """How long the oldest message has waited; 0 when none waits."""
        return 0.0 if self.oldest_waiting is None else max(0.0, self.at - self.oldest_waiting)

    @property
    def unsent_seconds(self) -> float:
        """How long the oldest answer has waited to be sent; 0 when none waits."""
        return 0.0 if self.oldest_unsent is None else max(0.0, self.at - self.oldest_unsent)
