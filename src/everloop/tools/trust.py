"""Decide which results are untrusted: text from outside, and files that the agent did not write in a clean session.

Files are identified by the SHA-256 of their whole content, so copying or moving them changes nothing. Content that was
never marked is unknown, and unknown content is untrusted.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from .context import CallContext

UNKNOWN = ""  # in place of a digest: text of unknown origin
EMPTY = hashlib.sha256(b"").hexdigest()

Trust = Literal["clean", "unknown", "tainted"]

_MAX_NAME = 32
_MAX_NAME_WORDS = 3
_MAX_NAME_FOREIGN = 8  # characters beyond ASCII: in some scripts a dozen of them are a sentence
_WORD = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}")
_ENDING = re.compile(r"(?<=.)\.[A-Za-z0-9]{1,5}\Z")

_MAX_WALKED = 20_000  # files and folders of a workspace that are examined after a command
_MAX_CHANGED = 5_000
_MAX_HASHED = 64 * 1024 * 1024  # bytes
_CLOCK_SLACK = 1_000_000_000  # nanoseconds: file systems stamp changes with a coarse clock


class Mark(NamedTuple):
    """File content that the agent writes."""

    digest: str
    tainted: bool  # untrusted text had been read before
    path: str


class Marks(Protocol):
    """Remembers the file contents that the agent wrote."""

    async def add(self, owner: str, marks: Sequence[Mark]) -> None:
        """Record contents. Content that was once written in a clean session stays clean."""
        ...

    async def tainted(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        """Return whether each of these contents is tainted; those that the agent never wrote are left out."""
        ...

    async def tainted_paths(self, owner: str) -> list[str]:
        """Return the paths to which tainted contents were written."""
        ...


async def trust_of(contents: Sequence[str], context: CallContext) -> Trust:
    """Return how far file contents can be trusted under the setting `taint`: as far as the least trusted of them."""
    wanted = {content for content in contents if content != EMPTY}
    if not wanted or context.taint is False:
        return "clean"
    digests = sorted(wanted - {UNKNOWN})
    marks = await context.marks.tainted(context.owner, digests) if context.marks is not None and digests else {}
    if any(marks.values()):
        return "tainted"
    return "unknown" if context.taint is True and len(marks) < len(wanted) else "clean"


async def mark_written(digest: str, path: str, context: CallContext, old: str = EMPTY) -> None:
    """Record content before it is written. It is clean if the session and the `old` content it is based on are clean.

    With `taint = "outside"`, only tainted contents are recorded: unknown files prove nothing.
    """
    if context.taint is False or context.marks is None:
        return
    trust: Trust = "tainted" if context.tainted else await trust_of((old,), context)
    if trust == "tainted" or (trust == "clean" and context.taint is True):
        await context.marks.add(context.owner, [Mark(digest, trust == "tainted", path)])


async def may_hold_tainted(context: CallContext) -> list[str]:
    """Return the paths in the workspace to which tainted contents were written; they may no longer exist."""
    if context.marks is None:
        return []
    root = str(context.real_workspace or context.workspace)
    paths = await context.marks.tainted_paths(context.owner)
    return [path for path in paths if os.path.commonpath([root, path]) == root]


def any_exists(paths: Iterable[str]) -> bool:
    """Return whether one of these files exists. Call it in a thread."""
    return any(map(os.path.lexists, paths))


def digest_of(descriptor: int, most: int) -> str:
    """Return the SHA-256 of an open file's whole content; UNKNOWN if the file is too long. Call it in a thread."""
    digest, place = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, 1 << 20, place):
        place += len(chunk)
        if place > most:
            return UNKNOWN
        digest.update(chunk)
    return digest.hexdigest()


def is_telling(path: str) -> bool:
    """Return whether a path could carry instructions.

    One of its names is longer than 32 characters, has more than three words besides its extension, or has spaces or
    other characters that names of source files do not have.
    """
    return any(_tells(name) for name in path.split("/") if name)


def _tells(name: str) -> bool:
    if len(name) > _MAX_NAME or not name.isprintable() or any(character.isspace() for character in name):
        return True
    if sum(not character.isascii() for character in name) > _MAX_NAME_FOREIGN:
        return True
    return len(_WORD.findall(_ENDING.sub("", name))) > _MAX_NAME_WORDS


def named(names: Iterable[str]) -> tuple[str, ...]:
    """Return the `contents` of a result that shows these names."""
    return (UNKNOWN,) if any(map(is_telling, names)) else ()


def changed_files(folder: str, since: int) -> list[Mark]:
    """Return tainted marks for the files below that changed since a time in nanoseconds, up to the limits.

    Call it in a thread.
    """
    marks: list[Mark] = []
    room = _MAX_HASHED
    for path, info in _walk(os.path.realpath(folder)):
        if info.st_ctime_ns < since - _CLOCK_SLACK or not stat.S_ISREG(info.st_mode) or not info.st_size:
            continue
        if info.st_size > room or len(marks) == _MAX_CHANGED:
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            digest = digest_of(descriptor, room)
        finally:
            os.close(descriptor)
        room -= info.st_size
        marks.append(Mark(digest, True, path))
    return [mark for mark in marks if mark.digest != UNKNOWN]


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder that can be reached without links, except for `.git`."""
    folders, walked = [folder], 0
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            walked += 1
            if walked > _MAX_WALKED:
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders += [entry.path] if entry.name != ".git" else []
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)
            except OSError:
                continue
