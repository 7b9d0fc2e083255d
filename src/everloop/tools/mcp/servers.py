"""MCP: the tools of other programs and services. Each remote tool becomes a `Tool` named `mcp_<server>_<tool>`.

The SDK is slow to import and does what servers make it do, so it is only imported if a server is configured, and runs
in a thread with its own event loop: nothing that a server sends can block the agent's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ...config import McpServer
from ...errors import EverloopError
from ...text import one_line
from ...threads import in_thread
from ..base import Output, Replay, Tool, ToolError
from ..context import current
from ..registry import ToolRegistry

if TYPE_CHECKING:
    from mcp import types

    from .connection import Connection

T = TypeVar("T")
logger = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0
PROGRESS_SECONDS = 0.1  # minimum time between two lines of progress
_NOISY_LOGGERS = ("mcp", "client", "httpx2", "httpcore2")  # loggers that print what servers send, and URLs with keys


class McpServers:
    """The configured MCP servers. Nothing is started before `ready()`, and nothing at all without a server."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._servers = tuple(servers)
        self._thread: _LoopThread | None = None
        self._connections: list[Connection] = []
        # by server: the listed tools, and the tools made from them
        self._tools: dict[str, tuple[object, list[Tool]]] = {}
        self._closed = False

    async def ready(self) -> list[Tool]:
        """Return the tools of all usable servers; the same objects for as long as a server's list is unchanged.

        The first call connects to all servers concurrently; a failure is logged as a warning. Later calls only wait for
        servers that announced changed tools.
        """
        if not self._servers or self._closed:
            return []
        if self._thread is None:
            self._thread = _LoopThread()
        return await self._thread.run(self._ready)

    async def provide(self, registry: ToolRegistry) -> None:
        """Update the registry with the tools of `ready()`; it is not touched if nothing has changed."""
        tools = {tool.name: tool for tool in await self.ready()}
        for old in [tool for tool in registry if isinstance(tool, RemoteTool) and tool.name not in tools]:
            registry.unregister(old.name)
        for name, tool in tools.items():
            if registry.get(name) is not tool:
                registry.register(tool)

    async def close(self) -> None:
        """Close all connections, and stop the started programs."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close(self._close)

    async def _ready(self) -> list[Tool]:
        from .connection import Connection

        if not self._connections:
            self._connections = [Connection(server) for server in self._servers]
        await asyncio.gather(*(connection.prepare() for connection in self._connections))
        return [tool for connection in self._connections for tool in self._tools_of(connection)]

    async def _close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))

    def _tools_of(self, connection: Connection) -> list[Tool]:
        name = connection.server.name
        listed, tools = self._tools.get(name, (None, []))
        if listed is not connection.tools:
            tools = self._make(connection)
            self._tools[name] = connection.tools, tools
        return tools

    def _make(self, connection: Connection) -> list[Tool]:
        """Return the tools of one server. Unusable ones are skipped with a warning."""
        from . import results

        server = connection.server
        prefixes = results.prefixes([other.name for other in self._servers])
        prefix = prefixes.pop(server.name)
        names = results.tool_names(prefix, [tool.name for tool in connection.tools], prefixes.values())
        usable = ToolRegistry()
        for tool in connection.tools:
            try:
                if not 0 < len(tool.name) <= results.MAX_NAME or names[tool.name] in usable:
                    raise ValueError("its name is too long, or another tool has it")
                usable.register(RemoteTool(names[tool.name], tool, connection, self._run))
            except (ValueError, TypeError, RecursionError) as error:
                shown, reason = one_line(tool.name, 80), one_line(str(error), 200)
                logger.warning("MCP server %s: skipped the tool %r: %s", server.name, shown, reason)
        return list(usable)

    async def _run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._thread is None:
            raise ToolError("The MCP servers are closed: the agent is shutting down.")
        return await self._thread.run(function)


class RemoteTool(Tool):
    """A tool of an MCP server."""

    name: str
    description: str
    parameters: dict[str, Any]
    untrusted = True

    def __init__(self, name: str, tool: types.Tool, connection: Connection, run: Callable[..., Any]) -> None:
        from . import results

        hints = tool.annotations
        self.read_only = bool(hints and hints.read_only_hint)
        self.name = name
        self.description = results.description_of(tool) or name
        self.parameters = results.parameters_of(tool)
        self.timeout = connection.server.timeout
        self.described_outside = not connection.server.trusted
        self.sends = not _keeps_data_local(hints, connection.server)
        self.replay: Replay = "safe" if self.read_only or (hints and hints.idempotent_hint) else "never"
        self._tool = tool
        self._connection = connection
        self._run = run

    async def execute(self, /, **arguments: Any) -> Output:
        context = current.get(None)
        show = _Progress(context.progress if context is not None else lambda text: None)

        async def call() -> Output:  # runs in the servers' thread
            from .limits import Unreachable
            from .results import output_of

            try:
                return output_of(await self._connection.call(self._tool.name, arguments, show))
            except Unreachable as error:  # partly the server's own words, so they are marked as such
                return Output(str(error), untrusted=True, failed=True)

        output: Output = await self._run(call)
        return output


def _keeps_data_local(hints: types.ToolAnnotations | None, server: McpServer) -> bool:
    """Return whether a call carries no data away.

    A remote server receives the data as soon as it is called, whatever it claims, unless a person vouches for it.
    """
    closed = hints is not None and hints.open_world_hint is False
    return closed and (server.trusted or not server.url)


class _Progress:
    """Passes a server's progress reports to the agent's loop, rate-limited to what a person can read."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._next = 0.0

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:

        if (now := time.monotonic()) < self._next:
            return
        self._next = now + PROGRESS_SECONDS
        from .limits import without_hidden

        text = (
            one_line(without_hidden(message), 500) if message else f"{progress:g}" + (f" of {total:g}" if total else "")
        )
        self._loop.call_soon_threadsafe(self._show, text)


class _LoopThread:
    """A thread with an event loop, for work that must not run on the caller's."""

    def __init__(self) -> None:
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None
        # A daemon thread, so that a hanging server does not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="everloop-mcp", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the thread; cancelling the wait cancels it."""
        loop = await asyncio.shield(asyncio.wrap_future(self._loop))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(), loop))

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a final coroutine and end the thread."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.run(last)
        except TimeoutError:
            logger.warning("the MCP servers did not end within %g seconds", CLOSE_SECONDS)
        except EverloopError:
            return  # it was never started
        loop, stop = self._loop.result(), self._stop
        assert stop is not None
        loop.call_soon_threadsafe(stop.set)
        await in_thread(self._thread.join, CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            _load()
        except BaseException as error:
            self._loop.set_exception(error)
            return
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop.set_result(asyncio.get_running_loop())
        await self._stop.wait()


def _load() -> None:
    """Import the SDK. That takes long and accesses files, so it happens before there is a loop."""
    try:
        from . import connection  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("everloop"):
            raise
        raise EverloopError('MCP servers need the MCP SDK: pip install "everloop[mcp]"') from None
    for name in _NOISY_LOGGERS:
        if (found := logging.getLogger(name)).level == logging.NOTSET:
            found.setLevel(logging.CRITICAL)
