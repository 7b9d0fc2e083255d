"""`everloop worker`: takes work from the store until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

from ..config import Config
from .common import check_model, load_config, make_agent, prepare_workspace
from .main import INTERRUPTED


def command(options: argparse.Namespace) -> int:
    config = load_config(options)
    check_model(config)
    prepare_workspace(config.workspace)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_work(config))


async def _work(config: Config) -> int:
    from ..dispatch.durable import DurableBus
    from ..store.sqlite import SQLiteStore

    store = SQLiteStore(config.store)
    agent = make_agent(config, DurableBus(store), store)
    told: list[int] = []

    def stop(number: int) -> None:
        told.append(number)
        agent.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    async with agent:
        await store.workers()  # opens it: a store that cannot be used is an error before anything is promised
        print(f"everloop: worker {os.getpid()} is ready, store {config.store}", file=sys.stderr, flush=True)
        await agent.run()
    return INTERRUPTED if signal.SIGINT in told else 0
