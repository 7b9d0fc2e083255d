"""Workspace changes made by turns of the web page: recorded like those of the chat, so that `/undo` works in both."""

from __future__ import annotations

import threading
from pathlib import Path

from ..log import CallEnded, Logged, ModelAnswered
from ..sandbox.reach import normalized
from ..threads import in_thread
from .turn_changes import MOST_IN_ALL, Activity, FileState, SavedTurns, Snapshot, TurnChanges, take_snapshot


class Snapshots:
    """The latest snapshots of workspaces, shared by the turns in them, so that unchanged files are not read again.

    The total size of their contents is bounded.
    """

    def __init__(self, most: int = MOST_IN_ALL) -> None:
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
