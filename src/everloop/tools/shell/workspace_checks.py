"""Undo what commands plant in a workspace for other programs to execute later, outside of the sandbox.

After every confined command, the git repositories of the workspace are checked (`sandbox/repositories.py`). After a
command in a tainted turn, so are the files that instruct the agent and those that build tools, editors or shells
execute (`tools/policy/steering.py`). What is new and unsafe is renamed, and the previous content is restored. While
commands run, a record on disk holds the previous state: if the runtime is killed, the next one performs the check.
"""

from __future__ import annotations

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
from pathlib import Path

import msgspec

from ...sandbox import repositories
from ...sandbox.folders import ASIDE, FolderTree, Part, aside_name, move_aside, opened_folder, put_back, read_part
from ...sandbox.reach import STEERING, within
from ..files.paths import written_by_tools
from ..policy.steering import is_generated, leads_to_steering, planted_by_command

logger = logging.getLogger(__name__)
_TICK_NS = 20_000_000  # granularity of file timestamps
_DEPENDENCIES = ("dependencies", "devDependencies", "peerDependencies", "optionalDependencies")
_numbers = itertools.count(1)
AgentFiles = dict[str, tuple[int, int, str]]
Images = dict[str, Part]


class Ticket(msgspec.Struct, eq=False):
    """A command that is running in a workspace."""

    workspace: str
    tainted: bool = False  # it may act on untrusted content, and was not approved


class _Watched(msgspec.Struct):
    """A workspace with running commands, and its state before the first of them."""

    tree: FolderTree
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    running: set[Ticket] = set()
    frozen: set[str] = set()  # read-only for all of them
    repositories: repositories.State = {}
    record: Path | None = None
    agent_files: AgentFiles = {}
    images: Images = {}  # of the files that other programs execute
    linked: dict[str, str] = {}  # targets of links with such names, and the reason
    tainted_since: int = 0  # nanoseconds


class WorkspaceChecks:
    """Checks workspaces after commands. All methods do file I/O: call them in a thread."""

    def __init__(self, records: Path | None = None) -> None:
        self._records = records
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._recovery: threading.Thread | None = None
        if records is not None:  # at once: the user may run git before the agent runs a command
            self._recovery = threading.Thread(target=_recover, args=(records,), daemon=True)
            self._recovery.start()

    def is_running(self, workspace: str) -> bool:
        """Return whether a confined command of this process is running in a workspace."""
        watched = self._watched.get(workspace)
        return watched is not None and bool(watched.running)

    def begin(self, workspace: str, frozen: tuple[str, ...], *, tainted: bool) -> Ticket:
        """Record the state of a workspace before a command starts. `frozen` paths are read-only for the command."""
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
        """Mark a command, possibly already running, as acting on untrusted content from now on."""
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
        """Undo what commands have planted so far. Returns notes for the model."""
        watched = self._watched[ticket.workspace]
        with watched.lock, self._alone(ticket.workspace):
            return self._check(watched, ticket) if ticket in watched.running else []

    def end(self, ticket: Ticket) -> list[str]:
        """Like `check`, once a command and all its processes have ended."""
        watched = self._watched[ticket.workspace]
        with watched.lock, self._alone(ticket.workspace):
            if ticket not in watched.running:
                return []
            try:
                notes = self._check(watched, ticket)
            except OSError as error:
                notes = [f"[the workspace could not be checked after the command: {error}]"]
                watched.record = None  # the file stays, so that the next runtime checks again
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
        """Lock the records of a workspace against other runtimes, and yield their folder."""
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
        for other in others:  # do not trust what that runtime's commands have created so far
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
    """Check the workspaces in which commands were running when a runtime was killed."""
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
        notes = []  # incomplete, so no command had started
    for note in notes:
        logger.warning("a command was interrupted when the runtime was killed: %s", note)
    path.unlink(missing_ok=True)


def _started(pid: int) -> str:
    """Return the start time of a process in the kernel's clock ticks; "" if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2].split(" ")[19]
    except (OSError, IndexError):
        return ""


# ------------------------------------------------------------------------------------------------ the agent's files


def _agent_files(workspace: str) -> AgentFiles:
    """Return the identities of the agent's instruction files and folders, and the targets of links among them."""
    found: AgentFiles = {}
    for name in STEERING:
        with suppress(OSError):
            path = os.path.join(workspace, name)
            info = os.lstat(path)
            found[name] = info.st_dev, info.st_ino, os.readlink(path) if os.path.islink(path) else ""
    return found


def _put_agent_files_aside(workspace: str, before: AgentFiles) -> list[str]:
    """Rename new instruction files. Existing ones are read-only for commands, so a person changed them."""
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
            notes.append(
                f"[{name} instructs the agent and was created after untrusted content was read: it is now {aside}]"
            )
    return notes


# ------------------------------------------------------------------------------------------------ build files


def _is_candidate(path: str) -> bool:
    return not ASIDE.search(path) and bool(planted_by_command(path) or leads_to_steering(path))


def _why(path: str, linked: dict[str, str]) -> str:
    return planted_by_command(path) or linked.get(path, "") or "other programs execute it"


def _linked(tree: FolderTree) -> dict[str, str]:
    """Return the files of the workspace that candidates link to."""
    found: dict[str, str] = {}
    for path in tree.steering():
        place = os.path.join(tree.root, path)
        if os.path.islink(place):
            real = os.path.realpath(place)
            if within(real, tree.root) and os.path.isfile(real):
                found[os.path.relpath(real, tree.root)] = planted_by_command(path)
    return found


def _images(tree: FolderTree, linked: dict[str, str]) -> Images:
    """Read all candidates and the targets of links among them."""
    images: Images = {}
    with opened_folder(tree.root, "") as root:
        for path in {*tree.steering(), *linked}:
            above, name = os.path.split(path)
            with opened_folder(root, above) as folder:
                if folder is not None and (part := read_part(folder, name)) is not None:
                    images[path] = part
    return images


def _put_files_aside(watched: _Watched) -> list[str]:
    """Rename candidates that commands created or changed, and restore the previous content."""
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
                        back = ", and the previous text is restored"
                    notes.append(
                        f"[{path} ({_why(path, watched.linked)}) was changed after untrusted content was read: the "
                        f"new text is in {os.path.join(above, aside)}{back}. Write it with write_file, so that a "
                        "person can be asked.]"
                    )
    return notes


def _is_harmless(watched: _Watched, path: str, part: Part, old: Part | None) -> bool:
    if part.kind != "file" or part.data is None:
        return False
    if old is not None and old.kind == "file" and old.data == part.data:
        return True  # only its mode differs
    if written_by_tools.wrote(os.path.join(watched.tree.root, path), part.data):
        return True
    if os.path.basename(path) == "package.json" and old is not None and old.data is not None:
        return _same_but_for_dependencies(old.data, part.data)
    return repositories.is_older_blob(watched.tree, path, part.data, watched.tainted_since)


def _same_but_for_dependencies(old: bytes, new: bytes) -> bool:
    """Return whether two package.json differ only in their dependencies, as after `npm install`."""
    with suppress(ValueError, RecursionError):
        one, other = json.loads(old), json.loads(new)
        if isinstance(one, dict) and isinstance(other, dict):
            for name in _DEPENDENCIES:
                one.pop(name, None)
                other.pop(name, None)
            return bool(one == other)
    return False
