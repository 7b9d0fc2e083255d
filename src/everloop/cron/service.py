"""CronService: jobs stored as timers, and a service that fires each slot once."""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ..bus import HEARTBEAT, Deliver, InboundMessage
from ..errors import EverloopError, StoreError
from ..store.base import Store, Timer
from ..store.peers import TIMERS, WORK
from ..text import clean
from ..threads import in_thread
from .jobs import Drop, Job, Missed, decide, job_of, timer_of
from .schedules import At, Schedule, next_after, parse_schedule

log = logging.getLogger(__name__)

POLL_SECONDS = 30.0  # maximum time between two reads of the store: another process may have added a job
BATCH_SIZE = 500  # timers read per query
MAX_JOBS = 100  # per owner
MAX_MESSAGE = 4_000  # characters

Fired = Callable[[str, str], None]
Beat = Callable[[Timer, float], Awaitable[tuple[InboundMessage | None, float | None]]]


class CronService:
    """Adds, lists and removes jobs, and fires them while `serve` runs.

    Any number of services may serve one store: each slot is fired by exactly one of them. `missed` decides what happens
    to a one-shot job that was due while no service was running.
    """

    def __init__(
        self, store: Store, *, owner: str = "me", missed: Missed = "run", clock: Callable[[], float] = time.time
    ) -> None:
        if missed not in ("run", "drop"):
            raise ValueError(f'missed must be "run" or "drop", not {missed!r}')
        self.store = store
        self.owner = owner
        self.missed: Missed = missed
        self.clock = clock
        self._beat: Beat | None = None
        self._changed = asyncio.Event()
        self._adding = asyncio.Lock()
        self._firing = asyncio.Lock()
        self._rests = False
        self._fired: Fired | None = None
        self._damaged: set[tuple[str, str]] = set()  # damaged jobs already logged

    # ------------------------------------------------------------------------------------------ jobs

    def set_heartbeat(self, beat: Beat | None) -> None:
        """Call `beat` when the heartbeat's timer is due; it returns the next due time. None disables the heartbeat."""
        self._beat = beat
        self.changed()

    async def add(
        self,
        message: str,
        *,
        at: str | None = None,
        every: str | float | None = None,
        cron: str | None = None,
        tz: str | None = None,
        channel: str,
        chat_id: str,
        session: str | None = None,
        name: str = "",
        may_schedule: bool = False,
        owner: str | None = None,
        key: str = "",
        by: str = "",
        shortest: int = 1,
        deliver: Deliver = "answer",
    ) -> Job:
        """Add a job; raise an `EverloopError` that explains what is wrong with it.

        With `deliver="text"` it is a reminder: its message is sent verbatim, without a model call. `key` is an
        idempotency key: repeating the call adds no second job. `by` is the person of the chat who asked for it.
        """
        owner = owner or self.owner
        message = clean(message).strip()
        if not message:
            raise EverloopError("the message is empty: write what should be done then")
        if len(message) > MAX_MESSAGE:
            raise EverloopError(
                f"the message has {len(message)} characters, at most {MAX_MESSAGE} are allowed: shorten it"
            )
        async with self._adding:
            there = {timer.id: timer for timer in await self.store.timers(owner)}
            id, made = _free_id(there, owner, key)
            if made is not None:
                return await in_thread(job_of, made)
            if key and (come := await self._was_fired(owner, session or f"{channel}:{chat_id}", id, tz)) is not None:
                return come
            if sum(id != HEARTBEAT for id in there) >= MAX_JOBS:
                raise EverloopError(f"there are {MAX_JOBS} jobs, the maximum: remove one first")
            now = self.clock()
            schedule, due = await in_thread(_read, now, at=at, every=every, cron=cron, tz=tz, shortest=shortest)
            where = (clean(channel), clean(chat_id), due, due, session and clean(session))
            job = Job(owner, id, schedule, message, *where, clean(name), may_schedule, key, deliver, by=clean(by))
            await self.store.set_timer(timer_of(job))
        self.changed()
        if self._fired is None:  # another process fires it
            await self.store.wake(TIMERS)
        return job

    async def list(self, owner: str | None = None) -> builtins.list[Job]:
        """Return the jobs of an owner in the order in which they are due. Damaged ones are skipped and logged."""
        timers = [one for one in await self.store.timers(owner or self.owner) if one.id != HEARTBEAT]
        found = await in_thread(lambda: [_or_error(job_of, timer) for timer in timers])
        for timer, job in zip(timers, found, strict=True):
            if not isinstance(job, Job):
                self._report(timer, job)
        return [job for job in found if isinstance(job, Job)]

    async def remove(self, id: str, owner: str | None = None) -> bool:
        """Remove a job, even a damaged one. Return False if there is none."""
        return id != HEARTBEAT and await self.store.cancel_timer(owner or self.owner, id)

    async def run(self, id: str, owner: str | None = None) -> bool:
        """Fire a job now, in addition to its schedule. Return False if there is none."""
        for job in await self.list(owner):
            if job.id == id:
                row = await self.store.accept(job.firing(f"run-{os.urandom(6).hex()}"))
                self._tell(job.owner, job.session_key)
                await self.store.wake(WORK, [row.session])  # another worker may run it
                return True
        return False

    async def pause(self, id: str, owner: str | None = None) -> bool:
        """Pause a job until `resume`. Return False if there is none."""
        return await self._replace(id, owner, lambda job: replace(job, paused=True))

    async def resume(self, id: str, owner: str | None = None) -> bool:
        """Resume a paused job at its next due time.

        Return False if there is none; raise an `EverloopError` if its only due time has passed.
        """

        def resumed(job: Job) -> Job:
            due = next_after(job.schedule, self.clock())
            if due is None:
                raise EverloopError("its time passed while it was paused: run it now, or remove it")
            return replace(job, paused=False, next_due=due) if job.paused else job

        return await self._replace(id, owner, resumed)

    async def _replace(self, id: str, owner: str | None, change: Callable[[Job], Job]) -> bool:
        for job in await self.list(owner):
            if job.id == id:
                await self.store.set_timer(timer_of(await in_thread(change, job)))
                self.changed()
                await self.store.wake(TIMERS)
                return True
        return False

    def changed(self) -> None:
        """Read the jobs again, because one was added, perhaps by another process."""
        self._changed.set()

    async def _was_fired(self, owner: str, session: str, id: str, tz: str | None) -> Job | None:
        """Return a one-shot job that was fired before the call that added it had its result.

        Its timer is gone, but its message still waits behind the open turn of that call. Without this check, a call
        that is repeated after a crash would add the job a second time.
        """
        for row in await self.store.waiting(owner, session):
            slot = str(row.message.id).removeprefix(f"cron:{id}:")
            if row.message.cron is not None and row.message.cron.job == id and slot.isdecimal():
                message, due = row.message, float(slot)
                where = (message.channel, message.chat_id, due, due, message.session)
                return Job(owner, id, At(int(slot), tz or ""), message.content, *where)
        return None

    # ------------------------------------------------------------------------------------------ firing

    async def serve(self, fired: Fired) -> None:
        """Fire due jobs until cancelled. `fired` is called with the owner and the session of each message."""
        self._fired = fired
        try:
            while True:
                self._changed.clear()  # before reading, so that a change that comes meanwhile is not lost
                try:
                    async with self._firing:
                        due = await self.fire_due() if not self._rests else None
                except (StoreError, ValueError) as error:  # a full, locked or damaged disk must not end the service
                    log.error("%s", error)
                    due = None
                await self._sleep(due)
        finally:
            self._fired = None

    async def rest(self) -> None:
        """Stop firing while `serve` keeps running. Returns once in-flight firings are done."""
        self._rests = True
        async with self._firing:
            return

    async def fire_due(self) -> float | None:
        """Fire every job that is due. Return when the next one is due; None if there is none."""
        now = self.clock()
        due: builtins.list[Timer] = []
        later: builtins.list[float] = []
        timers = await self.store.timers(limit=BATCH_SIZE)
        more = len(timers) == BATCH_SIZE
        for timer in timers:
            if timer.due_at > now:
                later.append(timer.due_at)
                more = False
                break  # they are sorted
            if timer.id != HEARTBEAT or (self._beat is not None and timer.owner == self.owner):
                due.append(timer)
        if due:
            later += await self._fire_all(due, now)
            later += [now] if more else []  # more of them are due
        return min(later, default=None)

    async def _fire_all(self, due: builtins.list[Timer], now: float) -> builtins.list[float]:
        """Fire these concurrently, in one commit. Return their next due times."""
        jobs = [timer for timer in due if timer.id != HEARTBEAT]
        decided = await in_thread(lambda: [_or_error(decide, timer, now, self.missed) for timer in jobs])
        work = [self._fire(timer, what) for timer, what in zip(jobs, decided, strict=True)]
        work += [self._fire_heartbeat(timer, now) for timer in due if timer.id == HEARTBEAT]
        found = await asyncio.gather(*work, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        return [next_due for next_due in found if isinstance(next_due, float | int)]

    async def _fire(self, timer: Timer, what: Any) -> float | None:
        if isinstance(what, Exception):
            self._report(timer, what)
            return None
        if isinstance(what, Drop):
            if await self.store.cancel_timer(timer.owner, timer.id):
                log.warning(
                    "removed the job %s, which missed its time: it was due at %s", timer.id, time.ctime(timer.due_at)
                )
            return None
        if await self.store.fire_timer(timer, what.message, what.next_due):
            self._tell(timer.owner, what.message.session_key)
        due: float | None = what.next_due
        return due

    async def _fire_heartbeat(self, timer: Timer, now: float) -> float | None:
        assert self._beat is not None
        message, next_due = await self._beat(timer, now)
        if message is not None:
            self._tell(timer.owner, message.session_key)
        return next_due

    def _tell(self, owner: str, session_key: str) -> None:
        if self._fired is not None:
            self._fired(owner, session_key)

    async def _sleep(self, due: float | None) -> None:
        seconds = POLL_SECONDS if due is None else min(POLL_SECONDS, max(0.0, due - self.clock()))
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _report(self, timer: Timer, error: Exception) -> None:
        if (timer.owner, timer.id) not in self._damaged:
            self._damaged.add((timer.owner, timer.id))
            log.error("the job %s is damaged (%s): remove it with `everloop cron remove %s`", timer.id, error, timer.id)


def _read(now: float, **given: Any) -> tuple[Schedule, float]:
    schedule = parse_schedule(now=now, **given)
    due = next_after(schedule, now)
    assert due is not None  # parse_schedule rejects schedules that are never due
    return schedule, due


def _or_error(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or its exception if a job's data is damaged."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def _free_id(there: dict[str, Timer], owner: str, key: str) -> tuple[str, Timer | None]:
    """Return an id for a new job, and the existing timer if this same call has already added the job."""
    number = 0
    while True:
        seed = f"{owner}\n{key}\n{number}".encode() if key else os.urandom(16)
        id = hashlib.sha256(seed).hexdigest()[:8]
        if id not in there:
            return id, None
        if key and there[id].data.get("key") == key:
            return id, there[id]
        number += 1
