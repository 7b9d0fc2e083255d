"""`everloop worker`: take work from the store until stopped."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..config import Config
from .common import check_model, is_trusted, load_config, prepare_workspace
from .folder import enter
from .service import at_work
from .setup import with_model

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from ..store.base import Store


def command(options: argparse.Namespace) -> int:
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    config = enter(config, person=False, trust=is_trusted(options))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_work(config))


async def _work(config: Config) -> int:
    from ..store.location import store_at

    store, meters = store_at(config.store, config), _meters(config)
    async with (
        at_work(config, store, drain=config.worker_drain, meters=meters) as (_, told, _),
        _telling(config, store, meters),
    ):
        print(f"everloop: worker {os.getpid()} is ready, store {config.store}", file=sys.stderr, flush=True)
        status = await told
        print("everloop: stopping; turns continue elsewhere, or at the next start", file=sys.stderr, flush=True)
        return status


def _meters(config: Config) -> Meters | None:
    """The metrics, if there is an address to serve them at; otherwise the module is not even loaded."""
    if not config.metrics:
        return None
    from ..observability.metrics import Meters

    return Meters()


@contextlib.asynccontextmanager
async def _telling(config: Config, store: Store, meters: Meters | None) -> AsyncIterator[None]:
    """Serve /metrics meanwhile, if it is configured."""
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
