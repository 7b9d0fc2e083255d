"""A conversation at a rough network whose process is killed at one of its writes, and then started again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, ClassVar

from everloop.store.base import Store
from everloop.store.sqlite import SQLiteStore
from everloop.testing.channels import Forker

from .hooks import HookNetwork


class Scene:
    """The network sends each message twice, and again until it is acknowledged."""

    settings: ClassVar[dict[str, Any]]

    def __init__(self, forker: Forker, folder: Path) -> None:
        self._forker = forker
        self._folder = folder
        self._commits = 0

    async def talk(self, network: HookNetwork) -> None:
        """What people say, each after they got their answer."""
        raise NotImplementedError

    def check(self, network: HookNetwork) -> None:
        """Check what they were told."""
        raise NotImplementedError

    async def check_store(self, store: Store, what: str) -> None:
        """Check what is in the store at the end; `what` names the run."""
        raise NotImplementedError

    async def kill_at_writes(self, step: int) -> list[int]:
        """Run the scene once for every `step`th place at which it can be killed. Return how often each was."""
        await self._run(None)
        places = [(number, when) for number in range(1, self._commits + 1) for when in ("before", "after")]
        return [await self._run(place) for place in places[::step]]

    async def _run(self, die_at: tuple[int, str] | None) -> int:
        folder = self._folder / ("whole" if die_at is None else f"{die_at[1]}-{die_at[0]}")
        await asyncio.to_thread(folder.mkdir, parents=True)
        kills = 0
        async with HookNetwork(rough=True).running() as network:
            network.settings |= self.settings
            talk = asyncio.create_task(self.talk(network))
            try:
                while not talk.done():
                    child = await asyncio.to_thread(self._forker.start, network.settings, folder, die_at)
                    while not talk.done() and not child.ended.is_set():
                        await asyncio.sleep(0.01)
                    kills += child.ended.is_set()
                    die_at = None
                talk.result()
                await child.stop()
                self._commits = await asyncio.to_thread(child.read_commits)
            finally:
                talk.cancel()
                child.kill()
                await asyncio.gather(talk, return_exceptions=True)
            self.check(network)
        store = SQLiteStore(folder / "store.db")
        try:
            await self.check_store(store, folder.name)
        finally:
            await store.close()
        await asyncio.to_thread(shutil.rmtree, folder)
        return kills
