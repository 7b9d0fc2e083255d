"""The owner directory: a table in one database that maps each owner to a database.

An owner without a row is in the database configured as `store`. Addresses are stored without passwords; they are used
with the directory's own user and password.

Servers cache lookups for a few seconds, and are notified of changes. A stale cache is harmless: a database that an
owner has left refuses their writes (`moved_owner`), so nothing is ever written to the wrong one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.sources import DSN
from ...errors import StoreError
from .connect import connect, explain, parts_of
from .connections import Connections
from .heartbeat import RETRY_SECONDS, Stop, wait_for
from .schema import Migration, migrate
from .transactions import NOW

if TYPE_CHECKING:
    from .connect import Connection

log = logging.getLogger(__name__)
CHANNEL = "everloop_directory"
CACHE_SECONDS = 5.0  # cache lifetime while notifications arrive
UNNOTIFIED_SECONDS = 1.0  # and while none can arrive
CACHE_SIZE = 10_000  # owners; beyond that the oldest are evicted
PATIENCE = 3.0  # seconds that a lookup waits for an unreachable directory
CONNECTIONS = 2
HELD = f"coalesce(held_until > {NOW}, false)"
PLACE = f"SELECT store, {HELD} FROM owner_place WHERE owner = %s"
PLACES = f"SELECT owner, store, {HELD} FROM owner_place ORDER BY owner"
DATABASES = "SELECT DISTINCT store FROM owner_place ORDER BY store"
POOL = "SELECT pool FROM database_pool WHERE store = %s"
POOLS = "SELECT store, pool FROM database_pool ORDER BY store"
PUT_POOL = """INSERT INTO database_pool (store, pool) VALUES (%s, %s)
    ON CONFLICT (store) DO UPDATE SET pool = excluded.pool"""
DELETE_POOL = "DELETE FROM database_pool WHERE store = %s"
NOTIFY = f"SELECT pg_notify('{CHANNEL}', %s)"
# After an interrupted move, the directory does not know which database has the owner: completing it lifts the hold.
HOLD = f"""INSERT INTO owner_place AS p (owner, store, held_until, changed_at) VALUES (%s, %s, {NOW} + %s, {NOW})
    ON CONFLICT (owner) DO UPDATE SET held_until = greatest(excluded.held_until, p.held_until),
        changed_at = excluded.changed_at"""
KEEP_HELD = f"UPDATE owner_place SET held_until = 'infinity' WHERE owner = %s AND {HELD} RETURNING owner"
UNHOLD = f"""UPDATE owner_place SET held_until = NULL, changed_at = {NOW}
    WHERE owner = %s AND held_until IS DISTINCT FROM 'infinity'"""
PUT = f"""INSERT INTO owner_place (owner, store, changed_at) VALUES (%s, %s, {NOW})
    ON CONFLICT (owner) DO UPDATE SET store = excluded.store, held_until = NULL, changed_at = excluded.changed_at"""


@dataclass(frozen=True, slots=True)
class Place:
    """The database of an owner: None for the configured one. An owner is `held` while being moved."""

    store: DSN | None
    held: bool = False


class Directory:
    """Looks up owners for a server. Nothing is opened before the first call."""

    def __init__(self, dsn: DSN, patience: float = PATIENCE) -> None:
        self.dsn = dsn
        self._migration = Migration(dsn)
        self._connections = Connections(self._connect, partial(explain, dsn), CONNECTIONS, patience)
        self._cache: OrderedDict[str, tuple[Place, float]] = OrderedDict()  # with the time of the lookup
        self._watchers: list[Callable[[str | None], None]] = []
        self._listener: _Listener | None = None

    async def place(self, owner: str, *, fresh: bool = False) -> Place:
        """Return the place of an owner.

        With `fresh`, it is read now; otherwise it may be a few seconds old, or older while the directory is
        unreachable.
        """
        if self._listener is None:
            self._listener = _Listener(self._connect, self.dsn, self._on_change)
        kept = self._cache.get(owner)
        if kept is not None and not fresh:
            lasts = CACHE_SECONDS if self._listener.listens else UNNOTIFIED_SECONDS
            if time.monotonic() - kept[1] < lasts:
                return kept[0]
        began = time.monotonic()
        try:
            rows = await self._read(PLACE, owner)
        except StoreError as error:
            if kept is None or fresh:
                raise
            log.warning("the directory is unreachable, assuming that %s has not moved: %s", owner, error)
            self._remember(owner, kept[0], began)
            return kept[0]
        place = Place(self._address(rows[0][0]), rows[0][1]) if rows else Place(None)
        self._remember(owner, place, began)
        return place

    async def databases(self) -> list[DSN]:
        """Return all databases that have owners, apart from the configured one."""
        return [self._address(store) for (store,) in await self._read(DATABASES)]

    async def places(self) -> list[tuple[str, DSN, bool]]:
        """Return (owner, database, held) for the owners with a row."""
        return [(owner, self._address(store), held) for owner, store, held in await self._read(PLACES)]

    async def pool(self, store: DSN) -> DSN | None:
        """Return the pooler through which servers reach a database; None if they connect to it directly."""
        rows = await self._read(POOL, store.without_password)
        return self._address(rows[0][0]) if rows else None

    async def pools(self) -> list[tuple[DSN, DSN]]:
        """Return (database, pooler) of the databases that are reached through poolers."""
        return [(self._address(store), self._address(pool)) for store, pool in await self._read(POOLS)]

    def watch(self, on_change: Callable[[str | None], None]) -> None:
        """Call `on_change` on the event loop with each owner whose place has changed; with None if any may have."""
        self._watchers.append(on_change)

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        await self._connections.close()

    def _remember(self, owner: str, place: Place, at: float) -> None:
        self._cache[owner] = (place, at)
        self._cache.move_to_end(owner)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)

    def _on_change(self, owner: str | None) -> None:
        if owner is None:
            self._cache = OrderedDict((name, (place, -math.inf)) for name, (place, _) in self._cache.items())
        elif owner in self._cache:
            self._cache[owner] = (self._cache[owner][0], -math.inf)
        for watcher in self._watchers:
            watcher(owner)

    def _address(self, store: str) -> DSN:
        return DSN(store).with_password_of(self.dsn)

    async def _read(self, query: str, *values: object) -> list[Any]:
        return await self._connections.submit("reads", lambda db: db.execute(query, values).fetchall())

    def _connect(self) -> Connection:
        return self._migration.through(connect(self.dsn))


class _Listener:
    """A thread that is notified of changes. It calls `on_change` on the event loop that created it."""

    def __init__(self, connect: Callable[[], Connection], dsn: DSN, on_change: Callable[[str | None], None]) -> None:
        self.listens = False
        self._connect = connect
        self._dsn = dsn
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run, name="everloop-directory", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._stop.set()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._stop.close()

    def _run(self) -> None:
        is_reported = False
        while not self._stop.is_set:
            try:
                with closing(self._connect()) as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    self._tell(None)  # notifications may have been lost
                    self.listens, is_reported = True, False
                    while not self._stop.is_set:
                        for owner in {notice.payload for notice in connection.notifies(timeout=0)}:
                            self._tell(owner)
                        wait_for(CACHE_SECONDS, connection.fileno(), self._stop.fileno())
                        connection.execute("SELECT 1")  # detects a connection that broke silently
            except Exception as error:
                self.listens = False
                if not is_reported:
                    log.warning("no notifications from the directory: %s", explain(self._dsn, error))
                is_reported = True
                wait_for(RETRY_SECONDS, self._stop.fileno())

    def _tell(self, owner: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_change, owner)


async def places_of(dsn: DSN, own: Path | DSN, owner: str | None) -> list[Path | DSN]:
    """Return the database of an owner, or all databases if no owner is given. `own` is the configured one."""
    directory = Directory(dsn)
    try:
        if owner is not None:
            return [(await directory.place(owner)).store or own]
        mine = own.without_password if isinstance(own, DSN) else None
        return [own, *(store for store in await directory.databases() if store.without_password != mine)]
    finally:
        await directory.close()


# ---------------------------------------------------------------------------------------------- changing it


class OwnerRow:
    """An owner's row, for a command that changes it. Only one command at a time may do so."""

    def __init__(self, db: Connection, owner: str, dsn: DSN) -> None:
        self._db = db
        self._owner = owner
        self._dsn = dsn

    def place(self) -> str | None:
        """Return the address in the row, without a password."""
        row = self._db.execute("SELECT store FROM owner_place WHERE owner = %s", (self._owner,)).fetchone()
        return row[0] if row is not None else None

    def hold(self, source: DSN, seconds: float) -> None:
        """Make servers hold back the owner's requests for the duration of the move, at most `seconds`."""
        self._change(HOLD, self._owner, source.without_password, seconds)

    def keep_held(self) -> None:
        """Hold them until the move is complete, possibly by another run: the owner is about to leave the database."""
        try:
            held = self._db.execute(KEEP_HELD, (self._owner,)).fetchone()
        except Exception as error:
            raise explain(self._dsn, error) from error
        if held is None:
            raise StoreError("the move took so long that requests are no longer held back: try again")

    def unhold(self) -> None:
        self._change(UNHOLD, self._owner)

    def put(self, target: DSN) -> None:
        """Record that the owner is in this database from now on."""
        self._change(PUT, self._owner, target.without_password)

    def _change(self, query: str, *values: object) -> None:
        try:
            with self._db.transaction():
                self._db.execute(query, values)
                self._db.execute(NOTIFY, (self._owner,))
        except Exception as error:
            raise explain(self._dsn, error) from error


@contextlib.contextmanager
def owner_row(owner: str, dsn: DSN) -> Iterator[OwnerRow]:
    """Open an owner's row of the directory in order to change it."""
    with closing(connect(dsn)) as db:
        try:
            migrate(db, dsn)
            row = db.execute("SELECT pg_try_advisory_lock(hashtext('everloop directory'), hashtext(%s))", (owner,))
            if row.fetchone() != (True,):
                raise StoreError(f"another command is currently moving {owner}: wait until it ends")
            yield OwnerRow(db, owner, dsn)
        except StoreError:
            raise
        except Exception as error:
            raise explain(dsn, error) from error


def put_pool(store: DSN, pool: DSN | None, dsn: DSN) -> None:
    """Make servers reach a database through a pooler, or directly again."""
    with closing(connect(dsn)) as db:
        try:
            migrate(db, dsn)
            if pool is None:
                db.execute(DELETE_POOL, (store.without_password,))
            else:
                db.execute(PUT_POOL, (store.without_password, pool.without_password))
        except StoreError:
            raise
        except Exception as error:
            raise explain(dsn, error) from error


def check_password(target: DSN, directory: DSN) -> None:
    """Refuse an address whose user or password servers cannot know: the directory stores no passwords."""
    given, known = parts_of(target), parts_of(DSN(target.without_password).with_password_of(directory))
    if any(known.get(name) != value for name, value in given.items()):
        raise StoreError(
            f"servers connect to {target} with the user and the password of the directory, but these differ: use "
            "the same ones in both"
        )
