"""The databases of `everloop serve` with an owner directory: each has its own store, agents and handlers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config import Config
from ..config.sources import DSN
from ..errors import ConfigError
from ..providers.factory import make_provider
from ..runtime.agent import agent_of
from ..runtime.owners import Owners
from ..server.app import Server
from ..server.placement import Database, Placement
from ..store.location import store_at
from ..store.postgres.directory import Directory
from .common import prune_requests, unless

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..observability.metrics import Meters
    from ..server.page_api import Services
    from ..store.base import Store

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Opened:
    """A database from the directory."""

    owners: Owners
    server: Server
    tasks: list[asyncio.Task[None]]


class Databases:
    """The databases of a server: the one in the settings, whose agents are `owners`, and those in the directory.

    The latter are opened when a request needs them.
    """

    def __init__(
        self, config: Config, owners: Owners, meters: Meters, services: Callable[[Config, Store], Services]
    ) -> None:
        if config.store_directory is None or not isinstance(config.store, DSN):
            raise ConfigError("store_directory: owners can be in several databases only where `store` is a PostgreSQL")
        self._config = config
        self._meters = meters
        self._services = services
        self._runs = owners.runs
        self._directory = Directory(config.store_directory)
        self._placement = Placement(self._directory, config.store, self._open)
        self._opened: list[_Opened] = []
        self.server = Server(config, owners, meters, services(config, owners.store), self._placement)

    async def start(self) -> list[str]:
        """Listen, and return the URLs. An unusable directory is an error before that."""
        try:
            await self._directory.databases()
            addresses = list(await self.server.start())
        except BaseException:
            await self._directory.close()
            raise
        self._directory.watch(self._placement.on_change)
        return addresses

    def drain(self) -> None:
        """Take no more work, and hand off turns that no client of this server waits for."""
        for one in self._opened:
            one.owners.drain()

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let running requests end, then hand off turns within so many seconds."""
        for one in self._opened:
            one.server.refuse()
        await self.server.stop(hurry)
        await asyncio.gather(*(self._close(one, seconds, hurry) for one in self._opened))
        await self._placement.close()
        await self._directory.close()

    async def _open(self, store: DSN | None) -> Database:
        if store is None:
            return self.server.database
        config = self._config
        opened = store_at(store, config, await self._directory.pool(store))
        try:
            await opened.workers()
        except BaseException:
            await opened.close()
            raise
        owners = Owners(config, opened, make_provider(config), agent_of, runs=self._runs, meters=self._meters)
        server = Server(config, owners, self._meters, self._services(config, opened))
        database = await server.prepare()
        tasks = [asyncio.create_task(owners.run())]
        if self._runs and config.keep_requests_seconds:
            tasks.append(asyncio.create_task(prune_requests(opened, config)))
        for task in tasks:
            task.add_done_callback(partial(_report, store))
        self._opened.append(_Opened(owners, server, tasks))
        return database

    async def _close(self, one: _Opened, seconds: float, hurry: asyncio.Event) -> None:
        await one.server.stop(hurry)
        late = asyncio.get_running_loop().call_later(seconds, one.owners.store.hurry)
        await unless(hurry, one.owners.leave(seconds))
        if hurry.is_set():
            one.owners.store.hurry()
        for task in one.tasks:
            task.cancel()
        await asyncio.gather(*one.tasks, return_exceptions=True)
        await one.owners.close()
        late.cancel()


def _report(store: DSN, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the agents of %s have stopped: %s", store, error)
