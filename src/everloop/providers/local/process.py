"""The parent's side of the model process: send requests, receive streamed answers, and survive its death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ...text import one_line
from ..base import ProviderError, error_text
from .frames import HEAD, length, pack
from .llama import Loading

OnDelta = Callable[[dict[str, Any]], None]
INSTALL = '`pip install "everloop[local]"`'
MISSING = f"the local model needs llama.cpp, which is not installed: {INSTALL}"
SILENCE_SECONDS = 300.0  # without output, after which a busy child is considered hung
LOAD_SECONDS = 1_800.0  # to load a model: a large one on a slow disk takes minutes, without output
EXIT_SECONDS = 2.0  # for the child to exit by itself
_TAIL = 4_096  # bytes of standard error that are kept
_FINAL = frozenset({400, 401, 403, 404, 413, 501})
# Environment variables for finding libraries and cores. No API keys: a model does not need them.
_PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
_PASSED_STARTS = ("OMP_", "GGML_", "CUDA_", "HIP_", "ROCR_", "LC_")


@dataclass(eq=False, slots=True)
class Work:
    """One request in the child. `ended` is done when the child has finished with it."""

    id: int
    ended: asyncio.Future[dict[str, Any]]
    on_delta: OnDelta | None


class ModelProcess:
    """A child that has loaded a model."""

    def __init__(self, process: Process, silence: float = SILENCE_SECONDS) -> None:
        self._process = process
        self._silence = silence
        self._works: dict[int, Work] = {}
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[str] = self._loop.create_future()
        self._silence_timer: asyncio.TimerHandle | None = None
        self._said = b""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._read_stderr())]
        self.dead = False

    @classmethod
    async def start(cls, loading: Loading, silence: float = SILENCE_SECONDS) -> ModelProcess:
        """Start a child that loads the model. Raises an error that says why it could not."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", f"{__package__}.child", str(os.getpid()),
                stdin=PIPE, stdout=PIPE, stderr=PIPE, env=_environment(),
                start_new_session=True,  # an interrupt from the terminal is meant for the parent
            )  # fmt: skip
        except OSError as error:  # too many processes or files, or no memory: a retry may succeed
            why = f"the local model's process cannot be started ({error.strerror or error})"
            raise ProviderError(why, retryable=True) from None
        child = cls(process, silence)
        try:
            child._send({"load": asdict(loading)})
            async with asyncio.timeout(LOAD_SECONDS):
                await child._loaded
        except TimeoutError:
            await child.close(at_once=True)
            why = f"the local model was not loaded after {LOAD_SECONDS:.0f} s, and its process was ended"
            raise ProviderError(why, retryable=True) from None
        except BaseException:
            await child.close(at_once=True)
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, request: dict[str, Any], on_delta: OnDelta | None) -> Work:
        if self.dead:  # it died after the caller obtained it: the request would never end
            raise ProviderError("the local model's process has just ended", retryable=True)
        work = Work(next(self._ids), self._loop.create_future(), on_delta)
        self._send({"id": work.id, "request": request})
        self._works[work.id] = work
        self._restart_silence_timer()
        return work

    def cancel(self, work: Work) -> None:
        """Stop the request at its next token; it is over once `ended` is done."""
        work.on_delta = None
        self._send({"cancel": work.id})

    async def close(self, at_once: bool = False) -> None:
        """End the child and wait for its exit."""
        if not at_once and self._process.stdin is not None:
            self._process.stdin.close()  # the child ends at the end of its input
            await self._ended()
        self._kill()
        await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the local model was closed")

    async def _ended(self) -> None:
        """Wait a short time for the child to exit by itself."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)

    def _send(self, frame: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(pack(frame))

    async def _listen(self) -> None:
        """Read frames from the child until the end of its output."""
        output = self._process.stdout
        assert output is not None
        try:
            while True:
                head = await output.readexactly(HEAD.size)
                self._take(json.loads(await output.readexactly(length(head))))
        except (asyncio.IncompleteReadError, ValueError, ConnectionError):
            # Killing a process that has just ended would hide its exit status from the event loop.
            await self._ended()
            self._kill()
            status = await self._process.wait()
            await asyncio.wait(self._tasks[1:], timeout=0.5)
            self._fail_all(_death_message(status, self._said))
        except asyncio.CancelledError:  # closed, or the event loop ends and the child could not be ended later
            self._kill()
            await self._process.wait()
            self._fail_all("the local model was closed")
            raise

    def _take(self, frame: dict[str, Any]) -> None:
        if "ready" in frame:
            self._settle(self._loaded, frame["ready"])
        elif "failed" in frame:
            why = _stderr_tail(self._said) or frame["failed"]
            text = f"the local model could not be loaded ({one_line(why)}): if its file is damaged, get it again"
            if frame.get("missing"):
                text = f"the local model needs llama.cpp, which cannot be used ({one_line(frame['failed'])}): {INSTALL}"
            self._fail(self._loaded, ProviderError(text))
        elif (work := self._works.get(frame["id"])) is not None:
            self._restart_silence_timer()
            if "delta" in frame:
                self._show(work, frame["delta"])
            else:
                self._end(work, frame)

    def _show(self, work: Work, delta: dict[str, Any]) -> None:
        if work.on_delta is not None and delta:
            try:
                work.on_delta(delta)
            except Exception as error:  # a bug in this request's callback must not affect other requests
                self.cancel(work)
                self._fail(work.ended, error)

    def _end(self, work: Work, frame: dict[str, Any]) -> None:
        del self._works[work.id]
        if "answer" in frame:
            self._settle(work.ended, frame["answer"])
        else:
            self._fail(work.ended, _refusal(frame.get("error", "stopped")))
        if not self._works and self._silence_timer is not None:
            self._silence_timer.cancel()

    def _restart_silence_timer(self) -> None:
        """Restart the silence timeout, because the child has sent something."""
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._silence_timer = self._loop.call_later(self._silence, self._kill)

    def _fail_all(self, why: str) -> None:
        """Fail all requests, because the child has died."""
        self.dead = True
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        error = ProviderError(why, retryable=True)
        self._fail(self._loaded, error)
        for work in self._works.values():
            self._fail(work.ended, error)
        self._works.clear()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(65_536):
            self._said = (self._said + data)[-_TAIL:]

    @staticmethod
    def _settle(future: asyncio.Future[Any], value: Any) -> None:
        if not future.done():
            future.set_result(value)

    @staticmethod
    def _fail(future: asyncio.Future[Any], error: Exception) -> None:
        if not future.done():
            future.set_exception(error)
            future.exception()  # marks it as retrieved: the caller may have gone


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PASSED_STARTS)} | {
        "OMP_WAIT_POLICY": "passive"
    }


def _refusal(error: Any) -> ProviderError:
    """Return the error that the model's server reported."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else None
    return ProviderError(f"the local model: {error_text(error)}", retryable=status not in _FINAL, status=status)


def _death_message(status: int, said: bytes) -> str:
    how = f"was killed (signal {-status})" if status < 0 else f"ended by itself (status {status})"
    words = _stderr_tail(said)
    return f"the local model's process {how}{f': {one_line(words)}' if words else ''}; the next request starts it again"


def _stderr_tail(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
