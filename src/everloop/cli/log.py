"""`everloop log`: what happened in a session or a turn."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable

import msgspec

from ..config import Config
from ..errors import EverloopError
from ..log import Logged, kind_of
from ..store.base import SessionInfo, Store
from .common import OWNER, checked_key, find_turn, load_config, reading
from .entries import described
from .paper import Paper, as_json, harmless


def command(options: argparse.Namespace) -> int:
    asked = getattr(options, "session", None)
    if asked is not None:
        checked_key(asked, "--session")
    key, logged = asyncio.run(_read(load_config(options), asked, options.turn, options.n))
    if options.json:
        for one in logged:
            entry = msgspec.to_builtins(one.entry)
            print(as_json({"session": key, "seq": one.seq, "turn": one.turn, "at": one.at, "entry": entry}))
    else:
        _show(Paper(sys.stdout), key, logged, full=options.turn is not None)
    return 0


async def _read(config: Config, key: str | None, turn: str | None, last: int | None) -> tuple[str, list[Logged]]:
    async with reading(config) as store:
        if turn is None:
            session = await _session(store, key)
            after = session.entries - last if last is not None else 0
            return session.key, await store.read_log(session.id, max(after, 0))
        found = await find_turn(store, turn)
        if key is not None and key != found.key:
            raise EverloopError(f'turn {found.id} is of the session "{found.key}", not of "{key}"')
        return found.key, (await store.read_turn(found.session, found.first_seq))[-(last or 0) :]


async def _session(store: Store, key: str | None) -> SessionInfo:
    if key is not None:
        session = await store.session(OWNER, key)
        if session is None:
            raise EverloopError(f'there is no session "{key}": `everloop sessions` lists them')
        return session
    latest = await store.sessions(OWNER, 1)
    if not latest:
        raise EverloopError("there are no sessions yet: `everloop` starts one")
    return latest[0]


def _show(paper: Paper, key: str, logged: Iterable[Logged], *, full: bool) -> None:
    """A line an entry under its turn; in full, what does not fit on the line comes below it."""
    paper.line(f"session {key}", "bold")
    turn: str | None = None
    before: float | None = None
    for one in logged:
        if one.turn != turn:
            turn = one.turn
            if turn is not None:
                paper.line(f"turn {turn}  {time.strftime('%Y-%m-%d', time.localtime(one.at))}", "bold")
        text, facts = described(one.entry, None if before is None else one.at - before, full=full)
        clock = time.strftime("%H:%M:%S", time.localtime(one.at))
        lines = harmless(text).split("\n")
        paper.put(f"{one.seq:>5}  {clock}  {kind_of(one.entry):<7}  {lines[0]}")
        paper.line_end(f"  [{facts}]" if facts else "", "dim")
        for line in lines[1:]:
            paper.line(f"{'':>26}{line}")
        before = one.at
