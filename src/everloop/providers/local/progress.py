"""Report the progress of a pull, and stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...errors import EverloopError

_PAUSE = 0.1  # seconds between two reports; more frequent ones would not be visible


class WeightsError(EverloopError):
    """A model's file is not available; the message says why."""


class PullStopped(Exception):
    """The pull was stopped; its partial file is kept for the next one."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a pull: how many bytes of the file are present, and where they come from."""

    stage: Literal["wait", "check", "download"]
    done: int
    total: int
    source: str = ""
    holder: str = ""  # the process that downloads, while this one waits


class ProgressReporter:
    """Forwards progress reports at a limited rate; after `stop`, its methods raise PullStopped."""

    def __init__(self, progress: Callable[[Progress], None] | None = None) -> None:
        self._progress = progress
        self._stop = threading.Event()
        self._last: tuple[str, str, float] = ("", "", 0.0)

    def stop(self) -> None:
        self._stop.set()

    def report(self, now: Progress) -> None:
        """Report progress. A new stage, a new source and the end are always reported."""
        self.check()
        stage, source, at = self._last
        if (stage, source) == (now.stage, now.source) and now.done < now.total and time.monotonic() - at < _PAUSE:
            return
        self._last = (now.stage, now.source, time.monotonic())
        if self._progress is not None:
            self._progress(now)

    def check(self) -> None:
        if self._stop.is_set():
            raise PullStopped

    def pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise PullStopped
