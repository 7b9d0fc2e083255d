"""The agents of all owners of a store: each owner has a workspace, a memory and sessions of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

from ..config import Config
from ..dispatch.durable import DurableBus
from ..dispatch.local import RETRY_SECONDS
from ..dispatch.neighbours import Neighbours
from ..errors import StoreError
from ..providers.base import LLMProvider
from ..store.base import Store
from ..store.workers import new_worker, retire
from ..tools.threads import in_thread
from .loop import AgentLoop

log = logging.getLogger(__name__)
OWN = "me"  # the person whose machine it is


class Household:
    """Makes an owner's agent when there is something for it to do, and keeps it at work until the end.

    The store and the provider are shared by all, and closed by whoever made them.
    """

    def __init__(self, config: Config, store: Store, provider: LLMProvider) -> None:
        self.config = config
        self.store = store
        self.provider = provider
        self._agents: dict[str, AgentLoop] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._worker = new_worker()
        self._changed = asyncio.Event()
        self._making = asyncio.Lock()

    async def agent(self, owner: str) -> AgentLoop:
        """The owner's agent, at work."""
        if (there := self._agents.get(owner)) is not None:
            return there
        async with self._making:
            if owner not in self._agents:
                agent = await self._make(owner)
                self._agents[owner] = agent
                run = self._runs[owner] = asyncio.create_task(agent.run(), name=f"agent of {owner}")
                run.add_done_callback(_ended)
        return self._agents[owner]

    async def run(self) -> None:
        """Take up the work that waits in the store, and whatever comes, until cancelled."""
        neighbours = Neighbours(self.store, self._worker, self._changed.set)
        await self.agent(OWN)  # also fires everybody's scheduled work
        try:
            await neighbours.join()
            while True:
                self._changed.clear()  # before looking: what comes meanwhile sets it again
                try:
                    for owner in {owner for owner, _ in await self.store.ready(self._worker)} - self._agents.keys():
                        await self.agent(owner)
                except StoreError as error:  # a full or locked disk ends no server
                    log.error("%s", error)
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed.set)
                await self._changed.wait()
        finally:
            await neighbours.leave()

    async def close(self) -> None:
        """Let go of all. Turns under way stay open on disk; the next start goes on with them."""
        for agent in self._agents.values():
            await agent.close()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        self._agents.clear()
        self._runs.clear()
        retire(self._worker)

    async def _make(self, owner: str) -> AgentLoop:
        config = self.config
        if owner != OWN:
            config = _for_others(config, await in_thread(_workspace, config.home, owner))
        return AgentLoop(
            DurableBus(self.store),
            self.provider,
            config.workspace,
            model=config.model or None,
            max_iterations=config.max_iterations,
            restrict_to_workspace=config.restrict_to_workspace,
            config=config,
            store=self.store,
            owner=owner,
            shared=True,
        )


def _ended(run: asyncio.Task[None]) -> None:
    if not run.cancelled() and (error := run.exception()) is not None:
        log.error("%s: %s", run.get_name(), error)


def _for_others(config: Config, workspace: Path) -> Config:
    """The settings for an owner who is not the person of the machine: always kept in the workspace, and without what
    that person has opened for the own agent, such as folders, keys, chats and hosts."""
    return dataclasses.replace(
        config,
        workspace=workspace,
        restrict_to_workspace=True,
        sandbox="auto" if config.sandbox == "off" else config.sandbox,
        readable=(),
        writable=(),
        environment=(),
        private_hosts=(),
        message_to=(),
        mcp=(),
        heartbeat_minutes=0.0,
    )


def _workspace(home: Path, owner: str) -> Path:
    folder = home / "owners" / owner / "workspace"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
