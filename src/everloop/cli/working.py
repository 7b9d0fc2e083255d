"""What `serve` and `worker` have in common: the agents of all owners at work, until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator

from ..agents.household import Household
from ..config import Config
from ..providers.factory import make_provider
from ..store.base import Store
from .main import INTERRUPTED


@contextlib.asynccontextmanager
async def at_work(config: Config, store: Store) -> AsyncIterator[tuple[Household, asyncio.Future[int]]]:
    """The agents at work, and the exit status that a signal will give; what goes wrong with them is raised by it."""
    try:
        await store.workers()  # opens it: a store that cannot be used is an error before anything is promised
    except BaseException:
        await store.close()
        raise
    provider = make_provider(config)
    household = Household(config, store, provider)
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()

    def hear(number: int) -> None:
        if not told.done():
            told.set_result(INTERRUPTED if number == signal.SIGINT else 0)

    def ended(work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None and not told.done():
            told.set_exception(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hear, number)
    gc.freeze()  # what is loaded by now stays; from here on whatever is left behind is looked for
    gc.enable()
    work = asyncio.create_task(household.run())
    work.add_done_callback(ended)
    try:
        yield household, told
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await household.close()
        await provider.close()
        await store.close()
        told.cancel()
