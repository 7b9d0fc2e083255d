"""The overview of a store: its workers and their leases, pending and orphaned work, and its standbys."""

from __future__ import annotations

import msgspec

MAX_LISTED = 100  # per list; the counts next to the lists are complete
PATIENCE = 10.0  # seconds that work may wait despite a live worker before it counts as stuck


class WorkerSeen(msgspec.Struct, frozen=True):
    """A live worker. A process may have several: one that runs turns, others that only send or receive notices."""

    id: str
    process: int  # its process id on its machine
    held: int  # sessions that it holds
    silent: float  # seconds since its last heartbeat; 0 if its process can be checked directly
    takes_work: bool  # it gets notices of all work; a terminal chat, for example, only does its own

    @property
    def place(self) -> str:
        """An id of its process, the same for all of its workers."""
        return self.id.rpartition(".")[0]


class Lease(msgspec.Struct, frozen=True):
    """A session held by a live worker."""

    owner: str
    key: str
    worker: str


class Unheld(msgspec.Struct, frozen=True):
    """A session with work that no live worker holds."""

    owner: str
    key: str
    since: float  # the latest of: arrival of the work, last activity of the session, last heartbeat of its worker


class Overview(msgspec.Struct, frozen=True):
    """The work of all owners at one point in time, by the store's clock. Lists hold the oldest hundred."""

    at: float
    sessions: int  # an estimate in PostgreSQL above ten thousand
    workers: tuple[WorkerSeen, ...]
    leases: tuple[Lease, ...]
    held: int  # total number of leases
    unheld: tuple[Unheld, ...]
    unheld_count: int
    waited_out: int  # those of them that have waited longer than `PATIENCE`
    waiting: int  # messages that no turn has taken
    oldest_waiting: float | None  # arrival of the oldest one
    open_turns: int  # running or interrupted
    parked_turns: int  # waiting for a person's answer
    unsent: int  # outbox rows
    oldest_unsent: float | None
    damaged: int = 0  # outbox rows that were set aside because they could not be decoded
    damaged_incoming: int = 0  # such rows of the inbox
    lost_commits: int = 0  # number of commits found missing when the store was opened, the last time that happened
    lost_at: float | None = None  # when that was detected

    @property
    def processes(self) -> int:
        """The number of processes that take work."""
        return len({worker.place for worker in self.workers if worker.takes_work})

    @property
    def stuck(self) -> int:
        """The number of sessions with work that no worker will do.

        If no worker takes work, these are all sessions without a holder; otherwise, those that have waited longer than
        it takes a worker to notice.
        """
        return self.waited_out if self.processes else self.unheld_count

    def stuck_sessions(self) -> list[Unheld]:
        """The first of the stuck sessions."""
        patience = PATIENCE if self.processes else -1.0
        return [one for one in self.unheld if self.at - one.since > patience]

    @property
    def waiting_seconds(self) -> float:
        """How long the oldest message has waited; 0 if none is pending."""
        return 0.0 if self.oldest_waiting is None else max(0.0, self.at - self.oldest_waiting)

    @property
    def unsent_seconds(self) -> float:
        """How long the oldest answer has waited to be sent; 0 if none is pending."""
        return 0.0 if self.oldest_unsent is None else max(0.0, self.at - self.oldest_unsent)


class Standby(msgspec.Struct, frozen=True):
    """A connected standby. Fields are None for a user who may not see its state."""

    name: str
    state: str | None  # normally "streaming"
    sync: str | None  # "sync" or "quorum": commits wait for it; "potential"; or "async"
    behind: int | None  # bytes of WAL that it has not applied

    @property
    def is_synchronous(self) -> bool:
        return self.sync in ("sync", "quorum")


class Replication(msgspec.Struct, frozen=True):
    """The state of a primary and its standbys."""

    names: str  # synchronous_standby_names; "": commits wait for no standby
    standbys: tuple[Standby, ...]
    waiting: int  # commits that wait for a standby
    seconds: float  # the longest of these waits

    @property
    def is_visible(self) -> bool:
        """Return whether this user may see the state of standbys."""
        return all(one.state is not None for one in self.standbys)
