"""`everloop log`: what happened in a session, a turn or all sessions, and what happens now."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..activity import Happening, Timeline
from ..config import Config
from ..errors import EverloopError
from ..store.base import SessionInfo, Store
from ..text import printable
from .common import checked_key, find_turn, load_config, reading
from .format import line_of
from .output import Paper, as_json

EVERY_SESSION = 1_000_000
LAST = 2**62  # an entry after all others


@dataclass(slots=True, frozen=True)
class Wanted:
    """What was asked for."""

    owner: str
    session: str | None = None
    turn: str | None = None
    every: bool = False  # all sessions
    last: int | None = None  # only so many events


@dataclass(slots=True, frozen=True)
class Told:
    """Something that happened, and where."""

    session: str
    happening: Happening


def command(options: argparse.Namespace) -> int:
    wanted = _wanted(options)
    config = load_config(options)
    if options.follow:
        from .log_follow import follow

        return asyncio.run(follow(config, wanted, Teller(options.json, full=wanted.turn is not None)))
    tell = Teller(options.json, full=wanted.turn is not None)
    for told in asyncio.run(_read(config, wanted)):
        tell(told)
    return 0


def _wanted(options: argparse.Namespace) -> Wanted:
    session = getattr(options, "session", None)
    if session is not None:
        checked_key(session, "--session")
    if options.all and (session is not None or options.turn is not None):
        raise EverloopError("--all shows every session: leave out --session and --turn, or --all")
    checked_key(options.owner, "--owner")
    every = options.all or (options.follow and session is None and options.turn is None)
    return Wanted(options.owner, session, options.turn, every, options.n)


async def _read(config: Config, wanted: Wanted) -> list[Told]:
    async with reading(config) as store:
        cost = Cost(store, config)
        if wanted.turn is not None:
            return await turn_so_far(store, wanted, cost)
        if wanted.every:
            sessions = await store.sessions(wanted.owner, EVERY_SESSION)
            return await merged(store, sessions, wanted.last, cost)
        session = await _session(store, wanted)
        return await _session_so_far(store, session, wanted.last, cost)


async def _session(store: Store, wanted: Wanted) -> SessionInfo:
    if wanted.session is not None:
        session = await store.session(wanted.owner, wanted.session)
        if session is None:
            raise EverloopError(f'there is no session "{wanted.session}": `everloop sessions` lists them')
        return session
    latest = await store.sessions(wanted.owner, 1)
    if not latest:
        raise EverloopError("there are no sessions yet: `everloop` starts one")
    return latest[0]


async def turn_so_far(store: Store, wanted: Wanted, cost: Cost, until: int = LAST) -> list[Told]:
    assert wanted.turn is not None
    found = await find_turn(store, wanted.turn, wanted.owner)
    if wanted.session is not None and wanted.session != found.key:
        raise EverloopError(f'turn {found.id} is of the session "{found.key}", not of "{wanted.session}"')
    logged = [one for one in await store.read_turn(found.session, found.first_seq) if one.seq <= until]
    return [Told(found.key, one) for one in Timeline(cost).read(logged)][-(wanted.last or 0) :]


async def merged(store: Store, sessions: list[SessionInfo], last: int | None, cost: Cost) -> list[Told]:
    """The events of several sessions by their time."""
    told = [one for session in sessions for one in await _session_so_far(store, session, last, cost)]
    told.sort(key=lambda one: one.happening.at)
    return told[-(last or 0) :]


async def _session_so_far(store: Store, session: SessionInfo, last: int | None, cost: Cost) -> list[Told]:
    after = max(session.entries - last, 0) if last is not None else 0
    logged = await store.read_log(session.id, after, session.entries)
    if after and logged and (turn := logged[0].turn) is not None:  # rounds and tokens count from the turn's first entry
        turns = await store.turns(session.owner, session=session.id, prefix=turn, limit=1)
        if turns and turns[0].first_seq <= after:
            logged = await store.read_log(session.id, turns[0].first_seq - 1, session.entries)
    return [Told(session.key, one) for one in Timeline(cost).read(logged)][-(last or 0) :]


# ---------------------------------------------------------------------------------------------- showing


class Teller:
    """Writes events: a line each under their session and turn, or a JSON object each."""

    def __init__(self, json: bool, *, full: bool) -> None:
        self._json = json
        self._full = full  # what does not fit on the line comes below it
        self._paper = Paper(sys.stdout)
        self._session: str | None = None
        self._turn: str | None = None

    def __call__(self, told: Told) -> None:
        happening = told.happening
        if happening.event in ("request", "steered"):
            happening.facts.setdefault("channel", told.session.partition(":")[0] if ":" in told.session else "")
        if self._json:
            print(as_json(_row(told)), flush=True)
            return
        self._heads(told)
        kind, text, facts = line_of(happening, full=self._full)
        clock = time.strftime("%H:%M:%S", time.localtime(happening.at))
        lines = printable(text).split("\n")
        place = "" if happening.seq is None else str(happening.seq)
        self._paper.put(f"{place:>5}  {clock}  {kind:<7}  {lines[0]}", "" if happening.seq is not None else "dim")
        self._paper.line_end(f"  [{facts}]" if facts else "", "dim")
        for line in lines[1:]:
            self._paper.line(f"{'':>26}{line}")

    def _heads(self, told: Told) -> None:
        turn, at = told.happening.turn, told.happening.at
        if told.session != self._session:
            self._session, self._turn = told.session, None
            self._paper.line(f"session {told.session}", "bold")
        if turn != self._turn and turn is not None:
            self._paper.line(f"turn {turn}  {time.strftime('%Y-%m-%d', time.localtime(at))}", "bold")
        self._turn = turn


def _row(told: Told) -> dict[str, Any]:
    happening = told.happening
    row = {"session": told.session, "turn": happening.turn, "seq": happening.seq, "at": happening.at}
    row |= {"event": happening.event, **happening.facts}
    return row if happening.entry is None else row | {"entry": msgspec.to_builtins(happening.entry)}


class Cost:
    """What tokens of a model cost by the prices in the settings; nothing where there is none."""

    def __init__(self, store: Store, config: Config) -> None:
        from ..runtime.budgets import Budgets

        self._prices = Budgets(store, config)
        self._usual = config.model or ""

    def __call__(self, model: str, usage: Mapping[str, int]) -> float | None:
        model = model or self._usual
        return self._prices.cost(model, usage) if self._prices.price(model) is not None else None
