"""Gives each session's next turn to this process: in order within a session, side by side across sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from .. import events
from ..bus import InboundMessage, Kind
from ..commands import command_of
from ..errors import EverloopError, StaleLease, StoreError
from ..log import Reason
from ..store.base import Busy, Claim, Incoming, Store, Waiting
from ..store.workers import new_worker, retire
from .session import VIA, Item, Live
from .waiters import Stopped, Waiters, fail, tell

log = logging.getLogger(__name__)

RETRY_SECONDS = 15.0  # until a turn that the store refused to write is tried again
REPLACED = "(replaced by a newer message)"
SAID_INSTEAD = "The person wrote something else instead of allowing it."
WAITS = "I am still waiting for your answer: y, n or a (always). Your message is kept and comes right after."


Run = Callable[[Claim, Live], Awaitable[str]]


class Leaves(EverloopError):
    """The turn is left to another process, with all of it on disk."""


class Dispatcher:
    """One task for each session with work to do.

    `run` takes a claim to its end, sets `live.again` when the session has more to do, and returns the answer;
    `system` reads the system prompt for it. `worker` is the name that sessions are held under, by default one of its
    own. Where it does not run turns (`runs`), what is handed in is for other processes.
    """

    def __init__(
        self,
        store: Store,
        run: Run,
        system: Callable[[], str],
        *,
        busy: str = "queue",
        at_once: int = 1000,
        owner: str | None = None,
        worker: str | None = None,
        runs: bool = True,
    ) -> None:
        self.worker = worker or new_worker()
        self.busy = busy
        self.runs = runs
        self._own_name = worker is None
        self._owner = owner  # whose sessions are taken up, None for anybody's
        self.on_held: Callable[[str, bool], None] | None = None  # told who holds a session that we wanted or wait for
        self.on_stranger: Callable[[int], None] | None = None  # told of a row that was answered and nobody here awaits
        self.on_left: Callable[[int | None], None] | None = None  # told of a session with work for other processes
        # Has a turn stopped that another process has begun: owner, key, and which one is meant.
        self.on_unstopped: Callable[[str, str, str | int | None], Awaitable[None]] | None = None
        self.on_waiting: Callable[[InboundMessage], None] | None = None  # told of a message behind a parked turn
        self._store = store
        self._run = run
        self._system = system
        self._slots = asyncio.Semaphore(at_once)
        self._live: dict[tuple[str, str], Live] = {}
        self._waiters = Waiters(store)
        self._taking: dict[asyncio.Future[None], Item] = {}  # on their way to disk, behind a running turn
        self._later: set[asyncio.TimerHandle] = set()
        self._leaving: set[asyncio.Task[None]] = set()  # of sessions that have nothing more to do here
        self._stopping = False

    # ------------------------------------------------------------------------------------------ taking work

    async def submit(
        self,
        message: InboundMessage,
        kind: Kind = "message",
        emit: events.Emit | None = None,
        on_elsewhere: Callable[[int], None] | None = None,
    ) -> asyncio.Future[str]:
        """Hand in a message; the future is its turn's answer, wherever that runs.

        The message of an idle session goes to disk in the same write as the start of its turn; behind a running
        turn it is on disk when this returns. `emit` is told what happens in the turn if it is begun here for this
        message; if not, because another process has the session or because the message was known, `on_elsewhere` is
        told its row of the inbox, and `emit` nothing.
        """
        item = Item(message, kind, asyncio.get_running_loop().create_future(), emit, on_elsewhere)
        if not self.runs:
            await self._hand_over(item)
            return item.answer
        live = self._live.get((message.owner, message.session_key))
        if live is not None and live.running and not live.fresh:  # what came before it goes to disk before it
            taking = asyncio.ensure_future(self._take(live, item))
            self._taking[taking] = item
            taking.add_done_callback(self._taking.pop)
            try:
                await asyncio.shield(taking)  # once it is on disk, somebody must know of it
            except asyncio.CancelledError:
                item.answer.cancel()
                raise
        else:
            live = live or self._start(message.owner, message.session_key)
            live.fresh.append(item)
        return item.answer

    def follow(self, row: int, message: InboundMessage, emit: events.Emit | None = None) -> asyncio.Future[str]:
        """Go on with the turn that this row of the inbox opened; the future is its answer."""
        item = Item(message, "message", asyncio.get_running_loop().create_future(), emit)
        self._waiters.add(row, item)
        self.kick(message.owner, message.session_key)
        return item.answer

    def wait_for(self, row: int, message: InboundMessage) -> asyncio.Future[str]:
        """The answer to a row of the inbox that another process gives."""
        item = Item(message, "urgent", asyncio.get_running_loop().create_future())
        self._waiters.add(row, item)
        return item.answer

    def kick(self, owner: str, key: str) -> None:
        """There may be something in this session's inbox."""
        if not self.runs:
            self._left(None)
            return
        live = self._live.get((owner, key))
        if live is None:
            self._start(owner, key)
        else:
            live.again = True

    async def scan(self) -> None:
        """Take up all that waits in the store: new messages, and turns that a dead worker left behind."""
        await self.take_up(await self._store.ready(self.worker, self._owner))
        await self.settle(await self._store.over(self.waits()))

    async def take_up(self, sessions: Sequence[tuple[str, str]]) -> None:
        """There is something in the inbox of these sessions."""
        for owner, key in sessions:
            if self.busy != "queue" and (live := self._live.get((owner, key))) is not None and live.running:
                await self._notice(live)
            self.kick(owner, key)

    def awaits(self, claim: Claim) -> bool:
        """Whether somebody here waits for the answer of this turn."""
        return bool(self._waiters.of(claim.inbox))

    def waits(self) -> list[int]:
        """The rows of the inbox whose answers somebody here waits for, and other processes give."""
        return self._waiters.outside(self._live)

    async def settle(self, rows: Iterable[int]) -> None:
        """These rows of the inbox are done: whoever waits for their answers here is told them."""
        for id in rows:
            await self._waiters.settle(id)

    def live(self, owner: str, key: str) -> Live | None:
        return self._live.get((owner, key))

    def stop_turn(
        self,
        owner: str,
        key: str,
        reason: Reason,
        text: str,
        meant: str | int | None = None,
        *,
        chat_told: bool = False,
    ) -> bool:
        """Stop the turn that runs in a session or is about to, if it is the one that is `meant`: by its id, or by the
        inbox row that opens it. False when there is none."""
        live = self._live.get((owner, key))
        if live is None:
            return False
        live.stop(reason, text, meant)
        live.chat_told |= chat_told
        return True

    def withdraw(self, owner: str, key: str, message: str, text: str) -> None:
        """Stop the turn of this message and of no other, now or when it begins, unless somebody still waits for it."""
        live = self._live.get((owner, key))
        coming = [*live.fresh, *([live.item] if live.item else [])] if live is not None else []
        everybody = chain(coming, self._taking.values(), self._waiters)
        items = [item for item in everybody if item.message.id == message and item.message.owner == owner]
        if any(not item.answer.done() for item in items):  # the client has asked for it once more
            return
        for item in items:
            item.withdrawn = text
        if live is not None and live.message == message:
            live.stop("cancelled", text)

    # ------------------------------------------------------------------------------------------ shutting down

    def drain(self, inside: str) -> None:
        """Leave each turn that nobody here waits for to other processes once its step is on disk; but sessions whose
        keys begin with `inside`, which turns that stay may wait for."""
        for live in self._live.values():
            awaited = live.fresh or self._waiters.in_session(live.owner, live.key)
            coming = live.item is not None and not live.item.answer.done()
            if not awaited and not coming and not live.key.startswith(inside):
                live.leave()

    async def leave(self, seconds: float) -> None:
        """Begin no more turns, and leave each that runs to other processes once its step is on disk; those whose step
        takes longer than this go on until `stop`."""
        self.runs = False
        for live in self._live.values():
            live.leave()
        if tasks := [live.task for live in self._live.values() if live.task is not None]:
            await asyncio.wait(tasks, timeout=seconds)

    async def stop(self) -> None:
        """Cancel everything that runs. Open turns stay open, and what was handed in is kept: the next start goes on
        with them."""
        self._stopping = True
        for handle in self._later:
            handle.cancel()
        self._later.clear()
        lives = list(self._live.values())
        tasks = [*(live.task for live in lives if live.task is not None), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.clear()  # a task that had not begun could not leave by itself
        for item in [item for live in lives for item in live.fresh]:
            await self._keep(item)
        await asyncio.gather(*self._taking, return_exceptions=True)
        if tasks:
            await self._give_back(self._store.release_all(self.worker, self._owner))
        fail([live.item for live in lives if live.item is not None], Stopped())
        self._waiters.fail_all(Stopped())
        self._stopping = False

    def retire(self) -> None:
        if self._own_name:
            retire(self.worker)

    def renew(self) -> None:
        """Go on under a new name, if it is our own: whatever the old one still holds in the store is free."""
        if self._own_name:
            retire(self.worker)
            self.worker = new_worker()

    # ------------------------------------------------------------------------------------------ one session

    def _start(self, owner: str, key: str) -> Live:
        live = Live(owner, key)
        self._live[owner, key] = live
        live.task = asyncio.create_task(self._drain(live), name=f"session {key}")
        return live

    async def _drain(self, live: Live) -> None:
        """Run the session's turns one after another until its inbox is empty."""
        try:
            async with self._slots:
                while await self._one(live):
                    pass
        except Exception as error:  # a fault of ours: whoever waits must hear of it
            log.exception("session %s failed", live.key)
            waiting = self._waiters.in_session(live.owner, live.key)
            for id, _ in waiting:
                self._waiters.take(id)
            fail([*([live.item] if live.item else []), *live.fresh, *(item for _, item in waiting)], error)
        finally:
            self._live.pop((live.owner, live.key), None)
        await self._leave(live)

    async def _leave(self, live: Live) -> None:
        """Look for answers that other processes gave while the session was at work here: nobody has looked so far."""
        left = [id for id, _ in self._waiters.in_session(live.owner, live.key)]
        if not left or live.task is None:
            return
        self._leaving.add(live.task)
        try:
            await self.settle(left)
        except StoreError as error:  # they are looked for again with the next wake-up
            log.warning("%s", error)
        finally:
            self._leaving.discard(live.task)

    async def _one(self, live: Live) -> bool:
        """Run the next turn, if there is one. False when the session has nothing more to do here."""
        if not self.runs:
            while live.fresh:
                live.item = live.fresh.popleft()
                await self._hand_over(live.item)
            return False
        item = live.item = live.fresh.popleft() if live.fresh else None
        live.again = False
        live.system = self._store.aside(self._system)  # read while the turn is begun: one wake-up for both
        try:
            claim = await self._begin(live, item)
        except Busy as busy:
            if item is not None and busy.accepted is not None:
                self._waiters.add(busy.accepted, item)
            awaited = self._waiters.in_session(live.owner, live.key)
            for id, waiter in awaited:
                waiter.is_elsewhere(id)
            if self.on_held is not None:
                self.on_held(busy.worker, bool(awaited))
            stopped, live.stopped = live.stopped, None
            if stopped is not None and stopped[0] == "cancelled" and self.on_unstopped is not None:
                await self.on_unstopped(live.owner, live.key, live.meant)
            return bool(live.fresh) or live.again  # it may have become free since
        except Waiting as waiting:
            if item is not None and waiting.accepted is not None:
                await self._behind_question(live, item, waiting.accepted)
            if live.stopped is not None and await self._store.decide(live.owner, live.key, None) is not None:
                live.again = True  # what was to be stopped is the turn that waits
            return bool(live.fresh) or live.again  # the answer to the question may have come just now
        except Exception as error:  # whatever it is, whoever waits must hear of it
            fail([item] if item else [], error)
            if isinstance(error, StoreError):  # others may wait in the inbox
                self._retry_later(live)
            return bool(live.fresh)
        if claim is None:
            if item is not None:  # its id was known: it has been answered before
                row = await self._store.accept(item.message, item.kind)
                self._waiters.add(row.id, item)
                item.is_elsewhere(row.id)
                await self._waiters.settle(row.id)
            return bool(live.fresh) or live.again
        live.begins()
        try:
            while live.fresh:
                live.item = live.fresh.popleft()
                await self._take(live, live.item)
            return await self._work(live, claim)
        finally:
            live.ends()

    async def _behind_question(self, live: Live, item: Item, row: int) -> None:
        """A message, on disk by now, for a session whose turn waits for a person's word: it waits too, and the person
        is reminded; or it is that word, a no, and is handed to the turn; or it ends the turn, as a command does."""
        ends = item.kind == "command" and command_of(item.message.content) == "new"
        if not ends and (self.busy == "queue" or item.kind == "command"):
            tell([item], WAITS)
            if self.on_waiting is not None:
                self.on_waiting(item.message)
            return
        self._waiters.add(row, item)
        live.again = True
        if self.busy == "steer" and item.kind == "message":
            await self._store.decide(live.owner, live.key, False, item.message.sender_id, SAID_INSTEAD)
            self._place(live, Incoming(row, 0, item.message, item.kind))
        elif await self._store.decide(live.owner, live.key, None) is not None:
            live.stopped = ("replaced", REPLACED)

    async def _begin(self, live: Live, item: Item | None) -> Claim | None:
        if item is None:
            return await self._store.begin(live.owner, live.key, self.worker)
        claim = await self._store.begin(live.owner, live.key, self.worker, item.message, item.kind)
        if claim is not None and claim.accepted is not None:
            self._waiters.add(claim.accepted, item)
            if claim.resumed and claim.accepted in claim.inbox:  # the same message once more: its turn was cut off
                item.is_elsewhere(claim.accepted)
        return claim

    async def _work(self, live: Live, claim: Claim) -> bool:
        waiting = self._waiters.of(claim.inbox)
        live.emit += [item.emit for item in waiting if item.emit is not None]
        for id in claim.inbox:
            live.behind.pop(id, None)
        live.message, live.rows = claim.message.id, claim.inbox
        if live.meant not in (None, claim.turn, *claim.inbox):  # the one that was to be stopped is over
            live.stopped = live.meant = None
            live.chat_told = False
        if self.busy == "interrupt" and "message" in live.behind.values():
            live.stop("replaced", REPLACED)
        if waiting and (why := waiting[0].withdrawn) and all(item.withdrawn for item in waiting):
            live.stop("cancelled", why)
        try:
            answer = await self._run(claim, live)
        except (StaleLease, Leaves) as error:  # whoever has it now answers, or takes it up
            for id, item in self._waiters.in_session(live.owner, live.key):
                item.is_elsewhere(id)
            if isinstance(error, Leaves):
                await self._give_back(self._store.release(claim))
                self._left(claim.session)
                return bool(live.fresh)
            log.warning("%s", error)
            return bool(live.fresh) or live.again  # what came in since may be unknown to whoever took it over
        except StoreError as error:
            fail([item for id in claim.inbox for item in self._waiters.take(id)], error)
            await self._give_back(self._store.release(claim))
            self._retry_later(live)
            return bool(live.fresh)
        # A client may ask for the answer to its message at more than one server.
        repeated = claim.message.request is not None and claim.message.request.kept
        for id in claim.inbox:
            items = self._waiters.take(id)
            if (repeated or not items) and not claim.message.reply and self.on_stranger is not None:
                self.on_stranger(id)
            tell(items, answer)
        return bool(live.fresh) or live.again

    async def _hand_over(self, item: Item) -> None:
        """Put a message into the inbox, for a turn that another process runs."""
        message = item.message
        if message.request is not None and not message.request.kept:  # of no use once this process is gone
            message = replace(message, metadata={**message.metadata, VIA: self.worker})
        try:
            row = await self._store.accept(message, item.kind)
        except Exception as error:  # whatever it is, whoever waits must hear of it
            fail([item], error)
            return
        self._waiters.add(row.id, item)
        item.is_elsewhere(row.id)
        if row.done:
            await self._waiters.settle(row.id)
        else:
            self._left(row.session)

    def _left(self, session: int | None) -> None:
        if self.on_left is not None:
            self.on_left(session)

    async def _take(self, live: Live, item: Item) -> None:
        """A message for a session whose turn is running: to disk first, then queue, steer or interrupt."""
        try:
            row = await self._store.accept(item.message, item.kind)
        except Exception as error:  # whatever it is, whoever waits must hear of it
            fail([item], error)
            return
        known = row.turn is not None or row.id in self._waiters  # the same message once more
        self._waiters.add(row.id, item)
        if known or row.done:
            item.is_elsewhere(row.id)
        live.again = True
        if row.done:
            await self._waiters.settle(row.id)
        elif not live.running:  # the turn ended meanwhile
            live.behind[row.id] = item.kind
            self.kick(live.owner, live.key)
        elif known:
            return
        else:
            self._place(live, row)

    async def _notice(self, live: Live) -> None:
        """Messages that another process put into the inbox of a session whose turn runs here."""
        changes, rows = -1, []
        while live.running and changes != live.changes:  # another turn may have taken what was read before it began
            changes = live.changes
            rows = await self._store.waiting(live.owner, live.key)
        for row in rows:
            if live.running and row.id not in self._waiters:
                self._place(live, row)

    def _place(self, live: Live, row: Incoming) -> None:
        """What a message does to the turn that runs: it steers it, replaces it, or waits behind it."""
        if live.knows(row.id):  # it was read, and perhaps taken, while it was being read once more
            return
        plain = row.kind == "message" and row.message.plain and row.message.request is None
        if self.busy == "steer" and plain and not live.behind:
            live.steer.append((row.id, row.message.said()))
            return
        live.behind[row.id] = row.kind
        if self.busy == "interrupt" and row.kind == "message":
            live.stop("replaced", REPLACED)

    # ------------------------------------------------------------------------------------------ what goes wrong

    async def _keep(self, item: Item) -> None:
        """Put a message on disk that no turn was begun for; the next start takes it up. Of a request that is all there
        is nothing is kept: its client hears of the failure, and nobody would wait for the answer."""
        request = item.message.request
        if request is not None and not request.kept:
            fail([item], Stopped())
            return
        try:
            await self._store.accept(item.message, item.kind)
            fail([item], Stopped())
        except Exception as error:  # whatever it is, whoever waits must hear of it
            fail([item], error)

    async def _give_back(self, release: Awaitable[None]) -> None:
        try:
            await release
        except StoreError as error:  # the lease ends with this process
            log.warning("%s", error)

    def _retry_later(self, live: Live) -> None:
        if self._stopping:
            return
        loop = asyncio.get_running_loop()

        def again() -> None:
            self._later.discard(handle)
            self.kick(live.owner, live.key)

        handle = loop.call_later(RETRY_SECONDS, again)
        self._later.add(handle)
