"""The agents of a process. They live in an `Owners`, and share its store, provider and worker id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import TYPE_CHECKING

import msgspec

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
EARLY = 5_000  # buffered notices of answers that were not yet awaited here; beyond that the oldest are dropped
PAUSE_SECONDS = 0.01  # minimum time between two scans of the store: a burst of wake-ups costs one
WRITE_SECONDS = 0.05  # delay before a session that is being written to is checked again


class WakeSet(msgspec.Struct):
    """Pending work, collected from notices, to look up in the store."""

    everything: bool = True
    sessions: set[int] = set()  # sessions with work
    ended: bool = False  # a turn has ended, but it is not known which
    rows: set[int] = set()  # inbox rows that were answered

    def add(self, notice: Notice) -> bool:
        """Add a notice. Return whether it requires a look into the store."""
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


class NoticeSubscription:
    """Subscribes to notices from other workers, and looks into the store when something there may have changed.

    `on_notice` is called with each notice; `look` with what to look up, one call at a time.
    """

    def __init__(
        self, store: Store, on_notice: Callable[[Notice], None], look: Callable[[WakeSet], Awaitable[None]]
    ) -> None:
        self.was_joined = False  # other processes may rely on this one; cleared by `Owners.rest`
        self._store = store
        self._on_notice = on_notice
        self._look = look
        self._peer: Peer | None = None
        self._joining = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._wake_set = WakeSet()

    @property
    def is_joined(self) -> bool:
        return self._peer is not None

    async def join(self, worker: str, takes_work: bool = False) -> None:
        """Subscribe as a worker, and look into the store at each notice."""
        async with self._joining:
            if self._peer is not None and takes_work:
                await self._peer.leave()
                self._peer = None
            if self._peer is None:
                peer = self._store.peer(worker, self._take, takes_work)
                await peer.join()
                self._peer, self.was_joined = peer, True
                self.changed()
            if self._looking is None or self._looking.done():
                self._changed = asyncio.Event()  # bound to this event loop; the first look needs no event
                self._looking = asyncio.create_task(self._keep_looking())

    async def leave(self) -> None:
        """Unsubscribe, and stop looking into the store."""
        async with self._joining:
            if self._looking is not None:
                looking, self._looking = self._looking, None
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            if self._peer is not None:
                peer, self._peer = self._peer, None
                await peer.leave()

    async def drain(self) -> None:
        """Get no more notices of work."""
        if self._peer is not None:
            await self._peer.drain()

    async def looking(self) -> None:
        """Wait until it looks no more."""
        if self._looking is not None:
            await self._looking

    def watch(self, worker: str) -> None:
        """Get a notice when another worker is done or dead, if subscribed."""
        if self._peer is not None:
            self._peer.watch(worker)

    def changed(self) -> None:
        """Look up everything."""
        self._wake_set.everything = True
        self._changed.set()

    def look_again(self) -> None:
        """Look up what has been announced."""
        self._changed.set()

    def _take(self, notice: Notice) -> None:
        self._on_notice(notice)
        if self._wake_set.add(notice):
            self._changed.set()

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()  # before looking, so that a notice that arrives meanwhile is not lost
            found, self._wake_set = self._wake_set, WakeSet(everything=False)
            try:
                await self._look(found)
            except StoreError as error:  # a full or locked disk must not stop a server
                log.error("%s", error)
                loop.call_later(RETRY_SECONDS, self.changed)
            looked_at = loop.time()
            await self._changed.wait()
            if (pause := looked_at + PAUSE_SECONDS - loop.time()) > 0:
                await asyncio.sleep(pause)


async def no_other(owners: Owners, owner: str) -> None:
    """Create no agent: the one that lives there serves every owner, or only its own."""


class Owners:
    """The agents in a process, by owner.

    A program's own agent lives in one alone. A server or worker holds the agents of all owners: `make` creates an
    owner's agent when there is work for it. They share the store and the provider, which are closed here, and lease
    sessions under one worker id. The store is scanned for all of them at once. Notices from other workers are
    subscribed to as soon as they can concern an agent. Without `runs`, all work is left to other processes.
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
        self._agents: dict[str | None, AgentLoop] = {}  # None is the key of the one that serves every owner
        self._failed: set[str] = set()  # owners whose agents are retried later
        self._tasks = BackgroundTasks()
        self._notices = NoticeSubscription(store, self._on_notice, self._look)
        self._serves = False  # takes all work in the store, and answers all commands there
        self._awaits_session = False  # also take work, after another process held a session that was wanted here
        self._drains = False
        self._resting: asyncio.Task[None] | None = None
        self._early: dict[int, None] = {}  # inbox rows that were answered and are not awaited here, or not yet

    # ------------------------------------------------------------------------------------------ agents

    def add(self, agent: AgentLoop) -> None:
        """Add an agent."""
        self._agents[agent.owner] = agent

    async def agent(self, owner: str) -> AgentLoop:
        """Return the owner's agent; LookupError if there is none and none can be created."""
        if (agent := await self._agent(owner)) is None:
            raise LookupError(f"no agent serves the owner {owner} here")
        return agent

    async def _agent(self, owner: str) -> AgentLoop | None:
        if (agent := self._living(owner)) is not None:
            return agent
        async with self._making:
            return self._living(owner) or await self._make(self, owner)

    def _living(self, owner: str) -> AgentLoop | None:
        return self._agents.get(owner) or self._agents.get(None)

    def changed(self) -> None:
        """Look into the store: something there may have changed."""
        self._notices.changed()

    # ------------------------------------------------------------------------------------------ for its agents

    def on_held(self, holder: str, awaited: bool) -> None:
        """Wait for another process that holds a session which is wanted here; its answers may be `awaited`.

        Subscribe to notices of its completion or death, and look again in case that has already happened; after a pause
        if only a write is in progress.
        """
        self._awaits_session = True
        if holder and self._notices.is_joined:
            self._notices.watch(holder)
            if awaited:
                self.changed()
        else:
            self._tasks.start(self._watch(holder))

    async def _watch(self, holder: str) -> None:
        await self._notices.join(self.worker)
        if holder:
            self._notices.watch(holder)
        else:
            await asyncio.sleep(WRITE_SECONDS)
        self.changed()

    def on_subagent(self) -> None:
        """Subscribe to notices because a sub-agent runs here: other processes may ask to stop it."""
        if not self._notices.is_joined:
            self._tasks.start(self._notices.join(self.worker))

    def on_awaited(self) -> None:
        """Look for an awaited answer of another process; its notice may have arrived before it was awaited."""
        self._notices.look_again()

    def on_fired(self, owner: str) -> None:
        """Handle the firing of an owner's job, which has put a message into the inbox."""
        self.changed()
        if not self._serves or self._living(owner) is None:
            self._tasks.start(self.store.wake(WORK))

    # ------------------------------------------------------------------------------------------ other workers

    async def _leave(self) -> None:
        """Unsubscribe from notices, and stop looking into the store."""
        await self._tasks.finish(1.0)  # a join may be in progress, for as long as the store is unreachable
        await self._notices.leave()

    def _on_notice(self, notice: Notice) -> None:
        """Handle a notice from another worker."""
        if notice.what in (TIMERS, ANY) and (own := self._living(OWN)) is not None:
            own.cron_service.changed()
        if notice.what in (ENDED, ANY):
            for agent in self._agents.values():
                agent.subagents.look_again()

    async def run(self) -> None:
        """Process the work in the store, current and future, until cancelled."""
        own = await self._agent(OWN)
        if own is not None and self.runs and not self._drains:
            own.serve_cron()  # for all owners
        self._serves = True
        try:
            await self._notices.join(self.worker, takes_work=self.runs)
            await self._notices.looking()
        finally:
            self._serves = False
            await self._leave()

    async def _look(self, found: WakeSet) -> None:
        """Look into the store once for all agents."""
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
            except Exception as error:  # a folder that cannot be created, say: other owners are not affected
                log.error("could not start the agent of owner %s: %s", owner, error)
                self._failed.add(owner)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry, owner)

    def _concerns_a_turn(self, row: Incoming) -> bool:
        """Return whether another process asks for something that concerns a turn running here, such as stopping it."""
        message = row.message
        agent = self._living(message.owner)
        where = (message.owner, message.session_key)
        return not message.reply and agent is not None and agent.dispatcher.is_running(*where)

    def _retry(self, owner: str) -> None:
        self._failed.discard(owner)
        self.changed()

    # ------------------------------------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no more work from the store, and hand off turns that have no local waiter after their current step.

        Only clients of this process are served to the end.
        """
        if self.runs and not self._drains:
            self._drains = True
            self._resting = asyncio.create_task(self._rest_cron())
            for agent in self._agents.values():
                agent.dispatcher.drain()

    async def _rest_cron(self) -> None:
        try:
            if (own := self._living(OWN)) is not None:
                await own.cron_service.rest()
            await self._notices.drain()
            await self.store.wake(WORK)  # other processes do not know what has just been fired
        except StoreError as error:  # other processes find the work after a while
            log.warning("%s", error)

    async def leave(self, seconds: float) -> None:
        """Start no more turns, and hand off running ones after their current step."""
        self.drain()
        self.runs = False
        if self._resting is not None:
            await self._resting
        await asyncio.gather(*(agent.dispatcher.leave(seconds) for agent in self._agents.values()))

    async def rest(self) -> None:
        """Stop all work, and close the store until it is used again. Open turns stay on disk for the next start."""
        await self._leave()
        for agent in self._agents.values():
            await agent.rest()
        await self._leave()  # one of them may have joined in the meantime
        retire(self.worker)
        self.worker = new_worker()  # releases whatever the old id still holds in the store
        if self._notices.was_joined:
            self._notices.was_joined = False
            try:
                await self.store.wake(WORK)  # turns that have only just been released
            except StoreError as error:  # other processes find them when the lease has expired
                log.warning("%s", error)
        await self.store.close()

    async def release(self) -> None:
        """Close everything except the provider, which may be in use elsewhere."""
        await self._leave()
        for agent in self._agents.values():
            await agent.end()
        await self.rest()
        retire(self.worker)

    async def close(self) -> None:
        """Close all agents, the store and the provider. Open turns stay on disk."""
        await self.release()
        # A custom provider may have no `close`, or one that is not async.
        if callable(close := getattr(self.provider, "close", None)) and isawaitable(closed := close()):
            await closed
