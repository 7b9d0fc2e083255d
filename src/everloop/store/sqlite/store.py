"""The SQLite store: log, inbox, outbox, leases and timers in one file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...bus import InboundMessage, Kind, OutboundMessage
from ...errors import StoreError
from ...log import CallsAsked, Compacted, Entry, Logged, Written, decode_entry, encode_entry, kind_of
from .. import commit_mark, forks, parking, rates, trust
from .. import search as searching
from .. import tokens as tokening
from .. import transactions as tx
from ..base import (
    Busy,
    Claim,
    FileMark,
    Finished,
    Found,
    Incoming,
    Outgoing,
    SessionInfo,
    Spent,
    Timer,
    Token,
    TurnInfo,
    Waiting,
)
from ..commit_mark import CommitMark
from ..counting import look
from ..migrations import NewerSchema, migrate
from ..overview import Overview
from ..peers import ANY, EventRelay, NoRelay, Notice
from ..workers import alive
from ..writer import Writer
from .peers import SocketPeer, send

T = TypeVar("T")
CHECKPOINT_PAGES = 256
PROBE = "INSERT INTO rate (owner, name, began, number) VALUES ('', ?, 0, 0)"
PROBE_BYTES = 32 * 1024  # about what a request writes
LOCK_SECONDS = 30.0  # how long a write waits for another program that holds the file

SESSIONS = """SELECT s.id, s.owner, s.key,
        (SELECT coalesce(max(seq), 0) FROM entry WHERE session = s.id), s.history_from, s.created_at, s.updated_at,
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1),
        s.worker, s.compacted,
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked')
    FROM session s WHERE s.owner = ?"""
READY = """SELECT owner, key, worker FROM session WHERE id IN (
        SELECT session FROM inbox WHERE state <> 'done' AND kind <> 'urgent'
        EXCEPT SELECT session FROM inbox WHERE state <> 'done' AND state = 'parked') ORDER BY updated_at"""
WAITING = """SELECT i.id, i.session, i.data, i.kind, i.state, i.turn, i.first_seq
    FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = ? AND s.key = ? AND i.state <> 'done' AND i.state = 'new' AND i.kind <> 'urgent' ORDER BY i.id"""
UNFINISHED = """SELECT id, session, data, kind, state, turn, first_seq FROM inbox
    WHERE state <> 'done' AND owner = ? AND json_extract(data, '$.channel') = ? ORDER BY id"""
# From the newest on, so that a turn of late is found at once.
TURNS = """SELECT i.turn, i.session, s.key, i.owner, i.first_seq,
        coalesce((SELECT at FROM entry WHERE session = i.session AND seq = i.first_seq), i.at), i.ended_at, i.reason
    FROM inbox i JOIN session s ON s.id = i.session
    WHERE i.opened AND i.owner = ?1 AND substr(i.turn, 1, length(?2)) = ?2"""


class SQLiteStore:
    """Log, inbox, outbox, leases and timers in one file.

    Nothing is opened before the first call. Writes go through one thread with group commit; reads have
    connections of their own and never wait for them.
    """

    def __init__(self, path: str | Path | Callable[[], Path], *, lock_seconds: float = LOCK_SECONDS) -> None:
        self._path = path
        self._lock_seconds = lock_seconds
        self.writer = Writer(self._connect, self._explain, lambda: CommitMark(self.path))
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._open: list[sqlite3.Connection] = []
        self.relay: EventRelay = NoRelay()

    @cached_property
    def path(self) -> Path:
        """The file; a function that finds it is asked once, by the thread that opens it."""
        return self._path() if callable(self._path) else Path(self._path)

    # ------------------------------------------------------------------------------------------ inbox

    async def accept(self, message: InboundMessage, kind: Kind = "message") -> Incoming:
        return await self.writer.submit(partial(tx.accept, message=message, kind=kind))

    async def ready(self, worker: str, owner: str | None = None) -> list[tuple[str, str]]:
        def free(db: sqlite3.Connection) -> list[tuple[str, str]]:
            rows = db.execute(READY)
            return [(of, key) for of, key, holder in rows if (owner is None or of == owner) and _free(holder, worker)]

        return await self._in_reader(free)

    async def waiting(self, owner: str, key: str) -> list[Incoming]:
        rows = await self._read(WAITING, owner, key)
        return [tx.incoming(row) for row in rows]

    async def urgent(self, worker: str, owner: str | None = None) -> list[Incoming]:
        sql = """SELECT i.id, i.session, i.data, i.kind, i.state, i.turn, i.first_seq, s.worker
                FROM inbox i JOIN session s ON s.id = i.session
                WHERE i.state <> 'done' AND i.kind = 'urgent' AND coalesce(i.owner = ?, 1) ORDER BY i.id"""
        return await self._in_reader(
            lambda db: [tx.incoming(row[:7]) for row in db.execute(sql, (owner,)) if _free(row[7], worker)]
        )

    async def look(
        self, worker: str, sessions: Sequence[int] | None = None
    ) -> tuple[list[tuple[str, str]], list[Incoming]]:
        # One machine has few processes: they look at everything.
        return await self.ready(worker), await self.urgent(worker)

    async def unfinished(self, owner: str, channel: str) -> list[Incoming]:
        rows = await self._read(UNFINISHED, owner, channel)
        return [tx.incoming(row) for row in rows]

    async def incoming(self, id: int) -> Incoming:
        rows = await self._read("SELECT id, session, data, kind, state, turn, first_seq FROM inbox WHERE id = ?", id)
        return tx.incoming(rows[0])

    async def over(self, ids: Sequence[int]) -> list[int]:
        sql = "SELECT id FROM inbox WHERE state IN ('done', 'parked') AND id IN (SELECT value FROM json_each(?))"
        return [id for (id,) in await self._read(sql, str(list(ids)))] if ids else []

    async def find(self, owner: str, message_id: str) -> Incoming | None:
        sql = "SELECT id, session, data, kind, state, turn, first_seq FROM inbox WHERE owner = ? AND message_id = ?"
        rows = await self._read(sql, owner, message_id)
        return tx.incoming(rows[0]) if rows else None

    # ------------------------------------------------------------------------------------------ turns

    async def begin(
        self, owner: str, key: str, worker: str, message: InboundMessage | None = None, kind: Kind = "message"
    ) -> Claim | None:
        work = partial(tx.begin, owner=owner, key=key, worker=worker, message=message, kind=kind)
        claim = await self.writer.submit(work)
        if isinstance(claim, tx.Held):
            raise Busy(claim.worker, claim.accepted)
        if isinstance(claim, tx.Behind):
            raise Waiting(claim.accepted)
        return claim

    def append(self, claim: Claim, entries: Sequence[Entry], took: Sequence[int] = ()) -> Written[None]:
        rows = _rows(claim, entries)
        if not took and not claim.spent and not isinstance(entries[-1], Compacted):
            return self.writer.submit(lambda db: tx.append(db, claim, rows))
        claim.inbox += took
        spent, claim.spent = claim.spent, []
        return self.writer.submit(lambda db: tx.append_taking(db, claim, rows, took, spent))

    def finish(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
        incoming: Sequence[InboundMessage] = (),
    ) -> Written[Finished]:
        claim.inbox += took
        rows = _rows(claim, entries)
        spent, claim.spent = claim.spent, []
        return self.writer.submit(
            lambda db: tx.finish(db, claim, rows, entries, took, outgoing, sender, incoming, spent),
        )

    def park(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
    ) -> Written[Finished]:
        claim.inbox += took
        rows = _rows(claim, entries)
        spent, claim.spent = claim.spent, []
        return self.writer.submit(lambda db: parking.park(db, claim, rows, took, outgoing, sender, spent))

    async def decide(
        self,
        owner: str,
        key: str,
        allowed: bool | None,
        by: str = "",
        note: str = "",
        word: Incoming | InboundMessage | None = None,
        always: bool = False,
    ) -> tuple[int, CallsAsked | None] | None:
        return await self.writer.submit(lambda db: parking.decide(db, owner, key, allowed, by, note, word, always))

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> Written[int | None]:
        return self.writer.submit(lambda db: tx.post(db, claim, message, key, sender))

    async def release(self, claim: Claim) -> None:
        await self.writer.submit(
            lambda db: (
                db.execute(
                    "UPDATE session SET worker = NULL WHERE id = ? AND fence = ?", (claim.session, claim.fence)
                ).rowcount
            )
        )

    async def release_all(self, worker: str, owner: str | None = None) -> None:
        sql = "UPDATE session SET worker = NULL WHERE worker = ? AND (? IS NULL OR owner = ?)"
        await self.writer.submit(lambda db: db.execute(sql, (worker, owner, owner)).rowcount)

    async def answer(
        self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None = None
    ) -> list[int]:
        return await self.writer.submit(partial(tx.answer, row=row, outgoing=outgoing, sender=sender))

    # ------------------------------------------------------------------------------------------ outbox

    async def take_outgoing(
        self,
        worker: str,
        limit: int = 100,
        chat: tuple[str, str] | None = None,
        channels: Sequence[str] | None = None,
    ) -> list[Outgoing]:
        taken = await self.writer.submit(lambda db: tx.take_outgoing(db, worker, limit, chat, channels))
        taken.log_damaged()
        return taken.rows

    async def sent(self, ids: Sequence[int]) -> None:
        now = time.time()
        rows = [(now, id) for id in ids]
        await self.writer.submit(lambda db: db.executemany("UPDATE outbox SET sent_at = ? WHERE id = ?", rows).rowcount)

    # ------------------------------------------------------------------------------------------ reading

    async def read_log(self, session: int, after: int = 0, until: int | None = None) -> list[Logged]:
        return await self._in_reader(lambda db: list(_read_log(db, session, after, until)))

    async def read_turn(self, session: int, first_seq: int) -> list[Logged]:
        def work(db: sqlite3.Connection) -> list[Logged]:
            log = _read_log(db, session, first_seq - 1, None)
            first = next(log, None)
            return [] if first is None else [first, *itertools.takewhile(lambda one: one.turn == first.turn, log)]

        return await self._in_reader(work)

    async def session(self, owner: str, key: str) -> SessionInfo | None:
        rows = await self._read(SESSIONS + " AND s.key = ?", owner, key)
        return _session_info(rows[0]) if rows else None

    async def sessions(self, owner: str, limit: int = 100) -> list[SessionInfo]:
        rows = await self._read(SESSIONS + " ORDER BY s.updated_at DESC LIMIT ?", owner, limit)
        return [_session_info(row) for row in rows]

    async def turns(
        self, owner: str, *, session: int | None = None, prefix: str = "", limit: int = 100
    ) -> list[TurnInfo]:
        where, values = ("", []) if session is None else (" AND i.session = ?4", [session])
        rows = await self._read(TURNS + where + " ORDER BY i.id DESC LIMIT ?3", owner, prefix, limit, *values)
        return [TurnInfo(*row) for row in rows]

    async def search(self, owner: str, query: str, limit: int = 10) -> list[Found]:
        return await searching.search(self._in_reader, self.writer.submit, owner, query, limit)

    # ------------------------------------------------------------------------------------------ from outside a turn

    async def note(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        return _or_busy(await self.writer.submit(partial(tx.note, owner=owner, key=key, entries=entries)))

    async def compact(self, owner: str, key: str, entry: Compacted) -> bool:
        return await self.writer.submit(partial(tx.compact, owner=owner, key=key, entry=entry))

    async def fork(self, owner: str, key: str, until: int | None, new_key: str) -> SessionInfo:
        await self.writer.submit(partial(forks.fork, owner=owner, key=key, until=until, new_key=new_key))
        made = await self.session(owner, new_key)
        assert made is not None
        return made

    async def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        await self.writer.submit(partial(tx.spend, owner=owner, spent=spent))

    async def spent(self, owner: str, scopes: Sequence[str]) -> dict[str, tuple[int, float]]:
        sql = f"SELECT scope, tokens, cost FROM spent WHERE owner = ? AND scope IN ({', '.join('?' * len(scopes))})"
        return {scope: (tokens, cost) for scope, tokens, cost in await self._read(sql, owner, *scopes)}

    async def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        return await self.writer.submit(partial(rates.admit, owner=owner, name=name, most=most, seconds=seconds))

    # ------------------------------------------------------------------------------------------ timers

    async def set_timer(self, timer: Timer) -> None:
        data = msgspec.json.encode(timer.data).decode()
        await self.writer.submit(
            lambda db: (
                db.execute(
                    "INSERT OR REPLACE INTO timer (owner, id, due_at, data) VALUES (?, ?, ?, ?)",
                    (timer.owner, timer.id, timer.due_at, data),
                ).rowcount
            )
        )

    async def cancel_timer(self, owner: str, id: str) -> bool:
        sql = "DELETE FROM timer WHERE owner = ? AND id = ?"
        return await self.writer.submit(lambda db: db.execute(sql, (owner, id)).rowcount) == 1

    async def timers(self, owner: str | None = None, limit: int | None = None) -> list[Timer]:
        sql = "SELECT owner, id, due_at, data FROM timer WHERE ? IS NULL OR owner = ? ORDER BY due_at LIMIT ?"
        rows = await self._read(sql, owner, owner, -1 if limit is None else limit)
        return [Timer(owner, id, due_at, _timer_data(data)) for owner, id, due_at, data in rows]

    async def fire_timer(self, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
        return await self.writer.submit(partial(tx.fire_timer, timer=timer, message=message, next_due=next_due))

    # ------------------------------------------------------------------------------------------ tokens

    async def add_token(self, name: str, owner: str, hash: str, rights: Iterable[str] = (tokening.USE,)) -> Token:
        return await self.writer.submit(partial(tokening.add, name=name, owner=owner, hash=hash, rights=rights))

    async def tokens_exist(self) -> bool:
        return bool((await self._read(tokening.EXIST))[0][0])

    async def token(self, hash: str) -> Token | None:
        rows = await self._read(tokening.LIVING, hash)
        return tokening.token_of(rows[0]) if rows else None

    async def tokens(self, owner: str | None = None) -> list[Token]:
        return [tokening.token_of(row) for row in await self._read(tokening.ALL, owner)]

    async def token_used(self, id: str, at: float) -> None:
        values = (at, id, tokening.NOTED_EVERY)
        await self.writer.submit(lambda db: db.execute(tokening.USED, values).rowcount)

    async def revoke_token(self, id: str) -> bool:
        values = (time.time(), id)
        return await self.writer.submit(lambda db: db.execute(tokening.REVOKE, values).rowcount) == 1

    # ------------------------------------------------------------------------------------------ trust

    async def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        now = time.time()
        rows = [(owner, mark.digest, mark.tainted, mark.path, now) for mark in marks]
        await self.writer.submit(lambda db: db.executemany(trust.MARK, rows).rowcount)

    async def file_marks(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        rows = await self._read(trust.MARKS, owner, str(msgspec.json.encode(list(digests)), "ascii"))
        return {digest: bool(tainted) for digest, tainted in rows}

    async def tainted_paths(self, owner: str, limit: int = 1000) -> list[str]:
        return [path for (path,) in await self._read(trust.TAINTED, owner, limit)]

    async def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        now = time.time()
        rows = [(owner, key, name, now) for name in names]
        await self.writer.submit(lambda db: db.executemany(trust.GRANT, rows).rowcount)

    async def grants(self, owner: str, key: str) -> frozenset[str]:
        return frozenset(name for (name,) in await self._read(trust.GRANTS, owner, key))

    async def revoke_grants(self, owner: str, key: str) -> None:
        await self.writer.submit(lambda db: db.execute(trust.REVOKE_GRANTS, (owner, key)).rowcount)

    # ------------------------------------------------------------------------------------------ workers

    async def join(self, worker: str, address: str) -> None:
        def work(db: sqlite3.Connection) -> None:
            for (id,) in db.execute("SELECT id FROM worker").fetchall():
                if not alive(id):
                    db.execute("DELETE FROM worker WHERE id = ?", (id,))
            db.execute(
                "INSERT OR REPLACE INTO worker (id, address, at) VALUES (?, ?, ?)", (worker, address, time.time())
            )

        await self.writer.submit(work)

    async def workers(self) -> list[tuple[str, str]]:
        sql = "SELECT id, address FROM worker"
        return await self._in_reader(lambda db: [(id, address) for id, address in db.execute(sql) if alive(id)])

    async def leave(self, worker: str) -> None:
        await self.writer.submit(lambda db: db.execute("DELETE FROM worker WHERE id = ?", (worker,)).rowcount)

    async def is_alive(self, worker: str) -> bool:
        return await asyncio.to_thread(alive, worker)

    def peer(self, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False) -> SocketPeer:
        return SocketPeer(self, worker, on_notice)

    async def wake(self, what: str = ANY, ids: Iterable[int] = (), but: str = "") -> None:
        # One machine has few workers: all of them are woken, and look at everything.
        for worker, address in await self.workers():
            if worker != but:
                send(address, what)

    async def overview(self) -> Overview:
        return await self._in_reader(look)

    # ------------------------------------------------------------------------------------------ for plain code

    def note_now(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        """`note` for callers without an event loop."""
        return _or_busy(self.writer.call(partial(tx.note, owner=owner, key=key, entries=entries)))

    def read_now(self, owner: str, key: str) -> list[Logged]:
        """The current conversation of a session, for callers without an event loop."""

        def work(db: sqlite3.Connection) -> list[Logged]:
            session = tx.session_row(db, owner, key, create=False)
            return [] if session is None else list(_read_log(db, session[0], session[3], None))

        return self.writer.call(work)

    # ------------------------------------------------------------------------------------------ connections

    def aside(self, work: Callable[[], T]) -> Written[T]:
        return self.writer.submit(lambda db: work(), "reads")

    async def check_writable(self) -> None:
        def work(db: sqlite3.Connection) -> None:
            # A row of several pages, gone again in the same commit: the file must be able to grow, not only to change.
            db.execute(PROBE, (os.urandom(PROBE_BYTES // 2).hex(),))
            db.execute("DELETE FROM rate WHERE owner = ''")
            try:
                with tempfile.TemporaryFile(dir=self.path.parent) as file:
                    file.write(bytes(PROBE_BYTES))
            except OSError as error:
                raise StoreError(f"nothing can be written beside {self.path}: {error.strerror}") from error

        await self.writer.submit(work)

    def files(self) -> list[Path]:
        real = self.path.resolve()
        return [real, *(real.with_name(real.name + suffix) for suffix in ("-wal", "-shm", "-journal", "-commits"))]

    def hurry(self) -> None:
        """A file is never away."""

    async def close(self) -> None:
        """Wait until everything is on disk and let go of the file."""
        await self.writer.close()
        loop = asyncio.get_running_loop()
        if self._readers is not None:
            readers, self._readers = self._readers, None
            await loop.run_in_executor(None, readers.shutdown)
            for connection in self._open:
                connection.close()
            self._open.clear()
            self._local = threading.local()

    async def _read(self, sql: str, *values: object) -> list[Any]:
        return await self._in_reader(lambda db: db.execute(sql, values).fetchall())

    async def _in_reader(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is None:
            self._readers = ThreadPoolExecutor(2, thread_name_prefix="everloop-reader")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._with_reader, work)

    def _with_reader(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            connection.execute("PRAGMA query_only = ON")
            self._open.append(connection)
        try:
            return work(connection)
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _connect(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileExistsError):  # private from its first byte on
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
                commit_mark.forget(self.path)
            connection = sqlite3.connect(
                self.path, timeout=self._lock_seconds, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            why = "it is a folder: name a file in it" if self.path.is_dir() else error
            raise StoreError(f"cannot open the store {self.path}: {why}") from error
        try:
            _use_wal(connection, self._lock_seconds)
            connection.execute("PRAGMA synchronous = FULL")
            # A short log is soon overwritten in place, and an fsync that does not grow the file is far cheaper.
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            migrate(connection)
            commit_mark.verify(connection, self.path)
        except NewerSchema:
            connection.close()
            raise StoreError(
                f"{self.path} was written by a newer Everloop: update this one, or choose another store"
            ) from None
        except sqlite3.Error as error:
            connection.close()
            raise self._explain(error) from error
        return connection

    def _explain(self, error: sqlite3.Error) -> Exception:
        """The error in one line that says what to do."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            what = f"the disk that holds {self.path} is full: free some space and try again"
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            what = f"{self.path} is locked by another program: close it and try again"
        elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            what = f"{self.path} is damaged or not a database: move it away or restore a copy (it was not changed)"
        elif code == sqlite3.SQLITE_READONLY:
            what = f"{self.path} is read-only: give this user the right to write it, or choose another store"
        elif code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            what = f"{self.path} cannot be read or written ({error}): check the disk and try again"
        else:
            what = f"{self.path}: {error}"
        return StoreError(f"{what}. What was on disk before is safe.")


def _timer_data(data: str) -> dict[str, Any]:
    """What a timer holds; nothing of one that is damaged, which must not keep the others from being fired."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _session_info(row: Sequence[Any]) -> SessionInfo:
    return replace(SessionInfo(*row[:-1]), parked=bool(row[-1]))


def _use_wal(connection: sqlite3.Connection, seconds: float) -> None:
    """Turn the write-ahead log on. SQLite does not wait here for others that make the same file, so we do."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.005)


def _free(holder: str | None, worker: str) -> bool:
    return holder is None or holder == worker or not alive(holder)


def _or_busy(result: int | tx.Held) -> int:
    if isinstance(result, tx.Held):
        raise Busy(result.worker, result.accepted)
    return result


def _rows(claim: Claim, entries: Sequence[Entry]) -> list[tx.Row]:
    """The rows of these entries, with their places taken in the order of the calls."""
    # When a conversation began is told in every prompt of it, so it must be the same from the first one on.
    now = claim.began if claim.next_seq == claim.history_from + 1 else time.time()
    first, claim.next_seq = claim.next_seq, claim.next_seq + len(entries)
    return [
        (claim.session, first + n, claim.turn or None, kind_of(entry), encode_entry(entry), now)
        for n, entry in enumerate(entries)
    ]


def _read_log(db: sqlite3.Connection, session: int, after: int, until: int | None) -> Iterator[Logged]:
    rows = db.execute(
        "SELECT seq, turn, at, data FROM entry WHERE session = ? AND seq > ? AND seq <= ? ORDER BY seq",
        (session, after, until if until is not None else 2**62),
    )
    for seq, turn, at, data in rows:
        try:
            entry = decode_entry(data)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"entry {seq} of session {session} is damaged ({error}): restore a copy of the store"
            ) from error
        yield Logged(seq, turn, at, entry)
