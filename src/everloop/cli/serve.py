"""`everloop serve`: the agent behind OpenAI's API, until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from ..config import Config
from .common import check_model, load_config, prepare_workspace
from .working import at_work


def command(options: argparse.Namespace) -> int:
    config = load_config(options)
    check_model(config)
    prepare_workspace(config.workspace)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    from ..server.app import Server
    from ..store.sqlite import SQLiteStore

    async with at_work(config, SQLiteStore(config.store)) as (household, told):
        server = Server(config, household)
        try:
            for address in await server.start():
                print(f"everloop: serving on {address}", file=sys.stderr, flush=True)
            return await told
        finally:
            await server.stop()
