"""`everloop log`: the events of a session, a turn or all sessions; with --follow also new ones."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..activity import ActivityEvent, Timeline
from ..config import Config
from ..config.sources import DSN
from ..errors import EverloopError
from ..store.base import SessionInfo, Store
from ..store.location import store_at
from ..text import printable
from .common import checked_key, find_turn, load_with_store, reading
from .file_watch import FileWatch
from .format import line_of
from .output import Output, as_json

EVERY_SESSION = 1_000_000
LAST = 2**62  # an entry after all others
FIRST = 10  # past events that --follow shows first
RECENT = 200  # sessions that --follow reads after a write, or more if more have changed; busy ones always
PAUSE_SECONDS = 0.02  # writes in quick succession are read together
# A write is announced before it is readable, for as long as the disk takes: read again after the last one.
AGAIN_SECONDS = (0.25, 1.0, 4.0, 15.0)


@dataclass(slots=True, frozen=True)
class Wanted:
    """What to show."""

    owner: str
    session: str | None = None
    turn: str | None = None
    every: bool = False  # all sessions
    last: int | None = None  # only this many events


@dataclass(slots=True, frozen=True)
class Told:
    """An event and its session."""

    session: str
    happening: ActivityEvent


def command(options: argparse.Namespace) -> int:
    wanted = _wanted(options)
    config = load_with_store(options)
    if options.follow:
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
        raise EverloopError(f'turn {found.id} belongs to the session "{found.key}", not to "{wanted.session}"')
    logged = [one for one in await store.read_turn(found.session, found.first_seq) if one.seq <= until]
    return [Told(found.key, one) for one in Timeline(cost).read(logged)][-(wanted.last or 0) :]


async def merged(store: Store, sessions: list[SessionInfo], last: int | None, cost: Cost) -> list[Told]:
    """Return the events of several sessions, ordered by time."""
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
    """Prints events: one line each under their session and turn, or one JSON object each."""

    def __init__(self, json: bool, *, full: bool) -> None:
        self._json = json
        self._full = full  # text that does not fit on the line is printed below it
        self._output = Output(sys.stdout)
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
        self._output.put(f"{place:>5}  {clock}  {kind:<7}  {lines[0]}", "" if happening.seq is not None else "dim")
        self._output.line_end(f"  [{facts}]" if facts else "", "dim")
        for line in lines[1:]:
            self._output.line(f"{'':>26}{line}")

    def _heads(self, told: Told) -> None:
        turn, at = told.happening.turn, told.happening.at
        if told.session != self._session:
            self._session, self._turn = told.session, None
            self._output.line(f"session {told.session}", "bold")
        if turn != self._turn and turn is not None:
            self._output.line(f"turn {turn}  {time.strftime('%Y-%m-%d', time.localtime(at))}", "bold")
        self._turn = turn


def _row(told: Told) -> dict[str, Any]:
    happening = told.happening
    row = {"session": told.session, "turn": happening.turn, "seq": happening.seq, "at": happening.at}
    row |= {"event": happening.event, **happening.facts}
    return row if happening.entry is None else row | {"entry": msgspec.to_builtins(happening.entry)}


class Cost:
    """Return the cost of a model's tokens by the prices in the settings; None without a price."""

    def __init__(self, store: Store, config: Config) -> None:
        from ..runtime.budgets import Budgets

        self._prices = Budgets(store, config)
        self._usual = config.model or ""

    def __call__(self, model: str, usage: Mapping[str, int]) -> float | None:
        model = model or self._usual
        return self._prices.cost(model, usage) if self._prices.price(model) is not None else None


# ---------------------------------------------------------------------------------------------- following


@dataclass(slots=True)
class Followed:
    """A session with an open turn."""

    key: str
    timeline: Timeline


async def follow(config: Config, wanted: Wanted, tell: Teller) -> int:
    """Show past events, then new ones until Ctrl-C; of a single turn until its end."""
    store = config.store
    watch = DatabaseWatch(store, config) if isinstance(store, DSN) else FileWatch(store)
    gone = _reader_gone()
    work = asyncio.create_task(_follow(config, wanted, tell, watch))
    gone.add_done_callback(lambda _: work.cancel())
    try:
        await asyncio.wait([work])
        if work.cancelled():
            raise BrokenPipeError
        return work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])
        gone.cancel()
        await watch.close()


class DatabaseWatch:
    """Wakes when a worker has written entries to a database, which sends a notification."""

    def __init__(self, database: DSN, config: Config) -> None:
        from ..store.postgres.notify import LogWatch

        self._store = store_at(database, config)
        self._watch = LogWatch(self._store)

    async def start(self) -> None:
        await self._watch.start()

    async def changed(self) -> None:
        await self._watch.changed()

    async def close(self) -> None:
        await self._watch.close()
        await self._store.close()


async def _follow(config: Config, wanted: Wanted, tell: Teller, watch: FileWatch | DatabaseWatch) -> int:
    await watch.start()
    first = True
    while True:
        while (file := await asyncio.to_thread(_file, config)) is None:
            if first and wanted.turn is None:
                print(f"everloop: waiting for the store {config.store}", file=sys.stderr)
            first = False
            await watch.changed()
        store = store_at(config.store, config)
        try:
            follower = Follower(store, wanted, tell, Cost(store, config))
            await follower.begin(everything=not first)
            first, again = False, iter(AGAIN_SECONDS)
            while not follower.done and await asyncio.to_thread(_file, config) == file:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(next(again, None)):
                        await watch.changed()
                    await asyncio.sleep(PAUSE_SECONDS)
                    again = iter(AGAIN_SECONDS)
                await follower.look()
            if follower.done:
                return 0
        finally:
            await store.close()


def _file(config: Config) -> tuple[int, int] | None:
    """Return the identity of the store's file; None while it is missing or empty. A database server always has the
    same.
    """
    if not isinstance(config.store, Path):
        return (0, 0)
    try:
        found = os.stat(config.store)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_size else None


class Follower:
    """Reads new entries, session by session."""

    def __init__(self, store: Store, wanted: Wanted, tell: Callable[[Told], None], cost: Cost) -> None:
        self.done = False
        self._store = store
        self._wanted = wanted
        self._tell = tell
        self._cost = cost
        self._seqs: dict[int, int] = {}  # the last entry read of each session
        self._open: dict[int, Followed] = {}

    async def begin(self, everything: bool) -> None:
        """Show the last events, or all events of a new store."""
        wanted = self._wanted
        sessions = await self._found(EVERY_SESSION)
        if wanted.turn is not None:  # up to the session's current end; from there it is followed
            self._show(
                await turn_so_far(self._store, wanted, self._cost, max((s.entries for s in sessions), default=0))
            )
        if everything:
            await self.look(EVERY_SESSION)
            return
        for session in sessions:
            self._seqs[session.id] = session.entries
            await self._read(session)
        if wanted.turn is None:
            recent = [session for session in sessions[:RECENT] if session.entries]
            self._show(await merged(self._store, recent, wanted.last or FIRST, self._cost))

    async def look(self, limit: int | None = None) -> None:
        """Show new events."""
        working = dict(self._open)
        for session in await self._latest(limit or RECENT):
            working.pop(session.id, None)
            await self._read(session)
        for one in working.values():
            if (info := await self._store.session(self._wanted.owner, one.key)) is not None:
                await self._read(info)

    async def _latest(self, limit: int) -> list[SessionInfo]:
        """Return the most recently active sessions: `limit` of them, or more, so that all with new entries are
        included.
        """
        while len(found := await self._found(limit)) == limit and any(map(self._is_new, found[limit // 2 :])):
            limit *= 4
        return found

    def _is_new(self, session: SessionInfo) -> bool:
        return session.entries > self._seqs.get(session.id, 0)

    async def _found(self, limit: int) -> list[SessionInfo]:
        wanted = self._wanted
        if wanted.session is None and wanted.turn is None:
            return await self._store.sessions(wanted.owner, limit)
        key = wanted.session
        if wanted.turn is not None:
            turns = await self._store.turns(wanted.owner, prefix=wanted.turn, limit=1)
            key = turns[0].key if turns else key
        one = await self._store.session(wanted.owner, key) if key is not None else None
        return [] if one is None else [one]

    async def _read(self, session: SessionInfo) -> None:
        seq, one = self._seqs.get(session.id, 0), self._open.pop(session.id, None)
        new, open = self._is_new(session), session.open_turn is not None
        if not new and not open:
            return
        one = one or Followed(session.key, await self._timeline(session, seq))
        if open:
            self._open[session.id] = one
        if new:
            logged = await self._store.read_log(session.id, seq, session.entries)
            self._seqs[session.id] = session.entries
            self._show([Told(session.key, happening) for happening in one.timeline.read(logged)])

    async def _timeline(self, session: SessionInfo, seq: int) -> Timeline:
        """Return the timeline of a session from this entry on, with the turn that is open there."""
        timeline = Timeline(self._cost)
        if seq and session.open_turn is not None:
            turns = await self._store.turns(session.owner, session=session.id, prefix=session.open_turn, limit=1)
            if turns and turns[0].first_seq <= seq:
                for _ in timeline.read(await self._store.read_log(session.id, turns[0].first_seq - 1, seq)):
                    pass
        return timeline

    def _show(self, told: list[Told]) -> None:
        wanted = self._wanted.turn
        for one in told:
            turn = one.happening.turn
            if wanted is None or (turn is not None and turn.startswith(wanted)):
                self._tell(one)
                self.done = wanted is not None and one.happening.event == "turn_ended"


def _reader_gone() -> asyncio.Future[None]:
    """Return a future that is done once the reader of our output is gone; a pipe reports that before the next write."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    if stat.S_ISFIFO(os.fstat(1).st_mode):

        def left() -> None:
            loop.remove_reader(1)
            if not gone.done():
                gone.set_result(None)

        loop.add_reader(1, left)
        gone.add_done_callback(lambda _: loop.remove_reader(1))
    return gone
