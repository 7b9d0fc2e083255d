"""The tools `exec`, which runs a shell command, and `process`, which manages background commands."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import Any, ClassVar

from ...text import clean
from ..base import Output, Plan, Tool, ToolError
from ..context import current_call
from .captures import Capture, Ticker
from .processes import Process
from .running import Shell, ShellSettings, ended, same_session

__all__ = ["ShellSettings", "shell_tools"]

_MAX_WAIT = 30.0
_NO_NETWORK = re.compile(
    r"could not resolve host|name resolution|name or service not known|network is unreachable|EAI_AGAIN|ENOTFOUND"
    r"|ENETUNREACH|failed to lookup address|no such host|unable to resolve|socket: (?:permission denied|operation not)",
    re.IGNORECASE,
)


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
            sends=network or kept,  # what it makes later, when nobody looks, may steer the agent
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
        if not command.strip() or "\0" in command:
            raise ToolError("The command is empty: give one or more lines for bash.")
        if background:
            job = await self._shell.start_background(clean(command), working_dir, network, keep)
            until = "the runtime ends" if keep else "this turn is over"
            # It may put what it fetches into files, which look like any others when they are read.
            return Output(f"Started in the background as {job.id}; it runs until it is done or {until}.", network)
        began = time.time_ns()
        output = await self._run(clean(command), working_dir, timeout, network)
        output = await self._shell.counted(output, clean(command), network)
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
        return Output("\n".join(filter(None, [text, *notes, *aside])) or "(no output)", untrusted=network)

    def _notes(self, code: int, text: str, network: bool, confined: bool) -> list[str]:
        notes = [f"[{ended(code)}]"] if code else []
        if confined and code == 128 + signal.SIGKILL:
            notes.append(f"[it may have exceeded the memory limit of {self._shell.settings.memory_mb} MB]")
        if confined and not network and code and _NO_NETWORK.search(text):
            notes.append("[the sandbox has no network: if the command needs it, call exec again with network=true]")
        return notes

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
