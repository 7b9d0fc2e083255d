"""`everloop directory`: which database each owner is in, where they are spread over several."""

from __future__ import annotations

import argparse
import asyncio

from ..config import Config
from ..config.sources import DSN, is_dsn
from ..errors import ConfigError, EverloopError
from ..store.tokens import checked_owner
from .common import load_config
from .output import as_json


def command(options: argparse.Namespace) -> int:
    config = load_config(options)
    if options.owner is not None:
        checked_owner(options.owner)
    if options.store_of_owner is not None and not is_dsn(options.store_of_owner):
        raise EverloopError("an owner's database is a postgresql:// address")
    directory = _directory(config)
    if options.store_of_owner is not None:
        return asyncio.run(_put(config, directory, options.owner, DSN(options.store_of_owner)))
    return asyncio.run(_show(config, directory, options.owner, options.json))


def _directory(config: Config) -> DSN:
    if config.store_directory is None:
        raise ConfigError("there is no directory: name the database that has it as store_directory in config.toml")
    return config.store_directory


async def _show(config: Config, dsn: DSN, owner: str | None, json: bool) -> int:
    from ..store.postgres.directory import Directory

    directory = Directory(dsn)
    try:
        found = [one for one in await directory.places() if owner in (None, one[0])]
    finally:
        await directory.close()
    if json:
        for name, store, held in found:
            print(as_json({"owner": name, "store": str(store), "moving": held}))
        return 0
    for name, store, held in found:
        print(f"{name}  {store}{'  (being moved)' if held else ''}")
    if owner is None:
        print(f"All others are in {config.store}.")
    elif not found:
        print(f"{owner}  {config.store}")
    return 0


async def _put(config: Config, dsn: DSN, owner: str, store: DSN) -> int:
    """Give a new owner a database. One who has anything is moved by `everloop move`."""
    from ..store.postgres.directory import check_password, entry_of

    check_password(store, dsn)
    with entry_of(owner, dsn) as entry:
        known = await asyncio.to_thread(entry.place)
        place = config.store if known is None else DSN(known).with_password_of(dsn)
        if isinstance(place, DSN) and place.without_password != store.without_password and await _has_any(place, owner):
            raise EverloopError(f"{owner} has sessions or tokens in {place}: `everloop move` moves them")
        await asyncio.to_thread(entry.put, store)
    print(f"{owner} is in {store}.")
    return 0


async def _has_any(place: DSN, owner: str) -> bool:
    from ..store.postgres.store import PostgresStore

    store = PostgresStore(place)
    try:
        return bool(await store.sessions(owner, 1) or await store.tokens(owner))
    finally:
        await store.close()
