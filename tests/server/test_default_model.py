"""Which model answers where the settings name none."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from everloop.testing.openai_server import FakeOpenAI

from ..support.commands import everloop
from .serving import Client, process, text_of

PORT = 11434  # Ollama's own


@pytest.fixture(autouse=True)
def _alone_at_the_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time, whatever number of processes run them: one has an Ollama there, and one has none."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / "ollama.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.asynccontextmanager
async def ollama(behind: FakeOpenAI, delay: float = 0.0) -> AsyncIterator[None]:
    """What an Ollama with one model answers, at Ollama's address; chats go to the fake."""

    async def tags(request: web.Request) -> web.Response:
        await asyncio.sleep(delay)
        model = {"name": "tools-0x1", "model": "tools-0x1", "modified_at": "2026-01-01T00:00:00Z", "size": 1}
        return web.json_response({"models": [model]})

    async def chat(request: web.Request) -> web.Response:
        url = f"{behind.base_url}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, data=await request.read()) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    app = web.Application()
    app.router.add_get("/api/tags", tags)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", PORT).start()
        yield
    finally:
        await runner.cleanup()


@pytest.mark.platform("an Ollama of the person's own may stand at its address")
@pytest.mark.parametrize("delay", [0.0, 1.5], ids=["at once", "on a busy machine"])
async def test_an_ollama_on_this_machine_answers_if_no_model_is_set(tmp_path: Path, delay: float):
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http:
        try:
            async with ollama(fake, delay):
                settings = {"EVERLOOP_BASE_URL": "", "EVERLOOP_MODEL": ""}
                async with process(fake, tmp_path, first="the Ollama on this machine", **settings) as (_, url):
                    assert text_of(await Client(url, http).ask("mark:m1")).startswith("done:m1")
        except OSError:
            pytest.skip(f"port {PORT} is taken")


async def test_without_ollama_and_weights_one_line_says_what_to_do(tmp_path: Path):
    done = await asyncio.wait_for(
        everloop("serve", "--port", "0", EVERLOOP_HOME=str(tmp_path), EVERLOOP_MODEL="", EVERLOOP_BASE_URL=""), 50
    )
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert "everloop model pull" in done.err or "everloop[local]" in done.err
