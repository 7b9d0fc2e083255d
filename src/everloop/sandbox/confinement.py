"""What a command may touch, said once for every kind of sandbox."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from .paths import within
from .system import system, without

# Files of a workspace that steer the agent, or that a person's own git runs: a command may read them, not change them.
STEERING = (
    "AGENTS.md",
    "SOUL.md",
    "USER.md",
    "TOOLS.md",
    "IDENTITY.md",
    "HEARTBEAT.md",
    "memory",
    "skills",
    "agents",
    ".everloop",
)
GIT_STEERING = ("hooks", "config", "config.worktree", "commondir")
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "COLUMNS", "LINES")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_FIXED = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",  # nobody is there to answer
    "DEBIAN_FRONTEND": "noninteractive",
}


@dataclass(slots=True, frozen=True)
class Limits:
    """What a command and its children may use up."""

    memory_mb: int = 4096
    processes: int = 512
    file_mb: int = 4096


@dataclass(slots=True, frozen=True)
class Confinement:
    """The world of one command. All paths are real ones."""

    workspace: str
    network: bool = False
    readable: tuple[str, ...] = ()  # the system's and those of the settings
    writable: tuple[str, ...] = ()  # besides the workspace
    hidden: tuple[str, ...] = ()  # not there for the command, wherever they lie
    frozen: tuple[str, ...] = ()  # parts of the workspace that can be read only
    held: tuple[str, ...] = ()  # folders of the workspace that must stay where they are, since they hold such parts
    outputs: str | None = None  # can be read although it lies among what is hidden
    limits: Limits = field(default_factory=Limits)


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
    """Look at the disk for what a command in this workspace may touch: nothing `protected`, and nothing `unchanged` but
    for reading. Call it in a thread."""
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
    """The variables a command gets: none of the runtime's but those on the list, so no key can leak."""
    passed = {name: value for name, value in outer.items() if name in _PASSED_ON or name.startswith("LC_")}
    if network:  # an address with a password in it stays here
        passed |= {name: outer[name] for name in _PROXIES if name in outer and "@" not in outer[name]}
    passed |= _FIXED | {"PATH": search}
    return passed | {name: outer[name] for name in names if name in outer}


def _hidden(protected: Sequence[str]) -> list[str]:
    """The protected paths that exist, with the files that stand beside a SQLite store."""
    found: list[str] = []
    for path in protected:
        real = os.path.realpath(path)
        found += [name for name in (real, f"{real}-wal", f"{real}-shm", f"{real}-commits") if os.path.exists(name)]
    return found


def _steering(workspace: str) -> tuple[list[str], list[str]]:
    """The files that steer, and the folders that hold them. Of a link, what it leads to in the workspace."""
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
    """The folders between the workspace and what is hidden in it: moved away, they would take it out of hiding."""
    found = []
    for path in hidden:
        parent = os.path.dirname(path)
        while parent != workspace and within(parent, workspace):
            found.append(parent)
            parent = os.path.dirname(parent)
    return found
