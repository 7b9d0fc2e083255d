"""Scheduled jobs: how they are stored as timers, and what happens when one is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..bus import CronOrigin, Deliver, InboundMessage
from ..store.base import Timer
from .schedules import At, Cron, Every, Schedule, check_expression, in_words, latest_until, moment, next_after
from .zones import zone

Missed = Literal["run", "drop"]
NEVER = 2.0**37  # due time of a paused job's timer
LATE_SECONDS = 60.0  # a one-shot job more overdue than this was missed: no service was running


class _StoredJob(msgspec.Struct, omit_defaults=True):
    """A job as stored in the data of its timer."""

    message: str
    channel: str
    chat_id: str
    first: float  # when it was first due
    at: int | None = None
    every: int | None = None
    anchor: int | None = None
    cron: str | None = None
    tz: str = ""
    session: str | None = None
    name: str = ""
    may_schedule: bool = False
    key: str = ""  # idempotency key of the call that added it
    deliver: Deliver = "answer"
    paused: float | None = None  # its next due time before it was paused; None unless it is paused
    by: str = ""  # the person of the chat who asked for it


@dataclass(slots=True, frozen=True)
class Job:
    """Scheduled work: a message that is sent later, to the chat in which it was requested."""

    owner: str
    id: str
    schedule: Schedule
    message: str
    channel: str
    chat_id: str
    next_due: float
    first_due: float
    session: str | None = None
    name: str = ""
    may_schedule: bool = False  # its turns may add jobs
    key: str = ""
    deliver: Deliver = "answer"
    paused: bool = False
    by: str = ""

    @property
    def session_key(self) -> str:
        return self.session or f"{self.channel}:{self.chat_id}"

    @property
    def last_fired(self) -> float | None:
        """The last slot that was fired. Missed slots before it were fired with it."""
        if self.next_due <= self.first_due:
            return None
        return latest_until(self.schedule, self.first_due, self.next_due - 1)

    @property
    def tz(self) -> str:
        return "" if isinstance(self.schedule, Every) else self.schedule.tz

    @property
    def words(self) -> str:
        """The schedule, for a person."""
        return in_words(self.schedule)

    @property
    def next_words(self) -> str:
        """The next due time, in the job's own time zone."""
        return "hold: it is paused" if self.paused else moment(self.next_due, self.tz)

    @property
    def _note(self) -> str:
        """The note to the model that comes with the message, since no person has just written it."""
        who = "the agent, in a turn of this session" if self.key else "the command line or a program"
        name = f" “{self.name}”" if self.name else ""
        return (
            f"This is scheduled work: the job {self.id}{name}, {self.words}, added by {who}. Nobody is there to "
            "answer questions; your answer goes to the chat."
        )

    def firing(self, slot: float | str) -> InboundMessage:
        """Return the message that opens the turn; its id is the same in every service that fires this slot."""
        return InboundMessage(
            self.channel,
            "cron",
            self.chat_id,
            self.message,
            cause=CronOrigin(self.id, self.may_schedule, self._note, self.deliver),
            id=f"cron:{self.id}:{slot if isinstance(slot, str) else int(slot)}",
            owner=self.owner,
            session=self.session_key,
            attended=False,
        )


@dataclass(slots=True, frozen=True)
class Fire:
    """Send one message for all slots that have passed, and wait for the next; `next_due` is None if there is none."""

    message: InboundMessage
    next_due: float | None


@dataclass(slots=True, frozen=True)
class Drop:
    """Remove a one-shot job that was missed."""


def decide(timer: Timer, now: float, missed: Missed) -> Fire | Drop:
    """Decide what to do with a job that is due. Raises the errors of `job_of`."""
    job = job_of(timer)
    if isinstance(job.schedule, At) and missed == "drop" and now - timer.due_at > LATE_SECONDS:
        return Drop()
    slot = latest_until(job.schedule, timer.due_at, now)
    return Fire(job.firing(slot), next_after(job.schedule, now))


def job_of(timer: Timer) -> Job:
    """Return the job of a timer. Raises a ValueError or a BadSchedule if its data is damaged."""
    kept = msgspec.convert(timer.data, _StoredJob)
    schedule: Schedule
    if kept.at is not None:
        schedule = At(kept.at, kept.tz)
    elif kept.every is not None and kept.every > 0 and kept.anchor is not None:
        schedule = Every(kept.every, kept.anchor)
    elif kept.cron is not None:
        schedule = Cron(kept.cron, kept.tz)
    else:
        raise ValueError("it has no schedule")
    if isinstance(schedule, Cron):
        check_expression(schedule.expression)
    zone(kept.tz)
    return Job(
        timer.owner,
        timer.id,
        schedule,
        kept.message,
        kept.channel,
        kept.chat_id,
        timer.due_at if kept.paused is None else kept.paused,
        kept.first,
        kept.session,
        kept.name,
        kept.may_schedule,
        kept.key,
        kept.deliver,
        kept.paused is not None,
        kept.by,
    )


def timer_of(job: Job) -> Timer:
    kept = _StoredJob(
        job.message,
        job.channel,
        job.chat_id,
        job.first_due,
        tz=job.tz,
        session=job.session,
        name=job.name,
        may_schedule=job.may_schedule,
        key=job.key,
        deliver=job.deliver,
        paused=job.next_due if job.paused else None,
        by=job.by,
    )
    match job.schedule:
        case At(at):
            kept.at = at
        case Every(seconds, anchor):
            kept.every, kept.anchor = seconds, anchor
        case Cron(expression):
            kept.cron = expression
    data: dict[str, Any] = msgspec.to_builtins(kept)
    return Timer(job.owner, job.id, NEVER if job.paused else job.next_due, data)
