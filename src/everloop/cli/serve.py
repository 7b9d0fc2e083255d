"""`everloop serve`: the agent behind OpenAI's API, until stopped."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import shlex
import sys
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import ConfigError
from .common import check_model, is_trusted, load_config, missing_model, prepare_workspace
from .folder import enter
from .service import at_work
from .setup import with_model

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from ..runtime.owners import Owners
    from ..server.app import Server
    from ..server.page_api import Services
    from ..store.base import Store
    from .databases import Databases


def command(options: argparse.Namespace) -> int:
    config = _with_model(load_config(options))
    prepare_workspace(config.workspace)
    config = enter(config, person=False, trust=is_trusted(options))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    return asyncio.run(_serve(config, options.open))


def _with_model(config: Config) -> Config:
    """The settings; if they name no model, with that of an Ollama on this machine, or else the local one."""
    if missing_model(config) and not (config.provider or config.base_url or config.api_key):
        from ..providers.ollama import find_ollama

        if found := asyncio.run(find_ollama()):
            model = config.model or found
            print(f"everloop: no model is set; the Ollama on this machine answers with {model}", file=sys.stderr)
            return dataclasses.replace(config, provider="ollama", model=model)
    config = with_model(config)
    check_model(config)
    return config


async def _check_tokens(config: Config) -> None:
    """Refuse to serve a workspace's own store without tokens where the home's store has some: a server that asks for
    tokens must not stop asking because it works in another folder."""
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
    """Say how to open the page: by a link that works once, which the person of this machine alone can read."""
    if not server.is_local:
        print(f"everloop: the page is at {address}/ and asks for a token", file=sys.stderr, flush=True)
        return
    link = f"{address}/#link={await server.access.new_link()}"
    print(f"everloop: open {link} (once, within ten minutes)", file=sys.stderr, flush=True)
    if in_browser and not await asyncio.to_thread(webbrowser.open, link):
        print("everloop: no browser was found here: open the link yourself", file=sys.stderr, flush=True)


def page_services(config: Config, store: Store) -> Services:
    """What the commands `doctor` and `sessions export` do, and what an @ means in the chat, for the page."""
    from ..server.page_api import Services
    from .doctor import checks_of
    from .export import exported, redactor
    from .page_changes import PageChanges, Snapshots
    from .prompt import WorkspaceFiles, attachments

    redact = redactor(config)
    return Services(
        partial(checks_of, config, store),
        lambda entries, title, form: exported(entries, title, form, redact),
        WorkspaceFiles,
        attachments,
        partial(PageChanges, config.home, Snapshots()),
    )


def _databases(config: Config, owners: Owners, meters: Meters, told: asyncio.Future[int]) -> Databases | None:
    """The databases of a server with an owner directory."""
    if config.store_directory is None:
        return None
    from .databases import Databases

    databases = Databases(config, owners, meters, page_services)
    told.add_done_callback(lambda _: databases.drain())
    return databases


async def _serve(config: Config, in_browser: bool = False) -> int:
    from ..observability.metrics import Meters
    from ..server.app import Server
    from ..store.location import store_at

    await _check_tokens(config)
    meters = Meters()
    store = store_at(config.store, config)
    drain, runs = config.drain_seconds, config.server_turns
    async with at_work(config, store, drain=drain, runs=runs, meters=meters) as (owners, told, again):
        databases = _databases(config, owners, meters, told)
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
            return await told
        finally:
            print("everloop: stopping; running requests may finish", file=sys.stderr, flush=True)
            if databases is None:
                await server.stop(again)
            else:
                is_told = told.done() and not told.cancelled() and told.exception() is None
                await databases.stop(drain if is_told and told.result() == 0 else 0.0, again)
