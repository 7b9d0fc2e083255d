"""What an agent does about the other workers of its store: react to their notices, and stop turns that they run."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..bus import InboundMessage, StopRequest
from ..errors import StoreError
from ..providers.base import LLMProvider
from ..store.base import SessionInfo, Store
from ..store.peers import ANY, ENDED, WORK, Notice, Peer
from .tasks import BackgroundTasks

if TYPE_CHECKING:
    from ..observability.metrics import Meters

log = logging.getLogger(__name__)
RETRY_SECONDS = 15.0  # until a store that failed is looked into again
WRITE_SECONDS = 0.05  # until a session that is being written to is looked at again
PATIENCE = 10.0  # seconds to wait for the answer to a stop request


class Process(Protocol):
    """The process that an agent runs in: alone, or with the agents of other owners."""

    @property
    def worker(self) -> str | None:
        """The name that its agents hold sessions under; None: each has its own."""
        ...

    @property
    def runs(self) -> bool:
        """Whether turns run in it."""
        ...

    @property
    def meters(self) -> Meters | None:
        """Count its work, where metrics are read."""
        ...

    @property
    def fires_cron(self) -> bool:
        """Whether an agent fires scheduled work as soon as it runs."""
        ...

    async def feed(self, worker: str, look: Callable[[], Awaitable[None]]) -> None:
        """Let the agent look into the store whenever something may have changed, until cancelled."""
        ...

    def on_held(self, worker: str, holder: str, awaited: bool) -> None:
        """Another process holds a session that is wanted here, and its answers may be `awaited`. Get a notice when it
        is done or dies, and look again in case it is already; after a pause if only a write is under way."""
        ...

    def on_subagent(self, worker: str) -> None:
        """A sub-agent runs here: other processes may ask to stop it."""
        ...

    def on_awaited(self) -> None:
        """An answer of another process is awaited; its notice may have come before that was known here."""
        ...

    def on_fired(self) -> None:
        """A job of another owner has put a message into the inbox."""
        ...

    async def unsubscribe(self) -> None:
        """Get no more notices for the agent."""
        ...

    async def close_store(self) -> None: ...

    async def close_provider(self) -> None: ...


class OwnProcess:
    """An agent that runs alone: it has its store and its provider for itself, and subscribes to notices when it must.

    `look` takes what other processes have done that concerns this one, and with True also new work.
    """

    worker: str | None = None
    runs = True
    meters: Meters | None = None
    fires_cron = True

    def __init__(
        self,
        store: Store,
        provider: LLMProvider,
        tasks: BackgroundTasks,
        look: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._store = store
        self._provider = provider
        self._tasks = tasks
        self._look = look
        self._peer: Peer | None = None
        self._scans = False  # it waits for a session that another process has

    async def feed(self, worker: str, look: Callable[[], Awaitable[None]]) -> None:
        changed = asyncio.Event()
        await self._join(worker, lambda _: changed.set(), takes_work=True)
        while True:
            changed.clear()  # before looking: what comes in meanwhile sets it again
            try:
                await look()
            except StoreError as error:  # a full or locked disk does not end a worker
                log.error("%s", error)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, changed.set)
            await changed.wait()

    def on_held(self, worker: str, holder: str, awaited: bool) -> None:
        self._tasks.start(self._join_for(worker, holder))

    def on_subagent(self, worker: str) -> None:
        if self._peer is None:
            self._tasks.start(self._join(worker, self._look_soon))

    def on_awaited(self) -> None:
        """Notices come to the dispatcher of the agent itself."""

    def on_fired(self) -> None:
        self._tasks.start(self._store.wake(WORK))

    async def unsubscribe(self) -> None:
        if self._peer is not None:
            peer, self._peer = self._peer, None
            await peer.leave()

    async def close_store(self) -> None:
        await self._store.close()

    async def close_provider(self) -> None:
        if (close := getattr(self._provider, "close", None)) is not None:  # a provider of the user's own may have none
            await close()

    async def _join(self, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False) -> None:
        if self._peer is None:
            self._peer = self._store.peer(worker, on_notice, takes_work)
            try:
                await self._peer.join()
            except BaseException:  # the store is away: the next caller tries again
                self._peer = None
                raise
        on_notice(Notice())

    async def _join_for(self, worker: str, holder: str) -> None:
        self._scans = True
        await self._join(worker, self._look_soon)
        if not holder:
            await asyncio.sleep(WRITE_SECONDS)
        elif self._peer is not None:
            self._peer.watch(holder)
        self._look_soon()

    def _look_soon(self, notice: Notice = Notice()) -> None:  # noqa: B008
        if notice.what in (ANY, ENDED, WORK):
            self._tasks.start(self._look_again())

    async def _look_again(self) -> None:
        await self._look(self._scans)


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

    def follow(self, row: int, message: InboundMessage) -> asyncio.Future[str]: ...


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
