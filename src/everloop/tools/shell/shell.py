"""The tools `exec`, which runs a shell command, and `process`, which manages background commands.

`Shell` starts commands in the sandbox, and keeps track of those in the background.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from ...log import exit_status
from ...sandbox.confinement import Confinement, Limits, confinement
from ...sandbox.launch import Backend, Launch, Mode, NoSandbox, choose_backend, prepare
from ...sandbox.reach import within_any
from ...text import clean
from ...threads import in_thread
from ..base import Output, Plan, Tool, ToolError
from ..context import CallContext, current_call
from ..files.paths import size
from ..policy.shell_line import SimpleCommand, unknown
from ..trust import UNKNOWN, any_exists, changed_files, may_hold_tainted
from .processes import Capture, Fresh, Process, Ticker
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


class Job(msgspec.Struct):
    """A background command."""

    id: str
    command: str
    context: CallContext
    keep: bool
    network: bool
    process: Process
    fresh: Fresh
    ticket: Ticket | None = None  # None: not confined, so nothing is checked afterwards
    began: float = msgspec.field(default_factory=time.monotonic)
    started: int = msgspec.field(default_factory=time.time_ns)
    watch: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        code = self.process.returncode
        if self.process.over_memory:
            return f"stopped for using too much memory: {self.process.over_memory}"
        return f"running for {time.monotonic() - self.began:.0f} s" if code is None else exit_status(code)


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

    def is_running(self, workspace: str) -> bool:
        return self._checks.is_running(workspace)

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
        """Return a command's output with what is known of its origin: it may contain anything the command has read."""
        context = current_call()
        if network:
            return replace(output, untrusted=True)
        if context.taint is True and not await in_thread(reads_nothing, command):
            return replace(output, contents=(UNKNOWN,))
        if context.taint == "outside" and await in_thread(any_exists, await may_hold_tainted(context)):
            return replace(output, untrusted=True)
        return output

    async def mark_changed(self, context: CallContext, since: int, untrusted: bool = False) -> None:
        """Mark the files that a command changed after untrusted text was read, or after it read some itself.

        If every unknown file is untrusted anyway, nothing needs to be marked.
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


__all__ = ["ShellSettings", "shell_tools"]

_MAX_WAIT = 30.0
_NO_NETWORK = re.compile(
    r"could not resolve host|name resolution|name or service not known|network is unreachable|EAI_AGAIN|ENOTFOUND"
    r"|ENETUNREACH|failed to lookup address|no such host|unable to resolve|socket: (?:permission denied|operation not)",
    re.IGNORECASE,
)


_NO_SPACE = re.compile(r"no space left on device|ENOSPC|disk quota exceeded", re.IGNORECASE)


def shell_tools(settings: ShellSettings | None = None) -> list[Tool]:
    """Return the tools `exec` and `process`, which share their running commands."""
    shell = Shell(settings or ShellSettings())
    return [Exec(shell), ProcessTool(shell)]


class Exec(Tool):
    """Runs a command. Not parallel: commands change files, so their order matters."""

    name = "exec"
    description: str
    parameters: dict[str, Any]
    replay = "never"
    parallel = False

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        settings = shell.settings
        self.timeout = settings.max_timeout + 60.0  # the command's own timeout comes first
        self.description = (
            "Run a shell command (bash) in the workspace. Output comes with the exit status; standard input is empty. "
            "In a sandbox only the workspace can be changed, /tmp and the home folder are empty and gone afterwards, "
            "and there is no network unless network=true. Processes that it leaves running are killed when it ends; "
            "use background=true for a server or a long job, and the tool process to manage it."
        )
        self.parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command, as for bash -c."},
                "working_dir": {"type": "string", "description": "The folder to run in, relative to the workspace."},
                "timeout": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": f"Seconds; {settings.timeout:g} by default, {settings.max_timeout:g} at most.",
                },
                "network": {"type": "boolean", "description": "Let the command reach the network."},
                "background": {"type": "boolean", "description": "Return at once with an id for the tool process."},
                "keep": {"type": "boolean", "description": "With background: keep it running after the turn."},
            },
            "required": ["command"],
        }

    def plan(self, arguments: dict[str, Any]) -> Plan:
        context = current_call()
        command, network = str(arguments["command"]), bool(arguments.get("network"))
        confined = self._shell.confined(context)
        given = str(arguments.get("working_dir") or "")
        given = given if "\0" in given else os.path.expanduser(given)
        folder = os.path.normpath(os.path.join(context.workspace, given))
        how = f"in the sandbox {'with' if network else 'without'} network" if confined else "without a sandbox"
        later = ", in the background" if arguments.get("background") else ""
        kept = bool(later and arguments.get("keep"))
        later += ", also after the turn" if kept else ""
        return Plan(
            shown=f"{command}\n(in {folder}, {how}{later})",
            command=command,
            network=network,
            sends=network or kept,  # files that it creates later, unchecked, may steer the agent
            unconfined=not confined,
        )

    async def execute(
        self,
        command: str,
        working_dir: str = "",
        timeout: float | None = None,
        network: bool = False,
        background: bool = False,
        keep: bool = False,
    ) -> Output:
        if not command.strip():
            raise ToolError("The command is empty: give one or more lines for bash.")
        if "\0" in command:
            raise ToolError("The command has a zero byte, which bash cannot be given: write it as an escape, \\0.")
        # A lone surrogate becomes a character that no glob matches; a "?" would stand for any file of one character.
        command = command.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if background:
            job = await self._shell.start_background(command, working_dir, network, keep)
            until = "the runtime ends" if keep else "this turn is over"
            # It may write fetched content to files, which look like any others when they are read.
            return Output(f"Started in the background as {job.id}; it runs until it is done or {until}.", network)
        began = time.time_ns()
        output = await self._run(command, working_dir, timeout, network)
        output = await self._shell.counted(output, command, network)
        await self._shell.mark_changed(current_call(), began, output.untrusted)
        return output

    async def _run(self, command: str, working_dir: str, timeout: float | None, network: bool) -> Output:
        context, settings = current_call(), self._shell.settings
        limit = min(timeout or settings.timeout, settings.max_timeout)
        capture = Capture(settings.output_limit, settings.saved_limit, context.outputs, f"exec-{context.call}")
        ticker = Ticker(context.progress)

        async def listen(data: bytes) -> bool:
            ticker.feed(data)
            await capture.feed(data)
            return capture.full

        launch, ticket = await self._shell.launch(command, working_dir, network)
        process = Process(launch)
        late = False
        aside: list[str] = []
        try:
            async with asyncio.timeout(limit):
                await process.start(listen)
                await process.wait()
        except TimeoutError:
            late = True
        finally:
            ticker.stop()
            aside = await self._shell.finish(process, ticket)
        await capture.save()
        text = capture.text().rstrip()
        if late:
            note = f"stopped because it ran longer than {limit:g} seconds; use a larger timeout (at most "
            note += f"{settings.max_timeout:g}) or background=true"
            return Output("\n".join([text, f"[{note}]", *aside]).lstrip(), untrusted=network, failed=True)
        if process.over_memory:
            note = f"it used {process.over_memory} and was stopped: the limit is {settings.memory_mb} MB of memory"
            return Output("\n".join([text, f"[{note}]", *aside]).lstrip(), untrusted=network, failed=True)
        if text.startswith("bwrap: ") and process.returncode == 1:
            note = f"The sandbox could not be created, so nothing was run: {text.splitlines()[0]}"
            return Output(note, untrusted=network, failed=True)  # unless the command itself printed that
        notes = self._notes(process.returncode or 0, text, network, self._shell.confined(context))
        if process.returncode and _NO_SPACE.search(text):
            notes.append(await in_thread(_space_note, context.workspace))
        return Output("\n".join(filter(None, [text, *notes, *aside])) or "(no output)", untrusted=network)

    def _notes(self, code: int, text: str, network: bool, confined: bool) -> list[str]:
        notes = [f"[{exit_status(code)}]"] if code else []
        if confined and code == 128 + signal.SIGKILL:
            notes.append(f"[it may have exceeded the memory limit of {self._shell.settings.memory_mb} MB]")
        if confined and not network and code and _NO_NETWORK.search(text):
            notes.append("[the sandbox has no network: if the command needs it, call exec again with network=true]")
        return notes

    def is_running(self, workspace: str) -> bool:
        """Return whether a confined command of this process is running in a workspace, given by its real path."""
        return self._shell.is_running(workspace)

    async def end_turn(self, turn: str) -> None:
        await self._shell.end_turn(turn)

    async def close(self) -> None:
        await self._shell.end(list(self._shell.background.values()))


class ProcessTool(Tool):
    """Manages background commands."""

    name = "process"
    description = (
        "Manage commands that were started with exec(background=true): list them; poll one for its state and new "
        "output since the last poll; write text to its standard input (empty text closes it); kill it."
    )
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["list", "poll", "write", "kill"]},
            "id": {"type": "string", "description": "The id that exec returned."},
            "text": {"type": "string", "description": "For write; end a line with a newline."},
            "wait": {
                "type": "number",
                "minimum": 0,
                "description": "For poll: seconds to wait, 30 at most.",
            },
        },
        "required": ["action"],
    }
    replay = "never"
    timeout = 60.0

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def plan(self, arguments: dict[str, Any]) -> Plan:
        if arguments["action"] != "write":
            return Plan()
        text = arguments.get("text", "")
        try:
            job = self._shell.find(arguments.get("id"))
        except ToolError:  # a call in the same round may start it
            return Plan(shown=f"write to {arguments.get('id')}, which is not running yet:\n{text}", sends=True)
        sends = job.network or job.keep or not self._shell.confined(job.context)
        return Plan(shown=f"write to {job.id} ({job.command}):\n{text}", sends=sends)

    async def execute(self, action: str, id: str | None = None, text: str = "", wait: float = 0.0) -> Output:
        if action == "list":
            return self._list()
        job = self._shell.find(id)
        if action == "write":
            await self._shell.taint(job)  # it may have started before untrusted content was read
            await job.process.write(clean(text).encode())
            return Output(f"Sent to {job.id}." if text else f"The standard input of {job.id} is closed.")
        if action == "kill":
            await self._shell.end([job])
        elif wait and job.process.returncode is None and not job.fresh.more.is_set():
            try:
                async with asyncio.timeout(min(wait, _MAX_WAIT)):
                    await job.fresh.more.wait()
            except TimeoutError:
                pass  # no new output: the state below says so
        if job.process.returncode is not None:
            await job.process.wait()  # include its last output: the model will not poll again
        said = job.fresh.take().rstrip()
        output = Output(f"{said}\n[{job.id}: {job.state}]".lstrip(), untrusted=job.network)
        return await self._shell.counted(output, job.command, job.network) if said else output

    def _list(self) -> Output:
        context = current_call()
        own = [job for job in self._shell.background.values() if same_session(job.context, context)]
        lines = [f"{job.id}  {job.state}{', kept' * job.keep}  {job.command[:200]}" for job in own]
        return Output("\n".join(lines) or "No background commands are running.")


def _space_note(workspace: str | os.PathLike[str]) -> str:
    """Say where space is missing: on the disk of the workspace, or elsewhere."""
    free = shutil.disk_usage(workspace).free
    if free < 1 << 20:
        return "[the disk of the workspace is full: free some space]"
    return f"[the disk of the workspace has {size(free)} free: another place that the command wrote to is full]"


_QUIET = frozenset({"echo", "printf", "pwd", "date", "true", "false", ":", "sleep", "mkdir", "touch", "exit"})
_READING_OPTION = re.compile(r"-[^-]*[fr]|--f|--re")  # of date and touch: it takes a file; also as in `-uf`, `--fi`


def reads_nothing(command: str) -> bool:
    """Return whether a command line reads neither files nor the network.

    Its output is then text that the model itself wrote.
    """
    from ..policy.shell_syntax import read  # most agents never run a command

    line = read(command)
    return not line.opaque and not line.altered and bool(line.commands) and all(map(_is_quiet, line.commands))


def _is_quiet(command: SimpleCommand) -> bool:
    if not command.words or command.words[0] not in _QUIET or any(map(unknown, command.words)):
        return False
    if not all(target.writes for target in command.targets):
        return False
    return command.words[0] in ("echo", "printf") or not any(_READING_OPTION.match(word) for word in command.words[1:])
