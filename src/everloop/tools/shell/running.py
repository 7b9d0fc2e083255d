"""Start commands in the sandbox, and keep track of those in the background."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...sandbox.confinement import Confinement, Limits, confinement
from ...sandbox.launch import Backend, Launch, Mode, NoSandbox, choose_backend, prepare
from ...sandbox.paths import within_any
from ...text import clean
from ...threads import in_thread
from ..base import Output, ToolError
from ..context import CallContext, current_call
from ..trust import UNKNOWN, any_exists, changed_files, may_hold_tainted
from .captures import Fresh
from .processes import Process
from .quiet import reads_nothing
from .workspace_checks import Ticket, WorkspaceChecks


@dataclass(slots=True, frozen=True)
class ShellSettings:
    """Settings of shell commands. With `confine` None, commands are confined where the workspace is restricted."""

    timeout: float = 60.0  # seconds, unless a call sets it
    max_timeout: float = 600.0
    mode: Mode = "auto"
    confine: bool | None = None
    readable: tuple[str, ...] = ()  # paths that are visible in addition to system paths
    writable: tuple[str, ...] = ()  # paths that are writable in addition to the workspace
    environment: tuple[str, ...] = ()  # names of environment variables to pass on in addition to the usual ones
    memory_mb: int = 4096
    processes: int = 512
    file_mb: int = 4096  # of a single file
    output_limit: int = 30_000  # characters of a result
    saved_limit: int = 16 * 1024 * 1024  # bytes of a long output that are saved for read_file
    session_background: int = 8  # concurrent background commands
    total_background: int = 32
    records: Path | None = None  # where running commands are recorded, for recovery after a kill


@dataclass(slots=True)
class Job:
    """A background command."""

    id: str
    command: str
    context: CallContext
    keep: bool
    network: bool
    process: Process
    fresh: Fresh
    ticket: Ticket | None = None  # None: not confined, so nothing is checked afterwards
    began: float = field(default_factory=time.monotonic)
    started: int = field(default_factory=time.time_ns)
    watch: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        code = self.process.returncode
        if self.process.over_memory:
            return f"stopped for using too much memory: {self.process.over_memory}"
        return f"running for {time.monotonic() - self.began:.0f} s" if code is None else ended(code)


class Prepared(NamedTuple):
    """A command that is ready to start, and the ticket of its workspace check."""

    launch: Launch
    ticket: Ticket | None


T = TypeVar("T")


class Shell:
    """State shared by the two tools: the settings, the sandbox backend and the background commands."""

    def __init__(self, settings: ShellSettings) -> None:
        self.settings = settings
        self.background: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._backend: Backend | NoSandbox | None = None
        self._choosing = asyncio.Lock()
        self._cleaning: set[asyncio.Future[Any]] = set()
        self._checks = WorkspaceChecks(settings.records)

    def confined(self, context: CallContext) -> bool:
        if self.settings.mode == "off":
            return False
        return context.restricted if self.settings.confine is None else self.settings.confine

    async def launch(self, command: str, working_dir: str, network: bool) -> Prepared:
        """Prepare a command. Raises ToolError if it cannot be confined as required."""
        context = current_call()
        backend = await self._chosen() if self.confined(context) else "off"
        preparing = asyncio.ensure_future(in_thread(self._prepare, backend, context, command, working_dir, network))
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:  # it holds open files and will not be started
            preparing.add_done_callback(self._let_go)
            raise
        except NoSandbox as error:
            raise ToolError(str(error)) from None
        except OSError as error:
            raise ToolError(f"The command could not be started: {error}.") from None

    def _let_go(self, prepared: asyncio.Future[Prepared]) -> None:
        if prepared.cancelled() or prepared.exception() is not None:
            return
        launch, ticket = prepared.result()
        launch.close()
        self._detached(in_thread(launch.clean_up))
        self._detached(self._end_ticket(ticket))

    def _detached(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work to its end even if the waiting call is cancelled."""
        task = asyncio.ensure_future(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return task

    async def finish(self, process: Process, ticket: Ticket | None, grace: float | None = None) -> list[str]:
        """End a command and check its workspace, even if cancelled; returns notes for the model."""
        return await asyncio.shield(self._detached(self._finish(process, ticket, grace)))

    async def _finish(self, process: Process, ticket: Ticket | None, grace: float | None) -> list[str]:
        await process.end(grace)
        return await self._end_ticket(ticket)

    async def _end_ticket(self, ticket: Ticket | None) -> list[str]:
        return await in_thread(self._checks.end, ticket) if ticket is not None else []

    async def taint(self, job: Job) -> None:
        """Mark a background command as acting on untrusted content, if the current call is tainted."""
        if job.ticket is not None and _is_tainted(current_call()):
            await in_thread(self._checks.taint, job.ticket)

    async def end_turn(self, turn: str) -> None:
        """End the background commands of a turn, and check the workspaces of those that keep running."""
        jobs = [job for job in self.background.values() if job.context.turn == turn]
        await self.end([job for job in jobs if not job.keep])
        for job in jobs:
            if job.keep and job.ticket is not None:
                self._tell(job, await in_thread(self._checks.check, job.ticket))

    async def counted(self, output: Output, command: str, network: bool) -> Output:
        """What a command said, with what is known of where that came from: it may be anything that it has read."""
        context = current_call()
        if network:
            return replace(output, untrusted=True)
        if context.taint is True and not await in_thread(reads_nothing, command):
            return replace(output, contents=(UNKNOWN,))
        if context.taint == "outside" and await in_thread(any_exists, await may_hold_tainted(context)):
            return replace(output, untrusted=True)
        return output

    async def mark_changed(self, context: CallContext, since: int, untrusted: bool = False) -> None:
        """Mark the files that a command has changed after untrusted text was read, or read some itself.

        Where every unknown file is untrusted there is nothing to be marked.
        """
        if context.taint != "outside" or context.marks is None or not (context.tainted or untrusted):
            return
        if marks := await in_thread(changed_files, os.fspath(context.workspace), since):
            await context.marks.add(context.owner, marks)

    async def _chosen(self) -> Backend:
        async with self._choosing:
            if self._backend is None:
                chosen: Backend | NoSandbox = await in_thread(_choose, self.settings.mode)
                self._backend = chosen
            backend = self._backend
        if isinstance(backend, NoSandbox):
            raise ToolError(str(backend))
        return backend

    def _prepare(
        self, backend: Backend, context: CallContext, command: str, working_dir: str, network: bool
    ) -> Prepared:
        settings, outer = self.settings, dict(os.environ)
        limits = Limits(settings.memory_mb, settings.processes, settings.file_mb)
        if backend == "off":
            world = Confinement(os.path.realpath(context.workspace), limits=limits)
        else:
            world = confinement(
                os.fspath(context.workspace),
                network=network,
                readable=settings.readable,
                writable=settings.writable,
                protected=[os.fspath(path) for path in context.protected],
                unchanged=[os.fspath(path) for path in context.frozen],
                outputs=None if context.outputs is None else os.fspath(context.outputs),
                limits=limits,
            )
        folder = find_folder(world, working_dir, restricted=context.restricted or backend != "off")
        ticket = None
        if backend != "off":
            ticket = self._checks.begin(world.workspace, world.frozen, tainted=_is_tainted(context))
        try:
            return Prepared(prepare(backend, world, folder, command, outer=outer, names=settings.environment), ticket)
        except BaseException:
            if ticket is not None:
                self._checks.end(ticket)
            raise

    async def start_background(self, command: str, working_dir: str, network: bool, keep: bool) -> Job:
        context = current_call()
        self._make_room(context)
        fresh = Fresh(self.settings.output_limit)
        launch, ticket = await self.launch(command, working_dir, network)
        process = Process(launch)

        async def listen(data: bytes) -> bool:
            fresh.feed(data)
            return True

        job = Job(f"p{next(self._numbers)}", command, context, keep, network, process, fresh, ticket)
        self.background[job.id] = job
        try:
            await process.start(listen, stdin=True)
        except BaseException:
            del self.background[job.id]
            await self.finish(process, ticket, 0)
            raise
        job.watch = asyncio.create_task(self._watch(job))
        return job

    def _make_room(self, context: CallContext) -> None:
        for job in [job for job in self.background.values() if job.process.returncode is not None]:
            if len(self.background) >= self.settings.total_background or same_session(job.context, context):
                del self.background[job.id]
        own = sum(same_session(job.context, context) for job in self.background.values())
        if own >= self.settings.session_background or len(self.background) >= self.settings.total_background:
            raise ToolError(f"Too many background commands ({own} in this session): kill one of them first.")

    async def _watch(self, job: Job) -> None:
        await job.process.wait()
        self._tell(job, await self.finish(job.process, job.ticket, 0))
        await self.mark_changed(job.context, job.started, job.network)
        job.fresh.more.set()

    @staticmethod
    def _tell(job: Job, notes: list[str]) -> None:
        for note in notes:
            job.fresh.feed(f"\n{note}\n".encode())

    def find(self, id: str | None) -> Job:
        """Return a background command of the same owner and session."""
        context = current_call()
        job = self.background.get(id or "")
        if job is not None and same_session(job.context, context):
            return job
        known = [job.id for job in self.background.values() if same_session(job.context, context)]
        there = f"running: {', '.join(known)}" if known else "none is running"
        raise ToolError(f"There is no background command {id!r} ({there}); they end with their turn or the runtime.")

    async def end(self, jobs: Sequence[Job]) -> None:
        """End these background commands and remove them from the list."""
        for job in jobs:
            self.background.pop(job.id, None)
        ended = await asyncio.gather(*(self.finish(job.process, job.ticket) for job in jobs))
        for job, notes in zip(jobs, ended, strict=True):
            self._tell(job, notes)
            await self.mark_changed(job.context, job.started, job.network)


def _choose(mode: Mode) -> Backend | NoSandbox:
    try:
        return choose_backend(mode)
    except NoSandbox as error:
        return error


def _is_tainted(context: CallContext) -> bool:
    """Return whether a command may act on untrusted content without having been approved."""
    return context.tainted and not context.approved


def same_session(one: CallContext, other: CallContext) -> bool:
    return (one.owner, one.session) == (other.owner, other.session)


def ended(code: int) -> str:
    """Describe an exit status."""
    if code > 128:
        try:
            return f"exit status {code}, {signal.Signals(code - 128).name}"
        except ValueError:
            pass  # not a signal number: the command's own exit status
    return f"exit status {code}"


def find_folder(world: Confinement, working_dir: str, *, restricted: bool) -> str:
    """Return the real path of the working folder. Raises ToolError if it is not accessible."""
    if "\0" in working_dir:
        raise ToolError(f"{working_dir!r} is not a path: give one relative to the workspace.")
    folder = os.path.realpath(os.path.join(world.workspace, os.path.expanduser(clean(working_dir))))
    if restricted and not within_any(folder, (world.workspace, *world.readable, *world.writable)):
        raise ToolError(f"{working_dir} is outside the workspace: commands run inside {world.workspace}.")
    if not os.path.isdir(folder):
        raise ToolError(f"{working_dir or 'the workspace'} is not a folder: use list_dir to see what there is.")
    return folder
