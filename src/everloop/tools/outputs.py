"""Texts too long for a result, kept in a folder of their session so that the agent can page through them."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

MAX_FILES = 64  # of one session; the oldest go first
MAX_BYTES = 16 * 1024 * 1024  # of one text


def outputs_folder(home: Path, owner: str, session: str) -> Path:
    """The folder of a session. It is made when something is put there; its name gives nothing away."""
    name = hashlib.sha256(f"{owner}\0{session}".encode()).hexdigest()[:24]
    return home / "outputs" / name


def keep_output(folder: Path, name: str, data: bytes) -> Path:
    """Save a text, whole up to the limit, and let the oldest ones go."""
    place = output_place(folder, name)
    draft = place.with_suffix(".part")
    draft.write_bytes(data[:MAX_BYTES])
    draft.replace(place)
    return place


def output_place(folder: Path, name: str) -> Path:
    """Where a text of this name goes; there is room for it when this returns."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.scandir(folder) as entries:
        known = sorted(entries, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
    for entry in known[: max(len(known) - MAX_FILES + 1, 0)]:
        with suppress(FileNotFoundError):
            os.unlink(entry.path)
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}.txt"
