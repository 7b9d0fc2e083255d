"""`everloop serve` answers HTTP clients, `everloop worker` takes work from the store; both run until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import shlex
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import ChannelConfig, Config
from ..errors import ConfigError
from ..providers.factory import make_provider
from ..runtime.agent import agent_of
from ..runtime.owners import Owners
from ..store.base import Store
from ..threads import in_thread
from .common import load_config, missing_model, open_workspace, prune_requests, unless
from .main import INTERRUPTED
from .setup import with_model

if TYPE_CHECKING:
    from ..channels import Channel, Options
    from ..channels.runner import ChannelRunner
    from ..observability.metrics import Meters
    from ..server.app import Server
    from ..server.page_api import Services
    from .databases import Databases

log = logging.getLogger(__name__)


def command(options: argparse.Namespace) -> int:
    config = open_workspace(_with_model(load_config(options)), options)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_serve(config, options.open))


def _with_model(config: Config) -> Config:
    """Return the settings; if they name no model, with that of an Ollama on this machine, or else the local one."""
    if missing_model(config) and not (config.provider or config.base_url or config.api_key):
        from ..providers.ollama import find_ollama

        if found := asyncio.run(find_ollama()):
            model = config.model or found
            print(f"everloop: no model is set; the Ollama on this machine answers with {model}", file=sys.stderr)
            return dataclasses.replace(config, provider="ollama", model=model)
    return with_model(config)


async def _check_tokens(config: Config) -> None:
    """Refuse to serve a workspace's own store without tokens if the home's store has some.

    A server that asks for tokens must not stop asking because it works in another folder.
    """
    homes = config.home / "everloop.db"
    if not isinstance(config.store, Path) or config.store.parent != config.home / "stores":
        return
    if await _has_tokens(homes) and not await _has_tokens(config.store):
        raise ConfigError(
            f"the tokens are in {homes}, and this workspace has a store of its own: make one with `everloop token add "
            f"NAME --workspace {shlex.quote(str(config.workspace))}`, or name the store with --store"
        )


async def _has_tokens(path: Path) -> bool:
    from ..store.location import store_at

    if not await asyncio.to_thread(path.exists):
        return False
    store = store_at(path)
    try:
        return bool(await store.tokens())
    finally:
        await store.close()


async def _open_page(server: Server, address: str, in_browser: bool) -> None:
    """Print how to open the page: with a link that works once, which only the person of this machine can read."""
    if not server.is_local:
        print(f"everloop: the page is at {address}/ and asks for a token", file=sys.stderr, flush=True)
        return
    link = f"{address}/#link={await server.access.new_link()}"
    print(f"everloop: open {link} (once, within ten minutes)", file=sys.stderr, flush=True)
    if in_browser and not await asyncio.to_thread(webbrowser.open, link):
        print("everloop: no browser was found here: open the link yourself", file=sys.stderr, flush=True)


def page_services(config: Config, store: Store) -> Services:
    """Return what `doctor`, `sessions export` and an @ in the chat do, for the page."""
    from ..server.page_api import Services
    from .doctor import checks_of
    from .export import exported, redactor
    from .prompt import WorkspaceFiles, attachments
    from .turn_changes import PageChanges, Snapshots

    redact = redactor(config)
    return Services(
        partial(checks_of, config, store),
        lambda entries, title, form: exported(entries, title, form, redact),
        WorkspaceFiles,
        attachments,
        partial(PageChanges, config.home, Snapshots()),
    )


def _databases(config: Config, owners: Owners, meters: Meters, signals: Signals) -> Databases | None:
    """Return the databases of a server with an owner directory; None for one without."""
    if config.store_directory is None:
        return None
    from .databases import Databases

    databases = Databases(config, owners, meters, page_services)
    signals.status.add_done_callback(lambda _: databases.drain())
    return databases


async def _serve(config: Config, in_browser: bool = False) -> int:
    from ..observability.metrics import Meters
    from ..server.app import Server
    from ..store.location import store_at

    await _check_tokens(config)
    meters = Meters()
    store = store_at(config.store, config)
    drain, runs = config.drain_seconds, config.server_turns
    async with at_work(config, store, drain=drain, runs=runs, meters=meters) as (owners, signals):
        databases = _databases(config, owners, meters, signals)
        server = (
            databases.server if databases is not None else Server(config, owners, meters, page_services(config, store))
        )
        addresses = await (databases or server).start()
        for address in addresses:
            print(f"everloop: serving on {address}", file=sys.stderr, flush=True)
        try:
            print(
                f"everloop: model {config.model}, workspace {config.workspace}; Ctrl-C stops",
                file=sys.stderr,
                flush=True,
            )
            await _open_page(server, addresses[0], in_browser)
            return await signals.status
        finally:
            print("everloop: stopping; running requests may finish", file=sys.stderr, flush=True)
            if databases is None:
                await server.stop(signals.again)
            else:
                await databases.stop(drain if signals.result == 0 else 0.0, signals.again)


# ---------------------------------------------------------------------------------------------- agents, until a signal


class Signals:
    """What SIGTERM and Ctrl-C request from a process that runs agents.

    After SIGTERM, turns are handed off to other processes after their current step, if that ends within `drain` seconds
    of the signal. After a second signal, or Ctrl-C, nothing is waited for.
    """

    def __init__(self, owners: Owners, drain: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.status: asyncio.Future[int] = self._loop.create_future()  # also raises the error that ends the agents
        self.again = asyncio.Event()  # set by a second signal
        self._hurry = asyncio.Event()  # do not wait for anything
        self._deadline: asyncio.TimerHandle | None = None  # set by the first signal
        self._owners = owners
        self._drain = drain
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        hurry = self._owners.store.hurry
        self._deadline = self._deadline or self._loop.call_later(self._drain, hurry)
        if self.status.done():
            self.again.set()
            hurry()
        if self.status.done() or number == signal.SIGINT:
            self._hurry.set()
        if not self.status.done():
            self._owners.drain()
            self.status.set_result(INTERRUPTED if number == signal.SIGINT else 0)

    @property
    def result(self) -> int | None:
        """Return the exit status that was requested; None if there is none yet, or an error ends the agents."""
        is_set = self.status.done() and not self.status.cancelled() and self.status.exception() is None
        return self.status.result() if is_set else None

    def watch(self, work: asyncio.Task[None]) -> asyncio.Task[None]:
        """End the process with the error that this work ends with."""
        work.add_done_callback(self._ended)
        return work

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None and not self.status.done():
            self.status.set_exception(error)

    async def hand_off(self) -> None:
        """Hand off running turns within the remaining time; only after SIGTERM."""
        if self._hurry.is_set() or self._deadline is None:
            self._owners.store.hurry()
        if self.result is not None and self._deadline is not None:
            left = max(0.0, self._deadline.when() - self._loop.time())
            await unless(self._hurry, self._owners.leave(left))

    def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.status.cancel()


@contextlib.asynccontextmanager
async def at_work(
    config: Config, store: Store, *, drain: float, runs: bool = True, meters: Meters | None = None
) -> AsyncIterator[tuple[Owners, Signals]]:
    """Run the agents and channels; yield the agents, and what signals request."""
    try:
        await store.workers()  # opens the store: an unusable one is an error before the start is announced
        made = await _make_channels(config, store)
    except BaseException:
        await store.close()
        raise
    owners = Owners(config, store, make_provider(config), agent_of, runs=runs, meters=meters)
    signals = Signals(owners, drain)
    gc.freeze()  # modules loaded by now stay alive; from here on garbage is collected
    gc.enable()
    tasks = [signals.watch(asyncio.create_task(owners.run()))]
    if runs and config.keep_requests_seconds:
        tasks.append(asyncio.create_task(prune_requests(store, config)))
    if made:
        tasks.append(signals.watch(asyncio.create_task(_run_channels(store, made, owners, meters).run())))
    try:
        yield owners, signals
    finally:
        await signals.hand_off()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await owners.close()
        signals.close()


async def _make_channels(config: Config, store: Store) -> list[tuple[ChannelConfig, Channel, Options]]:
    """Return the channels of the settings; their code is imported only if there are any."""
    if not config.channels:
        return []
    if isinstance(config.store, Path) and config.store.parent == config.home / "stores":
        # An account has one poller, which a lease in the store ensures.
        print("everloop: channels are left to the server of the home workspace", file=sys.stderr, flush=True)
        return []
    from ..channels.base import make_channel

    return [(one, *await in_thread(make_channel, one, store)) for one in config.channels]


def _run_channels(
    store: Store,
    made: list[tuple[ChannelConfig, Channel, Options]],
    owners: Owners,
    meters: Meters | None,
) -> ChannelRunner:
    from ..channels.files import saver
    from ..channels.runner import ChannelRunner, follower
    from ..tools.message import OutgoingFiles

    outgoing = OutgoingFiles(owners.config.home)
    config, hears = owners.config, bool(owners.config.transcription_model)
    return ChannelRunner(store, made, follower(owners), meters, config.links, saver(owners), outgoing, hears)


# ---------------------------------------------------------------------------------------------- worker


def worker(options: argparse.Namespace) -> int:
    config = open_workspace(with_model(load_config(options)), options)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_run_worker(config))


async def _run_worker(config: Config) -> int:
    from ..store.location import store_at

    store, meters = store_at(config.store, config), _meters(config)
    async with (
        at_work(config, store, drain=config.worker_drain, meters=meters) as (_, signals),
        _serving_metrics(config, store, meters),
    ):
        print(f"everloop: worker {os.getpid()} is ready, store {config.store}", file=sys.stderr, flush=True)
        status = await signals.status
        print("everloop: stopping; turns continue elsewhere, or at the next start", file=sys.stderr, flush=True)
        return status


def _meters(config: Config) -> Meters | None:
    """Return the metrics, if there is an address to serve them at; otherwise the module is not loaded."""
    if not config.metrics:
        return None
    from ..observability.metrics import Meters

    return Meters()


@contextlib.asynccontextmanager
async def _serving_metrics(config: Config, store: Store, meters: Meters | None) -> AsyncIterator[None]:
    """Serve /metrics while the body runs, if that is configured."""
    if meters is None:
        yield
        return
    from ..server.metrics import MetricsServer

    server = MetricsServer(config, store, meters)
    for address in await server.start():
        print(f"everloop: metrics on {address}/metrics", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        await server.stop()
