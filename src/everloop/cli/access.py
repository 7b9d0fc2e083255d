"""Access to the server: `everloop token` manages tokens, `everloop link` prints a one-time link to the web page."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec.structs import asdict

from ..config import Config
from ..config.sources import DSN
from ..errors import ConfigError, EverloopError
from ..store.base import Store, Token
from ..store.tokens import OWNER, checked_name, checked_owner, checked_rights, hash_of, joined_rights, new_token
from ..text import one_line
from .common import load_with_store, opened_store
from .output import as_json, minute, table

MIN_ID = 4  # so that a mistyped short name is not taken for the start of an id


def token(options: argparse.Namespace) -> int:
    config = load_with_store(options, claim=options.action == "add")
    return asyncio.run(ACTIONS[options.action](config, options))


@contextlib.asynccontextmanager
async def _opened(config: Config, owner: str | None = None) -> AsyncIterator[list[Store]]:
    """Open the store with an owner's tokens; without an owner, all stores with tokens."""
    from ..store.location import store_at

    places: list[Path | DSN] = [config.store]
    if config.store_directory is not None:
        from ..store.postgres.directory import places_of

        places = list(await places_of(config.store_directory, config.store, owner))
    stores: list[Store] = [store_at(place, config) for place in places]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def _add(config: Config, options: argparse.Namespace) -> int:
    name = checked_name(options.name)
    owner = _owner_of(name) if options.owner is None else checked_owner(options.owner)
    rights = checked_rights(part.strip() for part in options.rights.split(","))
    token = new_token()
    async with _opened(config, owner) as (store,):
        first = not await store.tokens_exist()
        made = await store.add_token(name, owner, hash_of(token), rights, options.agent)
    print(token)
    whose = "the user of this machine (me)" if owner == "me" else f"the owner {owner}"
    print(
        f"everloop: the token is shown only this once. It is for {whose}, with the rights {joined_rights(rights)}; "
        f'`everloop token revoke "{made.name}"` revokes it.',
        file=sys.stderr,
    )
    if first:
        print("everloop: from now on every request needs a token, on this machine too.", file=sys.stderr)
    return 0


async def _list(config: Config, options: argparse.Namespace) -> int:
    found: list[Token] = []
    if config.store.exists():
        async with _opened(config) as stores:
            found = [token for store in stores for token in await store.tokens()]
    if options.json:
        for token in found:
            print(as_json({**asdict(token), "rights": sorted(token.rights)}))
    elif found:
        print(_table(found))
    else:
        print("everloop: there are no tokens yet: `everloop token add NAME` makes one", file=sys.stderr)
    return 0


async def _revoke(config: Config, options: argparse.Namespace) -> int:
    if config.store.exists():
        async with _opened(config) as stores:
            found = {token.id: (token, store) for store in stores for token in await store.tokens()}
            token = _meant([token for token, _ in found.values()], options.name)
            await found[token.id][1].revoke_token(token.id)
            print(f"Revoked {token.name} of {token.owner}.")
            return 0
    raise _unknown(options.name)


ACTIONS = {"add": _add, "create": _add, "list": _list, "revoke": _revoke}


def _owner_of(name: str) -> str:
    if OWNER.fullmatch(name) is None:
        raise EverloopError(f"{name} cannot be an owner's name too (a-z, 0-9, _ and -, at most 32): pass --owner OWNER")
    return name


def _meant(tokens: list[Token], name: str) -> Token:
    """Return the valid token with this name, else the only one whose id starts with it."""
    living = [token for token in tokens if token.revoked_at is None]
    if found := [token for token in living if token.name == name]:
        return found[0]
    by_id = [token for token in living if len(name) >= MIN_ID and token.id.startswith(name)]
    if len(by_id) > 1:
        raise EverloopError(
            f'"{name}" may be one of {", ".join(token.id for token in by_id[:5])}: write more of its id'
        )
    if not by_id:
        if any(name in (token.name, token.id) for token in tokens):
            raise EverloopError(f'the token "{name}" is already revoked')
        raise _unknown(name)
    return by_id[0]


def _unknown(name: str) -> EverloopError:
    # The user may have pasted the token itself: never show enough of it to be used.
    return EverloopError(f'there is no token "{one_line(name, 13)}": `everloop token list` shows their names')


def _table(tokens: list[Token]) -> str:
    rows = [("name", "owner", "rights", "agent", "id", "made", "last used", "revoked")]
    for token in tokens:
        made, used, revoked = minute(token.created_at), minute(token.last_used_at), minute(token.revoked_at)
        rows.append(
            (token.name, token.owner, joined_rights(token.rights), token.agent or "-", token.id, made, used, revoked)
        )
    return table(rows)


def link(options: argparse.Namespace) -> int:
    config = load_with_store(options)
    if not config.port:
        raise ConfigError("name the port of the server with --port")
    link = asyncio.run(_new_link(config))
    print(link)
    if not _is_answered(config.host, config.port):
        print(f"everloop: nothing answers at port {config.port} yet: `everloop serve` starts it", file=sys.stderr)
    if options.open and not webbrowser.open(link):
        print("everloop: no browser was found here: open the link yourself", file=sys.stderr)
    return 0


def _is_answered(host: str, port: int) -> bool:
    """Return whether a server listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


async def _new_link(config: Config) -> str:
    from ..server.access import Access

    async with opened_store(config) as store:
        code = await Access(store, config.home).new_link()
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{config.port}/#link={code}"
