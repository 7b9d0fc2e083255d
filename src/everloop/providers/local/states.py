"""What a model knows after reading a prompt's beginning, kept on disk so that a restart does not read it again.

A file is only a cache: one that is not what was written, or of another model, is as good as none.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

FORMAT = "1"  # a change of what the files hold makes old ones useless
MOST_BYTES = 512 << 20
_SAMPLES, _SAMPLE = 32, 1 << 16
_SUM = 64  # bytes of a checksum
_LEFT_BEHIND = 3_600.0  # seconds after which nobody writes to a file any more


def fingerprint(weights: Path) -> str:
    """Tells one model's file from another by parts of it, for reading all of it takes as long as loading it."""
    found = hashlib.sha256()
    with weights.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found.update(str(size).encode())
        for n in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * n // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE))
    return found.hexdigest()


class States:
    """The folder with saved states. Each has its checksum in a file beside it, written last."""

    def __init__(self, folder: Path, *about: str, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self._about = (FORMAT, *about)
        self._most_bytes = most_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # what was said in a prompt is for its owner only

    def name(self, text: str) -> str:
        """The file of a prompt's beginning."""
        return f"{hashlib.sha256(repr((*self._about, text)).encode()).hexdigest()[:40]}.state"

    def right(self, name: str) -> bool:
        """Whether the file is there and as it was written; it counts as used now."""
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

    def written(self, temporary: str, name: str) -> None:
        """Take over a file that was written under another name."""
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
        """Delete the files that were not used for longest, until the rest is small enough."""
        found = []
        for path in self.folder.glob("*.state"):
            with suppress(OSError):
                known = path.stat()
                if not path.name.startswith("."):
                    found.append((known.st_mtime, known.st_size + _SUM, path.name))
                elif known.st_mtime < time.time() - _LEFT_BEHIND:  # by a process that was killed
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
