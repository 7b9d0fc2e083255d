"""An index of a workspace's folders that rereads only the folders that changed.

A command can create files anywhere in the workspace, so every folder must be checked after it. Listing them all takes
too long. A folder with the same inode and ctime has the same entries, so one `stat` per folder is enough; unprivileged
processes cannot set a ctime.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_BYTES = 1024 * 1024
ASIDE = re.compile(r"\.untrusted-[0-9a-f]{6}$")
_SETTLED_NS = 2_000_000_000  # two changes within one clock tick share a ctime
_GIT_FOLDER = frozenset({"objects", "refs"})


class Folder(msgspec.Struct, frozen=True):
    """The indexed facts about one folder."""

    place: str  # absolute path
    stamp: tuple[int, int, int, int] | None  # None: changed so recently that it must be reread
    folders: tuple[str, ...]  # names of subfolders; links are not followed
    pointer: bool  # contains a `.git` that is not a folder
    is_git: bool  # git would accept it as a repository
    steering: tuple[str, ...]  # names of files that other programs execute or obey
    generated: bool  # filled by build tools: such files do not count there
    readable: bool = True


class FolderTree:
    """The index. `refresh` updates it; it does file I/O, so call it in a thread."""

    def __init__(self, root: str, steers: Callable[[str], bool], generated: Callable[[str], bool]) -> None:
        self.root = root
        self._steers = steers
        self._generated = generated
        self._folders: dict[str, Folder] = {}
        self._marked: set[str] = set()  # folders that concern git or contain steering files

    def refresh(self, *, unlock: bool = False) -> None:
        """Reread changed folders. With `unlock`, make folders readable again that a command has locked."""
        if "" not in self._folders:
            self._add("", False, unlock)
            return
        lstat, changed = os.lstat, []
        for path, folder in self._folders.items():
            try:
                info = lstat(folder.place)
            except OSError:
                changed.append(path)
                continue
            if folder.stamp != (info.st_dev, info.st_ino, info.st_ctime_ns, info.st_mtime_ns):
                changed.append(path)
        for path in sorted(changed):  # outer folders first: one that became a link removes its subfolders
            if (known := self._folders.get(path)) is not None:
                self._update(path, known, unlock)

    def _update(self, path: str, old: Folder, unlock: bool) -> None:
        new = self._read(path, old.place, old.generated, unlock=unlock and old.readable)
        prefix = f"{path}/" if path else ""
        kept = set(new.folders) if new is not None else set()
        for name in old.folders:
            if name not in kept:
                self._remove(prefix + name)
        if new is None:
            self._remove(path)
            return
        self._keep(path, new)
        for name in kept:
            if prefix + name not in self._folders:
                self._add(prefix + name, new.generated or self._generated(prefix + name), unlock)

    def _add(self, path: str, generated: bool, unlock: bool) -> None:
        waiting = [(path, generated)]
        while waiting:
            path, generated = waiting.pop()
            place = f"{self.root}/{path}" if path else self.root
            folder = self._read(path, place, generated, unlock=unlock)
            if folder is not None:
                self._keep(path, folder)
                below = [f"{path}/{name}" if path else name for name in folder.folders]
                waiting += [(each, generated or self._generated(each)) for each in below]

    def _keep(self, path: str, folder: Folder) -> None:
        self._folders[path] = folder
        if folder.is_git or folder.pointer or folder.steering or path == ".git" or path.endswith("/.git"):
            self._marked.add(path)
        else:
            self._marked.discard(path)

    def _remove(self, path: str) -> None:
        waiting = [path]
        while waiting:
            path = waiting.pop()
            self._marked.discard(path)
            folder = self._folders.pop(path, None)
            if folder is not None:
                waiting += [f"{path}/{name}" for name in folder.folders]

    def repositories(self) -> Iterator[str]:
        """Yield the folders that git would accept as a repository: `.git` and bare repositories."""
        for path in self._marked:
            if self._folders[path].is_git or path == ".git" or path.endswith("/.git"):
                yield path

    def pointers(self) -> Iterator[str]:
        """Yield the path of each `.git` that is a file or a link."""
        for path in self._marked:
            if self._folders[path].pointer:
                yield f"{path}/.git" if path else ".git"

    def steering(self) -> Iterator[str]:
        """Yield the paths of files that other programs execute or obey, outside of generated folders."""
        for path in self._marked:
            for name in self._folders[path].steering:
                yield f"{path}/{name}" if path else name

    def has(self, path: str) -> bool:
        return path in self._folders

    def _read(self, path: str, place: str, generated: bool, *, unlock: bool) -> Folder | None:
        """Read a folder; return None if it is not one."""
        began = time.time_ns()
        try:
            info = os.lstat(place)
            if not stat.S_ISDIR(info.st_mode):
                return None
            entries = list(os.scandir(place))
        except PermissionError:
            if unlock and _unlock(place):
                return self._read(path, place, generated, unlock=False)
            return Folder(place, None, (), False, False, (), generated, readable=False)
        except OSError:
            return None
        stamp = (info.st_dev, info.st_ino, info.st_ctime_ns, info.st_mtime_ns)
        names = {entry.name for entry in entries}
        folders = tuple(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        is_git = "HEAD" in names and ("commondir" in names or names >= _GIT_FOLDER)
        pointer = ".git" in names and ".git" not in folders
        steering: tuple[str, ...] = ()
        if not generated:
            prefix = f"{path}/" if path else ""
            steering = tuple(name for name in names.difference(folders) if self._steers(prefix + name))
        settled = max(stamp[2], stamp[3]) < began - _SETTLED_NS
        return Folder(place, stamp if settled else None, folders, pointer, is_git, steering, generated)


def _unlock(place: str) -> bool:
    """Make a folder of our own accessible again, without following a link; return whether that worked."""
    try:
        descriptor = os.open(place, getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o500 == 0o500:
            return False
        os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(info.st_mode) | 0o700)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


# ------------------------------------------------------------------------------------------------ single files


class Part(msgspec.Struct, frozen=True):
    """The content of a file, or what is in its place."""

    kind: str  # "file", "large", "link" or "other"
    data: bytes | None = None  # content of a file, digest of a large one, or target of a link
    mode: int = 0o644


def aside_name(name: str) -> str:
    """Return a new name for a planted file; no program looks for files with this suffix."""
    return f"{name}.untrusted-{secrets.token_hex(3)}"


def read_part(folder: int, name: str) -> Part | None:
    """Read the file or link at a name in an open folder; None if there is nothing."""
    info = lstat(folder, name)
    if info is None:
        return None
    if stat.S_ISLNK(info.st_mode):
        with suppress(OSError):
            return Part("link", os.fsencode(os.readlink(name, dir_fd=folder)))
        return Part("other")
    if not stat.S_ISREG(info.st_mode):
        return Part("other")
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        return Part("other")
    with open(descriptor, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
        if len(data) <= _MAX_BYTES:
            return Part("file", data, stat.S_IMODE(info.st_mode))
        file.seek(0)
        return Part("large", hashlib.file_digest(file, "sha256").digest(), stat.S_IMODE(info.st_mode))


def put_back(folder: int, name: str, part: Part) -> None:
    if part.kind == "link" and part.data is not None:
        os.symlink(os.fsdecode(part.data), name, dir_fd=folder)
    if part.kind != "file" or part.data is None:
        return
    descriptor = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    with open(descriptor, "wb") as file:
        file.write(part.data)
        os.fchmod(descriptor, part.mode & 0o777)


def move_aside(folder: int, name: str) -> str:
    """Rename a planted file and return its new name. Raises OSError if that is impossible."""
    aside = aside_name(name)
    try:
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    except PermissionError:  # a command can make its own folder unwritable
        os.fchmod(folder, stat.S_IMODE(os.fstat(folder).st_mode) | 0o700)
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    return aside


def lstat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


@contextmanager
def opened_folder(root: int | str | None, path: str) -> Iterator[int | None]:
    """Open a folder below another, component by component without following links; None if that is impossible."""
    held: list[int] = []
    try:
        if isinstance(root, str):
            held.append(os.open(root, _FOLDER))
            root = held[-1]
        for name in path.split("/") if path and root is not None else ():
            held.append(os.open(name, _FOLDER, dir_fd=held[-1] if held else root))
        found = held[-1] if held else root
    except OSError:
        found = None
    try:
        yield found
    finally:
        for descriptor in held:
            os.close(descriptor)
