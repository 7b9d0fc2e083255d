"""Routes each request to the database that its owner is in, for a server with an owner directory.

The server has handlers for each database, created at the first request for it. A request is identified by its token:
the databases are asked for it once, and its owner is cached. The handlers verify the token themselves, every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from ..config.sources import DSN
from ..errors import StoreError
from ..runtime.owners import OWN
from ..store.base import Token
from ..store.postgres.directory import Directory, Place
from ..store.tokens import PREFIX, hash_of
from . import errors
from .access import cookie_name
from .guard import BEARER, MOVED, REQUEST_ID, Guard, Handler, credential_of, new_request_id

log = logging.getLogger("everloop.server")
HOLD_SECONDS = 10.0  # how long a request waits for its owner's move to finish
LOOK_SECONDS = 0.5  # polling interval meanwhile, in case a notification is lost
LEAVE_SECONDS = 5.0  # grace period for requests that are still open in the old database after a move
TRIES = 3  # attempts for a request whose owner has just been moved
MAX_KEPT = 10_000  # tokens; beyond that the oldest are evicted

# Looks up a token by its hash in one database.
FindToken = Callable[[str], Awaitable[Token | None]]


@dataclass(frozen=True, slots=True)
class Database:
    """A database with its request handlers."""

    admit: Handler
    guard: Guard
    token: FindToken


class Placement:
    """Admits requests by passing them on. `open` creates the handlers of a database; None is the configured one."""

    def __init__(self, directory: Directory, own: DSN, open: Callable[[DSN | None], Awaitable[Database]]) -> None:
        self._directory = directory
        self._own = own.without_password
        self._open = open
        self._databases: dict[DSN | None, asyncio.Future[Database]] = {}
        self._owners: OrderedDict[str, str] = OrderedDict()  # by token hash
        self._running: dict[str, set[_Running]] = {}  # requests, by owner
        self._changed = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()

    async def admit(self, request: web.Request) -> web.StreamResponse:
        """Answer a request in the database that its owner is in."""
        try:
            owner = await self._owner(request)
        except StoreError as error:
            return await self._refuse(request, error)
        if owner is None:  # the guard reports the problem, or serves a file of the page
            return await (await self._database(None)).admit(request)
        for number in range(TRIES):
            try:
                place = await self._place(owner, fresh=number > 0)
                database = await self._database(place.store)
            except (StoreError, errors.ApiError) as error:
                return await self._refuse(request, error)
            response = await self._pass_on(request, owner, place, database)
            if response.prepared or not await self._has_moved(request, response, owner, place):
                return response
        return await self._refuse(request, _moving(owner))

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def on_change(self, owner: str | None) -> None:
        """Handle a change of the directory."""
        self._changed.set()
        self._changed = asyncio.Event()
        for name in [owner] if owner is not None else list(self._running):
            if self._running.get(name):
                task = asyncio.create_task(self._end_left(name))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    # ------------------------------------------------------------------------------------------ the owner

    async def _owner(self, request: web.Request) -> str | None:
        """Return the owner of the request; None if it has no known token."""
        hash = _subject(request)
        if hash is None or hash == OWN:
            return hash
        if hash not in self._owners:
            await self.find_token(hash)
        return self._owners.get(hash)

    async def find_token(self, hash: str) -> Token | None:
        """Look for a token in all databases. If two have it, the directory decides: the owner has left one of them."""
        failed: StoreError | None = None
        for store in await self._stores():
            try:
                token = await (await self._database(store)).token(hash)
                if token is not None and (await self._place(token.owner, hold=False)).store == store:
                    self._owners[hash] = token.owner
                    while len(self._owners) > MAX_KEPT:
                        self._owners.popitem(last=False)
                    return token
            except StoreError as error:
                failed = error
        if failed is not None:  # the token may be in that database
            raise failed
        return None

    async def _stores(self) -> list[DSN | None]:
        others = [store for store in await self._directory.databases() if not self._is_own(store)]
        return [None, *others]

    # ------------------------------------------------------------------------------------------ the place

    async def _place(self, owner: str, *, fresh: bool = False, hold: bool = True) -> Place:
        """Return the owner's place, waiting for it while they are being moved."""
        place = await self._directory.place(owner, fresh=fresh)
        if hold and place.held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_SECONDS):
                    while place.held:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS)
                        place = await self._directory.place(owner, fresh=True)
            if place.held:
                raise _moving(owner)
        return Place(None, place.held) if self._is_own(place.store) else place

    def _is_own(self, store: DSN | None) -> bool:
        return store is None or store.without_password == self._own

    async def _database(self, store: DSN | None) -> Database:
        """Return the handlers of a database. If it cannot be opened, the next request tries again."""
        found = self._databases.get(store)
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            found = self._databases[store] = asyncio.ensure_future(self._open(store))
        return await asyncio.shield(found)

    async def _has_moved(self, request: web.Request, response: web.StreamResponse, owner: str, place: Place) -> bool:
        """Return whether a request was refused, without any effect, because its owner has moved to another database."""
        if response.status == 401:  # the token has moved, or was revoked
            try:
                now = await self._directory.place(owner, fresh=True)
            except StoreError:
                return False
            return now.held or (None if self._is_own(now.store) else now.store) != place.store
        return bool(request.get(MOVED, False))

    # ------------------------------------------------------------------------------------------ requests

    async def _pass_on(self, request: web.Request, owner: str, place: Place, database: Database) -> web.StreamResponse:
        request[MOVED] = False
        answer = asyncio.ensure_future(database.admit(request))
        running = _Running(answer, place)
        self._running.setdefault(owner, set()).add(running)
        try:
            await asyncio.wait([answer])
        finally:
            if not answer.done():  # the client has disconnected, or the server is stopping
                answer.cancel()
                await asyncio.wait([answer])
            self._running[owner].discard(running)
            if not self._running[owner]:
                del self._running[owner]
        if answer.cancelled() and running.left:
            return await self._refuse(request, _moving(owner))
        return answer.result()

    async def _end_left(self, owner: str) -> None:
        """End the requests that were passed on to a database that the owner has left, after a grace period.

        These are feeds, and requests that wait there for an answer that another database will have.
        """
        try:
            place = await self._directory.place(owner, fresh=True)
        except StoreError:
            return
        store = None if self._is_own(place.store) else place.store
        left = [one for one in self._running.get(owner, ()) if one.place.store != store]
        if left and not place.held:
            await asyncio.wait([one.answer for one in left], timeout=LEAVE_SECONDS)
            for one in left:
                one.left = True
                one.answer.cancel()

    async def _refuse(self, request: web.Request, error: StoreError | errors.ApiError) -> web.StreamResponse:
        guard = (await self._database(None)).guard
        if REQUEST_ID not in request:
            request[REQUEST_ID] = new_request_id()
        if isinstance(error, StoreError):
            log.error("request %s: %s", request[REQUEST_ID], error)
            error = errors.unavailable("the server cannot reach the database of this request; try again")
        return guard.refusal(request, error)


@dataclass(eq=False, slots=True)
class _Running:
    """A request that was passed on."""

    answer: asyncio.Future[web.StreamResponse]
    place: Place
    left: bool = False  # its owner is in another database now


def _moving(owner: str) -> errors.ApiError:
    return errors.unavailable(f"{owner} is being moved to another database; try again soon", 2.0, "owner_moving")


def _subject(request: web.Request) -> str | None:
    """Return the hash of a request's token, or the person of this machine, as claimed; nothing is verified."""
    sent = credential_of(request)
    if sent is not None:
        found = BEARER.fullmatch(sent)
        return hash_of(found[1]) if found is not None and found[1].startswith(PREFIX) else None
    about = request.cookies.get(cookie_name(request), "").rpartition(".")[0]
    return about.split(".")[-1] or None
