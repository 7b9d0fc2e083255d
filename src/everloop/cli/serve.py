"""`everloop serve`: the agent behind OpenAI's API, until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import sys

from ..config import Config
from .common import check_model, load_config, missing_model, prepare_workspace
from .service import at_work
from .setup import with_model


def command(options: argparse.Namespace) -> int:
    config = _with_model(load_config(options))
    prepare_workspace(config.workspace)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_serve(config))


def _with_model(config: Config) -> Config:
    """The settings; where they name no model, with the one of an Ollama on this machine, or else the local one."""
    if missing_model(config) and not (config.provider or config.base_url or config.api_key):
        from ..providers.ollama import find_ollama

        if found := asyncio.run(find_ollama()):
            model = config.model or found
            print(f"everloop: no model is set; the Ollama on this machine answers with {model}", file=sys.stderr)
            return dataclasses.replace(config, provider="ollama", model=model)
    config = with_model(config)
    check_model(config)
    return config


async def _serve(config: Config) -> int:
    from ..observability.metrics import Meters
    from ..server.app import Server
    from ..store.opening import store_at

    meters = Meters()
    store = store_at(config.store, config)
    drain, runs = config.drain_seconds, config.server_turns
    async with at_work(config, store, drain=drain, runs=runs, meters=meters) as (household, told, again):
        server = Server(config, household, meters)
        for address in await server.start():
            print(f"everloop: serving on {address}", file=sys.stderr, flush=True)
        try:
            print(f"everloop: {config.model} answers, in {config.workspace}; Ctrl-C stops", file=sys.stderr, flush=True)
            return await told
        finally:
            print("everloop: stopping; requests under way may end", file=sys.stderr, flush=True)
            await server.stop(again)
