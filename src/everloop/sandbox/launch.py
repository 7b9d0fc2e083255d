"""Turn a command and its confinement into a program to start, and choose the sandbox backend."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec

from . import bubblewrap, landlock, resources, seccomp
from .confinement import Confinement, Limits, command_environment
from .system import system

Mode = Literal["auto", "bubblewrap", "landlock", "off"]
Backend = Literal["bubblewrap", "landlock", "off"]
LAUNCHER = str(Path(__file__).with_name("launcher.py"))
SCOPE = str(Path(__file__).with_name("scope.py"))
_PROBE_SECONDS = 20.0
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
# Join the control group before anything else runs. When memory runs out, the kernel kills the command, not the runtime.
_JOIN = 'echo $$ >"$1/cgroup.procs" || exit 126; echo 1000 >/proc/self/oom_score_adj; shift; exec "$@"'
# Set inside the sandbox, so that processes count in its own user namespace. dash has another option for that limit.
_LIMIT = (
    "echo 1000 >/proc/self/oom_score_adj; ulimit -c 0; ulimit -d {data}; ulimit -f {file}; "
    "ulimit -u {processes} 2>/dev/null || ulimit -p {processes}; "
    'exec "$0" -c "$1"'
)
# The runtime checks the mounts before the command starts. By path, since dash only knows one-digit descriptors.
_GATE = "echo >/proc/self/fd/{told}; read -r go </proc/self/fd/{waiting}; "


class NoSandbox(Exception):
    """No sandbox backend works on this machine; the text says what to do."""


class Launch(msgspec.Struct):
    """A program that is ready to start, with the resources it holds until its end."""

    backend: Backend
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    passed: list[int] = []  # descriptors that the program inherits
    control: int | None = None  # our end of the launcher's pipe: "T" sends SIGTERM, closing it kills everything
    ready: int | None = None  # the sandbox signals here that it is set up …
    gate: int | None = None  # … and waits here until the command may start
    world: Confinement | None = None
    group: str | None = None
    private: str | None = None
    memory: int | None = None  # total bytes allowed, where no control group enforces them

    def started(self) -> None:
        """Close our copies of the inherited descriptors, once the program has started."""
        for descriptor in self.passed:
            os.close(descriptor)
        self.passed = []

    def close(self) -> None:
        """Close all descriptors, which ends whatever waits on them."""
        self.started()
        for name in ("control", "ready", "gate"):
            if (descriptor := getattr(self, name)) is not None:
                setattr(self, name, None)
                os.close(descriptor)

    def clean_up(self) -> None:
        """Remove the command's control group and temporary folder after its end. Call it in a thread."""
        if self.group is not None:
            resources.remove_group(self.group)
        if self.private is not None:
            shutil.rmtree(self.private, ignore_errors=True)


def choose_backend(mode: Mode) -> Backend:
    """Return the first backend that passes a trial run; NoSandbox if none does. Slow: call it once, in a thread."""
    if mode == "off":
        return "off"
    problems = []
    if mode in ("auto", "bubblewrap"):
        problem = _try_bubblewrap()
        if problem is None:
            return "bubblewrap"
        problems.append(problem)
    if mode in ("auto", "landlock"):
        problem = _try_landlock()
        if problem is None:
            return "landlock"
        problems.append(problem)
    raise NoSandbox(
        f"The command was not run, because no sandbox is available: {'; '.join(problems)}. Install bubblewrap (Debian, "
        'Ubuntu: apt install bubblewrap), or set mode = "off" under [sandbox] to run commands without a sandbox.'
    )


def prepare(
    backend: Backend,
    world: Confinement,
    folder: str,
    command: str,
    *,
    outer: dict[str, str],
    names: tuple[str, ...] = (),
) -> Launch:
    """Prepare a command for starting. Call it in a thread; the launch must be closed at the end."""
    search = system(outer.get("PATH", os.defpath), outer.get("HOME", "")).search
    environment = command_environment(outer, names, network=world.network or backend == "off", search=search)
    launch = Launch(backend, [], environment, "/" if sys.platform == "linux" else folder, world=world)
    try:
        if backend == "bubblewrap":
            _by_bubblewrap(launch, world, folder, command)
        else:
            _by_launcher(launch, world, folder, command, outer)
    except BaseException:
        launch.close()
        launch.clean_up()
        raise
    if backend != "off" and not resources.limits_memory(launch.group):
        launch.memory = world.limits.memory_mb * 2**20
    return launch


def guarantees(backend: Backend) -> list[str]:
    """Describe the guarantees that depend on this machine. Call it in a thread."""
    if resources.limits_memory(resources.parent_group()):
        memory = "memory_mb is enforced by the kernel for a command as a whole (control group)"
    else:
        memory = "memory_mb is enforced by summing up a command's processes several times a second (no cgroup v2 here)"
    sockets = "with network, a command cannot reach abstract Unix sockets of other programs"
    if backend == "bubblewrap" and not scopes_sockets(bubblewrap.find_bwrap()):
        sockets = "with network, a command can reach abstract Unix sockets of other programs (Linux 6.12 prevents it)"
    return [memory, sockets]


def find_shell() -> str:
    """Return bash if it is installed, since models write commands for bash."""
    return next((path for path in _SHELLS if os.path.exists(path)), "/bin/sh")


def _by_bubblewrap(launch: Launch, world: Confinement, folder: str, command: str) -> None:
    bwrap = bubblewrap.find_bwrap()
    if bwrap is None:
        raise NoSandbox("bubblewrap was uninstalled: install it again and restart the runtime.")
    launch.environment |= {"HOME": bubblewrap.HOME, "TMPDIR": "/tmp"}
    calls = None
    if seccomp.supported():
        calls = _memory(launch, seccomp.namespaced_filter())
    options = bubblewrap.arguments(world, folder, calls, launch.passed)
    script = ""
    if bubblewrap.expected(world):
        launch.ready, told = os.pipe()
        waiting, launch.gate = os.pipe()
        launch.passed += [told, waiting]
        script = _GATE.format(told=told, waiting=waiting)
    inner = _memory(launch, b"".join(os.fsencode(option) + b"\0" for option in options))
    shell = find_shell()
    limits = world.limits
    blocks = limits.file_mb * (1024 if shell.endswith("bash") else 2048)
    script += _LIMIT.format(data=limits.memory_mb * 1024, file=blocks, processes=limits.processes)
    arguments = [bwrap, "--args", str(inner), "--", shell, "-c", script, shell, command]
    if world.network and scopes_sockets(bwrap):
        arguments = [sys.executable, "-I", "-S", SCOPE, *arguments]
    launch.group = _group(limits)
    if launch.group is not None:
        arguments = ["/bin/sh", "-c", _JOIN, "sh", launch.group, *arguments]
    launch.arguments = arguments


def scopes_sockets(bwrap: str | None) -> bool:
    """Return whether bubblewrap can isolate a command with network from the host's abstract Unix sockets.

    A set-user-ID bwrap cannot run under Landlock.
    """
    if bwrap is None or landlock.abi() < landlock.SIGNALS_SCOPED:
        return False
    return not os.stat(bwrap).st_mode & stat.S_ISUID or os.geteuid() == 0


def _by_launcher(launch: Launch, world: Confinement, folder: str, command: str, outer: dict[str, str]) -> None:
    task: dict[str, Any] = {"folder": folder, "command": [find_shell(), "-c", command]}
    if launch.backend == "landlock":
        launch.private = tempfile.mkdtemp(prefix="everloop-")
        launch.environment |= {"HOME": launch.private, "TMPDIR": launch.private}
        launch.group = _group(world.limits)
        rules = _landlock_rules(world, launch.private, launch.group)
        task |= {"sandbox": rules, "group": launch.group, "private": launch.private}
    else:
        launch.environment |= {name: outer[name] for name in ("HOME", "TMPDIR") if name in outer}
    if sys.platform != "linux":  # the launcher needs Linux; here a process that leaves the process group survives
        launch.arguments = task["command"]
        return
    told = _memory(launch, json.dumps(task).encode("utf-8", "surrogateescape"))
    order, launch.control = os.pipe()
    launch.passed.append(order)
    launch.arguments = [sys.executable, "-I", "-S", LAUNCHER, str(told), str(order)]


def _landlock_rules(world: Confinement, private: str, group: str | None) -> dict[str, Any]:
    version = landlock.abi()
    calls = seccomp.shared_filter(network=world.network, signals=version >= landlock.SIGNALS_SCOPED)
    return {
        "abi": version,
        "rights": landlock.all_rights(version),
        "rules": landlock.rules(world, private, version),
        "links": [*world.readable, *world.writable],
        "network": world.network,
        "filter": calls.hex(),
        "limits": {
            "memory_mb": world.limits.memory_mb,
            "file_mb": world.limits.file_mb,
            "processes": world.limits.processes,
            "counted": group is not None,
        },
    }


def _group(limits: Limits) -> str | None:
    parent = resources.parent_group()
    return None if parent is None else resources.make_group(parent, limits)


def _memory(launch: Launch, data: bytes) -> int:
    """Return a descriptor from which the program reads these bytes. They are never on disk or in a process list."""
    descriptor = os.memfd_create("everloop", os.MFD_CLOEXEC)
    launch.passed.append(descriptor)
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _try_bubblewrap() -> str | None:
    """Return why bwrap does not work here, or None."""
    if bubblewrap.find_bwrap() is None:
        return "bubblewrap is not installed"
    problem = _try_out("bubblewrap")
    return None if problem is None else f"bubblewrap does not work here ({problem})"


def _try_landlock() -> str | None:
    if landlock.abi() < landlock.NEEDED:
        return "Landlock is missing, disabled or too old in this kernel (Linux 6.2 or newer is needed)"
    if not seccomp.supported():
        return "system call filters are not supported on this processor"
    problem = _try_out("landlock")
    return None if problem is None else f"Landlock does not work here ({problem})"


def _try_out(backend: Backend) -> str | None:
    """Run a command in a backend and return what went wrong, or None. No setting tells whether namespaces work."""
    with tempfile.TemporaryDirectory(prefix="everloop-") as folder:
        outer = {"PATH": os.defpath}
        world = Confinement(os.path.realpath(folder), readable=system(os.defpath, "").paths)
        launch = prepare(backend, world, world.workspace, "echo works", outer=outer)
        try:
            done = subprocess.run(
                launch.arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=launch.environment,
                pass_fds=launch.passed,
                timeout=_PROBE_SECONDS,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        finally:
            launch.close()
            launch.clean_up()
    said = done.stdout.decode(errors="replace").strip()
    return None if done.returncode == 0 and said == "works" else said.splitlines()[-1] if said else "it had no output"
