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
class Query:
    """Which events to show."""

    owner: str
    session: str | None = None
    turn: str | None = None
    every: bool = False  # all sessions
    last: int | None = None  # only this many events


@dataclass(slots=True, frozen=True)
class SessionEvent:
    """An event and its session."""

    session: str
    activity: ActivityEvent


def command(options: argparse.Namespace) -> int:
    query = _query(options)
    config = load_with_store(options)
    show = EventPrinter(options.json, full=query.turn is not None)
    if options.follow:
        return asyncio.run(follow(config, query, show))
    for event in asyncio.run(_read(config, query)):
        show(event)
    return 0


def _query(options: argparse.Namespace) -> Query:
    session = getattr(options, "session", None)
    if session is not None:
        checked_key(session, "--session")
    if options.all and (session is not None or options.turn is not None):
        raise EverloopError("--all shows every session: leave out --session and --turn, or --all")
    checked_key(options.owner, "--owner")
    every = options.all or (options.follow and session is None and options.turn is None)
    return Query(options.owner, session, options.turn, every, options.n)


async def _read(config: Config, query: Query) -> list[SessionEvent]:
    async with reading(config) as store:
        cost = Cost(store, config)
        if query.turn is not None:
            return await turn_so_far(store, query, cost)
        if query.every:
            sessions = await store.sessions(query.owner, EVERY_SESSION)
            return await merged(store, sessions, query.last, cost)
        session = await _session(store, query)
        return await _session_so_far(store, session, query.last, cost)


async def _session(store: Store, query: Query) -> SessionInfo:
    if query.session is not None:
        session = await store.session(query.owner, query.session)
        if session is None:
            raise EverloopError(f'there is no session "{query.session}": `everloop sessions` lists them')
        return session
    latest = await store.sessions(query.owner, 1)
    if not latest:
        raise EverloopError("there are no sessions yet: `everloop` starts one")
    return latest[0]


async def turn_so_far(store: Store, query: Query, cost: Cost, until: int = LAST) -> list[SessionEvent]:
    assert query.turn is not None
    found = await find_turn(store, query.turn, query.owner)
    if query.session is not None and query.session != found.key:
        raise EverloopError(f'turn {found.id} belongs to the session "{found.key}", not to "{query.session}"')
    logged = [one for one in await store.read_turn(found.session, found.first_seq) if one.seq <= until]
    return [SessionEvent(found.key, one) for one in Timeline(cost).read(logged)][-(query.last or 0) :]


async def merged(store: Store, sessions: list[SessionInfo], last: int | None, cost: Cost) -> list[SessionEvent]:
    """Return the events of several sessions, ordered by time."""
    events = [event for session in sessions for event in await _session_so_far(store, session, last, cost)]
    events.sort(key=lambda event: event.activity.at)
    return events[-(last or 0) :]


async def _session_so_far(store: Store, session: SessionInfo, last: int | None, cost: Cost) -> list[SessionEvent]:
    after = max(session.entries - last, 0) if last is not None else 0
    logged = await store.read_log(session.id, after, session.entries)
    if after and logged and (turn := logged[0].turn) is not None:  # rounds and tokens count from the turn's first entry
        turns = await store.turns(session.owner, session=session.id, prefix=turn, limit=1)
        if turns and turns[0].first_seq <= after:
            logged = await store.read_log(session.id, turns[0].first_seq - 1, session.entries)
    return [SessionEvent(session.key, one) for one in Timeline(cost).read(logged)][-(last or 0) :]


# ---------------------------------------------------------------------------------------------- showing


class EventPrinter:
    """Prints events: one line each, under their session and turn, or one JSON object each."""

    def __init__(self, json: bool, *, full: bool) -> None:
        self._json = json
        self._full = full  # text that does not fit on the line is printed below it
        self._output = Output(sys.stdout)
        self._session: str | None = None
        self._turn: str | None = None

    def __call__(self, event: SessionEvent) -> None:
        activity = event.activity
        if activity.event in ("request", "steered"):
            activity.facts.setdefault("channel", event.session.partition(":")[0] if ":" in event.session else "")
        if self._json:
            print(as_json(_row(event)), flush=True)
            return
        self._heads(event)
        kind, text, facts = line_of(activity, full=self._full)
        clock = time.strftime("%H:%M:%S", time.localtime(activity.at))
        lines = printable(text).split("\n")
        place = "" if activity.seq is None else str(activity.seq)
        self._output.put(f"{place:>5}  {clock}  {kind:<7}  {lines[0]}", "" if activity.seq is not None else "dim")
        self._output.line_end(f"  [{facts}]" if facts else "", "dim")
        for line in lines[1:]:
            self._output.line(f"{'':>26}{line}")

    def _heads(self, event: SessionEvent) -> None:
        turn, at = event.activity.turn, event.activity.at
        if event.session != self._session:
            self._session, self._turn = event.session, None
            self._output.line(f"session {event.session}", "bold")
        if turn != self._turn and turn is not None:
            self._output.line(f"turn {turn}  {time.strftime('%Y-%m-%d', time.localtime(at))}", "bold")
        self._turn = turn


def _row(event: SessionEvent) -> dict[str, Any]:
    activity = event.activity
    row = {"session": event.session, "turn": activity.turn, "seq": activity.seq, "at": activity.at}
    row |= {"event": activity.event, **activity.facts}
    return row if activity.entry is None else row | {"entry": msgspec.to_builtins(activity.entry)}


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


async def follow(config: Config, query: Query, show: EventPrinter) -> int:
    """Show past events, then new ones until Ctrl-C; of a single turn until its end."""
    store = config.store
    watch = DatabaseWatch(store, config) if isinstance(store, DSN) else FileWatch(store)
    gone = _reader_gone()
    work = asyncio.create_task(_follow(config, query, show, watch))
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


async def _follow(config: Config, query: Query, show: EventPrinter, watch: FileWatch | DatabaseWatch) -> int:
    await watch.start()
    first = True
    while True:
        while (file := await asyncio.to_thread(_file, config)) is None:
            if first and query.turn is None:
                print(f"everloop: waiting for the store {config.store}", file=sys.stderr)
            first = False
            await watch.changed()
        store = store_at(config.store, config)
        try:
            follower = Follower(store, query, show, Cost(store, config))
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

    def __init__(self, store: Store, query: Query, show: Callable[[SessionEvent], None], cost: Cost) -> None:
        self.done = False
        self._store = store
        self._query = query
        self._print = show
        self._cost = cost
        self._seqs: dict[int, int] = {}  # the last entry read of each session
        self._open: dict[int, Followed] = {}

    async def begin(self, everything: bool) -> None:
        """Show the last events, or all events of a new store."""
        query = self._query
        sessions = await self._found(EVERY_SESSION)
        if query.turn is not None:  # up to the session's current end; from there it is followed
            self._show(await turn_so_far(self._store, query, self._cost, max((s.entries for s in sessions), default=0)))
        if everything:
            await self.look(EVERY_SESSION)
            return
        for session in sessions:
            self._seqs[session.id] = session.entries
            await self._read(session)
        if query.turn is None:
            recent = [session for session in sessions[:RECENT] if session.entries]
            self._show(await merged(self._store, recent, query.last or FIRST, self._cost))

    async def look(self, limit: int | None = None) -> None:
        """Show new events."""
        working = dict(self._open)
        for session in await self._latest(limit or RECENT):
            working.pop(session.id, None)
            await self._read(session)
        for one in working.values():
            if (info := await self._store.session(self._query.owner, one.key)) is not None:
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
        query = self._query
        if query.session is None and query.turn is None:
            return await self._store.sessions(query.owner, limit)
        key = query.session
        if query.turn is not None:
            turns = await self._store.turns(query.owner, prefix=query.turn, limit=1)
            key = turns[0].key if turns else key
        one = await self._store.session(query.owner, key) if key is not None else None
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
            self._show([SessionEvent(session.key, activity) for activity in one.timeline.read(logged)])

    async def _timeline(self, session: SessionInfo, seq: int) -> Timeline:
        """Return the timeline of a session from this entry on, with the turn that is open there."""
        timeline = Timeline(self._cost)
        if seq and session.open_turn is not None:
            turns = await self._store.turns(session.owner, session=session.id, prefix=session.open_turn, limit=1)
            if turns and turns[0].first_seq <= seq:
                for _ in timeline.read(await self._store.read_log(session.id, turns[0].first_seq - 1, seq)):
                    pass
        return timeline

    def _show(self, events: list[SessionEvent]) -> None:
        wanted = self._query.turn
        for event in events:
            turn = event.activity.turn
            if wanted is None or (turn is not None and turn.startswith(wanted)):
                self._print(event)
                self.done = wanted is not None and event.activity.event == "turn_ended"


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
