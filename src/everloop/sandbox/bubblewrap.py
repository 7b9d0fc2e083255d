"""The bubblewrap backend: the `bwrap` options that run a command in its own namespaces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .confinement import Confinement
from .reach import within, within_any

_CANDIDATES = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap", "/run/current-system/sw/bin/bwrap")
HOME = "/tmp/home"
# When the runtime is root, its commands own these kernel files and could write them without any capability.
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "acpi", "scsi")
_COPIED_BYTES = 2**20  # bwrap rereads the mount table for every mount, so copying small files is faster


def find_bwrap() -> str | None:
    """Return the path of bwrap, or None. Search system folders only: PATH may include a workspace."""
    return next((path for path in _CANDIDATES if os.access(path, os.X_OK)), None)


def arguments(world: Confinement, folder: str, seccomp: int | None, passed: list[int]) -> list[str]:
    """Return the bwrap options for a command that starts in `folder`. Does file I/O: call it in a thread.

    `seccomp` is the descriptor of a filter program. Descriptors that bwrap must inherit are appended to `passed`.
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
    ]  # later mounts cover earlier ones
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder]


def misplaced(mounts: str, world: Confinement) -> str | None:
    """Return a path of the workspace whose mount is wrong according to a sandbox's mountinfo, or None.

    bwrap follows symbolic links when it mounts. A concurrent command in the same workspace could replace a file by a
    link between our check and the mount, and so expose a file from outside.
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
    """Return the paths of the workspace that get their own mount, outer ones first."""
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
    """Mount in-memory folders for the lifetime of the command, with a size limit of their own."""
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
    """Mount something empty over each hidden path that would otherwise be visible."""
    for path in sorted(hidden):
        if not within_any(path, (*world.readable, *world.writable, world.workspace)):
            continue
        if os.path.isdir(path):
            yield from ("--size", "4096", "--tmpfs", path)
        else:
            yield from ("--ro-bind", "/dev/null", path)


def _unescape(field: str) -> str:
    """Decode the octal escapes of spaces, tabs, newlines and backslashes in mountinfo."""
    for code, text in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, text)
    return field
