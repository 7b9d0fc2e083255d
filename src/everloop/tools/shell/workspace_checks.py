"""What commands leave behind in a workspace that other programs would run later, outside of the sandbox.

After every confined command the git repositories of the workspace are checked (`sandbox/repositories.py`). After one
that ran when untrusted content had been read, so are the files that steer the agent or that a build tool, an editor or
a shell runs (`tools/policy/steering.py`). What is new and unsafe gets another name, and what was there before is put
back. While commands run, a record on disk holds what was there before: if the runtime is killed, the next one checks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...sandbox import repositories
from ...sandbox.confinement import STEERING
from ...sandbox.folders import ASIDE, FolderTree, Part, aside_name, move_aside, opened_folder, put_back, read_part
from ...sandbox.paths import within
from ..files.paths import written_by_tools
from ..policy.steering import is_generated, leads_to_steering, planted_by_command
from .git_objects import is_older_blob

logger = logging.getLogger(__name__)
_TICK_NS = 20_000_000  # of the clock that files get their times from
_DEPENDENCIES = ("dependencies", "devDependencies", "peerDependencies", "optionalDependencies")
_numbers = itertools.count(1)
AgentFiles = dict[str, tuple[int, int, str]]
Images = dict[str, Part]


@dataclass(slots=True, eq=False)
class Ticket:
    """One command that runs in a workspace."""

    workspace: str
    tainted: bool = False  # untrusted content was read before, and no person has seen the command


@dataclass(slots=True)
class _Watched:
    """A workspace with commands in it, and how it was before the first of them."""

    tree: FolderTree
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: set[Ticket] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)  # was out of reach for all of them
    repositories: repositories.State = field(default_factory=dict)
    record: Path | None = None
    agent_files: AgentFiles = field(default_factory=dict)
    images: Images = field(default_factory=dict)  # of the files that other programs run
    linked: dict[str, str] = field(default_factory=dict)  # files that such a name leads to, and why they count
    tainted_since: int = 0  # nanoseconds


class WorkspaceChecks:
    """Checks workspaces after commands. All methods do file I/O: call them in a thread."""

    def __init__(self, records: Path | None = None) -> None:
        self._records = records
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._recovery: threading.Thread | None = None
        if records is not None:  # at once: the person may run git before the agent runs a command
            self._recovery = threading.Thread(target=_recover, args=(records,), daemon=True)
            self._recovery.start()

    def begin(self, workspace: str, frozen: tuple[str, ...], *, tainted: bool) -> Ticket:
        """Note how a workspace is, before a command starts in it. `frozen` paths are out of the command's reach."""
        if self._recovery is not None:
            self._recovery.join()
        ticket = Ticket(workspace)
        with self._lock:
            watched = self._watched.get(workspace)
            if watched is None:
                tree = FolderTree(workspace, _is_candidate, is_generated)
                watched = self._watched.setdefault(workspace, _Watched(tree))
        with watched.lock, self._alone(workspace) as folder:
            if not watched.running:
                watched.tree.refresh()
                watched.frozen = set(frozen)
                watched.repositories = repositories.read_state(watched.tree)
                self._write_record(watched, folder)
            watched.frozen &= set(frozen)
            watched.running.add(ticket)
        if tainted:
            self.taint(ticket)
        return ticket

    def taint(self, ticket: Ticket) -> None:
        """From now on, a command that may have been under way already acts on untrusted content."""
        watched = self._watched[ticket.workspace]
        with watched.lock:
            if ticket.tainted or ticket not in watched.running:
                return
            if not any(each.tainted for each in watched.running):
                watched.tree.refresh()
                watched.agent_files = _agent_files(ticket.workspace)
                watched.linked = _linked(watched.tree)
                watched.images = _images(watched.tree, watched.linked)
                watched.tainted_since = watched.tainted_since or time.time_ns() - _TICK_NS
            ticket.tainted = True

    def check(self, ticket: Ticket) -> list[str]:
        """Put aside what commands have planted by now. Gives notes for the model."""
        watched = self._watched[ticket.workspace]
        with watched.lock, self._alone(ticket.workspace):
            return self._check(watched, ticket) if ticket in watched.running else []

    def end(self, ticket: Ticket) -> list[str]:
        """As `check`, when a command and all it has started are over."""
        watched = self._watched[ticket.workspace]
        with watched.lock, self._alone(ticket.workspace):
            if ticket not in watched.running:
                return []
            notes = self._check(watched, ticket)
            watched.running.discard(ticket)
            if not any(each.tainted for each in watched.running):
                watched.images, watched.agent_files, watched.linked = {}, {}, {}
            if not watched.running and watched.record is not None:
                watched.record.unlink(missing_ok=True)
            return notes

    def _check(self, watched: _Watched, ticket: Ticket) -> list[str]:
        notes = repositories.check(watched.tree, watched.repositories, watched.frozen)
        if ticket.tainted:
            notes += _put_agent_files_aside(ticket.workspace, watched.agent_files)
            notes += _put_files_aside(watched)
        return notes

    @contextmanager
    def _alone(self, workspace: str) -> Iterator[Path | None]:
        """Hold the records of a workspace against other runtimes; gives their folder."""
        if self._records is None:
            yield None
            return
        folder = self._records / hashlib.sha256(os.fsencode(workspace)).hexdigest()[:16]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield None
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(lock)

    def _write_record(self, watched: _Watched, folder: Path | None) -> None:
        if folder is None:
            return
        others = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for other in others:  # what that runtime's commands have made until now is not to be trusted
            with suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(other.read_bytes())
                watched.repositories = repositories.from_json(record["repositories"])
                watched.frozen &= set(record["frozen"])
                break
        record = {
            "workspace": watched.tree.root,
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "frozen": sorted(watched.frozen),
            "repositories": repositories.to_json(watched.repositories),
        }
        watched.record = folder / f"{os.getpid()}-{next(_numbers)}.json"
        with (
            suppress(OSError),
            open(os.open(watched.record, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file,
        ):
            json.dump(record, file)


# ------------------------------------------------------------------------------------------------ after a kill


def _recover(records: Path) -> None:
    """Check the workspaces in which commands ran when a runtime was killed."""
    with suppress(OSError):
        for folder in records.iterdir():
            for path in folder.glob("*.json"):
                with suppress(OSError), open(folder / "lock", "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    _recover_one(path)


def _recover_one(path: Path) -> None:
    try:
        record = json.loads(path.read_bytes())
        if record["started"] == _started(record["pid"]):
            return
        tree = FolderTree(record["workspace"], lambda path: False, lambda path: False)
        notes = repositories.check(tree, repositories.from_json(record["repositories"]), record["frozen"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        notes = []  # it was cut off while it was written: no command had begun
    for note in notes:
        logger.warning("a command was cut off when the runtime was killed: %s", note)
    path.unlink(missing_ok=True)


def _started(pid: int) -> str:
    """When a process was started, as the kernel tells it; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2].split(" ")[19]
    except (OSError, IndexError):
        return ""


# ------------------------------------------------------------------------------------------------ the agent's files


def _agent_files(workspace: str) -> AgentFiles:
    """The files and folders that steer the agent, and where those that are links lead."""
    found: AgentFiles = {}
    for name in STEERING:
        with suppress(OSError):
            path = os.path.join(workspace, name)
            info = os.lstat(path)
            found[name] = info.st_dev, info.st_ino, os.readlink(path) if os.path.islink(path) else ""
    return found


def _put_agent_files_aside(workspace: str, before: AgentFiles) -> list[str]:
    """Rename what was not there before. What was there is read-only for commands, so a person has changed it."""
    notes = []
    for name, state in _agent_files(workspace).items():
        was = before.get(name)
        if was is not None and (was == state or not was[2]):
            continue
        path = os.path.join(workspace, name)
        if written_by_tools.wrote(path):
            continue
        aside = aside_name(name)
        with suppress(FileNotFoundError):
            os.rename(path, os.path.join(workspace, aside))
            notes.append(f"[{name} would steer the agent and was made after untrusted content was read: now {aside}]")
    return notes


# ------------------------------------------------------------------------------------------------ build files


def _is_candidate(path: str) -> bool:
    return not ASIDE.search(path) and bool(planted_by_command(path) or leads_to_steering(path))


def _why(path: str, linked: dict[str, str]) -> str:
    return planted_by_command(path) or linked.get(path, "") or "other programs run it"


def _linked(tree: FolderTree) -> dict[str, str]:
    """The files of the workspace that links among the candidates lead to."""
    found: dict[str, str] = {}
    for path in tree.steering():
        place = os.path.join(tree.root, path)
        if os.path.islink(place):
            real = os.path.realpath(place)
            if within(real, tree.root) and os.path.isfile(real):
                found[os.path.relpath(real, tree.root)] = planted_by_command(path)
    return found


def _images(tree: FolderTree, linked: dict[str, str]) -> Images:
    """The candidates as they are now, of those that are links also what they lead to."""
    images: Images = {}
    with opened_folder(tree.root, "") as root:
        for path in {*tree.steering(), *linked}:
            above, name = os.path.split(path)
            with opened_folder(root, above) as folder:
                if folder is not None and (part := read_part(folder, name)) is not None:
                    images[path] = part
    return images


def _put_files_aside(watched: _Watched) -> list[str]:
    """Rename what commands have made of the candidates, and put back what was there."""
    notes = []
    tree, before = watched.tree, watched.images
    known = {(os.path.basename(path), part.data) for path, part in before.items() if part.kind == "file"}
    with opened_folder(tree.root, "") as root:
        for path, part in _images(tree, watched.linked).items():
            above, name = os.path.split(path)
            old = before.get(path)
            if (
                old == part
                or (part.kind == "file" and (name, part.data) in known)
                or _is_harmless(watched, path, part, old)
            ):
                continue
            with opened_folder(root, above) as folder:
                if folder is None:
                    continue
                with suppress(FileNotFoundError):
                    aside = move_aside(folder, name)
                    back = ""
                    if old is not None:
                        put_back(folder, name, old)
                        back = ", and the old text is back"
                    notes.append(
                        f"[{path} ({_why(path, watched.linked)}) was changed after untrusted content was read: the "
                        f"new text is now {os.path.join(above, aside)}{back}. Write it with write_file, so that a "
                        "person can be asked.]"
                    )
    return notes


def _is_harmless(watched: _Watched, path: str, part: Part, old: Part | None) -> bool:
    if part.kind != "file" or part.data is None:
        return False
    if old is not None and old.kind == "file" and old.data == part.data:
        return True  # only its mode has changed
    if written_by_tools.wrote(os.path.join(watched.tree.root, path), part.data):
        return True
    if os.path.basename(path) == "package.json" and old is not None and old.data is not None:
        return _same_but_for_dependencies(old.data, part.data)
    return is_older_blob(watched.tree, path, part.data, watched.tainted_since)


def _same_but_for_dependencies(old: bytes, new: bytes) -> bool:
    """Whether a package.json differs only in what it depends on, as `npm install` leaves it."""
    with contextlib.suppress(ValueError, RecursionError):
        one, other = json.loads(old), json.loads(new)
        if isinstance(one, dict) and isinstance(other, dict):
            for name in _DEPENDENCIES:
                one.pop(name, None)
                other.pop(name, None)
            return bool(one == other)
    return False
