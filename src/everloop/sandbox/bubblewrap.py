"""A command in namespaces of its own, made by the program `bwrap`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .confinement import Confinement
from .paths import within, within_any

_CANDIDATES = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap", "/run/current-system/sw/bin/bwrap")
HOME = "/tmp/home"
# As root, these files of the kernel may be written by who holds no capability at all: the owner is enough.
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "acpi", "scsi")
_COPIED_BYTES = 2**20  # bwrap takes long for many mounts (it reads their table for each one): small files are copied


def find_bwrap() -> str | None:
    """Where bwrap is. Only the system's own folders are searched: a PATH may lead through a workspace."""
    return next((path for path in _CANDIDATES if os.access(path, os.X_OK)), None)


def arguments(world: Confinement, folder: str, seccomp: int | None, passed: list[int]) -> list[str]:
    """The options for a command that starts in `folder`. `seccomp` is the descriptor of a filter. Call in a thread.

    Descriptors that bwrap must inherit are added to `passed`.
    """
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--hostname", "sandbox"]
    if world.network:
        options += ["--share-net"]
    if seccomp is not None:
        options += ["--seccomp", str(seccomp)]
    options += [
        *_kernel(),
        *_temporary(world),
        *_system(world, passed),
        *_workspace(world),
    ]  # later ones lie over earlier ones
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder]


def misplaced(mounts: str, world: Confinement) -> str | None:
    """A part of the workspace that is not what it should be in a sandbox's table of mounts (mountinfo), or None.

    bwrap follows links when it mounts. A command that runs at the same time in the same workspace could have put a
    link in the place of a file between our look and bwrap's, and so have shown itself a file from outside.
    """
    roots = {}
    for line in mounts.splitlines():
        fields = line.split(" ")
        roots[_unescape(fields[4])] = (fields[2], _unescape(fields[3]))
    device, top = roots.get(world.workspace, ("", ""))
    for path in expected(world):
        root = os.path.join(top, os.path.relpath(path, world.workspace))
        if roots.get(path) != (device, os.path.normpath(root)):
            return path
    return None


def expected(world: Confinement) -> list[str]:
    """The parts of the workspace that are mounted by themselves, the outer ones first."""
    held = [path for path in world.held if not within_any(path, world.hidden)]
    return sorted({*held, *(path for path in world.frozen if not within_any(path, world.hidden))})


def _system(world: Confinement, passed: list[int]) -> Iterator[str]:
    for path in sorted(world.readable):
        if os.path.islink(path) and path.count("/") == 1:
            yield from ("--symlink", os.readlink(path), path)  # /bin to usr/bin
        elif path.startswith("/etc/") and os.path.isfile(path) and os.path.getsize(path) <= _COPIED_BYTES:
            passed.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            yield from ("--file", str(passed[-1]), path)
        else:
            yield from ("--ro-bind-try", path, path)
    for path in sorted(world.writable):
        yield from ("--bind", path, path)
    yield from _covers(world, [path for path in world.hidden if not within(path, world.workspace)])


def _kernel() -> Iterator[str]:
    yield from ("--proc", "/proc", "--dev", "/dev")
    for name in _KERNEL_SETTINGS:
        if os.path.exists(path := f"/proc/{name}"):
            yield from ("--ro-bind", path, path)


def _temporary(world: Confinement) -> Iterator[str]:
    """Folders in memory, gone with the command. Their sizes count where nothing else limits memory."""
    size = str(world.limits.memory_mb * 2**20)
    yield from ("--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--dir", HOME)
    yield from ("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--symlink", "/tmp", "/var/tmp")


def _workspace(world: Confinement) -> Iterator[str]:
    yield from ("--bind", world.workspace, world.workspace)
    for path in expected(world):
        yield from ("--ro-bind" if path in world.frozen else "--bind", path, path)
    yield from _covers(world, [path for path in world.hidden if within(path, world.workspace)])
    if world.outputs is not None:
        yield from ("--ro-bind", world.outputs, world.outputs)


def _covers(world: Confinement, hidden: Sequence[str]) -> Iterator[str]:
    """Something empty over what is hidden, where it would be seen at all."""
    for path in sorted(hidden):
        if not within_any(path, (*world.readable, *world.writable, world.workspace)):
            continue
        if os.path.isdir(path):
            yield from ("--size", "4096", "--tmpfs", path)
        else:
            yield from ("--ro-bind", "/dev/null", path)


def _unescape(field: str) -> str:
    """mountinfo writes blanks, tabs, line ends and backslashes as octal numbers."""
    for code, text in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, text)
    return field
