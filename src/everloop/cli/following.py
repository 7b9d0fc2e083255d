"""`everloop log --follow`: what happens, as it is written."""

from __future__ import annotations

import asyncio
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
from .log import EVERY_SESSION, Cost, Teller, Told, Wanted, merged, turn_so_far
from .watching import FileWatch, Steps

FIRST = 10  # events of the past that are shown first
RECENT = 200  # sessions that are looked at after a write; any other that works is looked at too
PAUSE_SECONDS = 0.02  # many writes in a row are read together


@dataclass(slots=True)
class Followed:
    """A session, and how far it has been read."""

    key: str
    seq: int
    timeline: Timeline
    open: bool


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
            first = False
            while not follower.done and await asyncio.to_thread(_file, config) == file:
                await watch.changed()
                await asyncio.sleep(PAUSE_SECONDS)
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
        self._sessions: dict[int, Followed] = {}

    async def begin(self, everything: bool) -> None:
        """Show the last events; of a store that is new, all."""
        wanted = self._wanted
        if wanted.turn is not None:
            self._show(await turn_so_far(self._store, wanted, self._cost))
        sessions = await self._found(EVERY_SESSION)
        for session in sessions:
            await self._know(session, 0 if everything else session.entries)
        if everything:
            await self.look()
        elif wanted.turn is None:
            recent = [session for session in sessions[:RECENT] if session.entries]
            self._show(await merged(self._store, recent, wanted.last or FIRST, self._cost))

    async def look(self) -> None:
        """Show what is new."""
        known = {id: one for id, one in self._sessions.items() if one.open}
        for session in await self._found(RECENT):
            known.pop(session.id, None)
            await self._read(session)
        for one in known.values():
            if (info := await self._store.session(self._wanted.owner, one.key)) is not None:
                await self._read(info)

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

    async def _know(self, session: SessionInfo, seq: int) -> Followed:
        """Follow a session from this entry on; its timeline knows the turn that is open there."""
        timeline = Timeline(self._cost)
        if seq and session.open_turn is not None:
            turns = await self._store.turns(session.owner, session=session.id, prefix=session.open_turn, limit=1)
            if turns and turns[0].first_seq <= seq:
                for _ in timeline.read(await self._store.read_log(session.id, turns[0].first_seq - 1, seq)):
                    pass
        one = Followed(session.key, seq, timeline, session.open_turn is not None)
        self._sessions[session.id] = one
        return one

    async def _read(self, session: SessionInfo) -> None:
        one = self._sessions.get(session.id) or await self._know(session, 0)
        one.open = session.open_turn is not None
        if session.entries <= one.seq:
            return
        logged = await self._store.read_log(session.id, one.seq, session.entries)
        one.seq = session.entries
        self._show([Told(session.key, happening) for happening in one.timeline.read(logged)])

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
