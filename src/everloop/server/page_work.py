"""Unattended work for the page: scheduled jobs and sub-agents."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from aiohttp import web

from ..bus import EXECUTOR
from ..cron.jobs import Job
from ..cron.schedules import At, next_after
from ..log import TurnEnded, UserSaid
from ..runtime.owners import Owners
from ..store.base import SessionInfo
from ..text import clean
from ..threads import in_thread
from .errors import conflict, not_found
from .guard import OWNER
from .page_routes import json_response, operation, read_body, refusals
from .page_sessions import State

NEXT_RUNS = 3
LOOKED_THROUGH = 20  # turns of a job's session that are searched for its last one
SHOWN = 500  # characters of a result
SESSIONS = 300  # the latest sessions, which are searched for sub-agents
SUB = "sub:"
RUN = f"{EXECUTOR}:"


class JobResult(msgspec.Struct):
    turn: str
    at: float
    reason: str | None  # None while the turn runs
    text: str


class JobItem(msgspec.Struct):
    id: str
    name: str
    message: str
    schedule: str  # in words
    session: str
    paused: bool
    deliver: str
    next_runs: list[float]  # empty while it is paused
    last: JobResult | None


class JobList(msgspec.Struct):
    jobs: list[JobItem]


class JobBody(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["pause", "resume", "run", "remove"]


class JobDone(msgspec.Struct):
    done: bool


class AgentItem(msgspec.Struct):
    """A sub-agent, or a program's run of an agent definition.

    The parent of a sub-agent is the session that started it, which may be another sub-agent.
    """

    key: str
    parent: str
    label: str
    task: str
    state: State
    started_at: float
    updated_at: float
    definition: str  # the name of the agent definition whose goal it works on; "" for a task without one


class AgentList(msgspec.Struct):
    agents: list[AgentItem]


class WorkApi:
    """Scheduled jobs and sub-agents of an owner."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._store = owners.store

    @operation("GET", "/api/jobs", "jobs", "The scheduled jobs, the next one first.", JobList)
    async def jobs(self, request: web.Request) -> web.Response:
        owner = request[OWNER]
        agent = await self._owners.agent(owner)
        found = await agent.cron_service.list(owner)
        return json_response(JobList([await self._job(owner, job) for job in found]))

    @operation("POST", "/api/jobs/{id}", "job", "Pause, resume, run or remove a job.", JobDone, JobBody)
    async def job(self, request: web.Request) -> web.Response:
        body, owner, id = await read_body(request, JobBody), request[OWNER], request.match_info["id"]
        service = (await self._owners.agent(owner)).cron_service
        acts = {"pause": service.pause, "resume": service.resume, "run": service.run, "remove": service.remove}
        with refusals(conflict):
            done = await acts[body.action](id, owner)
        if not done:
            raise not_found("there is no such job", code="job_not_found")
        self._owners.changed()
        return json_response(JobDone(True))

    async def _job(self, owner: str, job: Job) -> JobItem:
        runs = [] if job.paused else await in_thread(_next_runs, job)
        last = await self._last(owner, job)
        return JobItem(job.id, job.name, job.message, job.words, job.session_key, job.paused, job.deliver, runs, last)

    async def _last(self, owner: str, job: Job) -> JobResult | None:
        """Return how the job's latest turn ended."""
        info = await self._store.session(owner, job.session_key)
        if info is None:
            return None
        for turn in await self._store.turns(owner, session=info.id, limit=LOOKED_THROUGH):
            opening = await self._store.read_log(info.id, turn.first_seq - 1, turn.first_seq)
            said = opening[0].entry if opening else None
            if isinstance(said, UserSaid) and said.job == job.id:
                entries = await self._store.read_turn(info.id, turn.first_seq)
                text = next((one.entry.text for one in entries if isinstance(one.entry, TurnEnded)), "")
                return JobResult(turn.id, turn.ended_at or turn.started_at, turn.reason, clean(text)[:SHOWN])
        return None

    @operation("GET", "/api/agents", "agents", "The latest sub-agents and runs of agent definitions.", AgentList)
    async def agents(self, request: web.Request) -> web.Response:
        owner = request[OWNER]
        found = [info for info in await self._store.sessions(owner, SESSIONS) if info.key.startswith((SUB, RUN))]
        return json_response(AgentList([await self._agent(owner, info) for info in found]))

    async def _agent(self, owner: str, info: SessionInfo) -> AgentItem:
        id = info.key.removeprefix(SUB) if info.key.startswith(SUB) else info.key.rpartition("/")[2]
        began = await self._store.find(owner, f"spawn:{id}")
        task = began.message.task if began is not None else None
        text = began.message.content if began is not None else ""
        state: State = "running" if info.open_turn is not None else "idle"
        if state == "idle" and info.entries:
            last = await self._store.read_log(info.id, info.entries - 1)
            ended = last[-1].entry if last else None
            if isinstance(ended, TurnEnded) and ended.reason != "answer":
                state = "failed"
        elif state == "idle":
            state = "waiting"  # its task has not been taken yet
        label = task.label if task is not None else info.key
        parent = task.parent if task is not None else ""
        definition = str((task.definition or {}).get("name", "")) if task is not None else ""
        times = info.created_at, info.updated_at
        return AgentItem(info.key, parent, label, clean(text)[:SHOWN], state, *times, definition)


def _next_runs(job: Job) -> list[float]:
    """Return the next few due times of the job. May read time zones from disk: call it in a thread."""
    runs = [job.next_due]
    while len(runs) < NEXT_RUNS and not isinstance(job.schedule, At):
        due = next_after(job.schedule, max(runs[-1], time.time()))
        if due is None:
            break
        runs.append(due)
    return runs
