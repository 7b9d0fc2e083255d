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
    if options.pool or options.no_pool:
        if options.owner is not None or (options.pool and options.no_pool):
            raise EverloopError("--pool and --no-pool are about a database: name no owner, and one of the two")
        store, pool = options.pool or (options.no_pool, None)
        return asyncio.run(_put_pool(config, directory, store, pool))
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
        pools = {store.without_password: pool for store, pool in await directory.pools()}
    finally:
        await directory.close()
    if json:
        for name, store, held in found:
            pool = pools.get(store.without_password)
            print(as_json({"owner": name, "store": str(store), "pool": pool and str(pool), "moving": held}))
        return 0
    for name, store, held in found:
        print(f"{name}  {store}{'  (being moved)' if held else ''}")
    if owner is None:
        print(f"All others are in {config.store}.")
        for address, pool in pools.items():
            print(f"Servers reach {DSN(address)} through {pool}.")
    elif not found:
        print(f"{owner}  {config.store}")
    return 0


async def _put_pool(config: Config, dsn: DSN, address: str, pooler: str | None) -> int:
    """Name the pooler before a database, once it is seen to lead there."""
    from ..store.postgres.directory import check_password, put_pool
    from ..store.postgres.store import PostgresStore

    if not is_dsn(address) or (pooler is not None and not is_dsn(pooler)):
        raise EverloopError("a database and its pooler are postgresql:// addresses")
    store, pool = DSN(address), None if pooler is None else DSN(pooler)
    if isinstance(config.store, DSN) and config.store.without_password == store.without_password:
        raise EverloopError(f"{store} is the store of the settings: name its pooler there, as store_pool")
    if pool is not None:
        check_password(store, dsn)
        check_password(pool, dsn)
        opened = PostgresStore(store.with_password_of(dsn), pool=pool.with_password_of(dsn))
        try:
            await opened.workers()
        finally:
            await opened.close()
    await asyncio.to_thread(put_pool, store, pool, dsn)
    reached = f"through {pool}" if pool is not None else "directly"
    print(f"Servers that open {store} from now on reach it {reached}.")
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
