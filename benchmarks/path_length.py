"""Count how far data travels through our code: a streamed delta, a model call, and `everloop run`.

    .venv/bin/python benchmarks/path_length.py [-v]

A function counts for the delta when its text passes through it: as an argument, a local variable or a return value. A
model call's layers are the functions of ours on the stack, from the engine's port to the socket. For `everloop run` the
files count in which at least one function ran.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the tests' server

import everloop  # noqa: E402

SOURCE = str(Path(everloop.__file__).parent)
MARK = "Quagga7"  # the streamed word that is followed
TARGETS = {"delta": 12, "model call": 5, "run": 60}


def is_ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(SOURCE) and "/testing/" not in name


def name_of(frame: FrameType) -> str:
    path = frame.f_code.co_filename.removeprefix(f"{SOURCE}/")
    return f"{path}: {frame.f_code.co_qualname}"


def holds_mark(value: Any, depth: int = 2) -> bool:
    """Whether the value is, or directly holds, the followed text."""
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, bytes | bytearray | memoryview):
        return MARK.encode() in bytes(value)
    if depth and isinstance(value, list | tuple):
        return any(holds_mark(item, depth - 1) for item in value)
    if depth and is_dataclass(value) and not isinstance(value, type) and len(fields(value)) < 8:
        return any(holds_mark(getattr(value, field.name, None), depth - 1) for field in fields(value))
    return False


def is_importing(frame: FrameType | None) -> bool:
    """Whether the function runs because a module of ours is being imported, as a decorator does."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and is_ours(frame) and frame.f_globals["__name__"] != "__main__":
            return True
        frame = frame.f_back
    return False


class Trail:
    """The functions that the followed text passes between the model's socket and the client's."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.over = False

    def __call__(self, frame: FrameType, what: str, value: Any) -> None:
        if self.over or what not in ("call", "return") or not is_ours(frame):
            return
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount] if what == "call" else frame.f_code.co_varnames
        found = [frame.f_locals.get(name) for name in names if name != "self"]
        if any(map(holds_mark, found)) or (what == "return" and holds_mark(value)):
            self.names.setdefault(name_of(frame))


class Layers:
    """The functions of ours on the stack when a request's bytes reach the socket's transport."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def look(self) -> None:
        if self.names:
            return
        frame: FrameType | None = sys._getframe(1)
        stack = []
        while frame is not None:
            if is_ours(frame):
                stack.append(name_of(frame))
            frame = frame.f_back
        if any("_call_model" in name for name in stack):
            names = stack[: next(place for place, name in enumerate(stack) if "_call_model" in name)]
            self.names = names[::-1]


async def serve_one(trail: Trail, layers: Layers) -> None:
    """One streamed request through a real server, with a fake model behind it."""
    from tests.server.serving import serving

    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), retries=1) as server:
            ask = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
            for number in range(2):  # the first one loads what is imported on first use
                tokens = ["one ", "two ", f"{MARK} ", "three ", "four"]
                server.fake.reply("".join(tokens), tokens=tokens, token_delay=0.02)
                with watched_sockets(layers):
                    sys.setprofile(trail if number else None)
                    async with server.http.post(f"{server.url}/v1/chat/completions", json=ask) as response:
                        assert response.status == 200
                        async for line in response.content:
                            if MARK.encode() in line:
                                trail.over = bool(number)
                    sys.setprofile(None)


class watched_sockets:
    """Looks at the stack whenever bytes are written to a transport."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._kind = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
        self._write: Callable[..., None] = self._kind.write
        self._writelines: Callable[..., None] = self._kind.writelines

    def __enter__(self) -> None:
        layers, write, writelines = self._layers, self._write, self._writelines

        def look_and_write(transport: Any, data: Any) -> None:
            layers.look()
            write(transport, data)

        def look_and_writelines(transport: Any, data: Any) -> None:
            layers.look()
            writelines(transport, data)

        self._kind.write, self._kind.writelines = look_and_write, look_and_writelines

    def __exit__(self, *_: object) -> None:
        self._kind.write, self._kind.writelines = self._write, self._writelines


def files_of_run() -> list[str]:
    """The files whose functions `everloop run` runs, in a process of its own with the profiler on."""
    from everloop.testing.openai_server import FakeOpenAI

    async def go() -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            async with FakeOpenAI() as fake:
                fake.reply("hello")
                env = {**os.environ, "EVERLOOP_HOME": folder, "EVERLOOP_BASE_URL": fake.base_url}
                env |= {"EVERLOOP_MODEL": "scripted", "EVERLOOP_WORKSPACE": f"{folder}/workspace"}
                command = [sys.executable, __file__, "--child"]
                made = await asyncio.create_subprocess_exec(*command, env=env, stdout=subprocess.PIPE)
                out, _ = await made.communicate()
        return sorted(line for line in out.decode().splitlines() if line.endswith(".py"))

    return asyncio.run(go())


def child() -> None:
    """`everloop run hello` under a profiler that prints each file of ours in which a function ran."""
    seen: set[str] = set()

    def look(frame: FrameType, what: str, value: Any) -> None:
        if what == "call" and is_ours(frame) and frame.f_code.co_flags & CO_OPTIMIZED and not is_importing(frame):
            seen.add(frame.f_code.co_filename.removeprefix(f"{SOURCE}/"))

    sys.argv = ["everloop", "run", "hello"]
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        runpy.run_module("everloop", run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        print("\n".join(sorted(seen)))


def main() -> None:
    trail, layers = Trail(), Layers()
    asyncio.run(serve_one(trail, layers))
    files = files_of_run()
    rows = [
        ("functions that a streamed delta passes", len(trail.names), TARGETS["delta"]),
        ("layers of a model call", len(layers.names), TARGETS["model call"]),
        ("files in which `everloop run` runs something", len(files), TARGETS["run"]),
    ]
    if "-v" in sys.argv:
        print("delta:", *trail.names, sep="\n  ")
        print("model call:", *layers.names, sep="\n  ")
        print("run:", *files, sep="\n  ")
    print("| path | now | target |\n|---|---|---|")
    for what, count, target in rows:
        print(f"| {what} | {count} | {target} |")


if __name__ == "__main__":
    child() if "--child" in sys.argv else main()
