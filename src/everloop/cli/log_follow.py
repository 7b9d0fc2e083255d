"""`everloop log --follow`: what happens, as it is written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..activity import Timeline
from ..config import Config
from ..store.base import SessionInfo, Store
from ..store.opening import store_at
from .file_watch import FileWatch, Steps
from .log import EVERY_SESSION, Cost, Teller, Told, Wanted, merged, turn_so_far

FIRST = 10  # events of the past that are shown first
RECENT = 200  # sessions that are looked at after a write, or more, if so many have worked; those at work always are
PAUSE_SECONDS = 0.02  # many writes in a row are read together
# A write is heard of before it can be read, for as long as the disk takes: after the last one it is looked again.
AGAIN_SECONDS = (0.25, 1.0, 4.0, 15.0)


@dataclass(slots=True)
class Followed:
    """A session with an open turn."""

    key: str
    timeline: Timeline


async def follow(config: Config, wanted: Wanted, tell: Teller) -> int:
    """Show what there is, then what comes, until Ctrl-C; of one turn, until its end."""
    watch = FileWatch(config.store) if isinstance(config.store, Path) else Steps()
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
        watch.close()


async def _follow(config: Config, wanted: Wanted, tell: Teller, watch: FileWatch | Steps) -> int:
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
    """Which file the store is; None while there is none, or nothing in it. A database is always the same."""
    if not isinstance(config.store, Path):
        return (0, 0)
    try:
        found = os.stat(config.store)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_size else None


class Follower:
    """Reads what was written since the last time, session by session."""

    def __init__(self, store: Store, wanted: Wanted, tell: Callable[[Told], None], cost: Cost) -> None:
        self.done = False
        self._store = store
        self._wanted = wanted
        self._tell = tell
        self._cost = cost
        self._seqs: dict[int, int] = {}  # how far each session has been read
        self._open: dict[int, Followed] = {}

    async def begin(self, everything: bool) -> None:
        """Show the last events; of a store that is new, all."""
        wanted = self._wanted
        sessions = await self._found(EVERY_SESSION)
        if wanted.turn is not None:  # as far as the session was then: from there on it is followed
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
        """Show what is new."""
        working = dict(self._open)
        for session in await self._latest(limit or RECENT):
            working.pop(session.id, None)
            await self._read(session)
        for one in working.values():
            if (info := await self._store.session(self._wanted.owner, one.key)) is not None:
                await self._read(info)

    async def _latest(self, limit: int) -> list[SessionInfo]:
        """The sessions that worked last: so many, or as many as it takes to have all with something new."""
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
        """The timeline of a session from this entry on; it knows the turn that is open there."""
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
    """Done when whoever reads our output has left, which a pipe tells before the next write."""
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
