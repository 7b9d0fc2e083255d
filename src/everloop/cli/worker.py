"""`everloop worker`: takes work from the store until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from ..config import Config
from .common import check_model, load_config, prepare_workspace
from .first import with_model
from .working import at_work


def command(options: argparse.Namespace) -> int:
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_work(config))


async def _work(config: Config) -> int:
    from ..store.opening import store_at

    store = store_at(config.store, config)
    async with at_work(config, store) as (_, told):
        print(f"everloop: worker {os.getpid()} is ready, store {config.store}", file=sys.stderr, flush=True)
        return await told
