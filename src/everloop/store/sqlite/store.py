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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from ...bus import InboundMessage, Kind, OutboundMessage
from ...errors import StoreError
from ...log import CallsAsked, Compacted, Entry, Logged, Written
from .. import claims
from ..base import (
    ChannelRow,
    Claim,
    DeadLetter,
    Delivery,
    FileMark,
    Finished,
    Found,
    Incoming,
    Naming,
    Outgoing,
    Pruned,
    Removed,
    RequestText,
    SentPart,
    SessionInfo,
    Spent,
    Timer,
    Token,
    TurnInfo,
)
from ..claims import TurnStep
from ..peers import ANY, EventRelay, NoRelay, Notice, alive
from ..tokens import EXIST, NOTED_EVERY, USE, token_of
from . import deletion, queries
from .peers import SocketPeer, send_datagram
from .schema import NewerSchema, migrate
from .transactions import REVOKE_GRANTS, SQLiteTransaction
from .writer import CHECKPOINT_PAGES, FILES, PAGE_BYTES, SHORT, SYNCHRONOUS, CommitMark, Writer
from .writer import Kind as WriteKind

if TYPE_CHECKING:
    from ..overview import Overview

T = TypeVar("T")
PROBE = "INSERT INTO rate (owner, name, began, number) VALUES ('', ?, 0, 0)"
PROBE_BYTES = 32 * 1024  # roughly the size of what a request writes
LOCK_SECONDS = 30.0  # how long a write waits for another program that has locked the file
IO_ERROR_SECONDS = 1.0  # how long opening is retried after an I/O error


class _Readers:
    """Two threads, each with a connection of its own. What is read while they are closed needs others."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="everloop-reader")
        self._connect = connect
        self._local = threading.local()
        self._open: list[sqlite3.Connection] = []

    def connection(self) -> sqlite3.Connection:
        """Return the connection of the calling thread."""
        known: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if known is None:
            known = self._local.connection = self._connect()
            known.execute("PRAGMA query_only = ON")
            self._open.append(known)
        return known

    def close(self) -> None:
        """Wait for what is being read, then close the connections. Call it in a thread."""
        self.pool.shutdown()
        for connection in self._open:
            connection.close()


class SQLiteStore:
    """Log, inbox, outbox, leases and timers in one file.

    Nothing is opened before the first call. Writes go through one thread with group commit; reads have their own
    connections and never wait for writes.
    """

    def __init__(
        self,
        path: str | Path | Callable[[], Path],
        *,
        lock_seconds: float = LOCK_SECONDS,
        flush_always: bool = False,
    ) -> None:
        self._path = path
        self._lock_seconds = lock_seconds
        self.writer = Writer(self._connect_writer, self._explain, flush_always, lock_seconds)
        self.relay: EventRelay = NoRelay()
        self._readers: _Readers | None = None

    @cached_property
    def path(self) -> Path:
        """The path of the file. If it is a function, it is called once, by the thread that opens the file."""
        return self._path() if callable(self._path) else Path(self._path)

    # ------------------------------------------------------------------------------------------ inbox

    async def accept(self, message: InboundMessage, kind: Kind = "message") -> Incoming:
        return await self._transact(lambda tx: tx.accept(message, kind))

    async def ready(self, worker: str, owner: str | None = None) -> list[tuple[str, str]]:
        def work(db: sqlite3.Connection) -> list[tuple[str, str]]:
            rows = [row for row in db.execute(queries.READY) if owner is None or row[0] == owner]
            return [(of, key) for of, key, holder in rows if _is_free(holder, worker)]

        return await self._in_reader(work)

    async def waiting(self, owner: str, key: str) -> list[Incoming]:
        return await self._readable(await self._read(queries.WAITING, owner, key))

    async def urgent(self, worker: str, owner: str | None = None) -> list[Incoming]:
        def work(db: sqlite3.Connection) -> list[Any]:
            return [row[:-1] for row in db.execute(queries.URGENT, (owner,)) if _is_free(row[-1], worker)]

        return await self._readable(await self._in_reader(work))

    async def look(
        self, worker: str, sessions: Sequence[int] | None = None
    ) -> tuple[list[tuple[str, str]], list[Incoming]]:
        # A machine runs few processes: they look at everything.
        return await self.ready(worker), await self.urgent(worker)

    async def _readable(self, rows: Sequence[Any]) -> list[Incoming]:
        """Return the messages of these rows. Pending ones that cannot be decoded are set aside."""
        found, damaged = claims.readable(rows)
        if damaged:
            claims.log_damaged(await self._transact(lambda tx: tx.set_aside(damaged)))
        return found

    async def unfinished(self, owner: str, channel: str) -> list[Incoming]:
        rows = await self._readable(await self._read(queries.UNFINISHED, owner))
        return [row for row in rows if row.message.channel == channel]

    async def incoming(self, id: int) -> Incoming:
        return claims.incoming((await self._read(queries.INCOMING, id))[0])

    async def over(self, ids: Sequence[int]) -> list[int]:
        return [id for (id,) in await self._read(queries.OVER, _json(ids))] if ids else []

    async def find(self, owner: str, message_id: str) -> Incoming | None:
        rows = await self._read(queries.FIND, owner, message_id)
        return claims.incoming(rows[0]) if rows else None

    async def turn_of(self, owner: str, message_id: str) -> tuple[int, int] | None:
        rows = await self._read(queries.TURN_OF, owner, message_id)
        return rows[0] if rows else None

    async def hide(self, owner: str, message_id: str) -> bool:
        return await self._execute(queries.HIDE, owner, message_id) == 1

    # ------------------------------------------------------------------------------------------ turns

    async def begin(
        self, owner: str, key: str, worker: str, message: InboundMessage | None = None, kind: Kind = "message"
    ) -> Claim | None:
        def work(tx: SQLiteTransaction) -> claims.Begun:
            tx.announce(worker)
            return tx.begin(owner, key, worker, message, kind)

        begun = await self._transact(work)
        claims.log_damaged(begun.damaged)
        return claims.begun(begun.work)

    def append(
        self, claim: Claim, entries: Sequence[Entry], took: Sequence[int] = (), flush: bool = True
    ) -> Written[None]:
        step = TurnStep.of(claim, entries, took)
        if step.is_plain and entries and not took and not step.spent:  # a single statement
            unflushed: WriteKind = "short" if sum(map(len, step.rows.data)) < SHORT else "statement"
            return self._transact(lambda tx: tx.append(claim, step.rows), "flushed" if flush else unflushed)
        return self._transact(lambda tx: tx.append_step(claim, step), "flushed" if flush else "written")

    def finish(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
        incoming: Sequence[InboundMessage] = (),
    ) -> Written[Finished]:
        step = TurnStep.of(claim, entries, took)
        return self._transact(lambda tx: tx.finish(claim, step, entries, outgoing, sender, incoming))

    def park(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
    ) -> Written[Finished]:
        step = TurnStep.of(claim, entries, took)
        return self._transact(lambda tx: tx.park(claim, step, outgoing, sender))

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
        return await self._transact(lambda tx: tx.decide(owner, key, allowed, by, note, word, always))

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> Written[int | None]:
        return self._transact(lambda tx: tx.post(claim, message, key, sender))

    async def release(self, claim: Claim) -> None:
        await self._execute("UPDATE session SET worker = NULL WHERE id = ? AND fence = ?", claim.session, claim.fence)

    async def release_all(self, worker: str, owner: str | None = None) -> None:
        sql = "UPDATE session SET worker = NULL WHERE worker = ? AND (? IS NULL OR owner = ?)"
        await self._execute(sql, worker, owner, owner)

    async def answer(
        self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None = None
    ) -> list[int]:
        return await self._transact(lambda tx: tx.answer(row, outgoing, sender))

    # ------------------------------------------------------------------------------------------ outbox

    async def take_outgoing(
        self,
        worker: str,
        limit: int = 100,
        chat: tuple[str, str] | None = None,
        channels: Sequence[str] | None = None,
    ) -> list[Outgoing]:
        taken = await self._transact(lambda tx: tx.take_outgoing(worker, limit, chat, channels))
        taken.log_damaged()
        return taken.rows

    async def keep_outgoing(self, row: Outgoing, worker: str) -> bool:
        return True  # a worker keeps what it has taken for as long as its process lives

    async def sent(self, ids: Sequence[int]) -> None:
        now = time.time()
        rows = [(now, id) for id in ids]
        await self.writer.submit(lambda db: db.executemany("UPDATE outbox SET sent_at = ? WHERE id = ?", rows).rowcount)

    # ------------------------------------------------------------------------------------------ channels

    async def hold(self, name: str, worker: str) -> bool:
        return await self._transact(lambda tx: tx.hold(name, worker))

    async def unhold(self, name: str, worker: str) -> None:
        await self._execute("DELETE FROM channel_lease WHERE name = ? AND worker = ?", name, worker)

    async def holders(self) -> dict[str, str]:
        rows = await self._read("SELECT name, worker FROM channel_lease")
        return {name: worker for name, worker in rows if alive(worker)}

    async def deliveries(self, ids: Sequence[int]) -> dict[int, Delivery]:
        return {id: claims.delivery(*row) for id, *row in await self._read(queries.DELIVERIES, _json(ids))}

    async def hold_back(self, ids: Sequence[int], worker: str) -> None:
        await self._execute(queries.HOLD_BACK, worker, _json(ids))

    async def release_outgoing(self, worker: str, channel: str) -> None:
        await self._execute(queries.RELEASE_OUTGOING, worker, channel)

    async def mark_parts(self, id: int, worker: str, parts: Sequence[SentPart], sent: bool = False) -> bool:
        sent_at = time.time() if sent else None
        return await self._execute(queries.MARK_PARTS, claims.encoded_parts(parts), sent_at, id, worker) == 1

    async def bury(self, id: int, worker: str, reason: str) -> bool:
        return await self._execute(queries.BURY, claims.outbox_column(reason), time.time(), id, worker) == 1

    async def dead_letters(self, channel: str | None = None, limit: int = 100) -> list[DeadLetter]:
        return [claims.dead_letter(row) for row in await self._read(queries.DEAD_LETTERS, channel, limit)]

    async def revive(self, ids: Sequence[int]) -> list[int]:
        return await self._transact(lambda tx: tx.revive(ids))

    async def channel_state(self, channel: str) -> dict[str, str]:
        return dict(await self._read(queries.CHANNEL_STATE, channel))

    async def set_channel_state(self, channel: str, key: str, value: str | None) -> None:
        if value is None:
            await self._execute("DELETE FROM channel_state WHERE channel = ? AND key = ?", channel, key)
        else:
            await self._execute(queries.SET_CHANNEL_STATE, channel, key, value)

    async def write_channel_state(self, rows: Sequence[ChannelRow], expected: ChannelRow) -> bool:
        return await self._transact(lambda tx: tx.write_channel_state(rows, expected))

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
        rows = await self._read(queries.SESSIONS + " AND s.key = ?", owner, key)
        return _session_info(rows[0]) if rows else None

    async def sessions(self, owner: str, limit: int = 100) -> list[SessionInfo]:
        rows = await self._read(queries.SESSIONS + " ORDER BY s.updated_at DESC LIMIT ?", owner, limit)
        return [_session_info(row) for row in rows]

    async def turns(
        self, owner: str, *, session: int | None = None, prefix: str = "", limit: int = 100
    ) -> list[TurnInfo]:
        where, values = ("", []) if session is None else (" AND i.session = ?4", [session])
        rows = await self._read(queries.TURNS + where + " ORDER BY i.id DESC LIMIT ?3", owner, prefix, limit, *values)
        return [TurnInfo(*row) for row in rows]

    async def keep_request_texts(self, owner: str, key: str, texts: Mapping[str, str]) -> None:
        now = time.time()
        rows = [(owner, hash, key, text, now) for hash, text in texts.items()]
        await self.writer.submit(lambda db: db.executemany(queries.KEEP_REQUEST_TEXT, rows).rowcount, "written")

    async def request_texts(self, owner: str, hashes: Sequence[str]) -> dict[str, RequestText]:
        rows = await self._read(queries.REQUEST_TEXTS, owner, _json(hashes))
        return {hash: RequestText(data, key) for hash, data, key in rows}

    async def note_flushes(self, seconds: Mapping[int, float]) -> None:
        rows = [(waited, row) for row, waited in seconds.items()]
        await self.writer.submit(lambda db: db.executemany(queries.NOTE_FLUSH, rows).rowcount, "written")

    async def search(self, owner: str, query: str, limit: int = 10) -> list[Found]:
        from . import search as searching  # compiles large regular expressions

        return await searching.search(self._in_reader, self.writer.submit, owner, query, limit)

    # ------------------------------------------------------------------------------------------ outside of turns

    async def note(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        return claims.or_busy(await self._transact(lambda tx: tx.note(owner, key, entries)))

    async def compact(self, owner: str, key: str, entry: Compacted) -> bool:
        return await self._transact(lambda tx: tx.compact(owner, key, entry))

    async def fork(self, owner: str, key: str, until: int | None, new_key: str) -> SessionInfo:
        await self._transact(lambda tx: tx.fork(owner, key, until, new_key))
        made = await self.session(owner, new_key)
        assert made is not None
        return made

    async def set_title(self, owner: str, key: str, title: str, naming: Naming | None = None) -> bool:
        return await self._transact(lambda tx: tx.set_title(owner, key, title, naming))

    async def set_archived(self, owner: str, key: str, archived: bool) -> bool:
        return await self._transact(lambda tx: tx.set_archived(owner, key, archived))

    async def delete_session(self, owner: str, key: str) -> Removed | None:
        return claims.or_busy(await self.writer.submit(partial(deletion.delete, owner=owner, key=key)))

    async def prune_requests(self, before: float, position: int = 0) -> Pruned:
        found = await self._in_reader(lambda db: deletion.old_requests(db, before, position))
        if not found.sessions:
            return Pruned((), found.position)
        removed = await self.writer.submit(lambda db: deletion.delete_old(db, found.sessions, before))
        return Pruned(removed, found.position)

    async def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        await self._transact(lambda tx: tx.spend(owner, spent))

    async def spent(self, owner: str, scopes: Sequence[str]) -> dict[str, tuple[int, float]]:
        rows = await self._read(queries.SPENT, owner, _json(scopes))
        return {scope: (tokens, cost) for scope, tokens, cost in rows}

    async def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        return await self._transact(lambda tx: tx.admit(owner, name, most, seconds))

    # ------------------------------------------------------------------------------------------ timers

    async def set_timer(self, timer: Timer) -> None:
        await self._execute(queries.SET_TIMER, timer.owner, timer.id, timer.due_at, _json(timer.data))

    async def cancel_timer(self, owner: str, id: str) -> bool:
        return await self._execute("DELETE FROM timer WHERE owner = ? AND id = ?", owner, id) == 1

    async def timers(self, owner: str | None = None, limit: int | None = None) -> list[Timer]:
        rows = await self._read(queries.TIMERS, owner, owner, -1 if limit is None else limit)
        return [Timer(owner, id, due_at, claims.timer_data(data)) for owner, id, due_at, data in rows]

    async def fire_timer(self, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
        return await self._transact(lambda tx: tx.fire_timer(timer, message, next_due))

    # ------------------------------------------------------------------------------------------ tokens

    async def add_token(
        self, name: str, owner: str, hash: str, rights: Iterable[str] = (USE,), agent: str = ""
    ) -> Token:
        return await self._transact(lambda tx: tx.add_token(name, owner, hash, rights, agent))

    async def tokens_exist(self) -> bool:
        return bool((await self._read(EXIST))[0][0])

    async def token(self, hash: str) -> Token | None:
        rows = await self._read(queries.TOKEN, hash)
        return token_of(rows[0]) if rows else None

    async def tokens(self, owner: str | None = None) -> list[Token]:
        return [token_of(row) for row in await self._read(queries.TOKENS, owner)]

    async def token_used(self, id: str, at: float) -> None:
        await self._execute(queries.TOKEN_USED, at, id, NOTED_EVERY)

    async def revoke_token(self, id: str) -> bool:
        return await self._execute(queries.REVOKE_TOKEN, time.time(), id) == 1

    # ------------------------------------------------------------------------------------------ trust

    async def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        await self._transact(lambda tx: tx.mark_files(owner, marks))

    async def file_marks(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        rows = await self._read(queries.FILE_MARKS, owner, _json(digests))
        return {digest: bool(tainted) for digest, tainted in rows}

    async def tainted_paths(self, owner: str, limit: int = 1000) -> list[str]:
        return [path for (path,) in await self._read(queries.TAINTED_PATHS, owner, limit)]

    async def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        await self._transact(lambda tx: tx.grant(owner, key, names))

    async def grants(self, owner: str, key: str) -> frozenset[str]:
        return frozenset(name for (name,) in await self._read(queries.GRANTS, owner, key))

    async def revoke_grants(self, owner: str, key: str) -> None:
        await self._execute(REVOKE_GRANTS, owner, key)

    # ------------------------------------------------------------------------------------------ workers

    async def join(self, worker: str, address: str) -> None:
        await self._transact(lambda tx: tx.join(worker, address))

    async def workers(self) -> list[tuple[str, str]]:
        sql = "SELECT id, address FROM worker"
        return await self._in_reader(lambda db: [(id, address) for id, address in db.execute(sql) if alive(id)])

    async def session_holders(self) -> list[str]:
        return await self._in_reader(lambda db: [id for (id,) in db.execute(queries.HOLDERS) if alive(id)])

    async def leave(self, worker: str) -> None:
        await self._execute("DELETE FROM worker WHERE id = ?", worker)

    async def is_alive(self, worker: str) -> bool:
        return await asyncio.to_thread(alive, worker)

    def peer(self, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False) -> SocketPeer:
        return SocketPeer(self, worker, on_notice)

    async def wake(self, what: str = ANY, ids: Iterable[int] = (), but: str = "") -> None:
        # A machine runs few workers: all of them are woken, and look at everything.
        for worker, address in await self.workers():
            if worker != but:
                send_datagram(address, what)

    @property
    def standby_wait(self) -> float:
        return 0.0

    async def standbys(self) -> None:
        return None

    async def overview(self) -> Overview:
        from .overview import overview

        return await self._in_reader(overview)

    # ------------------------------------------------------------------------------------------ without an event loop

    def note_now(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        return claims.or_busy(self.writer.call(lambda db: SQLiteTransaction(db).note(owner, key, entries)))

    def read_now(self, owner: str, key: str) -> list[Logged]:
        def work(db: sqlite3.Connection) -> list[Logged]:
            sql = "SELECT id, history_from FROM session WHERE owner = ? AND key = ?"
            row = db.execute(sql, (owner, key)).fetchone()
            return [] if row is None else list(_read_log(db, row[0], row[1], None))

        return self.writer.call(work)

    # ------------------------------------------------------------------------------------------ connections

    def aside(self, work: Callable[[], T]) -> Written[T]:
        return self.writer.submit(lambda db: work(), "reads")

    def files(self) -> list[Path]:
        real = self.path.resolve()
        return [real.with_name(real.name + suffix) for suffix in FILES]

    def hurry(self) -> None:
        """Do nothing: there is no server to wait for."""

    async def check_writable(self) -> None:
        def work(db: sqlite3.Connection) -> None:
            # A row of several pages, deleted in the same commit: the file must be able to grow, not only to change.
            db.execute(PROBE, (os.urandom(PROBE_BYTES // 2).hex(),))
            db.execute("DELETE FROM rate WHERE owner = ''")
            try:
                with tempfile.TemporaryFile(dir=self.path.parent) as file:
                    file.write(bytes(PROBE_BYTES))
            except OSError as error:
                raise StoreError(f"nothing can be written next to {self.path}: {error.strerror}") from error

        await self.writer.submit(work)

    async def close(self) -> None:
        """Wait until everything is on disk, and close the file."""
        await self.writer.close()
        if self._readers is not None:
            readers, self._readers = self._readers, None
            await asyncio.get_running_loop().run_in_executor(None, readers.close)

    def _transact(self, work: Callable[[SQLiteTransaction], T], kind: WriteKind = "flushed") -> Written[T]:
        return self.writer.submit(lambda db: work(SQLiteTransaction(db)), kind)

    async def _execute(self, sql: str, *values: object) -> int:
        """Run one statement, and return the number of rows it changed."""
        return await self.writer.submit(lambda db: db.execute(sql, values).rowcount)

    async def _read(self, sql: str, *values: object) -> list[Any]:
        return await self._in_reader(lambda db: db.execute(sql, values).fetchall())

    async def _in_reader(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is None:
            self._readers = _Readers(self._connect)
        readers = self._readers
        return await asyncio.get_running_loop().run_in_executor(readers.pool, self._with_reader, readers, work)

    def _with_reader(self, readers: _Readers, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = readers.connection()
        try:
            return work(connection)
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _connect_writer(self) -> tuple[sqlite3.Connection, CommitMark]:
        return self._connect(), CommitMark(self.path)

    def _connect(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileExistsError):  # private from the first byte on
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
                CommitMark.forget(self.path)
            connection = sqlite3.connect(
                self.path, timeout=self._lock_seconds, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            why = "it is a folder: name a file in it" if self.path.is_dir() else error
            raise StoreError(f"cannot open the store {self.path}: {why}") from error
        try:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            # Deleted data leaves no trace in the file. Some builds of SQLite do this by default.
            connection.execute("PRAGMA secure_delete = ON")
            _use_wal(connection, self._lock_seconds)
            connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS[True]}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            migrate(connection)
            CommitMark.verify(connection, self.path)
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
        """Return the error as one line that says what to do."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            code = _cause(self.path) or code
        if code == sqlite3.SQLITE_FULL:
            what = f"the disk that holds {self.path} is full: free some space and try again"
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            what = f"{self.path} is locked by another program: close it and try again"
        elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            what = f"{self.path} is damaged or not a database: move it away or restore a copy (it was not changed)"
        elif code == sqlite3.SQLITE_READONLY:
            what = f"{self.path} is read-only: give this user write permission, or choose another store"
        elif code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            what = f"{self.path} cannot be read or written ({error}): check the disk and try again"
        else:
            what = f"{self.path}: {error}"
        return StoreError(f"{what}. What was on disk before is safe.")


def _read_log(db: sqlite3.Connection, session: int, after: int, until: int | None) -> Iterator[Logged]:
    return claims.logged(session, db.execute(queries.LOG, (session, after, until if until is not None else 2**62)))


def _cause(path: Path) -> int:
    """Return the SQLite error code if the disk is read-only or full, so that no file can be created there; else 0."""
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return 0
    if found.f_flag & os.ST_RDONLY:
        return sqlite3.SQLITE_READONLY
    return sqlite3.SQLITE_FULL if not found.f_bavail else 0


def _json(values: Sequence[object] | dict[str, Any]) -> str:
    return msgspec.json.encode(values).decode()


def _session_info(row: Sequence[Any]) -> SessionInfo:
    *facts, usage, archived_at = row
    info = SessionInfo(*facts)
    return replace(info, parked=bool(info.parked), naming_usage=claims.usage_of(usage), archived_at=archived_at)


def _use_wal(connection: sqlite3.Connection, seconds: float) -> None:
    """Enable write-ahead logging. SQLite does not wait here for another process that creates the same file.

    An I/O error was once seen here, when several connections opened the store of a killed process at the same time. It
    is retried for a moment: a real disk error persists.
    """
    began = time.monotonic()
    patience = {sqlite3.SQLITE_BUSY: seconds, sqlite3.SQLITE_IOERR: IO_ERROR_SECONDS}
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if time.monotonic() - began > patience.get(error.sqlite_errorcode & 0xFF, -1.0):
                raise
            time.sleep(0.005)


def _is_free(holder: str | None, worker: str) -> bool:
    return holder is None or holder == worker or not alive(holder)
