"""MCP servers over HTTP: a real one, and one that refuses, forgets sessions, hangs, disconnects and sends too much."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everloop import AgentLoop, Config, MessageBus
from everloop.config import McpServer
from everloop.log import Call
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Output, Tool
from everloop.tools.context import CallContext
from everloop.tools.mcp import connection as mcp_connection
from everloop.tools.mcp import limits as mcp_limits
from everloop.tools.mcp import results as mcp_results
from everloop.tools.mcp import stdio as mcp_stdio
from everloop.tools.mcp.servers import McpServers
from everloop.tools.registry import ToolRegistry
from tests.support.places import DOCS

from .servers import by_name, connected, failure, installed, run, text

PAGE = DOCS / "mcp.md"
SECRET = "canary-token-5f2c"


class WebServer:
    """A scriptable MCP server over HTTP that records what it receives."""

    def __init__(self) -> None:
        self.port = 0
        self.sessions: set[str] = set()
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.status = 0  # status of every answer, if set
        self.as_events = False
        self.tools = ["echo", "wait", "cut", "big", "page", "zipped", "away", "broken"]
        self.elsewhere = ""
        self.waiting: dict[Any, asyncio.Event] = {}
        self._listeners: list[asyncio.Queue[str]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/mcp", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.sessions.clear()
        for listener in self._listeners:
            listener.put_nowait("")
        if self._runner is not None:
            await self._runner.cleanup()

    def tell(self, method: str) -> None:
        """Send a notification to all listening clients."""
        for listener in self._listeners:
            listener.put_nowait(json.dumps({"jsonrpc": "2.0", "method": method}))

    def methods(self) -> list[str]:
        return [body["method"] for verb, _, body in self.requests if verb == "POST"]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body: Any = await request.json() if request.method == "POST" else None
        self.requests.append((request.method, dict(request.headers), body))
        if self.status:
            return web.Response(status=self.status, text=f"no, {request.headers.get('Authorization')}")
        known = request.headers.get("Mcp-Session-Id") in self.sessions
        if request.method == "GET":
            return await self._listen(request) if known else web.Response(status=404)
        if request.method == "DELETE":
            self.sessions.discard(request.headers.get("Mcp-Session-Id", ""))
            return web.Response()
        if body["method"] != "initialize" and not known:
            return web.Response(status=404)
        if "id" not in body:
            if body["method"] == "notifications/cancelled":
                # it may overtake the call, since it has its own connection
                self._call(body["params"]["requestId"]).set()
            return web.Response(status=202)
        return await self._answer(request, body)

    def _call(self, id: Any) -> asyncio.Event:
        """Set when the call is cancelled."""
        return self.waiting.setdefault(id, asyncio.Event())

    async def _listen(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        listener: asyncio.Queue[str] = asyncio.Queue()
        self._listeners.append(listener)
        while data := await listener.get():
            await response.write(f"data: {data}\n\n".encode())
        return response

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("params") or {}
        headers: dict[str, str] = {}
        result: dict[str, Any] = {}
        if body["method"] == "initialize":
            headers["Mcp-Session-Id"] = session = uuid.uuid4().hex
            self.sessions.add(session)
            tools = {"tools": {"listChanged": True}}
            info = {"name": "web", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": tools, "serverInfo": info}
        elif body["method"] == "tools/list":
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in self.tools]}
        elif body["method"] == "tools/call":
            name = params["name"]
            if name != "echo":
                return await self._misbehave(name, request, body)
            result = {"content": [{"type": "text", "text": params["arguments"].get("text", "")}]}
        answer = json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": result})
        if self.as_events:
            headers["Content-Type"] = "text/event-stream"
            return web.Response(body=f"event: message\ndata: {answer}\n\n".encode(), headers=headers)
        return web.Response(text=answer, content_type="application/json", headers=headers)

    async def _misbehave(self, name: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if name == "wait":
            await self._call(body["id"]).wait()
        if name == "page":
            return web.Response(text="<h1>Welcome</h1>", content_type="text/html")
        if name == "away":
            return web.Response(status=307, headers={"Location": self.elsewhere})
        if name == "broken":
            return web.Response(text="{not json", content_type="application/json")
        result = {"content": [{"type": "text", "text": "what was too big"}]}
        answer = json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": result}).encode()
        if name == "zipped":
            bomb = gzip.compress(b" " * 50_000_000 + answer)
            return web.Response(body=bomb, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(50 if name == "big" else 1):
            await response.write(b" " * 1_000_000)
        if name == "big":
            await response.write(answer)
            return response
        assert request.transport is not None
        request.transport.close()
        return response


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    server = WebServer()
    await server.start()
    yield server
    await server.stop()


def by_http(server: WebServer, **options: Any) -> McpServer:
    return McpServer(
        name="web", url=f"{server.url}?key={SECRET}-query", headers={"Authorization": f"Bearer {SECRET}"}, **options
    )


@pytest.mark.parametrize("as_events", [False, True])
async def test_headers_of_the_config_are_sent_with_every_request(server, as_events):
    server.as_events = as_events
    async with connected(by_http(server)) as (_, tools):
        assert await text(tools["mcp_web_echo"], text="hello") == "hello"
        assert len(server.sessions) == 1
    assert not server.sessions, "the session is closed at the end"
    assert {verb for verb, _, _ in server.requests} >= {"POST", "DELETE"}
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for _, headers, _ in server.requests)


async def test_a_forgotten_session_is_initialized_again_and_the_call_is_retried(server):
    async with connected(by_http(server)) as (_, tools):
        server.sessions.clear()
        said = await asyncio.gather(*(text(tools["mcp_web_echo"], text=str(number)) for number in range(5)))
        assert said == list("01234")
        assert server.methods().count("initialize") == 2


async def test_a_restarted_server_is_used_again(server, caplog):
    caplog.set_level(logging.DEBUG)
    async with connected(by_http(server)) as (group, tools):
        await server.stop()
        assert "127.0.0.1" in await failure(tools["mcp_web_echo"], text="x")
        server.tools = ["echo", "new"]
        await server.start()
        assert await text(tools["mcp_web_echo"], text="x") == "x"
        assert set(by_name(await group.ready())) == {"mcp_web_echo", "mcp_web_new"}
    assert SECRET not in caplog.text


async def test_an_unreachable_server_at_startup_is_one_warning_without_secrets(caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    settings = McpServer(
        name="web", url=f"http://me:{SECRET}@127.0.0.1:{port}/mcp?key={SECRET}&pin=qzx", headers={"X-Key": SECRET}
    )
    async with connected(settings) as (_, tools):
        assert not tools
    assert len(caplog.records) == 1
    assert f"127.0.0.1:{port}" in caplog.text
    assert SECRET not in caplog.text
    assert "qzx" not in caplog.text


@pytest.mark.parametrize(("status", "advice"), [(401, "token"), (403, "token"), (404, "url"), (503, "later")])
async def test_a_refusal_is_explained_without_secrets(server, caplog, status, advice):
    async with connected(by_http(server)) as (_, tools):
        server.status = status
        said = await failure(tools["mcp_web_echo"], text="x")
        assert str(status) in said
        assert advice in said
        assert SECRET not in said
        server.status = 0
        async with asyncio.timeout(25):
            while (await run(tools["mcp_web_echo"], text="x")).failed:
                await asyncio.sleep(0.2)
    server.status = status
    async with connected(by_http(server)) as (_, tools):
        assert not tools
    assert str(status) in caplog.records[-1].getMessage()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("name", ["cut", "big", "page", "zipped", "broken"])
async def test_an_unusable_answer_fails_only_its_own_call(server, name):
    async with connected(by_http(server)) as (_, tools):
        waiting = asyncio.create_task(run(tools["mcp_web_wait"]))
        await asyncio.sleep(0.1)
        said = await failure(tools[f"mcp_web_{name}"])
        assert said.startswith("MCP server web: ")
        assert not waiting.done()
        assert await text(tools["mcp_web_echo"], text="still here") == "still here"
        waiting.cancel()


async def test_a_redirect_to_another_server_is_not_followed(server):
    reached = WebServer()
    await reached.start()
    server.elsewhere = reached.url
    async with connected(by_http(server)) as (_, tools):
        await failure(tools["mcp_web_away"])
    assert not reached.requests
    await reached.stop()


async def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    proxy = WebServer()
    await proxy.start()
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    async with connected(by_http(server)) as (_, tools):
        assert await text(tools["mcp_web_echo"], text="direct") == "direct"
    assert not proxy.requests
    await proxy.stop()


async def test_a_call_that_takes_too_long_is_cancelled_at_the_server(server):
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", lambda text: None)
    async with connected(by_http(server, timeout=2)) as (_, tools):
        result = await ToolRegistry(tools.values()).run(Call("c", "mcp_web_wait"), context)
        assert result.status == "error"
        (cancelled,) = server.waiting.values()
        async with asyncio.timeout(20):
            await cancelled.wait()
        assert await text(tools["mcp_web_echo"], text="next") == "next"


async def test_a_call_that_a_busy_agent_times_out_late_is_cancelled_at_the_server(server):
    async with connected(by_http(server, timeout=1)) as (_, tools), asyncio.timeout(20):
        late = asyncio.create_task(ToolRegistry(tools.values()).execute("mcp_web_wait", {}))
        while not server.waiting:
            await asyncio.sleep(0.01)
        time.sleep(2)  # the agent is busy when the call times out; the servers' thread is not
        assert "timed out after 1 seconds" in await late
        (cancelled,) = server.waiting.values()
        await cancelled.wait()


async def test_a_server_that_hangs_at_startup_times_out(caplog):
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    began = time.monotonic()
    settings = McpServer(name="silent", url=f"http://127.0.0.1:{port}/mcp", connect_timeout=0.5)
    async with connected(settings) as (_, tools):
        assert not tools
        assert time.monotonic() - began < 15  # the default is twenty seconds
    assert len(caplog.records) == 1
    silent.close()


async def test_a_tool_list_change_is_received_over_http(server):
    async with connected(by_http(server)) as (group, tools):
        assert "mcp_web_new" not in tools
        async with asyncio.timeout(20):
            while not server._listeners:
                await asyncio.sleep(0.02)
        server.tools = ["echo", "new"]
        server.tell("notifications/tools/list_changed")
        async with asyncio.timeout(20):
            while "mcp_web_new" not in by_name(await group.ready()):
                await asyncio.sleep(0.05)


async def test_a_real_server_over_http_works_and_is_used_again_after_a_restart():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [installed("mcp-server-everything"), "streamableHttp"],
            env={"PATH": os.environ["PATH"], "PORT": str(port)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    async def echo(tools: dict[str, Tool]) -> Output:
        return await run(tools["mcp_everything_echo"], message="hi")

    process = start()
    group = McpServers([McpServer(name="everything", url=url)])
    try:
        async with asyncio.timeout(25):
            while not (tools := by_name(await group.ready())):
                await asyncio.sleep(0.1)
        assert (await echo(tools)).text == "Echo: hi"
        process.kill()
        process.wait()
        assert (await echo(tools)).failed
        process = start()
        async with asyncio.timeout(25):
            while (output := await echo(tools)).failed:
                await asyncio.sleep(0.1)
        assert output.text == "Echo: hi"
    finally:
        process.kill()
        process.wait()
        await group.close()


# ---------------------------------------------------------------------------------------------- the docs


async def test_the_example_in_the_docs_works_as_written(server, tmp_path, monkeypatch):
    (example,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    home = tmp_path / "settings"
    home.mkdir()
    (home / "config.toml").write_text(example.replace("https://tracker.example.com/mcp", server.url))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    model = ScriptedProvider([call("mcp_clock_get_current_time", timezone="Europe/Berlin"), "Noon."])
    config = await asyncio.to_thread(Config.load, home=home)
    async with AgentLoop(MessageBus(), model, tmp_path, config=config) as agent:
        assert await agent.process_direct("How late is it?") == "Noon."
        assert {"mcp_clock_get_current_time", "mcp_tracker_echo"} <= set(agent.tools.names)
        assert "mcp_clock_convert_time" not in agent.tools
    assert "Europe/Berlin" in model.requests[1].messages[-1]["content"]
    assert server.requests[0][1]["Authorization"] == "Bearer your-token"


async def test_the_limits_in_the_docs_match_the_code():
    page = PAGE.read_text()
    assert f"| one message or answer | {mcp_limits.MAX_MESSAGE >> 20} MB |" in page
    assert f"| messages of a program | {mcp_stdio.MAX_RATE:,} a second |" in page
    assert f"| consecutive lines that are not messages | {mcp_stdio.MAX_NOISE} |" in page
    assert f"| tools of one server | {mcp_connection.MAX_TOOLS}; " in page
    assert f"{mcp_results.MAX_DESCRIPTION:,} characters of description" in page
    assert f"{mcp_results.MAX_SCHEMA // 1000} KB of schema" in page
    assert f"| images in a result | {mcp_results.MAX_IMAGES}, each up to {mcp_results.MAX_IMAGE >> 20} MB |" in page
