"""What an agent does about the other workers of its store: react to their notices, and stop turns that they run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from ..bus import InboundMessage, StopRequest
from ..store.base import Incoming, SessionInfo, Store
from ..store.peers import ANY, ENDED, WORK, Notice, Peer

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from .dispatcher import Dispatcher
    from .subagents import SubagentManager

WRITE_SECONDS = 0.05  # until a session that is being written to is looked at again
PATIENCE = 10.0  # seconds to wait for the answer to a stop request


class House(Protocol):
    """The process that an agent shares with those of other owners. It gets the notices for all of them."""

    worker: str  # the name that all of them hold sessions under
    runs: bool  # whether turns are run in it at all
    meters: Meters | None  # counts its work, where metrics are read

    def changed(self) -> None:
        """There may be something new in the store."""
        ...

    def awaits(self) -> None:
        """An answer of another process is awaited; its notice may have come before that was known here."""
        ...

    def watch(self, worker: str) -> None:
        """Get a notice when this worker's process ends."""
        ...


class PeerListener:
    """Subscribes an agent to notices from other workers, unless the house does that for it."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        subagents: SubagentManager,
        answer: Callable[[Incoming], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        house: House | None,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._subagents = subagents
        self._answer = answer
        self._spawn = spawn
        self._house = house
        self._peer: Peer | None = None
        self._scans = False  # it waits for a session that another process has

    async def join(self, on_notice: Callable[[Notice], None], takes_work: bool = False) -> None:
        """Get notices from the other workers of this store."""
        if self._peer is None:
            self._peer = self._store.peer(self._dispatcher.worker, on_notice, takes_work)
            try:
                await self._peer.join()
            except BaseException:  # the store is away: the next caller tries again
                self._peer = None
                raise
        on_notice(Notice())

    async def leave(self) -> None:
        if self._peer is not None:
            peer, self._peer = self._peer, None
            await peer.leave()

    def held(self, worker: str, awaited: bool) -> None:
        """Another process has a session that is wanted here, and its answers may be `awaited`. Get a notice when it is
        done or dies, and look again in case it is already; after a pause if only a write is under way."""
        if self._house is None:
            self._spawn(self._join_for(worker))
        elif worker:
            self._house.watch(worker)
            if awaited:
                self._house.changed()
        else:
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self._house.changed)

    def listen(self) -> None:
        """A sub-agent runs here: other processes may ask to stop it."""
        if self._peer is None and self._house is None:
            self._spawn(self.join(self._look_soon))

    async def _join_for(self, worker: str) -> None:
        self._scans = True
        await self.join(self._look_soon)
        if not worker:
            await asyncio.sleep(WRITE_SECONDS)
        elif self._peer is not None:
            self._peer.watch(worker)
        self._look_soon()

    def _look_soon(self, notice: Notice = Notice()) -> None:  # noqa: B008
        if notice.what in (ANY, ENDED, WORK):
            self._spawn(self._look())

    async def _look(self) -> None:
        """Without a durable bus: see what other processes have done that concerns this one."""
        for row in await self._store.urgent(self._dispatcher.worker):
            session = self._dispatcher.session(row.message.owner, row.message.session_key)
            if session is not None and session.running and not row.message.reply:
                await self._answer(row)
        self._subagents.look_again()
        if self._scans:
            await self._dispatcher.scan()


# ---------------------------------------------------------------------------------------------- stopping their turns


class Sessions(Protocol):
    """Runs sessions in this process."""

    @property
    def worker(self) -> str: ...

    @property
    def runs(self) -> bool: ...

    def kick(self, owner: str, key: str) -> None: ...

    def stop_turn(self, owner: str, key: str, reason: Any, text: str) -> bool: ...

    def wait_for(self, row: int, message: InboundMessage) -> asyncio.Future[str]: ...


async def runs_elsewhere(store: Store, sessions: Sessions, info: SessionInfo | None) -> bool:
    """Whether another process runs the session's turn, and so must stop it."""
    if info is None or info.open_turn is None:
        return False
    if not sessions.runs:
        return True
    return info.worker is not None and info.worker != sessions.worker and await store.is_alive(info.worker)


async def stop_elsewhere(
    store: Store,
    sessions: Sessions,
    owner: str,
    key: str,
    meant: str | int | None = None,
    wait: bool = True,
    chat_told: bool = False,
) -> None:
    """Ask the process that runs the session's turn to stop it, and wait a while for its answer. With `meant`, a turn id
    or the inbox row that opens the turn, no other turn is stopped."""
    # Not from the session's own channel: it would count as one of its messages.
    word = InboundMessage("system", "agent", key, "/stop", owner=owner, session=key, reply=False)
    word.cause = StopRequest(meant, chat_told)
    word.id = f"stop:{key}:{secrets.token_hex(4)}"
    row = await store.accept(word, "urgent")
    if not wait:
        await store.wake(WORK, [row.session])
        return
    answer = sessions.wait_for(row.id, word)
    await store.wake(WORK, [row.session])
    await asyncio.wait([answer], timeout=PATIENCE)
    if not answer.done():
        answer.cancel()
