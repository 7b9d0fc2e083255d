"""The parent's side of the engine, with children that are not models: they end, refuse or stay silent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.local import engine as engine_module
from everloop.providers.local import process as process_module
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.llama import Loading
from everloop.providers.local.process import ModelProcess
from everloop.providers.local.provider import LocalProvider, Plain
from tests.support.commands import until

from .test_engine import alive

LOADING = Loading("model.gguf", 512, 1, 1, "")
SILENT = "import sys; sys.stdin.buffer.read()"  # reads its input to the end
GONE = "pass"


ANSWERING = """
import json, struct, sys
def send(frame):
    data = json.dumps(frame).encode()
    sys.stdout.buffer.write(struct.pack(">I", len(data)) + data)
    sys.stdout.flush()
while head := sys.stdin.buffer.read(4):
    frame = json.loads(sys.stdin.buffer.read(struct.unpack(">I", head)[0]))
    if "load" in frame:
        send({"ready": "1"})
    elif "id" in frame:
        send({"id": frame["id"], "answer": {"said": frame["request"]["prompt"]}})
"""


def start_instead(does: str, monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Start another program instead of any model; return those that were started."""
    begun: list[Process] = []
    start = asyncio.create_subprocess_exec

    async def started(*_: Any, **keywords: Any) -> Process:
        begun.append(await start(sys.executable, "-c", does, **keywords))
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(engine_module, "_prepared", lambda _: LOADING)
    return begun


@contextlib.asynccontextmanager
async def child_that(does: str, silence: float = 300.0) -> AsyncIterator[ModelProcess]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", does, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    child = ModelProcess(process, silence)
    try:
        yield child
    finally:
        await child.close(at_once=True)


@contextlib.asynccontextmanager
async def engine_with(child: ModelProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """Return an engine whose next start yields this child."""

    async def start(*_: Any) -> ModelProcess:
        return child

    monkeypatch.setattr(ModelProcess, "start", start)
    monkeypatch.setattr(engine_module, "_prepared", lambda _: LOADING)
    made = Engine(Settings(Path("model.gguf"), slots=1))
    try:
        yield made
    finally:
        await made.close()


async def test_a_child_that_dies_once_ready_fails_its_waiting_request(monkeypatch):
    async with child_that(GONE) as child:
        await until(lambda: child.dead)
        async with engine_with(child, monkeypatch) as made:
            with pytest.raises(ProviderError) as caught:
                await asyncio.wait_for(made.complete({"prompt": "hello"}), 20)
            assert caught.value.retryable


async def test_a_request_that_cannot_be_sent_is_forgotten_and_the_child_does_not_count_as_hung():
    async with child_that(SILENT, silence=0.2) as child:
        with pytest.raises(TypeError):
            child.begin({"prompt": object()}, None)
        await asyncio.sleep(1)
        assert not child.dead


async def test_a_child_that_ends_by_itself_is_not_killed_and_its_end_is_reported_truly(monkeypatch):
    monkeypatch.setattr(process_module, "EXIT_SECONDS", 20.0)
    async with child_that("import os, time; os.close(1); time.sleep(0.3); os._exit(7)") as child:
        with pytest.raises(ProviderError, match="status 7"):
            await asyncio.wait_for(child.begin({"prompt": "hello"}, None).ended, 30)


async def test_a_child_that_falls_silent_and_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(process_module, "EXIT_SECONDS", 0.2)
    async with child_that("import os, time; os.close(1); time.sleep(600)") as child:
        with pytest.raises(ProviderError, match="signal 9"):
            await asyncio.wait_for(child.begin({"prompt": "hello"}, None).ended, 30)


async def test_a_child_that_hangs_while_loading_is_ended_and_the_request_fails(monkeypatch):
    begun = start_instead(SILENT, monkeypatch)
    monkeypatch.setattr(process_module, "LOAD_SECONDS", 0.2)
    with pytest.raises(ProviderError, match="not loaded") as caught:
        await asyncio.wait_for(ModelProcess.start(LOADING), 20)
    assert caught.value.retryable
    assert begun[0].returncode is not None


async def test_a_process_that_cannot_be_started_is_one_line_with_the_reason(monkeypatch):
    async def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    with pytest.raises(ProviderError, match="cannot be started") as caught:
        await ModelProcess.start(LOADING)
    assert caught.value.retryable


async def test_a_conversation_is_shaped_outside_the_event_loop():
    looked_through = threading.Event()

    class Slow(Plain):
        def prepare(self, messages: Any, tools: Any) -> dict[str, Any]:
            assert looked_through.wait(20), "the event loop waits for us"
            raise ProviderError("that will do")

    made = LocalProvider(Engine(Settings(Path("model.gguf"))), Slow())
    asked = asyncio.create_task(made.chat([{"role": "user", "content": "hello"}]))
    await asyncio.sleep(0)
    looked_through.set()
    with pytest.raises(ProviderError, match="that will do"):
        await asked
    await made.close()


@pytest.mark.may_block
@pytest.mark.parametrize("ends", ["by a request", "by its end"])
def test_an_engine_whose_event_loop_has_ended_restarts_in_the_next_one(monkeypatch, ends):
    begun = start_instead(ANSWERING, monkeypatch)
    made = Engine(Settings(Path("model.gguf"), slots=1))

    async def ask() -> dict[str, Any]:
        return await asyncio.wait_for(made.complete({"prompt": "hello"}), 20)

    async def ask_and_end() -> dict[str, Any]:
        answer = await ask()
        await made.close()
        return answer

    assert asyncio.run(ask()) == {"said": "hello"}
    if ends == "by a request":
        assert asyncio.run(ask_and_end()) == {"said": "hello"}
    else:
        asyncio.run(made.close())
    assert made.pid is None
    ends_at = time.monotonic() + 20
    while any(map(alive, [process.pid for process in begun])) and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert not any(map(alive, [process.pid for process in begun]))
