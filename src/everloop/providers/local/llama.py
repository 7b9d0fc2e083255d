"""llama.cpp, loaded into this process: used through its Python module, and through a socket for what that lacks.

Only the child process imports this. llama.cpp always runs an HTTP server: here on a Unix socket in a folder that only
this user can enter, with a key that is generated at each start. It opens no port.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

SOCKETS = "everloop-engine-"
_SOCKET = "s.sock"  # in the working folder
BATCH = 128  # tokens of a prompt per batch; a request can be stopped between two batches
CACHE_MIB = 256  # for conversations that were evicted from their slot


@dataclass(frozen=True, slots=True)
class Loading:
    """How to load a model. `window` is the length of one conversation in tokens."""

    weights: str
    window: int
    slots: int
    threads: int
    states: str  # the folder for saved states, or ""


class LlamaError(Exception):
    """The model's server refused a request; `body` is its answer."""

    def __init__(self, body: Any) -> None:
        super().__init__(str(body))
        self.body = body


class Llama:
    """One loaded model."""

    def __init__(self, loading: Loading) -> None:
        # Spinning threads would take the cores that others need: on a busy machine this was four times slower.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        xllamacpp: Any = import_module("xllamacpp")
        self.version = str(xllamacpp.__version__)
        self._key = secrets.token_hex(16)
        remove_stale_sockets(Path(tempfile.gettempdir()))
        self._folder = tempfile.mkdtemp(prefix=f"{SOCKETS}{os.getpid()}-")  # mode 0700
        os.chdir(self._folder)  # the path of a socket may have at most 107 bytes
        params = xllamacpp.CommonParams()
        params.model.path = loading.weights
        params.hostnames = [_SOCKET]
        params.api_keys = [self._key]
        params.endpoint_slots = True
        params.ui = False
        params.n_ctx = loading.window * loading.slots
        params.n_parallel = loading.slots
        params.n_batch = params.n_ubatch = BATCH
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = loading.threads
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
        params.fit_params = False
        params.use_jinja = True
        params.warmup = False
        params.cache_ram_mib = CACHE_MIB
        params.n_threads_http = loading.slots + 2
        params.verbosity = 0
        if loading.states:
            params.slot_save_path = os.path.join(loading.states, "")
        self._server = xllamacpp.Server(params)

    def complete(self, request: dict[str, Any], on_chunk: Callable[[Any], bool]) -> None:
        """Answer a chat (`messages`) or complete a text (`prompt`); ends early when `on_chunk` returns True."""
        ask = self._server.handle_chat_completions if "messages" in request else self._server.handle_completions
        ask(request, on_chunk)

    def render(self, messages: list[Any], tools: Any) -> str:
        """Render a conversation with the model's chat template."""
        body = {"messages": messages, **({"tools": tools} if tools else {})}
        return str(self.post("/apply-template", body)["prompt"])

    def idle_slots(self) -> list[int]:
        """The idle slots, the one with the fewest tokens first."""
        idle = [slot for slot in self.post("/slots", None) if not slot["is_processing"]]
        return [int(slot["id"]) for slot in sorted(idle, key=lambda slot: int(slot.get("n_prompt_tokens") or 0))]

    def read_prompt(self, text: str, stopped: Callable[[], bool]) -> tuple[int, int] | None:
        """Make the model read a text. Return the slot and the number of tokens read; None if it was stopped."""
        body = {"prompt": text, "n_predict": 0, "cache_prompt": True, "stream": True, "return_progress": True}
        connection = self._ask("/completion", body)
        try:
            for line in connection.getresponse():
                if stopped():
                    return None  # closing the connection stops the server's work
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise LlamaError(event["error"])
                if event.get("stop"):
                    return int(event["id_slot"]), int(event["timings"]["prompt_n"])
            raise LlamaError("it ended before the prompt did")
        finally:
            connection.close()

    def save(self, slot: int, file: str) -> None:
        self.post(f"/slots/{slot}?action=save", {"filename": file})

    def restore(self, slot: int, file: str) -> int:
        """Restore a saved state, and return its number of tokens."""
        return int(self.post(f"/slots/{slot}?action=restore", {"filename": file})["n_restored"])

    def post(self, path: str, body: Any) -> Any:
        """Send a request to the server: a POST, or a GET without a body."""
        connection = self._ask(path, body)
        try:
            response = connection.getresponse()
            answer = json.loads(response.read())
            if response.status != 200:
                raise LlamaError(answer)
            return answer
        finally:
            connection.close()

    def remove_socket(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, path: str, body: Any) -> http.client.HTTPConnection:
        connection = _UnixConnection("localhost")
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", path, data, headers)
        return connection


class _UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(_SOCKET)


def remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets that killed processes of this user left behind."""
    for path in folder.glob(f"{SOCKETS}*-*"):
        with suppress(OSError, ValueError):
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            try:
                os.kill(int(path.name.removeprefix(SOCKETS).partition("-")[0]), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
