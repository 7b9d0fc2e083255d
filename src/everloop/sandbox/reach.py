"""Which files a tool call may open, and the workspace that this is derived from.

Every file tool opens paths here, and nothing else decides.

In a restricted call the kernel resolves the path beneath the workspace's descriptor (openat2), so no link can be
swapped in between check and use.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import EverloopError
from ..text import clean
from ..threads import in_thread

# Workspace files that instruct the agent: read-only for commands.
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


def normalized(path: str, workspace: Path) -> str:
    """Return an absolute path without "..". A leading "~" is the home folder; "~user" is not expanded."""
    text = clean(path)
    if text == "~" or text.startswith("~/"):
        text = os.path.expanduser("~") + text[1:]
    root = str(workspace) if workspace.is_absolute() else os.path.abspath(workspace)
    return "/" + os.path.normpath(os.path.join(root, text)).lstrip("/")


def within(path: str, folder: str) -> bool:
    """Return whether a path is a folder or inside it. Both must be real paths, or both as they were written."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def within_any(path: str, folders: Iterable[str]) -> bool:
    return any(within(path, folder) for folder in folders)


# O_NONBLOCK: opening a pipe without a writer would block for ever.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ANY = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC  # for inspection, whatever kind of file it is
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
BENEATH = 0x08  # nothing outside of the folder, through "..", an absolute path or a link
NO_SYMLINKS = 0x04  # no symbolic links at all
NO_MAGICLINKS = 0x02  # no /proc links to open files
_NUMBER = 437  # the same on every architecture
_TRIES = 64
_CONFINED = BENEATH | NO_MAGICLINKS


class OutOfReach(Exception):
    """A path that this call may not access; the text says why and what to do."""


class Opened(NamedTuple):
    """An open file or folder and its real path."""

    descriptor: int
    real: str


@dataclass(slots=True, frozen=True)
class Target:
    """Where a file will be written: a name in an open folder, and the file that is there now."""

    folder: int
    name: str
    real: str
    old: os.stat_result | None


@dataclass(slots=True, frozen=True)
class Reach:
    """What one tool call may access."""

    workspace: Path
    restricted: bool = True
    approved: bool = False  # a person approved this path: it may be outside, but then must not contain links
    outputs: Path | None = None  # an additional folder that is readable, never writable
    protected: tuple[Path, ...] = ()  # never accessible in a restricted call
    frozen: tuple[Path, ...] = ()  # not writable in a restricted call
    guard: Callable[[str, bool], None] | None = None
    readable: tuple[Path, ...] = ()  # further folders that are readable, never writable
    steers: Callable[[str], str] = lambda path: ""  # why a file may only be written by its own name; "" for most files

    @contextmanager
    def open(self, path: str, flags: int = READ) -> Iterator[Opened]:
        """Open a file or folder for reading, and close it at the end of the block."""
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
        """Open the folder of a file to be written, creating missing folders. Links are followed as for reading."""
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
        """Return the folder from which a path is resolved, and the resolve flags."""
        folders = [self.workspace] if writing else [self.workspace, *self._read_only()]
        for folder in folders:
            for root in (os.path.abspath(folder), os.path.realpath(folder)):
                if within(place, root):
                    return root, _CONFINED
        if self.approved:
            return "/", NO_SYMLINKS | BENEATH
        root = os.path.realpath(self.workspace)
        raise OutOfReach(f"{path} is outside the workspace: only files inside {root} can be accessed.")

    def _resolve(self, place: str, flags: int, path: str, writing: bool = False, rules: int = 0) -> int:
        """Open a path with the resolve flags of this call and additional ones."""
        if not self.restricted:
            return os.open(place, flags)
        root, own_rules = self._start(place, path, writing)
        try:
            return _open_below(root, place, flags, own_rules | rules)
        except NoOpenat2:
            raise OutOfReach(
                "Files cannot be confined to the workspace here: that needs Linux 5.6 or newer with openat2. "
                "Set restrict_to_workspace = false to work without confinement."
            ) from None
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ELOOP):
                raise
        real = os.path.realpath(place)
        if own_rules == _CONFINED and not rules and within(real, os.path.realpath(root)):
            # An absolute link to a path inside the workspace. The kernel refuses it, so open its target instead.
            return self._resolve(real, flags, path, writing, NO_SYMLINKS)
        if self.approved:
            raise OutOfReach(f"{path} contains a link to {real}: use that path instead.")
        raise OutOfReach(f"{path} leads outside the workspace through a link: only files inside can be accessed.")

    def _parent(self, looked_at: int, place: str, path: str) -> tuple[int, str, str, os.stat_result]:
        """Return the open folder of an existing file, its name, its real path and its status."""
        info = os.fstat(looked_at)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(info.st_mode):
            raise OutOfReach(f"{path} is a pipe, socket or device: only regular files can be read or written.")
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
        raise OutOfReach(f"{path} was moved by another process meanwhile: check it and try again.")

    def _make_folders(self, place: str, path: str) -> tuple[int, str, str]:
        """Create the missing folders of a new file, one by one below the last existing one."""
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
        """Return which of the agent's instruction files or folders contains a path; "" for none."""
        for root in {os.path.realpath(self.workspace), *([] if real else [os.path.abspath(self.workspace)])}:
            for name in STEERING:
                path = os.path.join(root, name)
                if within(place, os.path.realpath(path) if real else path):
                    return name
        return ""

    def _allow(self, real: str, path: str, writing: bool) -> None:
        """Raise OutOfReach for a real path that this call may not access, and consult the policy's guard."""
        if self.restricted:
            own = [os.path.realpath(self.workspace)]
            for folder in map(os.path.realpath, self._read_only()):
                if not writing:
                    own.append(folder)
                elif within(real, folder):
                    raise OutOfReach(f"{path} is read-only: copy it into the workspace to change it.")
            for folder in map(os.path.realpath, self.protected):
                exempt = any(within(real, inner) and inner != folder and within(inner, folder) for inner in own)
                if within(real, folder) and not exempt:
                    raise OutOfReach(f"{path} belongs to the runtime: it can be neither read nor written.")
            if writing and any(within(real, os.path.realpath(folder)) for folder in self.frozen):
                raise OutOfReach(f"{path} belongs to the program that runs this agent: it is read-only.")
            asked = os.path.relpath(self._place(path), os.path.abspath(self.workspace))
            shown = self.approved and _is_gits(asked)  # a person approved the path, but not the target of a link
            if writing and not shown and _is_gits(real.removeprefix(own[0])):
                # The user's git, and their editor's, execute what these files name, outside of any sandbox.
                raise OutOfReach(f"{path} is internal to git: use a git command, or ask the user to change it.")
            if writing and not self.approved and _makes_repository(real, own[0]):
                raise OutOfReach(f"{path} would be internal to a git repository: use git commands instead.")
        if writing and (name := self._steering(real)) and name != self._steering(self._place(path), real=False):
            # The policy judges the given name, so instruction files can only be written by their own name.
            raise OutOfReach(
                f"{path} is the same file as {name}, which instructs the agent: use that name to write it."
            )
        if writing and (why := self._steering_file(real)) and not self._steering_file(self._place(path)):
            raise OutOfReach(f"{path} is the same file as {real} ({why}): write it by that name.")
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
    """Return whether writing this file touches, or creates, a folder that git takes for a repository.

    Such a folder need not be named `.git`: git looks for HEAD and objects in any folder it is run in.
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
    """Return the real path of an open file, as the kernel knows it."""
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # no /proc: not Linux, so not a restricted call
        return os.path.realpath(place)
    if not real.startswith("/") or os.fstat(descriptor).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    return real


def _make_folder(folder: int, name: str, path: str) -> int:
    """Create a folder in an open one unless it exists, and open it without following a link."""
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        _check_free(folder, name, path)
    return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _check_free(folder: int, name: str, path: str) -> None:
    """Refuse a dangling link: writing would replace the link instead of creating its target."""
    try:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OutOfReach(f"{path} is a dangling link: write to its target path instead.")
    except FileNotFoundError:
        return


# ------------------------------------------------------------------------------------------------ openat2


class NoOpenat2(Exception):
    """The kernel has no openat2, or a seccomp filter blocks it."""


def openat2(path: str, flags: int, folder: int, resolve: int) -> int:
    """Open a path beneath a folder's descriptor. Raises OSError like `os.open`; EXDEV if it would lead out."""
    call = _system_call()
    raw = os.fsencode(path)
    if b"\0" in raw:  # C would stop reading the path there
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    for _ in range(_TRIES):
        descriptor, error = call(folder, raw, flags | os.O_CLOEXEC, resolve)
        if descriptor >= 0:
            return descriptor
        if error not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: a concurrent rename, so nothing is proven
            break
    raise OSError(error, os.strerror(error), path)


@cache
def _system_call() -> Callable[[int, bytes, int, int], tuple[int, int]]:
    """Return the system call through ctypes, after a trial on a path that always exists."""
    if sys.platform != "linux":
        raise NoOpenat2
    import ctypes

    class How(ctypes.Structure):
        _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]

    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    size = ctypes.c_size_t(ctypes.sizeof(How))

    def call(folder: int, path: bytes, flags: int, resolve: int) -> tuple[int, int]:
        how = How(flags, 0, resolve)
        number = ctypes.c_long(_NUMBER)
        descriptor = system_call(number, ctypes.c_int(folder), ctypes.c_char_p(path), ctypes.byref(how), size)
        return descriptor, ctypes.get_errno()

    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        descriptor, _ = call(root, b".", os.O_PATH | os.O_CLOEXEC, BENEATH)
    finally:
        os.close(root)
    if descriptor < 0:  # ENOSYS on an old kernel, EPERM from an old container filter
        raise NoOpenat2
    os.close(descriptor)
    return call


# ---------------------------------------------------------------------------------------------- the workspace


class Places(NamedTuple):
    """Resolved paths of an agent.

    The workspace is given as configured and with symlinks resolved. `protected` are the runtime's own files, which
    tools must not touch in a restricted workspace; `frozen` is its code, which they must never change.
    """

    workspace: Path
    real_workspace: Path
    protected: tuple[Path, ...]
    frozen: tuple[Path, ...]


class WorkspaceError(EverloopError):
    """The workspace is missing or is not a folder."""


class Workspace(msgspec.Struct):
    """An agent's workspace, resolved once."""

    path: Path
    home: Path  # the runtime's own folder
    restricted: bool  # to the workspace
    store_files: Callable[[], Iterable[Path]]  # returns the files of the agent's store
    _places: Places | None = None
    _is_checked: bool = False

    def __str__(self) -> str:
        return f"{self.path}{' (restricted)' if self.restricted else ''}"

    async def check(self) -> None:
        """On first use, create the folder if only the last path component is missing, or raise a `WorkspaceError`."""
        if not self._is_checked:
            await in_thread(self._check)
            self._is_checked = True

    async def places(self) -> Places:
        if self._places is None:
            self._places = await in_thread(self._resolve)
        return self._places

    def reach(self) -> Reach:
        """Return the files that may be read for the prompt, as for any tool. Reads from disk: call it in a thread."""
        places = self._places or self._resolve()
        return Reach(places.workspace, self.restricted, protected=places.protected)

    def _check(self) -> None:
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            what = "is not a folder" if self.path.exists() else f"cannot be created ({error.strerror})"
            where = os.path.abspath(self.path)
            raise WorkspaceError(f"the workspace {where} {what}: create the folder, or configure another one") from None

    def _resolve(self) -> Places:
        protected = [self.home.resolve(), *self.store_files()]
        frozen = Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()
        return Places(Path(os.path.abspath(self.path)), self.path.resolve(), tuple(protected), frozen)
