"""`everloop link`: a new one-time link to the web page of the server on this machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
import webbrowser

from ..config import Config
from ..errors import ConfigError
from .common import load_with_store


def command(options: argparse.Namespace) -> int:
    config = load_with_store(options)
    if not config.port:
        raise ConfigError("name the port of the server with --port")
    link = asyncio.run(_new_link(config))
    print(link)
    if options.open and not webbrowser.open(link):
        print("everloop: no browser was found here: open the link yourself", file=sys.stderr)
    return 0


async def _new_link(config: Config) -> str:
    from ..server.access import Access
    from ..store.location import store_at

    store = store_at(config.store, config)
    try:
        code = await Access(store, config.home).new_link()
    finally:
        await store.close()
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{config.port}/#link={code}"
