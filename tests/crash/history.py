"""The state that a run left in either store, and what was observed from outside."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop.log import CallEnded, Entry, decode_entry
from everloop.store.history_check import check_history
from everloop.store.peers import process_of

MARK = re.compile(r"mark:(\S+)")
# Messages other than answers: questions, replies to decisions, and messages of the tool `message`.
ASIDE = re.compile(r"May I do|Approved\.|There is no open question|I am still waiting|said:")


@dataclass(slots=True)
class Message:
    """A row of the inbox."""

    id: str
    session: int
    kind: str
    state: str
    turn: str | None
    content: str
    reply: bool = True  # the answer is sent to a chat; otherwise, its client fetches it
    at: float = 0.0


@dataclass(slots=True)
class Place:
    """An entry of a log with its position and time."""

    seq: int
    turn: str | None
    at: float
    entry: Entry


@dataclass(slots=True)
class Lease:
    """A change of a session's lease, as the database itself recorded it."""

    session: int
    at: float
    transaction: str
    fence_before: int
    fence: int
    before: str | None  # the worker that held it
    after: str | None
    alive: bool  # the previous holder had renewed its lease in time


@dataclass(slots=True)
class Write:
    """An entry or an answer of a turn, and who held the session when it was written."""

    session: int
    transaction: str
    writer: int  # the process
    holder: str | None
    what: str


@dataclass(slots=True)
class Asked:
    """A client's request to a server, and everything it received."""

    session: str
    mark: str
    answers: list[tuple[bool, str]] = field(default_factory=list)  # streamed or whole, and the text
    hung_up: bool = False
    resumed: int = 0  # how often it reconnected in the middle of a stream
    refused: list[str] = field(default_factory=list)  # answers that no client should get


@dataclass(slots=True)
class History:
    messages: list[Message] = field(default_factory=list)
    logs: dict[int, list[Place]] = field(default_factory=dict)
    answers: list[tuple[int, str | None, str]] = field(default_factory=list)  # outbox: session, reply_to, content
    unsent: int = 0
    held: list[tuple[int, str]] = field(default_factory=list)
    open_turns: list[str] = field(default_factory=list)
    integrity: str = "ok"
    takeovers: int = 0
    broken: list[str] = field(default_factory=list)  # the output of `everloop check-history` for the store
    # observed from outside
    acknowledged: list[str] = field(default_factory=list)
    published: dict[str, list[str]] = field(default_factory=dict)  # chat → ids in the order they were published
    delivered: list[dict[str, Any]] = field(default_factory=list)
    asides: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    killed: set[int] | None = None  # the processes that were, where that is known
    requests: list[dict[str, Any]] = field(default_factory=list)  # marker, round, time, problems
    # of many processes
    leases: list[Lease] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    clients: list[Asked] = field(default_factory=list)
    jobs: dict[str, float] = field(default_factory=dict)  # scheduled work: id → seconds between two slots
    outages: list[tuple[float, float]] = field(default_factory=list)  # periods in which the store was unavailable
    ended: dict[int, float] = field(default_factory=dict)  # when a process was terminated or killed
    complaints: list[str] = field(default_factory=list)  # lines that processes should not have written
    refused: int = 0  # writes of workers that had lost their lease

    @property
    def hung_up(self) -> set[str]:
        """The marks of messages whose client disconnected: their turns may end without an answer, and run again."""
        return {asked.mark for asked in self.clients if asked.hung_up}

    @property
    def robbed(self) -> dict[tuple[int, int], float]:
        """(session, process) → when another process took the session over from that process, which missed
        heartbeats."""
        return {
            (lease.session, process_of(lease.before)): lease.at
            for lease in reversed(self.leases)  # the first time counts
            if lease.before and lease.after and lease.before != lease.after and not lease.alive
        }

    @property
    def interrupted(self) -> int:
        return sum(
            isinstance(place.entry, CallEnded) and place.entry.status == "interrupted"
            for log in self.logs.values()
            for place in log
        )

    @property
    def repeats(self) -> int:
        return sum(bool(answer["repeat"]) for answer in self.delivered)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a notes file; a line truncated by the kill does not count."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in whole]


def seen_in(folder: Path, requests: Iterable[Any] = ()) -> History:
    """The observations of the run in this folder, without its store."""
    sent = lines(folder / "answers")
    return History(
        asides=[line for line in sent if ASIDE.match(line["content"])],
        acknowledged=[line["id"] for line in lines(folder / "acknowledged")],
        delivered=[line for line in sent if not ASIDE.match(line["content"])],
        runs=lines(folder / "runs"),
        requests=[_request(seen) for seen in requests],
    )


def read(folder: Path, requests: Iterable[Any] = ()) -> History:
    """The complete history of the run in this folder, with SQLite as its store."""
    history = seen_in(folder, requests)
    if not (folder / "store.db").exists():
        return history
    db = sqlite3.connect(folder / "store.db", isolation_level=None)
    try:
        history.integrity = db.execute("PRAGMA integrity_check").fetchone()[0]
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            return history
        read_store(lambda sql: db.execute(sql).fetchall(), history)
    finally:
        db.close()
    return history


def _request(seen: Any) -> dict[str, Any]:
    if isinstance(seen, dict):
        return seen
    return {"marker": seen.marker, "round": seen.round, "time": seen.time, "problems": seen.problems}


def read_store(rows: Callable[[str], list[Any]], history: History) -> None:
    """The contents of the tables, which are the same in every store."""
    for id, session, kind, state, turn, data, at in rows(
        "SELECT message_id, session, kind, state, turn, data, at FROM inbox ORDER BY id"
    ):
        message = json.loads(data)
        if (content := message["content"]) != "/approve":
            history.messages.append(Message(id, session, kind, state, turn, content, message.get("reply", True), at))
    for session, seq, turn, at, data in rows("SELECT session, seq, turn, at, data FROM entry ORDER BY session, seq"):
        history.logs.setdefault(session, []).append(Place(seq, turn, at, decode_entry(data)))
    for session, data, sent_at in rows("SELECT session, data, sent_at FROM outbox ORDER BY id"):
        message = json.loads(data)
        if not ASIDE.match(message["content"]):
            history.answers.append((session, message["reply_to"], message["content"]))
        history.unsent += sent_at is None
    history.held = rows("SELECT id, worker FROM session WHERE worker IS NOT NULL")
    history.open_turns = [id for (id,) in rows("SELECT id FROM turn WHERE ended_at IS NULL")]
    begun = rows("SELECT coalesce(sum(fence), 0) FROM session")[0][0]
    turns = rows("SELECT count(*) FROM turn")[0][0]
    commands = rows("SELECT count(*) FROM inbox WHERE kind = 'command'")[0][0]
    history.takeovers = int(begun) - turns - commands
    history.broken = check_history(rows).violations
