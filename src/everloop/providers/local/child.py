"""The model's process: `python -m everloop.providers.local.child`, with requests on its standard input.

It can be killed at any time, and exits with its parent. The library's own output goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .answer import AnswerBuilder
from .frames import HEAD, length, pack
from .llama import Llama, Loading
from .prefixes import Prefixes
from .states import States, fingerprint


class Output:
    """Sends frames to the parent, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115 - open for as long as we run
        self._lock = threading.Lock()

    def send(self, value: dict[str, Any]) -> None:
        data = memoryview(pack(value))
        with self._lock:
            try:
                while data:
                    data = data[self._file.write(data) or 0 :]
            except OSError:  # the parent has exited
                exit_now()


class Cancelled(Exception):
    """The request was cancelled."""


class Work:
    """One request, on its own thread."""

    def __init__(self, id: int, request: dict[str, Any], model: Model) -> None:
        self.id = id
        self.cancelled = False
        self._request = request
        self._model = model

    def run(self) -> None:
        try:
            last = self._answered()
        except Cancelled:
            last = {"cancelled": True}
        except Exception as error:
            last = {"error": {"message": str(error) or type(error).__name__, "code": 400}}
        self._model.ended(self.id)
        self._model.output.send({"id": self.id, **last})

    def _answered(self) -> dict[str, Any]:
        stable = int(self._request.pop("stable", 0))
        done = self._model.prefixes.prepare(self._request, stable, self._model.busy == 1, self._stopped)
        if self._stopped():
            raise Cancelled
        answer = AnswerBuilder()

        def on_chunk(chunk: dict[str, Any]) -> bool:
            if not self.cancelled:
                self._model.output.send({"id": self.id, "delta": answer.feed(chunk)})
            return self.cancelled

        self._model.llama.complete({**self._request, "stream": True, "return_progress": True}, on_chunk)
        return answer.ended(done)

    def _stopped(self) -> bool:
        """Return whether to stop, and tell the parent that the request is still running."""
        self._model.output.send({"id": self.id, "delta": {}})
        return self.cancelled


class Model:
    """The loaded model and its running requests."""

    def __init__(self, loading: Loading, output: Output) -> None:
        self.output = output
        folder = _usable(loading.states)
        self.llama = Llama(replace(loading, states=folder))
        states = None
        if folder:
            with suppress(OSError):  # the folder belongs to another user: save nothing
                states = States(Path(folder), fingerprint(Path(loading.weights)), self.llama.version)
        self.prefixes = Prefixes(self.llama, states)
        self._works: dict[int, Work] = {}

    @property
    def busy(self) -> int:
        return len(self._works)

    def begin(self, id: int, request: dict[str, Any]) -> None:
        work = self._works[id] = Work(id, request, self)
        threading.Thread(target=work.run, daemon=True).start()

    def cancel(self, id: int) -> None:
        if (work := self._works.get(id)) is not None:
            work.cancelled = True

    def ended(self, id: int) -> None:
        self._works.pop(id, None)


class Child:
    """Reads the parent's requests while the model loads, so that the parent's death is noticed at any time."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._model: Model | None = None

    def run(self, requests: BinaryIO) -> None:
        while head := requests.read(HEAD.size):
            frame = json.loads(requests.read(length(head)))
            if "load" in frame:
                threading.Thread(target=self._load, args=(Loading(**frame["load"]),), daemon=True).start()
            elif self._model is not None and "cancel" in frame:
                self._model.cancel(frame["cancel"])
            elif self._model is not None:
                self._model.begin(frame["id"], frame["request"])
        if self._model is not None:
            self._model.llama.remove_socket()

    def _load(self, loading: Loading) -> None:
        try:
            with suppress(AttributeError), open(loading.weights, "rb") as file:  # have the kernel read ahead
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            self._model = Model(loading, self._output)
            self._output.send({"ready": self._model.llama.version})
        except ImportError as error:
            self._output.send({"failed": str(error), "missing": True})
        except Exception as error:
            self._output.send({"failed": str(error) or type(error).__name__})


def _usable(folder: str) -> str:
    """Return the folder for states, or "" if it is not writable: the library would refuse to start."""
    with suppress(OSError):
        if folder:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            return folder if os.access(folder, os.W_OK | os.X_OK) else ""
    return ""


def exit_now() -> NoReturn:
    """Exit at once: the library is known to hang during a normal exit."""
    os._exit(0)


def main() -> NoReturn:
    parent = int(sys.argv[1])
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the kernel was asked to watch it
        exit_now()
    os.umask(0o077)
    with suppress(OSError):  # when memory is short, the kernel kills the model and not the agent
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError, AttributeError):  # the model may use every idle core, but event loops have priority
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    output = Output(os.dup(1))
    os.dup2(2, 1)
    Child(output).run(open(os.dup(0), "rb"))  # noqa: SIM115 - open for as long as we run
    exit_now()


if __name__ == "__main__":
    main()
