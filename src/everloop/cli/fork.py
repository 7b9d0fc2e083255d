"""`everloop fork`: create a session from the first entries of another one."""

from __future__ import annotations

import argparse
import asyncio
import shlex

from ..config import Config
from ..errors import EverloopError
from ..store.base import SessionInfo, Store
from .common import OWNER, checked_key, load_with_store, reading


def command(options: argparse.Namespace) -> int:
    source = checked_key(options.source, "SESSION[@N]")
    new_key = checked_key(options.new_key, "--as") if options.new_key is not None else None
    made = asyncio.run(_fork(load_with_store(options), source, new_key))
    print(made.key)
    under_way = " and finishes the open turn" if made.open_turn else ""
    given = ((name, getattr(options, name, None)) for name in ("workspace", "store"))
    flags = "".join(f"--{name} {shlex.quote(value)} " for name, value in given if value)
    count = f"{made.entries} entr{'y' if made.entries == 1 else 'ies'}"
    go_on = f"everloop {flags}--session {shlex.quote(made.key)}"
    print(f"It has {count}. `{go_on}` continues from there{under_way}.")
    return 0


async def _fork(config: Config, source: str, new_key: str | None) -> SessionInfo:
    async with reading(config) as store:
        key, until = await _split(store, source)
        return await store.fork(OWNER, key, until, new_key or await _free_key(store, key))


async def _split(store: Store, source: str) -> tuple[str, int | None]:
    """Split SESSION@N. A key may contain an @ itself."""
    key, at, number = source.rpartition("@")
    if at and number.isascii() and number.isdecimal() and await store.session(OWNER, key) is not None:
        if not 0 < len(number.lstrip("0")) < 18:
            raise EverloopError(f'the session "{key}" has no entry {number[:20]}: `everloop log` shows their numbers')
        return key, int(number)
    if await store.session(OWNER, source) is not None:
        return source, None
    if at and await store.session(OWNER, key) is not None:
        raise EverloopError(f'"{number}" is not an entry of "{key}": N is a number that `everloop log` shows')
    missing = key if at and number.isdecimal() else source
    raise EverloopError(f'there is no session "{missing}": `everloop sessions` lists them')


async def _free_key(store: Store, key: str) -> str:
    name, number = f"{key}-fork", 1
    while await store.session(OWNER, name) is not None:
        number += 1
        name = f"{key}-fork{number}"
    return name
