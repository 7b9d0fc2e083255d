"""Shared by `serve` and `worker`: run the agents of all owners until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ChannelConfig, Config
from ..providers.factory import make_provider
from ..runtime.agent import agent_of
from ..runtime.owners import Owners
from ..store.base import Store
from ..store.pruning import prune
from ..threads import in_thread
from .common import forget_outputs
from .main import INTERRUPTED

if TYPE_CHECKING:
    from ..channels import Channel, Options
    from ..channels.runner import ChannelRunner
    from ..observability.metrics import Meters

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def at_work(
    config: Config, store: Store, *, drain: float, runs: bool = True, meters: Meters | None = None
) -> AsyncIterator[tuple[Owners, asyncio.Future[int], asyncio.Event]]:
    """Run the agents; yield them, a future with the exit status that a signal sets, and an event that a second signal
    sets. The future also raises what makes the agents fail.

    After SIGTERM, turns are handed off to other processes after their current step, if that ends within `drain` seconds
    of the signal. A second signal, or Ctrl-C, waits for nothing.
    """
    try:
        await store.workers()  # opens the store: an unusable one is an error before the start is announced
        made = await _make_channels(config, store)
    except BaseException:
        await store.close()
        raise
    owners = Owners(config, store, make_provider(config), agent_of, runs=runs, meters=meters)
    channels = _run_channels(store, made, owners, meters) if made else None
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()
    hurry, again = asyncio.Event(), asyncio.Event()
    late: asyncio.TimerHandle | None = None  # from the first signal on: its deadline

    def hear(number: int) -> None:
        nonlocal late
        late = late or loop.call_later(drain, store.hurry)
        if told.done():
            again.set()
            store.hurry()
        if told.done() or number == signal.SIGINT:
            hurry.set()
        if not told.done():
            owners.drain()
            told.set_result(INTERRUPTED if number == signal.SIGINT else 0)

    def ended(work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None and not told.done():
            told.set_exception(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hear, number)
    gc.freeze()  # modules loaded so far stay alive; from here on garbage is collected
    gc.enable()
    work = asyncio.create_task(owners.run())
    work.add_done_callback(ended)
    forget = partial(forget_outputs, config.home)
    keep = config.keep_requests_seconds
    pruning = asyncio.create_task(prune(store, keep, forget)) if runs and keep else None
    talk = None if channels is None else asyncio.create_task(channels.run())
    if talk is not None:
        talk.add_done_callback(ended)
    try:
        yield owners, told, again
    finally:
        if hurry.is_set() or late is None:
            store.hurry()
        if told.done() and not told.cancelled() and told.exception() is None and late is not None:
            await unless(hurry, owners.leave(max(0.0, late.when() - loop.time())))
        tasks = [task for task in (talk, work, pruning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if pruning is not None and not pruning.cancelled() and (failed := pruning.exception()) is not None:
            log.error("old requests were not pruned: %s", failed)
        await owners.close()
        if late is not None:
            late.cancel()
        told.cancel()


async def _make_channels(config: Config, store: Store) -> list[tuple[ChannelConfig, Channel, Options]]:
    """The channels of the settings; their code is imported only if there are any."""
    if not config.channels:
        return []
    if isinstance(config.store, Path) and config.store.parent == config.home / "stores":
        # An account has one poller, and the lease that makes sure of it is in the store.
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
    from ..tools.outgoing import OutgoingFiles

    outgoing = OutgoingFiles(owners.config.home)
    config, hears = owners.config, bool(owners.config.transcription_model)
    return ChannelRunner(store, made, follower(owners), meters, config.links, saver(owners), outgoing, hears)


async def unless(hurry: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await the work until it ends or `hurry` is set."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            log.warning("%s", error)
