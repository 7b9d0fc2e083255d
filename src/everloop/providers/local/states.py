"""Model states after reading the prefix of a prompt, cached on disk so that a restart need not read it again.

The files are only a cache: one that is damaged or belongs to another model is ignored.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

FORMAT = "1"  # part of the file names: changing it invalidates old files
MAX_BYTES = 512 << 20
_SAMPLES, _SAMPLE = 32, 1 << 16
_SUM = 64  # bytes of a checksum
_LEFT_BEHIND = 3_600.0  # seconds after which an unfinished file can have no writer


def fingerprint(weights: Path) -> str:
    """Identify a model file by parts of its content: reading all of it would take as long as loading it."""
    found = hashlib.sha256()
    with weights.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found.update(str(size).encode())
        for n in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * n // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE))
    return found.hexdigest()


class States:
    """The folder of saved states. The checksum of each is in a file next to it, which is written last."""

    def __init__(self, folder: Path, *about: str, most_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._about = (FORMAT, *about)
        self._most_bytes = most_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # prompts are private to their owner

    def name(self, text: str) -> str:
        """Return the name of the file for this prefix of a prompt."""
        return f"{hashlib.sha256(repr((*self._about, text)).encode()).hexdigest()[:40]}.state"

    def is_intact(self, name: str) -> bool:
        """Return whether the file exists and is intact, and mark it as used now."""
        path = self.folder / name
        try:
            right = self._sum(name).read_text() == _sha256(path)
            if right:
                os.utime(path)
        except (OSError, UnicodeDecodeError):
            right = False
        if not right:
            self.remove(name)
        return right

    def add(self, temporary: str, name: str) -> None:
        """Add a file that was written under a temporary name."""
        path = self.folder / temporary
        digest = _sha256(path)
        self.remove(name)
        path.replace(self.folder / name)
        self._sum(name).write_text(digest)
        self._prune()

    def remove(self, name: str) -> None:
        for path in (self._sum(name), self.folder / name):
            with suppress(OSError):
                path.unlink()

    def _prune(self) -> None:
        """Delete the least recently used files until the rest fits the limit."""
        found = []
        for path in self.folder.glob("*.state"):
            with suppress(OSError):
                known = path.stat()
                if not path.name.startswith("."):
                    found.append((known.st_mtime, known.st_size + _SUM, path.name))
                elif known.st_mtime < time.time() - _LEFT_BEHIND:  # left by a process that was killed
                    path.unlink()
        total = sum(size for _, size, _ in found)
        for _, size, name in sorted(found):
            if total <= self._most_bytes:
                break
            self.remove(name)
            total -= size

    def _sum(self, name: str) -> Path:
        return self.folder / f"{name}.sha256"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
