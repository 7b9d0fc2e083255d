"""Load on a store while its servers fail over, and the promises that must hold afterwards.

Clients put messages into the inbox and count one as accepted when the store has acknowledged it. Workers of several
stores take any session that has work, as processes on several machines do, and record every fence that they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from everloop.bus import InboundMessage, OutboundMessage
from everloop.errors import StoreError
from everloop.log import ModelAnswered, TurnEnded, UserSaid, decode_entry
from everloop.store.base import Busy, Claim
from everloop.store.history_check import check_history
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.connect import break_off
from everloop.store.postgres.store import PostgresStore

SESSIONS = 6
WORKERS = 3  # coroutines per store
BACKLOG = 20  # messages that may wait
UNTIL_SECONDS = 60.0  # for turns to end


class Database(Protocol):
    """A connection that reads a database that is the primary."""

    def sql(self, query: str, *values: object, database: str) -> list[Any]: ...


class Load:
    def __init__(self, dsn: str, pool: str | None = None, stores: int = 2) -> None:
        self.stores = [PostgresStore(dsn, pool=pool) for _ in range(stores)]
        self.workers = [new_worker() for _ in self.stores]
        self.said: list[str] = []  # acknowledged by the store
        self.ended: list[str] = []  # whose end is known
        self.fences: Counter[tuple[int, int]] = Counter()
        self.errors: list[str] = []  # errors of calls
        self.longest = 0.0  # seconds between two acknowledgements, of any client
        self._last = time.monotonic()
        self._over = asyncio.Event()
        self._all_said = False
        self._running: set[tuple[str, str]] = set()  # a worker works on a session once

    async def say(self, chat: int) -> None:
        number = 0
        while not self._over.is_set():
            text = f"{chat}.{number}"
            message = InboundMessage("test", "user", str(chat), text, id=text).addressed()
            try:
                await self.stores[chat % len(self.stores)].accept(message)
            except StoreError as error:  # repeated, with its id
                self.errors.append(str(error))
                continue
            now = time.monotonic()
            self.longest, self._last = max(self.longest, now - self._last), now
            self.said.append(text)
            number += 1
            while not self._over.is_set() and len(self.said) > len(self.ended) + BACKLOG:
                await asyncio.sleep(0.02)

    async def work(self, store: PostgresStore, worker: str) -> None:
        ready: list[tuple[str, str]] = []
        while not self._all_said or ready:
            try:
                ready = await store.ready(worker)
                for owner, key in ready:
                    if (worker, key) not in self._running:
                        self._running.add((worker, key))
                        try:
                            await self._take(store, owner, key, worker)
                        finally:
                            self._running.discard((worker, key))
            except StoreError as error:
                self.errors.append(str(error))
            await asyncio.sleep(0.01)

    async def _take(self, store: PostgresStore, owner: str, key: str, worker: str) -> None:
        with contextlib.suppress(Busy):  # another store has it
            claim = await store.begin(owner, key, worker)
            if claim is not None:
                self.fences[claim.session, claim.fence] += 1
                await self._turn(store, claim)

    async def _turn(self, store: PostgresStore, claim: Claim) -> None:
        text = str(claim.message.content)
        if not any(isinstance(entry, ModelAnswered) for entry in claim.entries):
            await store.append(claim, [ModelAnswered(f"so {text}")], flush=False)
        await store.finish(claim, [TurnEnded("answer", text)], [OutboundMessage("test", claim.key, text)])
        self.ended.append(text)

    async def until(self, more: int) -> None:
        """Wait until so many more turns have ended."""
        wanted = len(self.ended) + more
        async with asyncio.timeout(UNTIL_SECONDS):
            while len(self.ended) < wanted:
                await asyncio.sleep(0.01)

    def measure(self) -> None:
        """Forget the longest wait so far."""
        self.longest, self._last = 0.0, time.monotonic()

    def problems(self, server: Database, database: str) -> list[str]:
        """Return what is lost, doubled or out of order in the store, and everything that the history checker finds."""

        def rows(query: str) -> list[tuple[object, ...]]:
            return server.sql(query, database=database)

        checked = check_history(rows)
        found = list(checked.violations)
        logged: Counter[str] = Counter()
        for (session,) in server.sql("SELECT id FROM session", database=database):
            entries = server.sql("SELECT data FROM entry WHERE session = %s ORDER BY seq", session, database=database)
            texts = [str(e.content) for (data,) in entries if isinstance(e := decode_entry(data), UserSaid)]
            logged.update(texts)
            if texts != sorted(texts, key=lambda text: int(text.partition(".")[2])):
                found.append(f"session {session} is out of order: {texts}")
        sent = Counter(text for (text,) in server.sql("SELECT data::json ->> 'content' FROM outbox", database=database))
        for name, counts in (("in the log", logged), ("in the outbox", sent)):
            found += [f"{text} was acknowledged and is not {name}" for text in self.said if not counts[text]]
            found += [f"{text} is {count} times {name}" for text, count in counts.items() if count > 1]
        found += [f"the fence {fence} was issued {count} times" for fence, count in self.fences.items() if count > 1]
        found += [f"{text} ended twice" for text, count in Counter(self.ended).items() if count > 1]
        return found


@contextlib.asynccontextmanager
async def closing(*stores: PostgresStore, tasks: Sequence[asyncio.Task[None]] = ()) -> AsyncIterator[None]:
    """End the tasks and close the stores.

    After a failure nothing waits for a server that may never respond: even a cancelled task would not end before its
    write does.
    """
    breaking: asyncio.Task[None] | None = None
    try:
        yield
    except BaseException:
        breaking = asyncio.create_task(_break_off(stores))
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for store in stores:
            await store.close()
        if breaking is not None:
            breaking.cancel()


async def _break_off(stores: Sequence[PostgresStore]) -> None:
    while True:
        for store in stores:
            store.hurry()
            store.connections.break_all()
            if (connection := store.heartbeat._connection) is not None:
                break_off(connection)
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def load(dsn: str, pool: str | None = None) -> AsyncIterator[Load]:
    """Run clients and workers until the end of the block, and then until everything accepted is answered."""
    made = Load(dsn, pool)
    peers = [one.peer(worker, lambda _: None) for one, worker in zip(made.stores, made.workers, strict=True)]
    for peer in peers:
        await peer.join()
    tasks = [asyncio.create_task(made.say(chat)) for chat in range(SESSIONS)]
    for store, worker in zip(made.stores, made.workers, strict=True):
        tasks += [asyncio.create_task(made.work(store, worker)) for _ in range(WORKERS)]
    try:
        async with closing(*made.stores, tasks=tasks):
            yield made
            made._over.set()
            async with asyncio.timeout(UNTIL_SECONDS):
                await asyncio.wait(tasks[:SESSIONS])
                made._all_said = True
                await asyncio.wait(tasks)
            await asyncio.gather(*tasks)
            for peer in peers:
                await peer.leave()
    finally:
        for worker in made.workers:
            retire(worker)
