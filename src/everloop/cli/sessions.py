"""`everloop sessions`: list the sessions, or continue those of a folder that is gone."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict

from ..config import Config
from ..store.base import SessionInfo
from ..text import printable
from .common import OWNER, load_config, load_with_store, reading
from .folder import adopt
from .output import as_json


def command(options: argparse.Namespace) -> int:
    if options.adopt is not None:
        adopt(load_config(options), options.adopt)
    config = load_with_store(options)
    found = asyncio.run(_read(config, options.n)) if config.store.exists() else []
    if options.json:
        for session in found:
            print(as_json(asdict(session)))
    elif found:
        print(_table(found))
    else:
        print("everloop: no sessions yet: `everloop` starts one", file=sys.stderr)
    return 0


async def _read(config: Config, limit: int) -> list[SessionInfo]:
    async with reading(config) as store:
        return await store.sessions(OWNER, limit)


def _table(found: list[SessionInfo]) -> str:
    rows = [("session", "entries", "updated", "open turn")]
    for session in found:
        updated = time.strftime("%Y-%m-%d %H:%M", time.localtime(session.updated_at))
        rows.append((printable(session.key), str(session.entries), updated, session.open_turn or ""))
    wide = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (f"{row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:<{wide[2]}}  {row[3]}" for row in rows)
    return "\n".join(line.rstrip() for line in lines)
