"""The agents of all owners of a store: each owner has a workspace, a memory and sessions of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import StoreError
from ..providers.base import LLMProvider
from ..store.base import Incoming, Store
from ..store.peers import ANY, ENDED, TIMERS, WORK, Notice, new_worker, retire
from ..threads import in_thread
from .agent import AgentLoop
from .dispatcher import RETRY_SECONDS
from .durable_bus import DurableBus
from .peers import WRITE_SECONDS

if TYPE_CHECKING:
    from ..observability.metrics import Meters

log = logging.getLogger(__name__)
OWN = "me"  # the owner of the machine
EARLY = 5_000  # notices of answers that were not awaited here yet; of more the oldest are forgotten
PAUSE_SECONDS = 0.01  # between two looks into the store: many wake-ups at once cost one


@dataclasses.dataclass(slots=True)
class WakeSet:
    """What notices have said to look for in the store."""

    everything: bool = True
    sessions: set[int] = dataclasses.field(default_factory=set)  # with work
    ended: bool = False  # a turn has ended, and it is not known which
    rows: set[int] = dataclasses.field(default_factory=set)  # inbox rows that were answered

    def add(self, notice: Notice) -> bool:
        """Add what a notice says. Return whether there is something to look for."""
        if notice.what == WORK and notice.ids:
            self.sessions.update(notice.ids)
        elif notice.what == ENDED:
            self.rows.update(notice.ids)
            self.ended |= not notice.ids
        elif notice.what in (WORK, ANY):
            self.everything = True
        else:
            return False
        return True


class Owners:
    """Creates an owner's agent when there is work for it, and keeps it running until the end.

    All agents share the store and the provider, which the caller closes, and hold sessions under one worker name. The
    store is read for all of them at once. Without `runs`, all work is left to other processes.
    """

    def __init__(
        self, config: Config, store: Store, provider: LLMProvider, *, runs: bool = True, meters: Meters | None = None
    ) -> None:
        self.config = config
        self.store = store
        self.provider = provider
        self.worker = new_worker()
        self.runs = runs
        self.meters = meters
        self.fires_cron = False  # one agent does, for all
        self._agents: dict[str, AgentLoop] = {}
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._wake_set = WakeSet()
        self._drains = False
        self._resting: asyncio.Task[None] | None = None
        self._failed: set[str] = set()  # owners whose agents are tried again later
        self._early: dict[int, None] = {}  # inbox rows that were answered and are not awaited here, or not yet
        self._peer = store.peer(self.worker, self._on_notice, runs)
        self._making = asyncio.Lock()

    async def agent(self, owner: str) -> AgentLoop:
        """The owner's agent, running."""
        if (there := self._agents.get(owner)) is not None:
            return there
        async with self._making:
            if owner not in self._agents:
                agent = await self._make(owner)
                self._agents[owner] = agent
                run = self._at_work[owner] = asyncio.create_task(agent.run(), name=f"agent of {owner}")
                run.add_done_callback(_ended)
        return self._agents[owner]

    def changed(self) -> None:
        """There may be something new in the store."""
        self._wake_set.everything = True
        self._changed.set()

    # ------------------------------------------------------------------------------------------ for its agents

    async def feed(self, worker: str, look: Callable[[], Awaitable[None]]) -> None:
        """Looking into the store is done here, for all agents at once."""
        await asyncio.Event().wait()

    def on_held(self, worker: str, holder: str, awaited: bool) -> None:
        if not holder:  # only a write is under way
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self.changed)
            return
        self._peer.watch(holder)
        if awaited:
            self.changed()

    def on_subagent(self, worker: str) -> None:
        """Notices come in any case."""

    def on_awaited(self) -> None:
        self._changed.set()

    def on_fired(self) -> None:
        self.changed()

    async def unsubscribe(self) -> None:
        """The other agents still need the notices."""

    async def close_store(self) -> None:
        """It is shared."""

    async def close_provider(self) -> None:
        """It is shared."""

    def _on_notice(self, notice: Notice) -> None:
        """Take a notice from another worker."""
        if notice.what in (TIMERS, ANY) and (own := self._agents.get(OWN)) is not None:
            own.cron_service.changed()
        if notice.what in (ENDED, ANY):
            for agent in self._agents.values():
                agent.subagents.look_again()
        if self._wake_set.add(notice):
            self._changed.set()

    async def run(self) -> None:
        """Do the work that is in the store and that comes in, until cancelled."""
        own = await self.agent(OWN)
        if self.runs and not self._drains:
            own.serve_cron()  # for all owners
        try:
            await self._peer.join()
            while True:
                self._changed.clear()  # before looking: what comes meanwhile sets it again
                try:
                    await self._look()
                except StoreError as error:  # a full or locked disk does not end a server
                    log.error("%s", error)
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self.changed)
                await asyncio.sleep(PAUSE_SECONDS)
                await self._changed.wait()
        finally:
            await self._peer.leave()

    async def _look(self) -> None:
        """Look into the store once for the agents of all owners."""
        found, self._wake_set = self._wake_set, WakeSet(everything=False)
        if self.runs and not self._drains and (found.everything or found.sessions):
            await self._take_up(None if found.everything else list(found.sessions))
        waits = {id: agent for agent in self._agents.values() for id in agent.waits()}
        over = {id for id in waits if id in found.rows or id in self._early}
        self._early.update(dict.fromkeys(found.rows - waits.keys()))
        while len(self._early) > EARLY:
            del self._early[next(iter(self._early))]
        if found.everything or found.ended:
            over = {*over, *await self.store.over(list(waits))}
        for id in over:
            await waits[id].settle([id])

    async def _take_up(self, sessions: Sequence[int] | None) -> None:
        ready, urgent = await self.store.look(self.worker, sessions)
        found: dict[str, tuple[list[tuple[str, str]], list[Incoming]]] = {}
        for place in ready:
            found.setdefault(place[0], ([], []))[0].append(place)
        for row in urgent:
            found.setdefault(row.message.owner, ([], []))[1].append(row)
        for owner in found.keys() - self._failed:
            try:
                await (await self.agent(owner)).look(*found[owner])
            except StoreError:
                raise
            except Exception as error:  # such as a folder that cannot be made: the other owners go on
                log.error("the agent of %s cannot work: %s", owner, error)
                self._failed.add(owner)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry, owner)

    def _retry(self, owner: str) -> None:
        self._failed.discard(owner)
        self.changed()

    def drain(self) -> None:
        """Take no more work from the store, and hand off turns that have no local waiter after their current step: only
        clients of this process are served to the end."""
        if self.runs and not self._drains:
            self._drains = True
            self._resting = asyncio.create_task(self._rest())
            for agent in self._agents.values():
                agent.drain()

    async def _rest(self) -> None:
        try:
            if (own := self._agents.get(OWN)) is not None:
                await own.cron_service.rest()
            await self._peer.drain()
            await self.store.wake(WORK)  # other processes do not know what was fired just now
        except StoreError as error:  # others find the work after a while
            log.warning("%s", error)

    async def leave(self, seconds: float) -> None:
        """Begin no more turns, and hand off those that run after their current step."""
        self.drain()
        self.runs = False
        if self._resting is not None:
            await self._resting
        await asyncio.gather(*(agent.leave(seconds) for agent in self._agents.values()))

    async def close(self) -> None:
        """Close all agents. Turns under way stay open on disk; the next start continues them."""
        for agent in self._agents.values():
            await agent.close()
        await asyncio.gather(*self._at_work.values(), return_exceptions=True)
        self._agents.clear()
        self._at_work.clear()
        retire(self.worker)
        try:
            await self.store.wake(WORK)  # turns that were released only now
        except StoreError as error:  # others find them when the lease has ended
            log.warning("%s", error)

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
            process=self,
        )


def _ended(run: asyncio.Task[None]) -> None:
    if not run.cancelled() and (error := run.exception()) is not None:
        log.error("%s: %s", run.get_name(), error)


def _for_others(config: Config, workspace: Path) -> Config:
    """The settings for an owner other than the machine's: restricted to the workspace, and without what the machine's
    owner has opened for their own agent, such as folders, keys, chats and hosts."""
    return dataclasses.replace(
        config,
        workspace=workspace,
        trusted=True,  # only the owner and the owner's agent write there
        restrict_to_workspace=True,
        sandbox="auto" if config.sandbox == "off" else config.sandbox,
        readable=(),
        writable=(),
        environment=(),
        private_hosts=(),
        message_to=(),
        mcp=(),
        channels=(),
        heartbeat_minutes=0.0,
    )


def _workspace(home: Path, owner: str) -> Path:
    folder = home / "owners" / owner / "workspace"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
