"""Files on their way to a chat: copies that the agent cannot change, so that what was allowed is what is sent."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..text import clean

KEPT_SECONDS = 30 * 24 * 3600.0  # of a file that was never sent: its message may be a dead letter
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OutgoingFiles:
    """A folder beside the workspace, with a folder for each file. All of it blocks: call it in a thread."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "outgoing"

    def keep(self, key: str, name: str, data: bytes) -> str:
        """Copy a file durably and return the path of the copy. A call that is run again has the same key, and keeps
        the copy that it made first."""
        name = re.sub(r"[/\\\x00-\x1f\x7f]+", "-", clean(name)).strip()[-100:]
        folder = self._folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        place = folder / (name if name.strip(".") else "file")
        if not place.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = folder / f".{secrets.token_hex(8)}"
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(place)
            for changed in (folder, self._folder):
                _flush(changed)
        return os.path.abspath(place)

    def read(self, path: str, most: int) -> bytes:
        """The content of a copy: at most one byte more than `most`. Raises OSError for anything else."""
        place = Path(path)
        if place.parent.parent != Path(os.path.abspath(self._folder)) or place.parent.name == "..":
            raise FileNotFoundError(path)
        with open(os.open(place, _FLAGS), "rb") as file:
            return file.read(most + 1)

    def forget(self, paths: Iterable[str]) -> None:
        """Delete copies that were sent."""
        for path in paths:
            place = Path(path)
            if place.parent.parent == Path(os.path.abspath(self._folder)):
                shutil.rmtree(place.parent, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what is too old to be sent."""
        with suppress(FileNotFoundError):
            for folder in list(self._folder.iterdir()):
                with suppress(OSError):
                    if folder.lstat().st_mtime < time.time() - KEPT_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
