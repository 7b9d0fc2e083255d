"""The PostgreSQL store, for more than one machine: the tables of SQLite, with leases that expire."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from ...bus import InboundMessage, Kind, OutboundMessage
from ...config.sources import DSN
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
from ..claims import Begun, Taken
from ..overview import Overview, Replication
from ..peers import ANY, SENDING, Notice
from ..tokens import EXIST, NOTED_EVERY, USE, token_of
from . import deletion, prepared, queries, replication, transactions
from . import search as searching
from .connect import Primary, check_pool, connect, explain, refuse_transaction_mode, set_defaults
from .connections import Connections
from .event_relay import NotifyRelay
from .heartbeat import ANNOUNCE, Heartbeat
from .notify import NotifiedPeer, Notifier, send_now
from .overview import overview
from .prepared import Call, LoneWrite, MustTransact, repeatable
from .schema import Migration
from .transactions import NOW, Appended, Looked, PostgresTransaction, TakenAlone, is_alive, living

if TYPE_CHECKING:
    from .connect import Connection

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE_SECONDS = 15.0
CONNECTIONS = 8
UNFLUSHED = 1024 * 1024  # characters of a turn's log kept in memory until they are flushed
PATIENCE = 30.0  # seconds that a call waits for a server that was reachable before


class PostgresStore:
    """Log, inbox, outbox, leases and timers in one database, shared by any number of processes.

    Nothing is opened before the first call. `pool` is the address of a pooler in transaction mode in front of the same
    database: reads and writes go through it, and only the heartbeat, which listens, goes to `dsn`. `lease_seconds` is
    how long a worker that misses its heartbeats keeps its leases; it should be the same in all processes of a store.
    With `flush_always`, every step waits for the disk.
    """

    def __init__(
        self,
        dsn: str | DSN,
        *,
        pool: str | DSN | None = None,
        lease_seconds: float = LEASE_SECONDS,
        connections: int = CONNECTIONS,
        patience: float = PATIENCE,
        flush_always: bool = False,
    ) -> None:
        self.dsn = dsn if isinstance(dsn, DSN) else DSN(dsn)
        self.pool = pool if isinstance(pool, DSN | None) else DSN(pool)
        in_words = partial(explain, self.dsn)
        self.connections = Connections(
            self._connect if self.pool is None else partial(self._connect_pooled, self.pool),
            in_words if self.pool is None else partial(explain, self.pool),
            connections,
            patience,
        )
        self._primary = Primary(self.dsn, self.connections.break_all) if self.dsn.has_several_hosts else None
        self.heartbeat = Heartbeat(self._connect, in_words, lease_seconds, self._primary)
        self._notifier = Notifier(self.connections, lease_seconds)
        self.relay = NotifyRelay(self.connections, self.heartbeat, self._notifier.seal)
        self._lease_seconds = lease_seconds
        self._flush_always = flush_always
        self._looked: dict[tuple[str, str], Looked] = {}  # sessions that the last look found ready
        self._migration = Migration(self.dsn)
        self._pool_checked = False
        self._checking_pool = threading.Lock()

    @property
    def _lease(self) -> float:
        """Seconds after which an unrenewed lease has expired.

        While this process cannot renew its own leases, none counts as expired: without a primary, no process can renew
        any.
        """
        return math.inf if self.heartbeat.is_late else self._lease_seconds

    # ------------------------------------------------------------------------------------------ inbox

    async def accept(self, message: InboundMessage, kind: Kind = "message") -> Incoming:
        # A key of its own: a new message need not wait for writes of the session's turn.
        key = ("inbox", message.owner, message.session_key)
        alone = partial(transactions.accept_alone, message=message, kind=kind)
        return await self._write(LoneWrite(alone, self._in_transaction(lambda tx: tx.accept(message, kind))), key)

    async def ready(self, worker: str, owner: str | None = None) -> list[tuple[str, str]]:
        return await self._in_reader(lambda db: _ready(db, self._lease, owner, worker))

    async def look(
        self, worker: str, sessions: Sequence[int] | None = None
    ) -> tuple[list[tuple[str, str]], list[Incoming]]:
        def work(db: Connection) -> tuple[list[tuple[str, str]], list[Any]]:
            return _ready(db, self._lease, None, worker), _urgent(db, self._lease, None, worker)

        if sessions is None:
            found, rows = await self._in_reader(work)
        else:
            found, rows = await self._look_at(worker, sessions)
        return found, await self._readable(rows)

    async def _look_at(self, worker: str, sessions: Sequence[int]) -> tuple[list[tuple[str, str]], list[Any]]:
        def work(db: Connection) -> tuple[list[Looked], list[Any]]:
            rows = [Looked.of(row) for row in prepared.run(db, transactions.LOOK_AT, (self._lease, list(sessions)))]
            free = [row for row in rows if _is_free(row.state.holder, row.is_fresh, worker)]
            urgent = [row.state.id for row in free if row.has_urgent]
            return free, db.execute(queries.URGENT_IN, (urgent,)).fetchall() if urgent else []

        free, urgent = await self._in_reader(work)
        self._looked = {(row.owner, row.key): row for row in free if row.is_ready}
        return list(self._looked), urgent

    async def waiting(self, owner: str, key: str) -> list[Incoming]:
        return await self._readable(await self._read(queries.WAITING, owner, key))

    async def urgent(self, worker: str, owner: str | None = None) -> list[Incoming]:
        return await self._readable(await self._in_reader(lambda db: _urgent(db, self._lease, owner, worker)))

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
        return [id for (id,) in await self._read(queries.OVER, list(ids))] if ids else []

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
        def work(tx: PostgresTransaction) -> Begun:
            begun = tx.begin(owner, key, worker, message, kind)
            if isinstance(begun.work, Claim) and not self.heartbeat.knows(worker):
                tx.db.execute(transactions.RENEW, (worker,))
                tx.db.execute(ANNOUNCE)
            return begun

        looked = self._looked.pop((owner, key), None)

        def alone(db: Connection, call: Call) -> Begun:
            if not self.heartbeat.knows(worker):
                raise MustTransact
            return transactions.begin_alone(
                db, call, owner, key, worker, message, kind, looked if message is None else None
            )

        begun = await self._write(LoneWrite(alone, self._in_transaction(work)), (owner, key))
        claims.log_damaged(begun.damaged)
        claim = claims.begun(begun.work)
        if claim is not None:
            self.heartbeat.keep(worker)
        return claim

    def append(
        self, claim: Claim, entries: Sequence[Entry], took: Sequence[int] = (), flush: bool = True
    ) -> Written[None]:
        unflushed = sum(len(data) for step in claim.unflushed for data in step.rows.data)
        flush = flush or self._flush_always or not entries or unflushed > UNFLUSHED
        appended = Appended.of(claim, entries, took, flush)
        alone = partial(transactions.append_alone, appended=appended, flush=flush)
        work = LoneWrite(alone, self._in_transaction(lambda tx: tx.append(appended)))
        return self.connections.submit("writes" if flush else "unflushed", work, (claim.owner, claim.key))

    def finish(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
        incoming: Sequence[InboundMessage] = (),
    ) -> Written[Finished]:
        appended = Appended.of(claim, entries, took)
        values = transactions.finish_values(appended, entries, outgoing, sender)

        def alone(db: Connection, call: Call) -> Finished:
            if incoming:
                raise MustTransact
            finished = transactions.finish_alone(db, call, appended, values)
            if finished.outbox and sender is None:  # from here on it needs neither a thread's wake-up nor the loop's
                return replace(finished, announced=send_now(db, SENDING))
            return finished

        work = LoneWrite(alone, self._in_transaction(lambda tx: tx.finish(appended, values, incoming)))
        return self._write(work, (claim.owner, claim.key))

    def park(
        self,
        claim: Claim,
        entries: Sequence[Entry],
        outgoing: Sequence[OutboundMessage] = (),
        sender: str | None = None,
        took: Sequence[int] = (),
    ) -> Written[Finished]:
        appended = Appended.of(claim, entries, took)
        return self._transact(lambda tx: tx.park(appended, outgoing, sender), (claim.owner, claim.key))

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
        return await self._transact(lambda tx: tx.decide(owner, key, allowed, by, note, word, always), (owner, key))

    def post(self, claim: Claim, message: OutboundMessage, key: str, sender: str | None) -> Written[int | None]:
        return self._transact(lambda tx: tx.post(claim, message, key, sender), (claim.owner, claim.key))

    async def release(self, claim: Claim) -> None:
        await self._write(repeatable(queries.RELEASE, claim.session, claim.fence), (claim.owner, claim.key))

    async def release_all(self, worker: str, owner: str | None = None) -> None:
        await self._execute(queries.RELEASE_ALL, worker, owner, owner)

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
        def work(tx: PostgresTransaction, most: int = limit, known: Sequence[tuple[int, str]] = ()) -> Taken:
            taken = tx.take_outgoing(worker, most, chat, channels, known)
            if taken.rows and not self.heartbeat.knows(worker):
                tx.db.execute(transactions.RENEW, (worker,))
            return taken

        def alone(db: Connection, call: Call) -> TakenAlone:
            if not self.heartbeat.knows(worker):
                raise MustTransact
            return transactions.take_outgoing_alone(call, worker, limit, chat, channels, self._lease)

        key, term = ("outbox", worker), self.heartbeat.term
        found = await self._write(LoneWrite(alone, self._in_transaction(work)), key)
        taken = found if isinstance(found, Taken) else Taken()
        if isinstance(found, TakenAlone):
            claims.take_outgoing(
                await self._read(transactions.TAKEN, list(found.ids)) if found.ids else found.rows, limit, taken
            )
            if taken.damaged or found.has_more:
                rest = partial(work, most=limit - len(taken.rows), known=tuple(taken.damaged))
                try:
                    others = await self._transact(rest, key)
                    taken = Taken([*taken.rows, *others.rows], [*taken.damaged, *others.damaged])
                except StoreError as error:  # what was taken must be sent all the same
                    log.warning("%s", error)
        taken.log_damaged()
        if taken.rows:
            self.heartbeat.keep(worker)
        return [replace(row, term=term) for row in sorted(taken.rows, key=lambda row: row.id)]

    async def keep_outgoing(self, row: Outgoing, worker: str) -> bool:
        if row.term is not None and row.term == self.heartbeat.term:
            return True
        return await self._transact(lambda tx: tx.keep_outgoing(row.id, worker), ("outbox", worker))

    async def sent(self, ids: Sequence[int]) -> None:
        await self._write(repeatable(f"UPDATE outbox SET sent_at = {NOW} WHERE id = ANY(%s)", list(ids)))

    # ------------------------------------------------------------------------------------------ channels

    async def hold(self, name: str, worker: str) -> bool:
        held = await self._transact(lambda tx: tx.hold(name, worker), ("lease", name))
        if held:
            self.heartbeat.keep(worker)
        return held

    async def unhold(self, name: str, worker: str) -> None:
        await self._execute("DELETE FROM channel_lease WHERE name = %s AND worker = %s", name, worker)

    async def holders(self) -> dict[str, str]:
        rows = await self._read(queries.HOLDERS, self._lease)
        return {name: worker for name, worker, fresh in rows if living(worker, fresh)}

    async def deliveries(self, ids: Sequence[int]) -> dict[int, Delivery]:
        return {id: claims.delivery(*row) for id, *row in await self._read(queries.DELIVERIES, list(ids))}

    async def hold_back(self, ids: Sequence[int], worker: str) -> None:
        await self._execute(queries.HOLD_BACK, worker, list(ids), key=("outbox", worker))

    async def release_outgoing(self, worker: str, channel: str) -> None:
        await self._execute(queries.RELEASE_OUTGOING, worker, channel, key=("outbox", worker))

    async def mark_parts(self, id: int, worker: str, parts: Sequence[SentPart], sent: bool = False) -> bool:
        values = claims.encoded_parts(parts), sent, id, worker
        return await self._execute(queries.MARK_PARTS, *values, key=("outbox", worker)) == 1

    async def bury(self, id: int, worker: str, reason: str) -> bool:
        return await self._execute(queries.BURY, claims.outbox_column(reason), id, worker, key=("outbox", worker)) == 1

    async def dead_letters(self, channel: str | None = None, limit: int = 100) -> list[DeadLetter]:
        return [claims.dead_letter(row) for row in await self._read(queries.DEAD_LETTERS, channel, channel, limit)]

    async def revive(self, ids: Sequence[int]) -> list[int]:
        revived = await self._write(lambda db: db.execute(queries.REVIVE, (list(ids),)).fetchall())
        return [id for (id,) in revived]

    async def channel_state(self, channel: str) -> dict[str, str]:
        return dict(await self._read(queries.CHANNEL_STATE, channel))

    async def set_channel_state(self, channel: str, key: str, value: str | None) -> None:
        if value is None:
            await self._execute(queries.REMOVE_CHANNEL_STATE, channel, key)
        else:
            await self._execute(queries.SET_CHANNEL_STATE, channel, key, value)

    async def write_channel_state(self, rows: Sequence[ChannelRow], expected: ChannelRow) -> bool:
        def work(db: Connection) -> bool:
            *where, value = expected
            if value is None:  # there is no row to lock: insert one, so that another transaction waits for this one
                if db.execute(queries.NEW_CHANNEL_STATE, where).fetchone() is None:
                    return False
            else:
                found = db.execute(queries.LOCKED_CHANNEL_STATE, where).fetchone()
                if found is None or found[0] != value:
                    return False
            with db.pipeline():
                if value is None:
                    db.execute(queries.REMOVE_CHANNEL_STATE, where)
                for row in rows:
                    if row[2] is None:
                        db.execute(queries.REMOVE_CHANNEL_STATE, row[:2])
                    else:
                        db.execute(queries.SET_CHANNEL_STATE, row)
            return True

        return await self._write(work)

    # ------------------------------------------------------------------------------------------ reading

    async def read_log(self, session: int, after: int = 0, until: int | None = None) -> list[Logged]:
        values = (session, after, until if until is not None else 2**62)
        rows = await self._in_reader(lambda db: prepared.run(db, queries.LOG, values))
        return list(claims.logged(session, rows))

    async def read_turn(self, session: int, first_seq: int) -> list[Logged]:
        def work(db: Connection) -> list[Logged]:
            log = claims.logged(session, db.execute(queries.TURN, (session, first_seq, session, first_seq)))
            first = next(log, None)
            return [] if first is None else [first, *itertools.takewhile(lambda one: one.turn == first.turn, log)]

        return await self._in_reader(work)

    async def session(self, owner: str, key: str) -> SessionInfo | None:
        rows = await self._read(queries.SESSIONS + " AND s.key = %s", owner, key)
        return _session_info(rows[0]) if rows else None

    async def sessions(self, owner: str, limit: int = 100) -> list[SessionInfo]:
        rows = await self._read(queries.SESSIONS + " ORDER BY s.updated_at DESC LIMIT %s", owner, limit)
        return [_session_info(row) for row in rows]

    async def turns(
        self, owner: str, *, session: int | None = None, prefix: str = "", limit: int = 100
    ) -> list[TurnInfo]:
        rows = await self._read(queries.TURNS, owner, prefix, session, session, limit)
        return [TurnInfo(*row) for row in rows]

    async def keep_request_texts(self, owner: str, key: str, texts: Mapping[str, str]) -> None:
        kept = _statement(queries.KEEP_REQUEST_TEXTS, owner, key, list(texts), list(texts.values()))
        await self.connections.submit("unflushed", kept, ("request", owner))

    async def request_texts(self, owner: str, hashes: Sequence[str]) -> dict[str, RequestText]:
        rows = await self._read(queries.REQUEST_TEXTS, owner, list(hashes))
        return {hash: RequestText(data, key) for hash, data, key in rows}

    async def note_flushes(self, seconds: Mapping[int, float]) -> None:
        values = list(seconds), list(seconds.values())

        def alone(_: Connection, call: Call) -> None:
            call(queries.NOTE_FLUSHES, *values)

        def in_transaction(db: Connection) -> None:
            db.execute(queries.NOTE_FLUSHES, (*transactions.NO_MARK, *values))

        await self.connections.submit("unflushed", LoneWrite(alone, in_transaction))

    async def search(self, owner: str, query: str, limit: int = 10) -> list[Found]:
        def write(work: Callable[[Connection], T], /) -> Written[T]:
            return self._write(work, ("search", owner))

        return await searching.search(self._in_reader, write, owner, query, limit)

    # ------------------------------------------------------------------------------------------ outside of turns

    async def note(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        return claims.or_busy(await self._transact(lambda tx: tx.note(owner, key, entries), (owner, key)))

    async def compact(self, owner: str, key: str, entry: Compacted) -> bool:
        return await self._transact(lambda tx: tx.compact(owner, key, entry), (owner, key))

    async def fork(self, owner: str, key: str, until: int | None, new_key: str) -> SessionInfo:
        await self._transact(lambda tx: tx.fork(owner, key, until, new_key), (owner, key))
        made = await self.session(owner, new_key)
        assert made is not None
        return made

    async def set_title(self, owner: str, key: str, title: str, naming: Naming | None = None) -> bool:
        return await self._transact(lambda tx: tx.set_title(owner, key, title, naming), (owner, key))

    async def set_archived(self, owner: str, key: str, archived: bool) -> bool:
        return await self._transact(lambda tx: tx.set_archived(owner, key, archived), (owner, key))

    async def delete_session(self, owner: str, key: str) -> Removed | None:
        return claims.or_busy(await self._write(lambda db: deletion.delete(db, owner, key, self._lease), (owner, key)))

    async def prune_requests(self, before: float, position: int = 0) -> Pruned:
        found = await self._in_reader(lambda db: deletion.old_requests(db, before, position))
        if not found.sessions:
            return Pruned((), found.position)
        removed = await self._write(lambda db: deletion.delete_old(db, found.sessions, before))
        return Pruned(removed, found.position)

    async def spend(self, owner: str, spent: Sequence[Spent]) -> None:
        await self._transact(lambda tx: tx.spend(owner, spent))

    async def spent(self, owner: str, scopes: Sequence[str]) -> dict[str, tuple[int, float]]:
        rows = await self._read(queries.SPENT, owner, list(scopes))
        return {scope: (tokens, cost) for scope, tokens, cost in rows}

    async def admit(self, owner: str, name: str, most: int, seconds: float) -> float:
        # One key per owner: concurrent calls are one transaction, and none waits for another's lock.
        return await self._transact(lambda tx: tx.admit(owner, name, most, seconds), ("rate", owner))

    # ------------------------------------------------------------------------------------------ timers

    async def set_timer(self, timer: Timer) -> None:
        data = msgspec.json.encode(timer.data).decode()
        await self._execute(queries.SET_TIMER, timer.owner, timer.id, timer.due_at, data)

    async def cancel_timer(self, owner: str, id: str) -> bool:
        return await self._execute("DELETE FROM timer WHERE owner = %s AND id = %s", owner, id) == 1

    async def timers(self, owner: str | None = None, limit: int | None = None) -> list[Timer]:
        rows = await self._read(queries.TIMERS, owner, owner, limit)
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
        return [token_of(row) for row in await self._read(queries.TOKENS, owner, owner)]

    async def token_used(self, id: str, at: float) -> None:
        await self._execute(queries.TOKEN_USED, at, id, at - NOTED_EVERY)

    async def revoke_token(self, id: str) -> bool:
        return await self._execute(queries.REVOKE_TOKEN, id) == 1

    # ------------------------------------------------------------------------------------------ trust

    async def mark_files(self, owner: str, marks: Sequence[FileMark]) -> None:
        await self._transact(lambda tx: tx.mark_files(owner, marks))

    async def file_marks(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        return dict(await self._read(queries.FILE_MARKS, owner, list(digests)))

    async def tainted_paths(self, owner: str, limit: int = 1000) -> list[str]:
        return [path for (path,) in await self._read(queries.TAINTED_PATHS, owner, limit)]

    async def grant(self, owner: str, key: str, names: Sequence[str]) -> None:
        await self._transact(lambda tx: tx.grant(owner, key, names))

    async def grants(self, owner: str, key: str) -> frozenset[str]:
        return frozenset(name for (name,) in await self._read(queries.GRANTS, owner, key))

    async def revoke_grants(self, owner: str, key: str) -> None:
        await self._execute(transactions.REVOKE_GRANTS, owner, key)

    # ------------------------------------------------------------------------------------------ workers

    async def join(self, worker: str, address: str) -> None:
        if self.heartbeat.knows(worker):  # a renewal in progress then sees that it is outdated
            self.heartbeat.keep(worker, address)
        await self._execute(queries.JOIN, worker, address)
        self.heartbeat.keep(worker, address)

    async def workers(self) -> list[tuple[str, str]]:
        def work(db: Connection) -> list[tuple[str, str]]:
            rows = db.execute(queries.WORKERS, (self._lease,)).fetchall()
            return [(id, address) for id, address, fresh in rows if living(id, fresh)]

        return await self._in_reader(work)

    async def session_holders(self) -> list[str]:
        def work(db: Connection) -> list[str]:
            return [
                id for id, fresh in db.execute(queries.SESSION_HOLDERS, (self._lease,)).fetchall() if living(id, fresh)
            ]

        return await self._in_reader(work)

    async def leave(self, worker: str) -> None:
        self.heartbeat.leave(worker)
        await self._execute("UPDATE worker SET address = NULL WHERE id = %s", worker)

    async def overview(self) -> Overview:
        return await self._in_reader(lambda db: overview(db, self._lease))

    async def standbys(self) -> Replication:
        return await self._in_reader(replication.look)

    @property
    def standby_wait(self) -> float:
        return self.heartbeat.standby.wait

    async def is_alive(self, worker: str) -> bool:
        return await self._in_reader(lambda db: is_alive(db, worker, self._lease))

    def peer(self, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False) -> NotifiedPeer:
        return NotifiedPeer(self, worker, on_notice, takes_work)

    async def wake(self, what: str = ANY, ids: Iterable[int] = ()) -> None:
        try:
            await self._notifier.send(what, ids)
        except StoreError:  # no other worker may know about what was written
            self.heartbeat.wake_is_due = True
            raise

    # ------------------------------------------------------------------------------------------ without an event loop

    def note_now(self, owner: str, key: str, entries: Sequence[Entry]) -> int:
        work = self._in_transaction(lambda tx: tx.note(owner, key, entries))
        return claims.or_busy(self.connections.call("writes", work, (owner, key)))

    def read_now(self, owner: str, key: str) -> list[Logged]:
        def work(db: Connection) -> list[Logged]:
            session = db.execute(queries.HISTORY, (owner, key)).fetchone()
            return (
                [] if session is None else list(claims.logged(session[0], db.execute(queries.LOG, (*session, 2**62))))
            )

        return self.connections.call("reads", work, (owner, key))

    # ------------------------------------------------------------------------------------------ connections

    def aside(self, work: Callable[[], T]) -> Written[T]:
        return self.connections.submit("aside", work)

    def files(self) -> Sequence[Path]:
        return ()

    def hurry(self) -> None:
        self.connections.hurry()

    async def check_writable(self) -> None:
        await self._execute(queries.PROBE)

    async def close(self) -> None:
        """Wait until everything is written, and disconnect."""
        self.relay.close()
        await self.connections.close()
        await self.heartbeat.close()

    def _execute(self, query: str, *values: object, key: tuple[str, ...] | None = None) -> Written[int]:
        """Run one statement, and return the number of rows it changed."""
        return self._write(_statement(query, *values), key)

    def _in_transaction(self, work: Callable[[PostgresTransaction], T]) -> Callable[[Connection], T]:
        return lambda db: work(PostgresTransaction(db, self._lease))

    def _transact(self, work: Callable[[PostgresTransaction], T], key: tuple[str, ...] | None = None) -> Written[T]:
        return self._write(self._in_transaction(work), key)

    def _write(self, work: Callable[[Connection], T], key: tuple[str, ...] | None = None) -> Written[T]:
        return self.connections.submit("writes", work, key)

    def _in_reader(self, work: Callable[[Connection], T]) -> Written[T]:
        return self.connections.submit("reads", work)

    async def _read(self, query: str, *values: object) -> list[Any]:
        return await self._in_reader(lambda db: db.execute(query, values).fetchall())

    def _connect(self) -> Connection:
        """Return a connection to the server itself."""
        connection = self._primary.connect() if self._primary is not None else connect(self.dsn)
        return self._migration.through(connection, self._refuse_pooler)

    def _refuse_pooler(self, connection: Connection) -> None:
        refuse_transaction_mode(connection, self.dsn, partial(connect, self.dsn))

    def _connect_pooled(self, pool: DSN) -> Connection:
        """Return a connection through the pooler, once it is known to lead to the same tables."""
        with self._checking_pool:
            if not self._pool_checked:
                with self._connect() as direct, connect(pool, pooled=True) as pooled:
                    try:
                        check_pool(pooled, pool, direct, self.dsn)
                        set_defaults(pooled)
                    except Exception as error:
                        raise explain(pool, error) from error
                self._pool_checked = True
        return connect(pool, pooled=True)


def _session_info(row: Sequence[Any]) -> SessionInfo:
    *facts, usage, archived_at = row
    return replace(SessionInfo(*facts), naming_usage=claims.usage_of(usage), archived_at=archived_at)


def _statement(query: str, *values: object) -> Callable[[Connection], int]:
    """Return a single statement as a job whose result is the number of rows it changed."""

    def work(db: Connection) -> int:
        with db.pipeline():
            done = db.execute(query, values)
        return done.rowcount

    return work


def _ready(db: Connection, lease: float, owner: str | None, worker: str) -> list[tuple[str, str]]:
    rows = prepared.run(db, queries.READY, (lease, owner))
    return [(owner, key) for owner, key, holder, fresh in rows if _is_free(holder, fresh, worker)]


def _urgent(db: Connection, lease: float, owner: str | None, worker: str) -> list[Any]:
    rows = prepared.run(db, queries.URGENT, (lease, owner))
    return [row[:7] for row in rows if _is_free(row[7], row[8], worker)]


def _is_free(holder: str | None, fresh: bool, worker: str) -> bool:
    return holder is None or holder == worker or not living(holder, fresh)
