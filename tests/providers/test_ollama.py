"""Detecting an Ollama on this machine, against real servers on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web

from everloop.providers.ollama import find_ollama


def model(name: str, modified: str, family: str = "llama", **more: Any) -> dict[str, Any]:
    return {"name": name, "modified_at": f"{modified}T10:00:00.000000000+02:00", "details": {"family": family}, **more}


@asynccontextmanager
async def ollama(answer: Any, status: int = 200, delay: float = 0.0) -> AsyncIterator[str]:
    async def tags(request: web.Request) -> web.Response:
        await asyncio.sleep(delay)
        if isinstance(answer, bytes):
            return web.Response(body=answer, status=status)
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_get("/api/tags", tags)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def test_the_most_recently_changed_model_is_found():
    models = [model("old:1b", "2026-01-01"), model("new:8b", "2026-03-01"), model("middle:3b", "2026-02-01")]
    async with ollama({"models": models}) as base_url:
        assert await find_ollama(5, base_url) == "new:8b"


async def test_models_that_do_not_chat_or_run_remotely_are_skipped():
    models = [
        model("chat:1b", "2026-01-01"),
        model("nomic-embed-text:latest", "2026-02-01"),
        model("snowflake:latest", "2026-02-02", family="bert"),
        model("vectors:latest", "2026-02-03", capabilities=["embedding"]),
        model("large:cloud", "2026-02-04", remote_host="https://ollama.com"),
        {"name": None, "modified_at": "2026-02-05"},
        "nonsense",
    ]
    async with ollama({"models": models}) as base_url:
        assert await find_ollama(5, base_url) == "chat:1b"
    async with ollama({"models": models[1:]}) as base_url:
        assert await find_ollama(5, base_url) is None


async def test_a_models_declared_abilities_count_more_than_its_name():
    models = [model("embedded-expert", "2026-02-01", capabilities=["completion", "tools"])]
    async with ollama({"models": models}) as base_url:
        assert await find_ollama(5, base_url) == "embedded-expert"


@pytest.mark.parametrize("answer", [{}, [], {"models": None}, {"models": []}, b"<html>hello</html>", b"", b"\xff\xfe"])
async def test_another_server_is_not_taken_for_ollama(answer):
    async with ollama(answer) as base_url:
        assert await find_ollama(5, base_url) is None
    async with ollama({"models": [model("chat:1b", "2026-01-01")]}, status=404) as base_url:
        assert await find_ollama(5, base_url) is None


async def test_without_a_server_the_answer_is_immediate():
    started = time.monotonic()
    assert await find_ollama(30, "http://127.0.0.1:1/v1") is None
    assert time.monotonic() - started < 15


async def test_a_slow_server_is_not_waited_for():
    async with ollama({"models": [model("chat:1b", "2026-01-01")]}, delay=20) as base_url:
        started = time.monotonic()
        assert await find_ollama(0.2, base_url) is None
        assert time.monotonic() - started < 10


@asynccontextmanager
async def speaking(*words: bytes, pause: float = 0.0) -> AsyncIterator[str]:
    """A server that sends this text to every client, and disconnects."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            for word in words:
                writer.write(word)
                await writer.drain()
                await asyncio.sleep(pause)
        writer.transport.abort()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with asyncio.timeout(20):
            await gone.wait()
    finally:
        server.close()


@pytest.mark.parametrize("words", [b"SSH-2.0-hello\r\n", b'{"models": []}', b"HTTP/1.0 200 OK\r\n", b""])
async def test_a_server_that_does_not_speak_http_is_not_taken_for_ollama(words):
    async with speaking(words) as base_url:
        assert await find_ollama(20, base_url) is None


async def test_a_server_that_sends_a_byte_at_a_time_is_not_waited_for():
    async with speaking(*[b"H"] * 1000, pause=0.03) as base_url:
        started = time.monotonic()
        assert await find_ollama(0.3, base_url) is None
        assert time.monotonic() - started < 15


async def test_an_endless_list_is_not_read_to_its_end():
    async with speaking(b"HTTP/1.0 200 OK\r\n\r\n", *[b" " * (1 << 16)] * 1000) as base_url:
        assert await find_ollama(5, base_url) is None
