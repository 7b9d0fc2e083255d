"""Shared by the tests of weights: a small model, and a web server on loopback that serves it, well or badly."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from everloop.errors import EverloopError
from everloop.providers.local.catalogue import ModelCard, Wheel
from everloop.providers.local.weights import Weights

BYTES = b"GGUF" + random.Random(7).randbytes(400_000)
OTHER = BYTES[:200_000] + b"!" + BYTES[200_001:]  # one byte of it is wrong
CARD = ModelCard(
    name="tiny",
    file="tiny-q4.gguf",
    size=len(BYTES),
    sha256=hashlib.sha256(BYTES).hexdigest(),
    licence="Apache-2.0",
    about="for tests",
)


@dataclass
class Answer:
    """How one request is answered."""

    body: bytes = b""
    status: int = 200
    ranges: bool = True
    etag: str = '"one"'
    cut: int | None = None  # the connection is closed after so many bytes
    hold: int | None = None  # nothing more is sent after so many, until the server is told to continue
    length: int | None = None  # the header's value, if not the true one
    location: str = ""
    kind: str = "application/octet-stream"
    slow: float = 0.0  # seconds between pieces of 20 kB
    content_range: str = ""


@dataclass
class Server:
    """Responses by path, one per request; the last one repeats. `requests` are the (path, headers) received."""

    port: int = 0
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[tuple[str, Message]] = field(default_factory=list)
    sent: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ranges(self) -> list[str | None]:
        """The Range of every request, in order."""
        return [headers["Range"] for _, headers in self.requests]

    def gives(self, path: str, *answers: Answer) -> None:
        self.answers[path] = list(answers)

    def take(self, path: str) -> Answer:
        plan = self.answers.get(path, [Answer(b"no such file", status=404)])
        return plan.pop(0) if len(plan) > 1 else plan[0]


@contextmanager
def serving(context: Any = None) -> Iterator[Server]:
    """Run a server in threads of its own; with a TLS context it uses HTTPS."""
    plan = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            plan.requests.append((self.path, self.headers))
            with suppress(OSError):  # the client has gone
                _respond(self, plan, plan.take(self.path))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    plan.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield plan
    finally:
        plan.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _respond(handler: BaseHTTPRequestHandler, plan: Server, answer: Answer) -> None:
    start, status = 0, answer.status
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    if asked and answer.ranges and status == 200 and handler.headers.get("If-Range", answer.etag) == answer.etag:
        start, status = int(asked[1]), 206
    body = answer.body[start:]
    handler.send_response(status)
    if answer.location:
        handler.send_header("Location", answer.location)
    if status == 206:
        whole = f"bytes {start}-{len(answer.body) - 1}/{len(answer.body)}"
        handler.send_header("Content-Range", answer.content_range or whole)
    if answer.etag:
        handler.send_header("ETag", answer.etag)
    handler.send_header("Content-Type", answer.kind)
    handler.send_header("Content-Length", str(len(body) if answer.length is None else answer.length))
    handler.end_headers()
    end = len(body) if answer.cut is None else answer.cut
    for at in range(0, end, 20_000):
        if answer.hold is not None and at >= answer.hold:
            plan.go_on.wait(50)
        piece = body[at : min(at + 20_000, end)]
        plan.sent += len(piece)  # before the client can have it
        handler.wfile.write(piece)
        time.sleep(answer.slow)


# ---------------------------------------------------------------------------------------------- wheels


def wheel(package: str, members: dict[str, bytes]) -> bytes:
    """Make a wheel of version 1.0 with these members."""
    folder = package.replace("-", "_")
    about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = f"{folder}-1.0.dist-info"
    inside = {**members, f"{info}/METADATA": about.encode(), f"{info}/WHEEL": kind.encode(), f"{info}/RECORD": b""}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in inside.items():
            archive.writestr(name, data)
    return made.getvalue()


def member_of(package: str) -> str:
    return f"{package.replace('-', '_')}/data/piece.bin"


def card_of_wheels(wheels: dict[str, bytes], pieces: list[bytes]) -> ModelCard:
    """Return the small model's card, whose file is in these wheels."""
    found = [
        Wheel(package, "1.0", hashlib.sha256(data).hexdigest(), member_of(package), len(piece))
        for (package, data), piece in zip(wheels.items(), pieces, strict=True)
    ]
    return replace(CARD, wheels=tuple(found))


def put_in_registry(server: Server, wheels: dict[str, bytes]) -> None:
    for package, data in wheels.items():
        file = f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
        page = f'<!DOCTYPE html><html><body><a href="/files/{file}">{file}</a></body></html>'
        server.gives(f"/simple/{package}/", Answer(page.encode(), kind="text/html"))
        server.gives(f"/files/{file}", Answer(data))


def write_catalogue(path: Path, *cards: ModelCard) -> Path:
    path.write_text(json.dumps([asdict(card) for card in cards]))
    return path


def refused(weights: Weights) -> str:
    """Return the one line that a pull fails with; then no file has the model's name."""
    with pytest.raises(EverloopError) as caught:
        weights.pull("tiny")
    assert not (weights.folder / CARD.file).exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)
