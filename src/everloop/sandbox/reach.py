"""What a path that a model gave may touch. Every file tool opens through here, and nothing else decides.

In a restricted call the kernel resolves the path below the workspace's descriptor (openat2), so there is no instant
between the check and the use in which a link could be swapped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .confinement import STEERING
from .openat2 import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, NoOpenat2, openat2
from .paths import normalized, within

# O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ANY = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC  # to look at, whatever it is
_GIT_NAMES = (
    "HEAD",
    "objects",
    "refs",
    "commondir",
    "config",
    "config.worktree",
    "hooks",
    "info",
    "worktrees",
    "modules",
)
_CONFINED = BENEATH | NO_MAGICLINKS


class OutOfReach(Exception):
    """A path that this call may not touch; the text says why and what to do."""


class Opened(NamedTuple):
    """An open file or folder and its real place."""

    descriptor: int
    real: str


@dataclass(slots=True, frozen=True)
class Target:
    """Where a file is to be put: a name in an open folder, and what stands there now."""

    folder: int
    name: str
    real: str
    old: os.stat_result | None


@dataclass(slots=True, frozen=True)
class Reach:
    """What one call may touch."""

    workspace: Path
    restricted: bool = True
    approved: bool = False  # a person has seen the path: it may lie outside, but then no link may lead elsewhere
    outputs: Path | None = None  # may be read besides, never written
    protected: tuple[Path, ...] = ()  # out of reach where restricted, however they are got at
    frozen: tuple[Path, ...] = ()  # not to be written where restricted
    guard: Callable[[str, bool], None] | None = None
    readable: tuple[Path, ...] = ()  # further folders that may be read, never written
    steers: Callable[[str], str] = lambda path: ""  # why a file of the workspace must be written by its own name only

    @contextmanager
    def open(self, path: str, flags: int = READ) -> Iterator[Opened]:
        """A file or folder, opened for reading and closed at the end of the block."""
        place = self._place(path)
        descriptor = self._resolve(place, flags, path)
        try:
            real = _real(descriptor, place)
            self._allow(real, path, writing=False)
            yield Opened(descriptor, real)
        finally:
            os.close(descriptor)

    @contextmanager
    def target(self, path: str) -> Iterator[Target]:
        """The place of a file that is to be written, with missing folders made. Links are followed as in reading."""
        place = self._place(path)
        try:
            looked_at = self._resolve(place, _ANY, path, writing=True)
        except FileNotFoundError:
            folder, name, real = self._make_folders(place, path)
            old = None
        else:
            try:
                folder, name, real, old = self._parent(looked_at, place, path)
            finally:
                os.close(looked_at)
        try:
            yield Target(folder, name, real, old)
        finally:
            os.close(folder)

    def _place(self, path: str) -> str:
        if "\0" in path or not path.strip():
            raise OutOfReach(f"{path!r} is not a path: give one relative to the workspace.")
        return normalized(path, self.workspace)

    def _start(self, place: str, path: str, writing: bool) -> tuple[str, int]:
        """The folder that a path is resolved from, and by which rules."""
        folders = [self.workspace] if writing else [self.workspace, *self._read_only()]
        for folder in folders:
            for root in (os.path.abspath(folder), os.path.realpath(folder)):
                if within(place, root):
                    return root, _CONFINED
        if self.approved:
            return "/", NO_SYMLINKS | BENEATH
        root = os.path.realpath(self.workspace)
        raise OutOfReach(f"{path} is outside the workspace: only files inside {root} can be reached.")

    def _resolve(self, place: str, flags: int, path: str, writing: bool = False, rules: int = 0) -> int:
        """Open a place by the rules of this call, and more of them if need be."""
        if not self.restricted:
            return os.open(place, flags)
        root, own_rules = self._start(place, path, writing)
        try:
            return _open_below(root, place, flags, own_rules | rules)
        except NoOpenat2:
            raise OutOfReach(
                "Files cannot be confined to the workspace here: that takes Linux 5.6 or newer with openat2. "
                "Set restrict_to_workspace = false to work without confinement."
            ) from None
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ELOOP):
                raise
        real = os.path.realpath(place)
        if own_rules == _CONFINED and not rules and within(real, os.path.realpath(root)):
            # An absolute link to a place inside. The kernel refuses it, and judges the place itself once more.
            return self._resolve(real, flags, path, writing, NO_SYMLINKS)
        if self.approved:
            raise OutOfReach(f"{path} leads through a link to {real}: ask for that path itself.")
        raise OutOfReach(f"{path} leads outside the workspace through a link: only files inside can be reached.")

    def _parent(self, looked_at: int, place: str, path: str) -> tuple[int, str, str, os.stat_result]:
        """The folder of a file that exists, its name there, its real place and what it is."""
        info = os.fstat(looked_at)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(info.st_mode):
            raise OutOfReach(f"{path} is a pipe, socket or device: only ordinary files can be read or written.")
        real = _real(looked_at, place)
        self._allow(real, path, writing=True)
        above, name = os.path.split(real)
        folder = self._resolve(above, FOLDER, path, writing=True, rules=NO_SYMLINKS)
        try:
            now = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(info, now):
                return folder, name, real, now
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(folder)
            raise
        os.close(folder)
        raise OutOfReach(f"{path} was moved at the same time by something else: look again, then try again.")

    def _make_folders(self, place: str, path: str) -> tuple[int, str, str]:
        """Make the missing folders of a new file, one by one from the last that exists."""
        above, name = os.path.split(place)
        missing = [name]
        while True:
            try:
                folder = self._resolve(above, FOLDER, path, writing=True)
                break
            except FileNotFoundError:
                above, name = os.path.split(above)
                if not name:
                    raise
                missing.insert(0, name)
        try:
            real = os.path.join(_real(folder, above), *missing)
            self._allow(real, path, writing=True)
            for name in missing[:-1]:
                below = _make_folder(folder, name, path)
                os.close(folder)
                folder = below
            _check_free(folder, missing[-1], path)
        except BaseException:
            os.close(folder)
            raise
        return folder, missing[-1], real

    def _read_only(self) -> list[Path]:
        return [*([] if self.outputs is None else [self.outputs]), *self.readable]

    def _steering(self, place: str, real: bool = True) -> str:
        """Which of the files and folders that steer the agent a place is or lies in; "" for none."""
        for root in {os.path.realpath(self.workspace), *([] if real else [os.path.abspath(self.workspace)])}:
            for name in STEERING:
                path = os.path.join(root, name)
                if within(place, os.path.realpath(path) if real else path):
                    return name
        return ""

    def _allow(self, real: str, path: str, writing: bool) -> None:
        """Refuse a real place that belongs to the runtime, and ask the guard."""
        if self.restricted:
            own = [os.path.realpath(self.workspace)]
            for folder in map(os.path.realpath, self._read_only()):
                if not writing:
                    own.append(folder)
                elif within(real, folder):
                    raise OutOfReach(f"{path} can be read, not written: copy it into the workspace to change it.")
            for folder in map(os.path.realpath, self.protected):
                exempt = any(within(real, inner) and inner != folder and within(inner, folder) for inner in own)
                if within(real, folder) and not exempt:
                    raise OutOfReach(f"{path} belongs to the runtime itself: it can be neither read nor written.")
            if writing and any(within(real, os.path.realpath(folder)) for folder in self.frozen):
                raise OutOfReach(f"{path} belongs to the program that runs this agent: it can be read, not written.")
            asked = os.path.relpath(self._place(path), os.path.abspath(self.workspace))
            shown = self.approved and _is_gits(asked)  # a person has seen the path, but not where a link leads
            if writing and not shown and _is_gits(real.removeprefix(own[0])):
                # What stands there makes a person's own git, and their editor's, run commands outside of any sandbox.
                raise OutOfReach(f"{path} is git's own: change it by a git command, or let a person do it.")
            if writing and not self.approved and _makes_repository(real, own[0]):
                raise OutOfReach(f"{path} would be part of a git repository's own folder: use git commands for that.")
        if writing and (name := self._steering(real)) and name != self._steering(self._place(path), real=False):
            # The policy judges the name that was given: what steers the agent is written by no other.
            raise OutOfReach(f"{path} is the same file as {name}, which steers the agent: write to it by that name.")
        if writing and (why := self._steering_file(real)) and not self._steering_file(self._place(path)):
            raise OutOfReach(f"{path} is the same file as {real}, and {why}: write to it by that name.")
        if self.guard is not None:
            self.guard(real, writing)

    def _steering_file(self, place: str) -> str:
        for root in (os.path.realpath(self.workspace), os.path.abspath(self.workspace)):
            if within(place, root):
                return self.steers(os.path.relpath(place, root))
        return ""


def _is_gits(path: str) -> bool:
    return ".git" in path.lower().split("/")


def _makes_repository(real: str, workspace: str) -> bool:
    """Whether a folder that the file lies in is, or becomes, one that git takes for a repository's own folder.

    Such a folder need not be called `.git`: git looks for HEAD and objects in any folder that it is run in.
    """
    parts = real.removeprefix(workspace).strip("/").split("/")
    for count, name in enumerate(parts):
        if name in _GIT_NAMES:
            folder = os.path.join(workspace, *parts[:count])
            there = {other for other in _GIT_NAMES if other == name or os.path.lexists(os.path.join(folder, other))}
            if "HEAD" in there and ("commondir" in there or {"objects", "refs"} <= there):
                return True
    return False


def _open_below(root: str, place: str, flags: int, rules: int) -> int:
    folder = os.open(root, _ANY | os.O_DIRECTORY)
    try:
        return openat2(os.path.relpath(place, root), flags, folder, rules)
    finally:
        os.close(folder)


def _real(descriptor: int, place: str) -> str:
    """The real path of what is open, as the kernel knows it."""
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # no /proc: not Linux, and so not a restricted call
        return os.path.realpath(place)
    if not real.startswith("/") or os.fstat(descriptor).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    return real


def _make_folder(folder: int, name: str, path: str) -> int:
    """Make a folder in an open one, unless somebody just did, and open it; a link in its place is not followed."""
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        _check_free(folder, name, path)
    return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _check_free(folder: int, name: str, path: str) -> None:
    """Refuse a link that leads nowhere: writing would not create what it names."""
    try:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OutOfReach(f"{path} leads through a link to nothing: write to the place that is meant.")
    except FileNotFoundError:
        return
