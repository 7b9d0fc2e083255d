"""What a turn changed in the workspace, and how to undo it.

Before a turn the files of the workspace are read, up to a limit; after it they are compared. A change belongs to the
turn if a file tool made it, or if it happened while a command of the turn ran; any other was made by someone else. A
change is undone only while the file is as the turn left it. The latest turns are kept in the home, so that they can be
undone after a restart too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from .. import events
from ..log import CallEnded, Logged, ModelAnswered
from ..sandbox.reach import normalized
from ..threads import in_thread
from .prompt import SKIPPED

MAX_FILES = 5_000
MAX_BYTES = 1_000_000  # of a file that is kept
MAX_IN_ALL = 64_000_000
MAX_TURNS = 20  # that can be undone
SAVED_TURNS = 5  # that can be undone after a restart
SAVED_BYTES = 8_000_000  # of a session
SAVED_SESSIONS = 50
LEEWAY = 0.05  # seconds by which file times are inaccurate


class FileState(NamedTuple):
    """A regular file: what reveals a change, and its content unless it is too large."""

    mtime: int
    size: int
    inode: int
    mode: int
    content: bytes | None

    def same(self, other: FileState | None) -> bool:
        if other is None:
            return False
        if self.content is not None and other.content is not None:
            return self.content == other.content
        return self[:3] == other[:3]


class Snapshot(msgspec.Struct):
    """The files of a folder at one time, by their relative paths."""

    files: dict[str, FileState] = {}
    whole: bool = True  # no file was left out


def take_snapshot(folder: Path, known: Snapshot | None = None) -> Snapshot:
    """Read the files of a folder; those unchanged since the `known` snapshot are not read again."""
    found = Snapshot()
    kept = 0
    for path, info in _regular_files(folder):
        if len(found.files) == MAX_FILES:
            found.whole = False
            break
        old = known.files.get(path) if known is not None else None
        facts = (info.st_mtime_ns, info.st_size, info.st_ino)
        content = old.content if old is not None and old[:3] == facts else None
        if content is None and info.st_size <= MAX_BYTES and kept + info.st_size <= MAX_IN_ALL:
            content = _read(folder / path)
        kept += len(content or b"")
        found.files[path] = FileState(*facts, stat.S_IMODE(info.st_mode), content)
    return found


def _regular_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = os.path.join(here, name)
            with contextlib.suppress(OSError):
                info = os.lstat(path)
                if stat.S_ISREG(info.st_mode):
                    yield os.path.relpath(path, folder), info


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(MAX_BYTES + 1)
    return data if len(data) <= MAX_BYTES else None


class Activity(msgspec.Struct):
    """The parts of a turn that may change files."""

    written: set[str] = set()  # paths that file tools wrote
    commands: list[tuple[float, float]] = []  # when commands ran

    def made(self, path: str, after: FileState | None) -> bool:
        """Return whether this turn changed a file."""
        if path in self.written:
            return True
        if after is None:  # a removed file has no time
            return bool(self.commands)
        changed = after.mtime / 1e9
        return any(start - LEEWAY <= changed <= end + LEEWAY for start, end in self.commands)


class Change(NamedTuple):
    """A file that a turn changed; None where it does not exist."""

    path: str
    before: FileState | None
    after: FileState | None


class TurnChanges(msgspec.Struct, frozen=True):
    """The changes of one turn."""

    folder: Path
    changes: tuple[Change, ...]
    whole: bool  # all files of the folder were compared
    ran_commands: bool = True  # which may have done more than change files of the folder

    @classmethod
    def between(cls, folder: Path, before: Snapshot, after: Snapshot, activity: Activity) -> TurnChanges:
        changes = [
            Change(path, old, new)
            for path in sorted({*before.files, *after.files})
            if _differ(old := before.files.get(path), new := after.files.get(path)) and activity.made(path, new)
        ]
        return cls(folder, tuple(changes), before.whole and after.whole, bool(activity.commands))

    def undo(self) -> tuple[list[str], list[str]]:
        """Restore the files; return those that were restored, and what could not be undone and why."""
        done: list[str] = []
        kept: list[str] = []
        for change in self.changes:
            try:
                problem = self._undo(change)
            except OSError as error:
                problem = error.strerror or str(error)
            if problem:
                kept.append(f"{change.path}: {problem}")
            else:
                done.append(change.path)
        return done, kept

    def _undo(self, change: Change) -> str:
        """Restore one file; return why not if that fails."""
        if change.before is not None and change.before.content is None:
            return "it was too large to be kept"
        parent, _, name = change.path.rpartition("/")
        with _opened(self.folder, parent) as folder:
            if not _is_as(folder, name, change.after):
                return "it has changed since, and is left alone"
            if change.before is None:
                os.unlink(name, dir_fd=folder)
                return ""
            assert change.before.content is not None
            draft = f".{name[:100]}.{secrets.token_hex(4)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(change.before.content)
                os.fchmod(file.fileno(), change.before.mode)
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
            return ""


# ---------------------------------------------------------------------------------------------- after a restart


class _Saved(msgspec.Struct, array_like=True):
    """A turn as stored in a file."""

    changes: tuple[Change, ...]
    whole: bool
    ran_commands: bool = True


class SavedTurns:
    """The latest turns of a session that changed files, in a file of the home that no tool can read.

    Its methods read the disk: call them in a thread.
    """

    def __init__(self, home: Path, folder: Path, session: str) -> None:
        name = hashlib.sha256(os.fsencode(f"{folder}\0{session}")).hexdigest()[:24]
        self.path = home / "undo" / name
        self._folder = folder

    def load(self) -> list[TurnChanges]:
        """Return the turns, latest last; none if the file cannot be read."""
        try:
            saved = msgspec.msgpack.decode(self.path.read_bytes(), type=list[_Saved])
        except (OSError, msgspec.MsgspecError):
            return []
        return [TurnChanges(self._folder, one.changes, one.whole, one.ran_commands) for one in saved]

    def save(self, turns: Sequence[TurnChanges]) -> None:
        """Keep the latest of these turns, as many as fit. Turns that cannot be written can only be undone in this
        process.
        """
        kept: list[_Saved] = []
        size = 0
        for turn in reversed(turns[-SAVED_TURNS:]):
            states = [state for change in turn.changes for state in change[1:] if state is not None]
            size += sum(len(state.content or b"") + 200 for state in states)
            if size > SAVED_BYTES:
                break
            kept.insert(0, _Saved(turn.changes, turn.whole, turn.ran_commands))
        with contextlib.suppress(OSError, UnicodeEncodeError):  # a full disk, or a name that is no text
            if kept:
                self._write(msgspec.msgpack.encode(kept))
            else:
                self.forget()

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        draft.replace(self.path)
        others = sorted(self.path.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in others[:-SAVED_SESSIONS]:
            old.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- turns of the chat


class ChangeTracker:
    """Follows the turns of a chat, and keeps the changes of the latest ones, including those of earlier processes."""

    def __init__(self, folder: Path, saved: SavedTurns) -> None:
        self._turns: deque[TurnChanges] = deque(maxlen=MAX_TURNS)
        self._saved = saved
        self._is_loaded = False
        self._folder = folder
        self._last: Snapshot | None = None
        self._before: Snapshot | None = None
        self._turn = ""
        self._activity = Activity()
        self._running: dict[str, float] = {}

    async def latest(self) -> TurnChanges | None:
        """Return the last turn that changed files; None if there is none."""
        if not self._is_loaded:
            earlier = await in_thread(self._saved.load)
            if not self._is_loaded:
                self._turns.extendleft(reversed(earlier))
                self._is_loaded = True
        return self._turns[-1] if self._turns else None

    async def undo(self, turn: TurnChanges) -> tuple[list[str], list[str]]:
        """Undo a turn and forget it; return the files that were restored, and what could not be undone and why."""
        self._turns.remove(turn)
        found = await in_thread(turn.undo)
        await in_thread(self._saved.save, list(self._turns))
        return found

    async def begin(self) -> None:
        """Read the workspace before a turn, unless one is running."""
        if not self._turn:
            self._last = self._before = await in_thread(take_snapshot, self._folder, self._last)

    def see(self, event: events.Event) -> None:
        match event:
            case events.TurnStarted(turn=turn) if turn != self._turn:
                self._turn, self._activity = turn, Activity()
            case events.ToolStarted(name="write_file" | "edit_file", arguments={"path": str(path)}):
                self._activity.written.add(os.path.normpath(os.path.relpath(self._folder / path, self._folder)))
            case events.ToolStarted(name="exec", call=call):
                self._running[call] = time.time()
            case events.ToolEnded(name="exec", call=call) if call in self._running:
                self._activity.commands.append((self._running.pop(call), time.time()))

    async def end(self) -> None:
        """Compare the workspace after a turn with its state before."""
        before, activity = self._before, self._activity
        activity.commands += [(since, time.time()) for since in self._running.values()]
        self._turn, self._running = "", {}
        if before is None or not (activity.written or activity.commands):
            return
        self._last = self._before = after = await in_thread(take_snapshot, self._folder, before)
        if (found := TurnChanges.between(self._folder, before, after, activity)).changes:
            await self.latest()  # of earlier processes
            self._turns.append(found)
            await in_thread(self._saved.save, list(self._turns))


# ---------------------------------------------------------------------------------------------- turns of the web page


class Snapshots:
    """The latest snapshots of workspaces, shared by the turns in them, so that unchanged files are not read again.

    The total size of their contents is bounded.
    """

    def __init__(self, most: int = MAX_IN_ALL) -> None:
        self._most = most
        self._known: dict[Path, Snapshot] = {}  # latest last
        self._lock = threading.Lock()

    def take(self, folder: Path) -> Snapshot:
        """Read what has changed in a folder. Reads from disk: call it in a thread."""
        with self._lock:
            known = self._known.get(folder)
        found = take_snapshot(folder, known)
        with self._lock:
            self._known.pop(folder, None)
            self._known[folder] = found
            sizes = {path: _size(snapshot) for path, snapshot in self._known.items()}
            while sum(sizes.values()) > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest], sizes[oldest]
        return found


class PageChanges:
    """Follows the turns of one session by their entries."""

    def __init__(self, home: Path, snapshots: Snapshots, folder: Path, session: str) -> None:
        self._snapshots = snapshots
        self._folder = folder
        self._saved = SavedTurns(home, folder, session)
        self._before: Snapshot | None = None
        self._began: dict[str, float] = {}  # when commands were called
        self._activity = Activity()

    async def begin(self) -> None:
        """Read the workspace before a turn."""
        self._before = await in_thread(self._snapshots.take, self._folder)
        self._began, self._activity = {}, Activity()

    def note(self, one: Logged) -> None:
        """Take an entry of the turn into account."""
        match one.entry:
            case ModelAnswered(calls=calls):
                for call in calls:
                    path = call.arguments.get("path")
                    if call.name in ("write_file", "edit_file") and isinstance(path, str):
                        self._activity.written.add(normalized(path, self._folder).removeprefix(f"{self._folder}/"))
                    elif call.name == "exec":
                        self._began[call.id] = one.at
            case CallEnded(id=id) if id in self._began:
                self._activity.commands.append((self._began.pop(id), one.at))

    async def end(self) -> None:
        """Compare the workspace after a turn with its state before."""
        if self._before is None or not (self._activity.written or self._activity.commands):
            return
        after = await in_thread(self._snapshots.take, self._folder)
        found = TurnChanges.between(self._folder, self._before, after, self._activity)
        self._before = after
        if found.changes:
            await in_thread(lambda: self._saved.save([*self._saved.load(), found]))

    async def latest(self) -> list[tuple[str, bytes | None, bytes | None]] | None:
        """Return the files that the last turn changed, each with its content before and after; None if no turn changed
        any.

        A content is None if the file did not exist, or was too large to be kept.
        """
        turns = await in_thread(self._saved.load)
        if not turns:
            return None
        return [(change.path, _content(change.before), _content(change.after)) for change in turns[-1].changes]

    async def undo(self) -> tuple[list[str], list[str]]:
        """Undo the last turn that changed files; return what was restored, and what was not and why."""
        return await in_thread(self._undo)

    def _undo(self) -> tuple[list[str], list[str]]:
        turns = self._saved.load()
        if not turns:
            return [], []
        found = turns[-1].undo()
        self._saved.save(turns[:-1])
        return found


def _size(snapshot: Snapshot) -> int:
    return sum(len(state.content or b"") for state in snapshot.files.values())


def _content(state: FileState | None) -> bytes | None:
    return state.content if state is not None else None


# ---------------------------------------------------------------------------------------------- files


def _differ(old: FileState | None, new: FileState | None) -> bool:
    return new is not None if old is None else not old.same(new)


@contextlib.contextmanager
def _opened(folder: Path, inside: str) -> Iterator[int]:
    """Open a folder below another, creating what is missing. Links are not followed: they may lead out of it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        for part in inside.split("/") if inside else ():
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=descriptor)
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _is_as(folder: int, name: str, state: FileState | None) -> bool:
    """Return whether a file is as it was after the turn."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return state is None
    except OSError:
        return False
    with open(descriptor, "rb") as file:
        if state is None or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        if state.content is None:
            info = os.fstat(descriptor)
            return (info.st_mtime_ns, info.st_size, info.st_ino) == state[:3]
        return file.read(MAX_BYTES + 1) == state.content
