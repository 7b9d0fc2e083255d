"""Paths of the file tools: what a call may access, helpful errors, and atomic replacement of files."""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import json
import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import islice
from threading import Lock

from ...sandbox.reach import FOLDER, OutOfReach, Reach, Target, normalized, within
from ...text import clean
from ..base import Output, ToolError
from ..context import current_call
from ..policy.steering import steers
from ..trust import named

MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_REMEMBERED = 4_096  # files, over all sessions
LOCK_SECONDS = 5.0


def reach() -> Reach:
    """Return what the running call may access."""
    call = current_call()
    return Reach(
        call.workspace,
        call.restricted,
        call.approved,
        call.outputs,
        call.protected,
        call.frozen,
        call.guard,
        call.readable,
        steers,
    )


def marked_output(path: str, result: Output) -> Output:
    """Return what was read at a path, marked as untrusted if it is a saved result, whose origin is no longer known."""
    call = current_call()
    if call.outputs is None or not within(normalized(path, call.workspace), os.path.normpath(call.outputs)):
        return result
    return dataclasses.replace(result, untrusted=True)


def shipped(real: str) -> bool:
    """Return whether a file belongs to the program itself, such as a shipped skill."""
    return any(within(real, os.path.realpath(folder)) for folder in current_call().readable)


def changed_meanwhile(path: str) -> ToolError:
    return ToolError(f"{path} was changed by another process meanwhile: read it again.")


class WrittenFiles:
    """Digests of what the file tools have written, which the policy has allowed. The oldest entries are dropped."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def note(self, real: str, data: bytes) -> None:
        with self._lock:
            self._texts[real] = sha256(data).digest()
            self._texts.move_to_end(real)
            while len(self._texts) > MAX_REMEMBERED:
                self._texts.popitem(last=False)

    def wrote(self, real: str, data: bytes | None = None) -> bool:
        """Return whether a file tool wrote this content, by default the current content of the file."""
        with self._lock:
            known = self._texts.get(real)
        if known is None:
            return False
        if data is None:
            try:
                with open(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                    data = file.read(MAX_FILE_BYTES)
            except OSError:
                return False
        return sha256(data).digest() == known


written_by_tools = WrittenFiles()  # of this process


def state_of(now: os.stat_result | str) -> tuple[int, int, int]:
    """Return a value that changes when a file, or an editor's text of it, changes."""
    if isinstance(now, str):
        digest = sha256(now.encode("utf-8", "surrogatepass")).digest()
        return 0, len(now), int.from_bytes(digest[:16])
    return now.st_ino, now.st_size, now.st_mtime_ns


def check_kind(info: os.stat_result, path: str, most: int = MAX_FILE_BYTES) -> None:
    """Raise ToolError unless it is a regular file within the size limit."""
    if stat.S_ISDIR(info.st_mode):
        raise ToolError(f"{path} is a folder: use list_dir.")
    if not stat.S_ISREG(info.st_mode):
        raise ToolError(f"{path} is a pipe, socket or device: only regular files can be read or written.")
    if info.st_size > most:
        much = f"{size(info.st_size)}, the limit is {size(most)}"
        raise ToolError(f"{path} is too large ({much}): find the part you need with grep or in another way.")


@contextmanager
def opened_target(path: str) -> Iterator[Target]:
    """Open the folder of a file to be written. Raises ToolError if it cannot be replaced."""
    if path.endswith("/"):
        raise ToolError(f"{path} is a folder: give the path of a file.")
    try:
        with reach().target(path) as target:
            if target.old is not None and not os.access(target.name, os.W_OK, dir_fd=target.folder):
                raise ToolError(f"{path} is write-protected.")
            yield target
    except IsADirectoryError:
        raise ToolError(f"{path} is a folder: give the path of a file.") from None


@contextmanager
def alone(target: Target) -> Iterator[None]:
    """Lock a folder against other users of these tools, in any process, while a file is checked and replaced.

    A command can hold the lock as well, so the wait is limited.
    """
    give_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(target.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(0.005)
                continue
        except OSError:
            pass  # not supported by this file system
        break
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(target.folder, fcntl.LOCK_UN)


def replace(target: Target, data: bytes) -> os.stat_result:
    """Replace a file atomically and durably, keeping the mode and owner of the old one."""
    draft = f".everloop-{secrets.token_hex(8)}.tmp"
    descriptor, unnamed = _draft(target.folder, draft)
    try:
        with open(descriptor, "wb") as file:
            if target.old is not None:
                with suppress(PermissionError):  # only root can change the owner
                    os.fchown(descriptor, target.old.st_uid, target.old.st_gid)
                os.fchmod(descriptor, target.old.st_mode & 0o777)  # without set-user-ID bits
            file.write(data)
            file.flush()
            os.fsync(descriptor)
            if unnamed:
                os.link(f"/proc/self/fd/{descriptor}", draft, dst_dir_fd=target.folder, follow_symlinks=True)
            written_by_tools.note(target.real, data)
            os.rename(draft, target.name, src_dir_fd=target.folder, dst_dir_fd=target.folder)
            info = os.fstat(descriptor)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=target.folder)
        raise
    os.fsync(target.folder)
    return info


def _draft(folder: int, name: str) -> tuple[int, bool]:
    """Create a file in a folder, without a name if possible: then a killed process leaves nothing behind."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666, dir_fd=folder), True
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder), False


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn OutOfReach and OSError about a path into ToolErrors that say what to do."""
    try:
        yield
    except OutOfReach as error:
        raise ToolError(str(error)) from None
    except FileNotFoundError:
        nearby, names = _nearby(path)
        raise ToolError(f"{path} does not exist. {nearby}", contents=named(names)) from None
    except NotADirectoryError:
        raise ToolError(f"{path} is not a folder, or one of its parents is not.") from None
    except PermissionError:
        raise ToolError(f"{path}: permission denied.") from None
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror or error}.") from None


def _nearby(path: str) -> tuple[str, list[str]]:
    """Describe what exists instead of a missing path: similar names beside it, or the part of the path that exists.

    Return that, and the names that it shows.
    """
    folder, name = os.path.split(normalized(path, current_call().workspace))
    missing = ""
    while True:
        try:
            with reach().open(folder, FOLDER) as opened, os.scandir(opened.descriptor) as entries:
                names = {entry.name.casefold(): entry.name for entry in islice(entries, 10_000)}
            break
        except (FileNotFoundError, NotADirectoryError):
            folder, missing = os.path.split(folder)
            if not missing:
                return "Nor does any folder on the way to it.", []
        except (OSError, OutOfReach, ToolError):
            return "Its folder cannot be listed.", []
    close = difflib.get_close_matches((missing or name).casefold(), names, 3, 0.5)
    shown = [names[match] for match in close]
    similar = f"Similar names: {clean(', '.join(shown))}." if close else ""
    if missing:
        return f"Neither does the folder {clean(missing)}. {similar or 'Use list_dir to see what there is.'}", shown
    return similar or "Use list_dir to see what there is.", shown


def quoted(name: str) -> str:
    """Return the name as one line: unchanged, or as JSON if it contains a line end."""
    return json.dumps(name, ensure_ascii=False) if "\n" in name or "\r" in name else name


def size(count: float) -> str:
    """Format a number of bytes for humans."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KB", "MB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GB"
