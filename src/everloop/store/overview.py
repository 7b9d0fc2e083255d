"""The overview of a store: its workers, their leases, what waits, what no worker does, and its standbys."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 100  # of each list; the counts beside them are complete
PATIENCE = 10.0  # seconds that work may wait beside a living worker before it counts as stuck


@dataclass(slots=True, frozen=True)
class WorkerSeen:
    """A living worker. A process may have several: one that runs turns, others that send or only get notices."""

    id: str
    process: int  # its process id on its machine
    held: int  # sessions that it holds
    silent: float  # seconds since its last heartbeat; 0 where its process can be seen
    takes_work: bool  # it gets notices of all work; a chat in a terminal, for example, does only its own

    @property
    def place(self) -> str:
        """The same for all workers of one process."""
        return self.id.rpartition(".")[0]


@dataclass(slots=True, frozen=True)
class Lease:
    """A session held by a living worker."""

    owner: str
    key: str
    worker: str


@dataclass(slots=True, frozen=True)
class Unheld:
    """A session with work that no living worker holds."""

    owner: str
    key: str
    since: float  # the latest of: the work came in, the session did something, its worker's last heartbeat


@dataclass(slots=True, frozen=True)
class Overview:
    """The work of all owners at one moment, by the store's clock. Lists hold the oldest hundred."""

    at: float
    sessions: int  # an estimate in PostgreSQL if there are more than ten thousand
    workers: tuple[WorkerSeen, ...]
    leases: tuple[Lease, ...]
    held: int  # leases in all
    unheld: tuple[Unheld, ...]
    unheld_count: int
    waited_out: int  # of these, those that have waited longer than `PATIENCE`
    waiting: int  # messages that no turn has taken
    oldest_waiting: float | None  # when the oldest of them came in
    open_turns: int  # running or interrupted
    parked_turns: int  # waiting for a person's answer
    unsent: int  # rows of the outbox
    oldest_unsent: float | None
    damaged: int = 0  # rows of the outbox that were set aside because they could not be decoded
    damaged_incoming: int = 0  # rows of the inbox
    lost_commits: int = 0  # commits that were missing when the store was opened, the last time that happened
    lost_at: float | None = None  # when that was noticed

    @property
    def processes(self) -> int:
        """Processes that take work."""
        return len({worker.place for worker in self.workers if worker.takes_work})

    @property
    def stuck(self) -> int:
        """Sessions with work that no worker will do: all that are not held if no worker takes work, otherwise those
        that have waited longer than it takes to be noticed."""
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


@dataclass(slots=True, frozen=True)
class Standby:
    """A standby that is connected. A user who may not see its state sees None."""

    name: str
    state: str | None  # "streaming" as a rule
    sync: str | None  # "sync" or "quorum": commits wait for it; "potential"; or "async"
    behind: int | None  # bytes of the log that it has not applied

    @property
    def is_synchronous(self) -> bool:
        return self.sync in ("sync", "quorum")


@dataclass(slots=True, frozen=True)
class Replication:
    """The state of a primary and its standbys."""

    names: str  # synchronous_standby_names; "": commits wait for no standby
    standbys: tuple[Standby, ...]
    waiting: int  # commits that wait for a standby
    seconds: float  # the longest of these waits

    @property
    def is_visible(self) -> bool:
        """Whether this user may see the state of standbys."""
        return all(one.state is not None for one in self.standbys)
