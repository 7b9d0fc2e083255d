"""A partially downloaded model file, kept between attempts even if they use different sources."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .progress import Progress, ProgressReporter, WeightsError

CHUNK = 1 << 18
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartialFile:
    """An incomplete file and its checksum. Until it is complete it has a temporary name, and is never loaded."""

    def __init__(self, path: Path, total: int, reporter: ProgressReporter) -> None:
        self._path = path
        self._tag = path.with_name(f"{path.name}.tag")
        self._total = total
        self._reporter = reporter
        with self._disk():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._file: BinaryIO = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 - closed by `close`
        self.done = 0
        self._hash = hashlib.sha256()
        self._rehash(os.fstat(descriptor).st_size)

    def write(self, data: bytes) -> None:
        """Append bytes. Raises a WeightsError that names the cause, such as a full disk."""
        with self._disk():
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
        self._hash.update(data)
        self.done += len(data)

    def truncate(self, length: int) -> None:
        """Truncate the file to this length."""
        if length < self.done:
            with self._disk():
                self._file.truncate(length)
            self._rehash(length)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def sync(self) -> None:
        with self._disk():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Discard the whole file."""
        self.truncate(0)
        self._tag.unlink(missing_ok=True)

    def rename_to(self, path: Path) -> None:
        """Rename the file to the model's name, atomically and durably."""
        with self._disk():
            os.fchmod(self._file.fileno(), 0o644)
            os.fsync(self._file.fileno())
            os.replace(self._path, path)
            _sync_folder(path.parent)
        self._tag.unlink(missing_ok=True)

    @property
    def tags(self) -> dict[str, str]:
        """The version (ETag) of the partial file, by the address it came from."""
        with suppress(OSError, ValueError):
            found = json.loads(self._tag.read_bytes())
            if isinstance(found, dict) and all(isinstance(text, str) for text in found.values()):
                return found
        return {}

    def tag(self, url: str, version: str) -> None:
        with self._disk():
            self._tag.write_text(json.dumps({url: version}))

    def _rehash(self, length: int) -> None:
        """Compute the checksum of the bytes so far. A file longer than the model cannot be right, and is discarded."""
        self._hash, self.done = hashlib.sha256(), 0
        self._file.seek(0)
        if length > self._total:
            length = 0
        while self.done < length and (data := self._file.read(min(CHUNK, length - self.done))):
            self._hash.update(data)
            self.done += len(data)
            self._reporter.report(Progress("check", self.done, length))
        self._file.truncate(self.done)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self._path.parent) from None


def disk_error(error: OSError, folder: Path) -> WeightsError:
    """Explain a failed write to the user."""
    if error.errno in _FULL:
        return WeightsError(
            f"no space left in {folder} ({error.strerror}); the partial file is kept: free some space and pull again, "
            "or set EVERLOOP_MODELS to a folder on another disk"
        )
    return WeightsError(f"{folder} cannot be written ({error.strerror}); set EVERLOOP_MODELS to another folder")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
