"""Runs a case: a fresh workspace and store, one turn of the real loop, and the judge."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop import AgentLoop, MessageBus
from everloop.config import Config
from everloop.log import CallEnded, Logged, ModelAnswered, Noted, TurnEnded
from everloop.providers.base import LLMProvider
from everloop.threads import in_thread

from .cases import Case
from .judge import Job, Made, Run, Verdict, World, judge
from .watched import watched

OWNER = "me"
MAX_FILE = 1_000_000  # bytes of a file that are looked at
MAX_FILES = 2_000


@dataclass(slots=True)
class Desk:
    """A place to work at. Its path is the same from case to case and from run to run, so that the prompt is."""

    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    def lay_out(self, files: dict[str, str]) -> None:
        """A workspace with these files and nothing else, and no memory of cases before."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.workspace.mkdir(parents=True, mode=0o700)
        for path, text in files.items():
            place = self.workspace / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8", newline="")


@dataclass(slots=True)
class Outcome:
    """What came of a case, for the results' file."""

    case: str
    category: str
    stamp: str
    right: bool
    end: bool
    problems: tuple[str, ...]
    answer: str
    reason: str
    calls: list[dict[str, Any]]
    rounds: int
    seconds: float
    usage: dict[str, int] = field(default_factory=dict)


async def run_case(case: Case, provider: LLMProvider, config: Config, desk: Desk, limit: float = 120.0) -> Outcome:
    """Take a case to its end, or until `limit` seconds are over."""
    await in_thread(desk.lay_out, case.files)
    own = dataclasses.replace(
        config,
        home=desk.folder / "home",
        workspace=desk.workspace,
        store=desk.folder / "store.db",
        restrict_to_workspace=True,
    )
    worlds: dict[int, World] = {}

    async def observe(results: int) -> None:
        if results not in worlds:
            worlds[results] = await look_at(agent, desk.workspace)

    agent = agent_of(own, watched(provider, observe))
    async with closing(agent):
        await _prepare(agent, case)
        before = await look_at(agent, desk.workspace)
        started, clock = time.time(), time.monotonic()
        answer, reason = await _turn(agent, case, limit)
        seconds = time.monotonic() - clock
        logged = await _logged(agent, case)
        after = await look_at(agent, desk.workspace)
    ends = [one.entry for one in logged if isinstance(one.entry, TurnEnded)]
    run = Run(
        workspace=str(desk.workspace),
        before=before,
        calls=_calls(logged, worlds, after),
        after=after,
        answer=answer,
        reason=ends[-1].reason if ends else reason,
        started=started,
        seconds=seconds,
    )
    return _outcome(case, run, logged, await in_thread(judge, case, run))


def agent_of(config: Config, provider: LLMProvider) -> AgentLoop:
    return AgentLoop(
        MessageBus(),
        provider,
        config.workspace,
        model=config.model or None,
        max_iterations=config.max_iterations,
        restrict_to_workspace=True,
        config=config,
        store=config.store,
    )


@contextlib.asynccontextmanager
async def closing(agent: AgentLoop) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await agent.close()
        await agent.store.close()


async def _prepare(agent: AgentLoop, case: Case) -> None:
    """Give it the past that the case tells of."""
    for number, (said, answered) in enumerate(case.past, start=1):
        notes = [Noted({"role": "user", "content": said}), Noted({"role": "assistant", "content": answered})]
        await agent.store.note(OWNER, f"cli:past-{number}", notes)
    for job in case.scheduled:
        await agent.cron_service.add(job["message"], at=job["at"], channel="cli", chat_id="direct")


async def _turn(agent: AgentLoop, case: Case, limit: float) -> tuple[str, str]:
    """(answer, why it ended). A turn that takes too long is stopped like one that a person stops."""
    turn = asyncio.create_task(
        agent.process_direct(case.request, _key(case), "cli", "direct", on_event=lambda event: None)
    )
    done, _ = await asyncio.wait([turn], timeout=limit)
    if not done:
        await agent.process_direct("/stop", _key(case), "cli", "direct")
        with contextlib.suppress(Exception):
            await asyncio.wait_for(turn, 30)
        return "", "timeout"
    if (error := turn.exception()) is not None:
        return str(error), "error"
    return turn.result(), "answer"


def _key(case: Case) -> str:
    return f"evaluation:{case.name}"


async def _logged(agent: AgentLoop, case: Case) -> list[Logged]:
    session = await agent.store.session(OWNER, _key(case))
    return await agent.store.read_log(session.id) if session is not None else []


def _calls(logged: list[Logged], worlds: dict[int, World], after: World) -> tuple[Made, ...]:
    """The calls in their order, each with the world as the model's next question found it."""
    ends = {one.entry.id: one.entry for one in logged if isinstance(one.entry, CallEnded)}
    made: list[Made] = []
    for one in logged:
        if isinstance(one.entry, ModelAnswered) and one.entry.calls:
            world = worlds.get(len(made) + len(one.entry.calls), after)
            for call in one.entry.calls:
                ok = call.id in ends and ends[call.id].status == "ok"
                made.append(Made(call.name, call.arguments, ok, world))
    return tuple(made)


async def look_at(agent: AgentLoop, workspace: Path) -> World:
    jobs = [Job(job.message, job.schedule) for job in await agent.cron_service.list(OWNER)]
    files, folders = await in_thread(_look, workspace)
    return World(files, folders, tuple(jobs))


def _look(workspace: Path) -> tuple[dict[str, str], frozenset[str]]:
    """The workspace's files with their texts, and its folders. Links are not followed."""
    files: dict[str, str] = {}
    folders: set[str] = set()
    for place, names, found in os.walk(workspace):
        folders.update(os.path.relpath(os.path.join(place, name), workspace) for name in names)
        for name in found[: MAX_FILES - len(files)]:
            path = Path(place, name)
            key = os.path.relpath(path, workspace)
            if path.is_symlink() or not path.is_file():
                files[key] = "(no file)"
                continue
            with path.open("rb") as file:
                files[key] = file.read(MAX_FILE).decode("utf-8", "replace")
    return files, frozenset(folders)


def _outcome(case: Case, run: Run, logged: list[Logged], verdict: Verdict) -> Outcome:
    answers = [one.entry for one in logged if isinstance(one.entry, ModelAnswered)]
    usage: dict[str, int] = {}
    for answer in answers:
        for name, count in answer.usage.items():
            usage[name] = usage.get(name, 0) + count
    return Outcome(
        case=case.name,
        category=case.category,
        stamp=case.stamp,
        right=verdict.right,
        end=verdict.end,
        problems=verdict.problems,
        answer=run.answer,
        reason=run.reason,
        calls=[{"tool": made.tool, "arguments": dict(made.arguments), "ok": made.ok} for made in run.calls],
        rounds=len(answers),
        seconds=round(run.seconds, 3),
        usage=usage,
    )
