"""The workspace's files: read, write, list.

The functions are plain ones, so they run in threads. Paths are relative to the workspace of the call.
"""

from __future__ import annotations

import difflib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Annotated, BinaryIO

from ..messages import clean
from .base import Tool, ToolError, tool
from .context import current_call

MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_LINES = 2_000
MAX_OUTPUT = 60_000  # characters of one read
MAX_LINE = 2_000
MAX_ENTRIES = 1_000
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# O_NONBLOCK: opening a pipe that nobody writes to would wait for ever. O_NOFOLLOW: links were followed by locate().
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def file_tools() -> list[Tool]:
    """The tools of this file."""
    return [read_file, write_file, list_dir]


def locate(path: str) -> str:
    """The real place of a path a model gave, links followed; a ToolError if it is out of the call's reach.

    This is the one place that decides what may be touched.
    """
    context = current_call()
    if "\0" in path or not path.strip():
        raise ToolError(f"{path!r} is not a path: give one relative to the workspace.")
    root = os.path.realpath(context.workspace)
    place = os.path.realpath(os.path.join(root, os.path.expanduser(clean(path))))
    if context.restricted and place != root and not place.startswith(root.rstrip(os.sep) + os.sep):
        raise ToolError(f"{path} is outside the workspace: only files inside {root} can be reached.")
    return place


@tool(replay="safe")
def read_file(
    path: Annotated[str, "The file, relative to the workspace."],
    offset: Annotated[int, "The first line to show; lines count from 1."] = 1,
    limit: Annotated[int, "How many lines to show at most."] = MAX_LINES,
) -> str:
    """Read a text file. Lines come with their numbers; a long file comes in pages."""
    if offset < 1 or limit < 1:
        raise ToolError("offset and limit must be at least 1.")
    with explained(path), open_text(path) as file:
        shown, total = _page(file, offset, min(limit, MAX_LINES))
    last = offset + len(shown) - 1
    if total == 0:
        return "(empty file)"
    if not shown:
        raise ToolError(f"{path} has only {total} lines: choose a smaller offset than {offset}.")
    text = "\n".join(shown)
    if len(shown) == total:
        return text
    more = f"; go on with offset={last + 1}" if last < total else ""
    return f"{text}\n[lines {offset} to {last} of {total}{more}]"


@tool(replay="safe", parallel=False)
def write_file(
    path: Annotated[str, "The file, relative to the workspace."],
    content: Annotated[str, "The whole new content."],
) -> str:
    """Write a text file, replacing what was in it. Missing folders are made."""
    with explained(path):
        place = locate(path)
        if path.endswith(("/", os.sep)):
            raise ToolError(f"{path} names a folder: give the path of a file.")
        data = clean(content).encode()
        existed = _check_writable(place, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _replace(place, data)
    lines = content.count("\n") + (not content.endswith("\n") and bool(content))
    return f"{'Replaced' if existed else 'Created'} {path} ({lines} lines, {size(len(data))})."


@tool(replay="safe")
def list_dir(path: Annotated[str, "The folder, relative to the workspace."] = ".") -> str:
    """List a folder: its folders first, then its files with their sizes."""
    with explained(path), os.scandir(locate(path)) as entries:
        found = list(islice(entries, MAX_ENTRIES * 10))
        more = next(entries, None) is not None
    folders = sorted((entry.name for entry in found if _is_folder(entry)), key=str.casefold)
    files = sorted((entry for entry in found if not _is_folder(entry)), key=lambda entry: entry.name.casefold())
    lines = [f"{name}/" for name in folders[:MAX_ENTRIES]]
    lines += [f"{entry.name}  {_size_of(entry)}" for entry in files[: MAX_ENTRIES - len(lines)]]
    if len(found) > len(lines):
        count = f"more than {len(found)}" if more else str(len(found))
        lines.append(f"[{len(lines)} of {count} entries shown]")
    return clean("\n".join(lines)) or "(empty folder)"


@contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """A text file of the workspace, opened for reading as UTF-8 bytes; what is no text file is refused at once."""
    place = locate(path)
    descriptor = os.open(place, _OPEN)
    try:
        _check_kind(os.fstat(descriptor), path)
    except ToolError:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        head = file.read(8192)
        file.seek(0)
        if head.startswith(_UTF16):
            yield io.BytesIO(file.read().decode("utf-16", "replace").encode("utf-8", "replace"))
            return
        if b"\0" in head:
            raise ToolError(f"{path} is a binary file: only text can be read.")
        if head.startswith(b"\xef\xbb\xbf"):
            file.seek(3)
        yield file


def _check_kind(info: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise ToolError(f"{path} is a folder: use list_dir.")
    if not stat.S_ISREG(info.st_mode):
        raise ToolError(f"{path} is not an ordinary file (a pipe, socket or device): it cannot be read or written.")
    if info.st_size > MAX_FILE_BYTES:
        much = f"{size(info.st_size)}, and {size(MAX_FILE_BYTES)} is the most that is read"
        raise ToolError(f"{path} is too big ({much}): look for the part you need in another way.")


def _page(file: BinaryIO, offset: int, limit: int) -> tuple[list[str], int]:
    """The numbered lines of one page, as many as fit, and how many lines there are in all."""
    shown: list[str] = []
    room, number = MAX_OUTPUT, 0
    for number, raw in enumerate(file, 1):
        if number < offset:
            continue
        line = raw[: MAX_LINE * 4].decode("utf-8", "replace").rstrip("\r\n")
        if len(line) > MAX_LINE:
            line = f"{line[:MAX_LINE]} [… the line has {len(raw)} bytes]"
        room -= len(line) + 8
        if len(shown) == limit or (room < 0 and shown):
            break
        shown.append(f"{number:>6}\t{line}")
    return shown, number + _count_lines(file)


def _count_lines(file: BinaryIO) -> int:
    """The number of lines from here to the end."""
    count, last = 0, b"\n"
    while chunk := file.read(1 << 20):
        count += chunk.count(b"\n")
        last = chunk[-1:]
    return count + (last != b"\n")


def _check_writable(place: str, path: str) -> bool:
    """Whether the file exists already; a ToolError where it may not be replaced."""
    try:
        info = os.stat(place)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(info.st_mode):
        raise ToolError(f"{path} is a folder: give the path of a file.")
    if not stat.S_ISREG(info.st_mode):
        raise ToolError(f"{path} is not an ordinary file (a pipe, socket or device): it cannot be read or written.")
    if not os.access(place, os.W_OK):
        raise ToolError(f"{path} is write-protected.")
    return True


def _replace(place: str, data: bytes) -> None:
    """Put a file in place whole or not at all, on disk when this returns; the mode of the old one is kept."""
    folder = os.path.dirname(place)
    draft = os.path.join(folder, f".everloop-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            with suppress(FileNotFoundError):  # a new file has the mode that is usual here
                os.fchmod(descriptor, stat.S_IMODE(os.stat(place).st_mode))
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, place)
    except BaseException:
        os.unlink(draft)
        raise
    folder_descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn the system's errors about a path into ones that say what to do."""
    try:
        yield
    except FileNotFoundError:
        raise ToolError(f"{path} does not exist. {_nearby(path)}") from None
    except NotADirectoryError:
        raise ToolError(f"{path} is not a folder, or goes through something that is none.") from None
    except PermissionError:
        raise ToolError(f"{path}: permission denied by the system.") from None
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror or error}.") from None


def _nearby(path: str) -> str:
    """What there is instead of a missing path: similar names beside it, or how far the path does exist."""
    folder, name = os.path.split(locate(path))
    missing = ""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder, missing = os.path.split(folder)
    try:
        with os.scandir(folder) as entries:
            names = {entry.name.casefold(): entry.name for entry in islice(entries, 10_000)}
    except OSError:
        return "Its folder cannot be listed."
    close = difflib.get_close_matches((missing or name).casefold(), names, 3, 0.5)
    similar = f"Similar names: {clean(', '.join(names[match] for match in close))}." if close else ""
    if missing:
        return f"Neither does the folder {clean(missing)}. {similar or 'Use list_dir to see what there is.'}"
    return similar or "Use list_dir to see what there is."


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _size_of(entry: os.DirEntry[str]) -> str:
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError:
        return "?"
    if stat.S_ISREG(info.st_mode):
        return size(info.st_size)
    return "(link)" if stat.S_ISLNK(info.st_mode) else "(special)"


def size(count: float) -> str:
    """A number of bytes for people."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KB", "MB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GB"
