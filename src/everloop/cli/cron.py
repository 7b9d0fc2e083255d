"""`everloop cron`: scheduled work, added, listed, removed, or run at once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from ..config import Config
from ..cron.jobs import Job
from ..cron.service import CronService
from ..errors import EverloopError
from ..text import one_line, printable
from .common import OWNER, chat_of, load_with_store, opened_store, session_key
from .output import as_json, minute, table

FIRED_BY = "It fires while `everloop`, `everloop serve` or `everloop worker` runs on this store."


def command(options: argparse.Namespace) -> int:
    config = load_with_store(options, claim=options.action == "add")
    return asyncio.run(ACTIONS[options.action](config, options))


@contextlib.asynccontextmanager
async def _service(config: Config) -> AsyncIterator[CronService]:
    async with opened_store(config) as store:
        yield CronService(store, owner=OWNER)


async def _add(config: Config, options: argparse.Namespace) -> int:
    key = session_key(options, "cli:direct")
    channel, chat_id = chat_of(key)
    when = {"at": options.at, "every": options.every, "cron": options.cron, "tz": options.tz}
    async with _service(config) as service:
        job = await service.add(
            options.message, **when, channel=channel, chat_id=chat_id, session=key, deliver=options.deliver
        )
    print(job.id)
    print(f"{job.words}; first on {job.next_words}, in the session {printable(key)}. {FIRED_BY}")
    return 0


async def _list(config: Config, options: argparse.Namespace) -> int:
    jobs: list[Job] = []
    if config.store.exists():
        async with _service(config) as service:
            jobs = await service.list()
    if options.json:
        for job in jobs:
            print(as_json(_plain(job)))
    elif jobs:
        print(_table(jobs))
    else:
        print('everloop: nothing is scheduled: `everloop cron add "message" --every 1h` adds a job', file=sys.stderr)
    return 0


async def _remove(config: Config, options: argparse.Namespace) -> int:
    if config.store.exists():
        async with _service(config) as service:
            if await service.remove(options.id):
                print(f"Removed {options.id}.")
                return 0
    raise _unknown(options.id)


async def _run(config: Config, options: argparse.Namespace) -> int:
    if config.store.exists():
        async with _service(config) as service:
            found = [job.id for job in await service.list() if job.id.startswith(options.id)]
            if len(found) > 1 and options.id not in found:
                raise EverloopError(f'"{options.id[:60]}" is the beginning of {len(found)} ids: {", ".join(found[:8])}')
            id = options.id if options.id in found or not found else found[0]
            if await service.run(id):
                print(f"{id} is in the inbox of its session: `everloop worker` runs it, if none does yet.")
                return 0
    raise _unknown(options.id)


ACTIONS = {"add": _add, "list": _list, "remove": _remove, "run": _run}


def _unknown(id: str) -> EverloopError:
    return EverloopError(f'there is no job "{id[:60]}": `everloop cron list` shows the ids')


def _plain(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "schedule": job.words,
        "next_due": job.next_due,
        "last_fired": job.last_fired,
        "session": job.session_key,
        "channel": job.channel,
        "chat_id": job.chat_id,
        "message": job.message,
        "name": job.name,
        "deliver": job.deliver,
    }


def _table(jobs: list[Job]) -> str:
    rows = [("id", "next", "last", "session", "schedule", "message")]
    for job in jobs:
        where = printable(job.session_key)
        due = "paused" if job.paused else minute(job.next_due)
        rows.append((job.id, due, minute(job.last_fired), where, job.words, one_line(job.message, 60)))
    return table(rows)
