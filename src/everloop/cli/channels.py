"""`everloop channels`: the accounts at chat networks, who is paired with them, and what could not be delivered."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import ChannelConfig, Config
from ..errors import ConfigError, EverloopError
from ..text import one_line, printable
from .common import load_with_store, opened_store
from .output import as_json, minute

if TYPE_CHECKING:
    from ..channels.base import Can
    from ..store.base import Store

CHECK_SECONDS = 20.0


def command(options: argparse.Namespace) -> int:
    return asyncio.run(ACTIONS[options.action](load_with_store(options), options))


def _configured(config: Config, name: str) -> ChannelConfig:
    for one in config.channels:
        if one.name == name:
            return one
    there = ", ".join(one.name for one in config.channels) or "none"
    raise EverloopError(f'there is no channel "{name[:60]}" in the settings; there: {there}')


async def _list(config: Config, options: argparse.Namespace) -> int:
    found = await facts_of(config)
    if options.json:
        for facts in found:
            print(as_json(facts))
    elif found:
        for facts in found:
            print("\n".join(printable(line) for line in _shown(facts)))
    else:
        print("everloop: no channel is set: docs/channels.md shows how to add [channels.NAME]", file=sys.stderr)
    return 0


async def facts_of(config: Config) -> list[dict[str, Any]]:
    """Return the state of each channel in the settings."""
    if not config.channels:
        return []
    async with opened_store(config) as store:
        return [await _facts(store, one) for one in config.channels]


async def _facts(store: Store, config: ChannelConfig) -> dict[str, Any]:
    """Return the state of a channel, from the settings and from the store."""
    from ..channels.access import Pairings
    from ..channels.base import make_channel
    from ..channels.links import LinkStore, channel_of
    from ..channels.matrix_devices import encryption_facts
    from ..channels.runner import STATUS, Status, lease_of
    from ..store.peers import process_of

    pairings = Pairings(store, config.name)
    shared = (one for one in (await LinkStore(store, config.owner).read()).shared if one.is_shared)
    state = (await store.channel_state(config.name)).get(STATUS)
    status = msgspec.json.decode(state, type=Status) if state else None
    holder = (await store.holders()).get(lease_of(config.name))
    try:
        channel, _ = await asyncio.to_thread(make_channel, config)
        problem, repeats = "", str(channel.can.repeats)
    except ConfigError as error:
        problem, repeats = str(error), ""
    return {
        "name": config.name,
        "network": config.network or config.name,
        "owner": config.owner,
        "allow": list(config.allow),
        "paired": [{"sender": one.sender, "name": one.name} for one in (await pairings.peers()).values()],
        "pending": [
            {"code": one.code, "sender": one.sender, "name": one.name, "at": one.at} for one in await pairings.pending()
        ],
        "linked": [
            {
                "sender": member.account.removeprefix(f"{config.name}:"),
                "session": one.session,
                "with": [other.account for other in one.members if other is not member],
            }
            for one in shared
            for member in one.members
            if channel_of(member.account) == config.name
        ],
        "repeats": repeats,
        "process": process_of(holder) if holder is not None else None,
        "error": problem or (status.error if status is not None else ""),
        "since": status.at if status is not None else None,
        "dead": len(await store.dead_letters(config.name, 1000)),
        "encryption": await encryption_facts(store, config),
    }


def _shown(facts: dict[str, Any]) -> list[str]:
    process, error = facts["process"], facts["error"]
    state = f"run by process {process}" if process else "not running: `everloop serve` or `everloop worker` runs it"
    since = f" since {minute(facts['since'])}" if facts["since"] and (process or error) else ""
    lines = [f"{facts['name']} ({facts['network']}): {state}", f"  {f'fails{since}: {error}' if error else 'no error'}"]
    people = [*facts["allow"], *(f"{one['sender']} {one['name']}".strip() for one in facts["paired"])]
    lines.append(f"  answers {', '.join(people) or 'nobody yet'}; repeats: {facts['repeats'] or 'unknown'}")
    for one in facts["pending"]:
        who = f"{one['sender']} {one['name']}".strip()
        lines.append(f"  {who} wants to be paired: everloop channels pair {one['code']}")
    for one in facts["linked"]:
        others = ", ".join(one["with"])
        lines.append(
            f"  {one['sender']} shares the session {one['session']} with {others}: "
            f"everloop channels unlink {facts['name']} {shlex.quote(one['sender'])}"
        )
    if facts["encryption"] is not None:
        lines += _encryption_shown(facts["name"], facts["encryption"])
    if facts["dead"]:
        lines.append(f"  {facts['dead']} could not be delivered: everloop channels dead {facts['name']}")
    return lines


def _encryption_shown(channel: str, facts: dict[str, Any]) -> list[str]:
    from ..channels.matrix_devices import grouped

    lines = [f"  encrypts as device {facts['device']}, fingerprint {grouped(facts['fingerprint'])}"]
    lines += [
        f"  {one['user']} has device {one['device']}, fingerprint {grouped(one['fingerprint'])}, not confirmed: "
        f"everloop channels trust {channel} {shlex.quote(one['user'])} {shlex.quote(one['device'])}"
        for one in facts["unconfirmed"]
    ]
    unread = facts["unread"]
    return lines + [f"  {unread.count(why)} cannot be read yet: {why}" for why in sorted(set(unread))]


async def _trust(config: Config, options: argparse.Namespace) -> int:
    from ..channels.matrix_devices import confirm

    one = _configured(config, options.name)
    async with opened_store(config) as store:
        print(printable(await confirm(store, one.name, options.user, options.device, options.remove)))
    return 0


async def _test(config: Config, options: argparse.Namespace) -> int:
    from ..channels.access import tell
    from ..channels.base import make_channel
    from ..channels.runner import describe

    one = _configured(config, options.name)
    channel, own = await asyncio.to_thread(make_channel, one)
    if options.chat:
        async with opened_store(config) as store:
            text = f"A test message from {os.uname().nodename}."
            await tell(store, one.name, one.owner, options.chat, text, f"test:{os.urandom(6).hex()}")
        print(
            f"A message to {printable(options.chat)} is in the outbox: `everloop serve` or `everloop worker` sends it."
        )
        return 0
    check = getattr(channel, "check", None)
    if check is None:
        print(f"{one.name}: the settings are right.")
        return 0
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            found = await check()
    except Exception as error:
        why = "no answer" if isinstance(error, TimeoutError) else own.redacted(describe(error))
        raise EverloopError(f"{one.name}: {one_line(why)}; check the settings of [channels.{one.name}]") from None
    print(printable(f"{one.name}: connected as {found}."))
    return 0


async def _pair(config: Config, options: argparse.Namespace) -> int:
    from ..channels.access import confirm_anywhere

    async with opened_store(config) as store:
        channels = {one.name: one for one in config.channels}
        print(printable(await confirm_anywhere(store, channels, options.code, options.admin)))
    return 0


async def _unpair(config: Config, options: argparse.Namespace) -> int:
    from ..channels.links import unpair

    one = _configured(config, options.name)
    can = await _can(one)
    async with opened_store(config) as store:
        if not await unpair(store, one, can, options.sender):
            raise EverloopError(f"{one_line(options.sender, 60)} is not paired with {one.name}")
    print(printable(f"{options.sender} is no longer answered by {one.name}."))
    return 0


async def _can(config: ChannelConfig) -> Can:
    """Return what the channel's network can do; the settings of the channel may be invalid."""
    from ..channels.base import Can, make_channel

    try:
        return (await asyncio.to_thread(make_channel, config))[0].can
    except ConfigError:
        return Can()


async def _unlink(config: Config, options: argparse.Namespace) -> int:
    from ..channels.links import unlink

    one = _configured(config, options.name)
    can = await _can(one)
    async with opened_store(config) as store:
        if not await unlink(store, one, can, options.sender):
            raise EverloopError(f"{one_line(options.sender, 60)} shares no session by a code in {one.name}")
    print(printable(f"{options.sender} shares no session any more in {one.name}."))
    return 0


async def _dead(config: Config, options: argparse.Namespace) -> int:
    async with opened_store(config) as store:
        found = await store.dead_letters(options.name, 1000)
    for one in found:
        if options.json:
            plain = {"id": one.id, "at": one.at, "channel": one.channel, "chat_id": one.chat_id}
            print(as_json({**plain, "reason": one.reason, "content": one.content}))
        else:
            where = printable(f"{one.channel}:{one.chat_id}")
            print(f"{one.id}  {minute(one.at)}  {where}  {one_line(one.reason, 100)}  {one_line(one.content, 60)}")
    if not found and not options.json:
        print("everloop: everything was delivered, or is on its way", file=sys.stderr)
    return 0


async def _resend(config: Config, options: argparse.Namespace) -> int:
    from ..store.peers import SENDING

    if bool(options.id) == options.all:
        raise EverloopError("name the ids that `everloop channels dead` shows, or give --all")
    async with opened_store(config) as store:
        ids = [one.id for one in await store.dead_letters(None, 10_000)] if options.all else options.id
        revived = await store.revive(ids)
        await store.wake(SENDING)
    if missing := sorted(set(ids) - set(revived)):
        raise EverloopError(f"{missing[0]} is not a dead letter: `everloop channels dead` shows them")
    print(f"{len(revived)} will be sent again.")
    return 0


ACTIONS = {
    "list": _list,
    "status": _list,
    "test": _test,
    "pair": _pair,
    "unpair": _unpair,
    "unlink": _unlink,
    "trust": _trust,
    "dead": _dead,
    "resend": _resend,
}
