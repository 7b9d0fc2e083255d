"""The agents of a process: each lives in an `Owners`, with a store, a provider and a worker's name that they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import StoreError
from ..providers.base import LLMProvider
from ..store.base import Incoming, Store
from ..store.peers import ANY, ENDED, TIMERS, WORK, Notice, Peer, new_worker, retire
from ..threads import BackgroundTasks
from .dispatcher import RETRY_SECONDS

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from .agent import AgentLoop

log = logging.getLogger(__name__)
OWN = "me"  # the owner of the machine
EARLY = 5_000  # notices of answers that were not awaited here yet; of more the oldest are forgotten
PAUSE_SECONDS = 0.01  # between two looks into the store: many wake-ups at once cost one
WRITE_SECONDS = 0.05  # until a session that is being written to is looked at again


@dataclass(slots=True)
class WakeSet:
    """What notices have said to look for in the store."""

    everything: bool = True
    sessions: set[int] = field(default_factory=set)  # with work
    ended: bool = False  # a turn has ended, and it is not known which
    rows: set[int] = field(default_factory=set)  # inbox rows that were answered

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


async def no_other(owners: Owners, owner: str) -> None:
    """Make no agent: the one that lives there works for every owner, or for its own only."""


class Owners:
    """The agents that live in a process, by their owners.

    A program's own agent lives in one alone. A server or a worker has the agents of all owners: `make` creates an
    owner's agent when there is work for it. They share the store and the provider, which are closed here, and hold
    sessions under one worker name. The store is read for all of them at once. Other workers' notices are subscribed to
    as soon as they can concern an agent. Without `runs`, all work is left to other processes.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        provider: LLMProvider,
        make: Callable[[Owners, str], Awaitable[AgentLoop | None]],
        *,
        runs: bool = True,
        meters: Meters | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.provider = provider
        self.worker = new_worker()
        self.runs = runs
        self.meters = meters
        self._make = make
        self._making = asyncio.Lock()
        self._agents: dict[str | None, AgentLoop] = {}  # under None the one that works for every owner
        self._failed: set[str] = set()  # owners whose agents are tried again later
        self._tasks = BackgroundTasks()
        self._peer: Peer | None = None
        self._joining = asyncio.Lock()
        self._has_joined = False  # since the last rest: other processes may count on this one
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._wake_set = WakeSet()
        self._serves = False  # takes all work in the store, and answers all commands there
        self._awaits_session = False  # takes work as well, once another process had a session that was wanted here
        self._drains = False
        self._resting: asyncio.Task[None] | None = None
        self._early: dict[int, None] = {}  # inbox rows that were answered and are not awaited here, or not yet

    # ------------------------------------------------------------------------------------------ agents

    def add(self, agent: AgentLoop) -> None:
        """The agent lives here from now on."""
        self._agents[agent.owner] = agent

    async def agent(self, owner: str) -> AgentLoop:
        """The owner's agent; LookupError if there is none and none can be made."""
        if (agent := await self._agent(owner)) is None:
            raise LookupError(f"no agent works for {owner} here")
        return agent

    async def _agent(self, owner: str) -> AgentLoop | None:
        if (agent := self._living(owner)) is not None:
            return agent
        async with self._making:
            return self._living(owner) or await self._make(self, owner)

    def _living(self, owner: str) -> AgentLoop | None:
        return self._agents.get(owner) or self._agents.get(None)

    def changed(self) -> None:
        """There may be something new in the store."""
        self._wake_set.everything = True
        self._changed.set()

    # ------------------------------------------------------------------------------------------ for its agents

    def on_held(self, holder: str, awaited: bool) -> None:
        """Another process holds a session that is wanted here, and its answers may be `awaited`. Get a notice when it
        is done or dies, and look again in case it is already; after a pause if only a write is under way."""
        self._awaits_session = True
        if holder and self._peer is not None:
            self._peer.watch(holder)
            if awaited:
                self.changed()
        else:
            self._tasks.start(self._watch(holder))

    async def _watch(self, holder: str) -> None:
        await self._join()
        if not holder:
            await asyncio.sleep(WRITE_SECONDS)
        elif self._peer is not None:
            self._peer.watch(holder)
        self.changed()

    def on_subagent(self) -> None:
        """A sub-agent runs here: other processes may ask to stop it."""
        if self._peer is None:
            self._tasks.start(self._join())

    def on_awaited(self) -> None:
        """An answer of another process is awaited; its notice may have come before that was known here."""
        self._changed.set()

    def on_fired(self, owner: str) -> None:
        """A job of an owner has put a message into the inbox."""
        self.changed()
        if not self._serves or self._living(owner) is None:
            self._tasks.start(self.store.wake(WORK))

    # ------------------------------------------------------------------------------------------ other workers

    async def _join(self, takes_work: bool = False) -> None:
        """Subscribe to other workers' notices, and look into the store at each."""
        async with self._joining:
            if self._peer is not None and takes_work:
                await self._peer.leave()
                self._peer = None
            if self._peer is None:
                peer = self.store.peer(self.worker, self._on_notice, takes_work)
                await peer.join()
                self._peer, self._has_joined = peer, True
                self.changed()
            if self._looking is None or self._looking.done():
                self._changed = asyncio.Event()  # of this event loop; the first look needs no event
                self._looking = asyncio.create_task(self._keep_looking())

    async def _leave(self) -> None:
        """Get no more notices, and look into the store no more."""
        await self._tasks.finish(1.0)  # one may be joining, for as long as the store is away
        async with self._joining:
            if self._looking is not None:
                looking, self._looking = self._looking, None
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            if self._peer is not None:
                peer, self._peer = self._peer, None
                await peer.leave()

    def _on_notice(self, notice: Notice) -> None:
        """Take a notice from another worker."""
        if notice.what in (TIMERS, ANY) and (own := self._living(OWN)) is not None:
            own.cron_service.changed()
        if notice.what in (ENDED, ANY):
            for agent in self._agents.values():
                agent.subagents.look_again()
        if self._wake_set.add(notice):
            self._changed.set()

    async def run(self) -> None:
        """Do the work that is in the store and that comes in, until cancelled."""
        own = await self._agent(OWN)
        if own is not None and self.runs and not self._drains:
            own.serve_cron()  # for all owners
        self._serves = True
        try:
            await self._join(takes_work=self.runs)
            if self._looking is not None:
                await self._looking
        finally:
            self._serves = False
            await self._leave()

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()  # before looking: what comes meanwhile sets it again
            try:
                await self._look()
            except StoreError as error:  # a full or locked disk does not end a server
                log.error("%s", error)
                loop.call_later(RETRY_SECONDS, self.changed)
            looked_at = loop.time()
            await self._changed.wait()
            if (pause := looked_at + PAUSE_SECONDS - loop.time()) > 0:
                await asyncio.sleep(pause)

    async def _look(self) -> None:
        """Look into the store once for all agents."""
        found, self._wake_set = self._wake_set, WakeSet(everything=False)
        if self.runs and not self._drains and (found.everything or found.sessions):
            await self._take_up(None if found.everything else list(found.sessions))
        waits = {id: agent for agent in self._agents.values() for id in agent.dispatcher.awaited_elsewhere()}
        over = {id for id in waits if id in found.rows or id in self._early}
        self._early.update(dict.fromkeys(found.rows - waits.keys()))
        while len(self._early) > EARLY:
            del self._early[next(iter(self._early))]
        if found.everything or found.ended:
            over = {*over, *await self.store.over(list(waits))}
        for id in over:
            await waits[id].dispatcher.settle([id])
        if found.everything:
            for agent in list(self._agents.values()):
                await agent.dispatcher.stop_abandoned()

    async def _take_up(self, sessions: Sequence[int] | None) -> None:
        ready, urgent = await self.store.look(self.worker, sessions)
        found: dict[str, tuple[list[tuple[str, str]], list[Incoming]]] = {}
        for place in ready if self._serves or self._awaits_session else ():
            found.setdefault(place[0], ([], []))[0].append(place)
        for row in urgent:
            if self._serves or self._concerns_a_turn(row):
                found.setdefault(row.message.owner, ([], []))[1].append(row)
        for owner in found.keys() - self._failed:
            try:
                if (agent := await self._agent(owner)) is not None:
                    await agent.look(*found[owner])
            except StoreError:
                raise
            except Exception as error:  # such as a folder that cannot be made: the other owners go on
                log.error("the agent of %s cannot work: %s", owner, error)
                self._failed.add(owner)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry, owner)

    def _concerns_a_turn(self, row: Incoming) -> bool:
        """Whether another process asks for something about a turn that runs here, such as to stop it."""
        message = row.message
        agent = self._living(message.owner)
        where = (message.owner, message.session_key)
        return not message.reply and agent is not None and agent.dispatcher.is_running(*where)

    def _retry(self, owner: str) -> None:
        self._failed.discard(owner)
        self.changed()

    # ------------------------------------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no more work from the store, and hand off turns that have no local waiter after their current step: only
        clients of this process are served to the end."""
        if self.runs and not self._drains:
            self._drains = True
            self._resting = asyncio.create_task(self._rest_cron())
            for agent in self._agents.values():
                agent.dispatcher.drain()

    async def _rest_cron(self) -> None:
        try:
            if (own := self._living(OWN)) is not None:
                await own.cron_service.rest()
            if self._peer is not None:
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
        await asyncio.gather(*(agent.dispatcher.leave(seconds) for agent in self._agents.values()))

    async def rest(self) -> None:
        """Stop all work, and close the store until it is used again. Turns under way stay open on disk; the next start
        continues them."""
        await self._leave()
        for agent in self._agents.values():
            await agent.rest()
        await self._leave()  # one of them may have joined only now
        retire(self.worker)
        self.worker = new_worker()  # what the old one still holds in the store is free
        if self._has_joined:
            self._has_joined = False
            try:
                await self.store.wake(WORK)  # turns that were released only now
            except StoreError as error:  # others find them when the lease has ended
                log.warning("%s", error)
        await self.store.close()

    async def release(self) -> None:
        """Close everything but the provider, which may be in use elsewhere."""
        await self._leave()
        for agent in self._agents.values():
            await agent.end()
        await self.rest()
        retire(self.worker)

    async def close(self) -> None:
        """Close all agents, the store and the provider. Turns under way stay open on disk."""
        await self.release()
        if (close := getattr(self.provider, "close", None)) is not None:  # a provider of the user's own may have none
            await close()
