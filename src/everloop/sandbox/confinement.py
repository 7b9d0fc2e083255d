"""What a command may access: one description for every sandbox backend."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

import msgspec

from .reach import STEERING, within
from .system import system, without

# Files in .git that git executes: read-only for commands, as STEERING is.
GIT_STEERING = ("hooks", "config", "config.worktree", "commondir")
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "COLUMNS", "LINES")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_FIXED = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",  # there is no terminal to answer on
    "DEBIAN_FRONTEND": "noninteractive",
}


class Limits(msgspec.Struct, frozen=True):
    """Resource limits of a command and its children."""

    memory_mb: int = 4096
    processes: int = 512
    file_mb: int = 4096


class Confinement(msgspec.Struct, frozen=True):
    """What one command may access. All paths are real paths."""

    workspace: str
    network: bool = False
    readable: tuple[str, ...] = ()  # system paths and those from the settings
    writable: tuple[str, ...] = ()  # in addition to the workspace
    hidden: tuple[str, ...] = ()  # invisible to the command, wherever they are
    frozen: tuple[str, ...] = ()  # read-only parts of the workspace
    held: tuple[str, ...] = ()  # folders that must not be moved, because they contain such parts
    outputs: str | None = None  # readable although it is inside a hidden folder
    limits: Limits = msgspec.field(default_factory=Limits)


def confinement(
    workspace: str,
    *,
    network: bool = False,
    readable: Sequence[str] = (),
    writable: Sequence[str] = (),
    protected: Sequence[str] = (),
    unchanged: Sequence[str] = (),
    outputs: str | None = None,
    limits: Limits | None = None,
    environment: dict[str, str] | None = None,
) -> Confinement:
    """Determine what a command in this workspace may access. Does file I/O: call it in a thread.

    `protected` paths are hidden from it, and `unchanged` ones are read-only.
    """
    real = os.path.realpath(workspace)
    outer = os.environ if environment is None else environment
    hidden = tuple(path for path in _hidden(protected) if path != real)
    shown = without(system(outer.get("PATH", os.defpath), outer.get("HOME", "")).paths, hidden, real)
    shown += [os.path.realpath(path) for path in map(os.path.expanduser, readable) if os.path.exists(path)]
    frozen, held = _steering(real)
    kept = [path for path in map(os.path.realpath, unchanged) if path != real and within(path, real)]
    frozen += [path for path in kept if os.path.exists(path)]
    held += _parents((*hidden, *kept, *frozen), real)
    return Confinement(
        workspace=real,
        network=network,
        readable=tuple(shown),
        writable=tuple(os.path.realpath(path) for path in map(os.path.expanduser, writable) if os.path.exists(path)),
        hidden=hidden,
        frozen=tuple(frozen),
        held=tuple(sorted(set(held))),
        outputs=os.path.realpath(outputs) if outputs is not None and os.path.isdir(outputs) else None,
        limits=limits or Limits(),
    )


def command_environment(outer: dict[str, str], names: Sequence[str], *, network: bool, search: str) -> dict[str, str]:
    """Return the environment of a command: only allow-listed variables, so that no API key leaks."""
    passed = {name: value for name, value in outer.items() if name in _PASSED_ON or name.startswith("LC_")}
    if network:  # a proxy address that contains a password is withheld
        passed |= {name: outer[name] for name in _PROXIES if name in outer and "@" not in outer[name]}
    passed |= _FIXED | {"PATH": search}
    return passed | {name: outer[name] for name in names if name in outer}


def _hidden(protected: Sequence[str]) -> list[str]:
    """Return the protected paths that exist, including the files that SQLite keeps next to a database."""
    found: list[str] = []
    for path in protected:
        real = os.path.realpath(path)
        found += [name for name in (real, f"{real}-wal", f"{real}-shm", f"{real}-commits") if os.path.exists(name)]
    return found


def _steering(workspace: str) -> tuple[list[str], list[str]]:
    """Return the read-only files and the folders that contain them. Links are resolved within the workspace."""
    places = [os.path.realpath(os.path.join(workspace, name)) for name in STEERING]
    frozen = [path for path in places if path != workspace and within(path, workspace) and _is_plain(path)]
    git = os.path.join(workspace, ".git")
    if not _is_plain(git):
        return frozen, []
    if not os.path.isdir(git):
        return [*frozen, git], []
    parts = [path for name in GIT_STEERING if _is_plain(path := os.path.join(git, name))]
    return frozen + parts, [git]


def _is_plain(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _parents(hidden: Sequence[str], workspace: str) -> list[str]:
    """Return the folders between the workspace and these paths. Renaming one would expose what is hidden in it."""
    found = []
    for path in hidden:
        parent = os.path.dirname(path)
        while parent != workspace and within(parent, workspace):
            found.append(parent)
            parent = os.path.dirname(parent)
    return found
