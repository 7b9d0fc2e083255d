"""Texts too long for a result, saved in a folder of their session so that the agent can page through them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

MAX_FILES = 64  # per session; the oldest are deleted first
MAX_BYTES = 16 * 1024 * 1024  # per text
MAX_SESSION_BYTES = 64 * 1024 * 1024  # per session
MAX_SESSIONS = 200  # with saved texts; the least recently used are deleted first


def outputs_folder(home: Path, owner: str, session: str) -> Path:
    """Return the folder of a session. It is created on first use; its name does not reveal the session."""
    name = hashlib.sha256(f"{owner}\0{session}".encode()).hexdigest()[:24]
    return home / "outputs" / name


def keep_output(folder: Path, name: str, data: bytes) -> Path:
    """Save a text, up to its size limit, and delete the oldest ones to make room."""
    place = output_place(folder, name)
    draft = place.with_suffix(".part")
    try:
        draft.write_bytes(data[:MAX_BYTES])
        draft.replace(place)
    except OSError:
        with suppress(OSError):
            draft.unlink()  # leave no partial file on a full disk
        raise
    return place


def output_place(folder: Path, name: str) -> Path:
    """Return the path for a text of this name, after making room for it."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for _, old in _by_age(folder.parent)[:-MAX_SESSIONS]:
            shutil.rmtree(old, ignore_errors=True)
    known = _by_age(folder)
    size = sum(info.st_size for info, _ in known)
    while known and (len(known) >= MAX_FILES or size + MAX_BYTES > MAX_SESSION_BYTES):
        info, old = known.pop(0)
        size -= info.st_size
        with suppress(FileNotFoundError):
            os.unlink(old)
    os.utime(folder)
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}.txt"


def _by_age(folder: Path) -> list[tuple[os.stat_result, str]]:
    """Return the entries of a folder, oldest first."""
    with os.scandir(folder) as entries:
        found = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
    return sorted(found, key=lambda one: one[0].st_mtime_ns)
