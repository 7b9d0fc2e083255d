"""One MCP server: connecting, calling, and reconnecting when the connection is lost.

All of this runs on the event loop of `McpServers`' own thread.
"""

from __future__ import annotations

import asyncio
import logging
from fnmatch import fnmatchcase
from typing import Any

from mcp import types
from mcp.client.session import ClientSession, MessageHandlerFnT
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from ..._version import __version__
from ...config import McpServer
from ...text import one_line
from .http import Endpoint, Exchange, exchange
from .limits import Unreachable, hide, secrets_of
from .stdio import Program

logger = logging.getLogger(__name__)


class Link:
    """A connection. A single task enters and leaves its contexts; calls only use the session.

    `opened` resolves to the session, or fails with Unreachable and the reason.
    """

    def __init__(self, server: McpServer, notified: MessageHandlerFnT, deadline: float) -> None:
        self.transport = Program(server) if server.command else Endpoint(server)
        self.opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self.dispatcher: JSONRPCDispatcher[Any] | None = None
        self.calls = 0  # calls that await their results
        self.retired = False  # accepts no new calls, and ends with the last one
        self.doubtful = False  # a call got no answer: check for liveness before the next one
        self._server = server
        self._deadline = deadline
        self._notified = notified
        self.task = asyncio.create_task(self._own())

    @property
    def alive(self) -> bool:
        return not self.transport.ended.is_set()

    def retire(self) -> None:
        self.retired = True
        if not self.calls:
            self.transport.ended.set()

    def done(self) -> None:
        """Note that a call has its result, or no longer waits for it."""
        self.calls -= 1
        if self.retired:
            self.retire()

    async def close(self) -> None:
        """Close the connection, and wait until nothing of it is left."""
        self.transport.ended.set()
        if not self.opened.done():
            self.task.cancel()
        await asyncio.wait([self.task])

    async def _own(self) -> None:
        try:
            async with self.transport.streams() as streams:
                dispatcher = self.dispatcher = JSONRPCDispatcher(*streams)
                client = types.Implementation(name="everloop", version=__version__)
                async with ClientSession(
                    dispatcher=dispatcher, message_handler=self._notified, client_info=client
                ) as session:
                    async with asyncio.timeout_at(self._deadline):
                        await _negotiate(session)
                    self.opened.set_result(session)
                    await self.transport.ended.wait()
        except asyncio.CancelledError:
            self._fail(Unreachable("the connection was closed"))
        except Exception as error:
            self._fail(error)
        finally:
            self.transport.ended.set()

    def _fail(self, error: Exception) -> None:
        if self.opened.done():
            logger.debug("a connection to the MCP server %s broke: %s", self._server.name, type(error).__name__)
            return
        while isinstance(error, ExceptionGroup):  # the SDK's contexts wrap exceptions raised inside them
            error = error.exceptions[0]
        self.opened.set_exception(Unreachable(self._why(error)))
        self.opened.exception()  # there may be no waiter left

    def _why(self, error: Exception) -> str:
        note = exchange.get()
        if isinstance(error, Unreachable):
            return str(error)
        if isinstance(error, TimeoutError):
            said = self.transport.problem or f"did not answer within {self._server.connect_timeout:g} seconds"
            return said + self.transport.details()
        if note is not None and (said := note.describe()):
            return said
        if isinstance(self.transport, Program) and (not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED):
            return self.transport.describe_end()
        return f"refused the connection: {one_line(str(error), 300)}"


async def _negotiate(session: ClientSession) -> None:
    """Initialise the session as all current servers do; fall back to the newest protocol's own handshake."""
    try:
        await session.initialize()
    except MCPError as error:
        if error.code == CONNECTION_CLOSED:
            raise
        note = exchange.get()
        status = note.status if note is not None else 0
        if status in (401, 403) or (note is not None and note.problem):
            raise
        try:
            await session.discover()
        except (MCPError, ValidationError, RuntimeError):
            if note is not None:
                note.status = status
            raise error from None


logger = logging.getLogger(__name__)
MAX_TOOLS = 500  # per server, after its `tools` patterns
MAX_LISTED = 20_000
MAX_PAGES = 200
PING_SECONDS = 3.0  # for a liveness check of a program that left a call unanswered
MAX_RETRY_SECONDS = 60.0  # seconds between two attempts to connect


class Connection:
    """A configured server, for the lifetime of the agent."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: tuple[types.Tool, ...] = ()
        self._secrets = secrets_of(server)
        self._link: Link | None = None  # the current one
        self._links: set[Link] = set()  # all that have not ended
        self._opening: asyncio.Task[Link] | None = None
        self._tried = False  # an attempt to connect has finished, successfully or not
        self._warned = ""
        self._stale = False  # the server announced that its tools have changed
        self._failures = 0  # since the last call that was answered
        self._next_try = 0.0

    async def prepare(self) -> None:
        """Connect for the first time, or list the tools again if they have changed; a failure is one warning."""
        try:
            if not self._tried:
                await self._open()
            elif self._link is not None and self._link.alive:
                if self._stale:
                    await self._refresh(self._link, self.server.connect_timeout)
            elif not self.tools and _now() >= self._next_try:
                self._start()  # in the background: no call waits for a server that was not there at startup
        except Unreachable as error:
            self._warn(error)

    async def call(self, name: str, arguments: dict[str, Any], progress: ProgressFnT) -> types.CallToolResult:
        """Call a tool of the server; raise Unreachable with the reason if that fails."""
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=arguments))
        link = await self._ready_link()
        try:
            return await self._send(link, request, progress)
        except _SessionLost:  # the server has lost the session and did nothing: initialise a new one
            if self._link is link:
                self._link = None
            link.retire()
        try:
            return await self._send(await self._ready_link(), request, progress)
        except _SessionLost as error:
            raise self._unreachable(str(error)) from None

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        self._link = None
        await asyncio.gather(*(link.close() for link in set(self._links)))

    # ------------------------------------------------------------------------------------------ connecting

    async def _ready_link(self) -> Link:
        link = self._link
        if link is not None and link.alive and link.doubtful and not link.calls and not await self._answers(link):
            if self._link is link:
                self._failed()
            await self._drop(link)
        if self._link is not None and self._link.alive:
            return self._link
        if (wait := self._next_try - _now()) > 0 and (self._opening is None or self._opening.done()):
            raise self._unreachable(f"failed {self._failures} times in a row: the next attempt is in {wait:.0f} s")
        return await self._open()

    def _start(self) -> asyncio.Task[Link]:
        """Return the current attempt to connect, starting one if necessary."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(_retrieve_exception)
        return self._opening

    async def _open(self) -> Link:
        attempt = self._start()
        await asyncio.wait([attempt])  # a waiter that gives up does not cancel it for the others
        if attempt.cancelled():
            raise self._unreachable("is being closed")
        return attempt.result()

    async def _connect(self) -> Link:
        exchange.set(Exchange())
        deadline = _now() + self.server.connect_timeout
        link = Link(self.server, self._notified, deadline)
        self._links.add(link)
        link.task.add_done_callback(lambda _: self._lost(link))
        try:
            await asyncio.shield(link.opened)
            await self._refresh(link, deadline - _now())
        except Unreachable as error:
            self._failed()
            await link.close()
            failure = self._unreachable(str(error))
            self._warn(failure)
            raise failure from None
        except BaseException:
            await link.close()
            raise
        finally:
            self._tried = True
        self._link = link
        return link

    def _lost(self, link: Link) -> None:
        """Handle the end of a connection; the current one never ends on purpose."""
        self._links.discard(link)
        if self._link is link:
            self._failed()
            self._warn(self._unreachable(link.transport.describe_end()))

    def _warn(self, failure: Unreachable) -> None:
        """Log a failure, unless it is the same as last time."""
        if str(failure) != self._warned:
            self._warned = str(failure)
            logger.warning("%s", failure)

    def _failed(self) -> None:
        self._failures += 1
        delay = 0.0 if self._failures == 1 else min(2.0 ** (self._failures - 2), MAX_RETRY_SECONDS)
        self._next_try = _now() + delay

    async def _drop(self, link: Link) -> None:
        if self._link is link:
            self._link = None
        await link.close()

    async def _answers(self, link: Link) -> bool:
        """Return whether a program that owes a response still answers others."""
        if isinstance(link.transport, Program):
            session = link.opened.result()
            try:
                async with asyncio.timeout(PING_SECONDS):
                    modern = session.protocol_version in MODERN_PROTOCOL_VERSIONS
                    await (session.send_discover(str(session.protocol_version)) if modern else session.send_ping())
            except TimeoutError:
                return False
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    return False
        link.doubtful = False
        return True

    # ------------------------------------------------------------------------------------------ speaking

    async def _send(self, link: Link, request: types.CallToolRequest, progress: ProgressFnT) -> types.CallToolResult:
        note = Exchange()
        exchange.set(note)
        session = link.opened.result()
        sent = asyncio.create_task(session.send_request(request, types.CallToolResult, progress_callback=progress))
        sent.add_done_callback(_retrieve_exception)
        link.calls += 1
        try:
            await asyncio.wait([sent])
        except asyncio.CancelledError:
            link.doubtful = True  # immediately: cancelling on the server takes a while
            sent.cancel()
            raise
        finally:
            link.done()
        try:
            result = sent.result()
        except MCPError as error:
            if note.status == 404 or (note.status == 400 and error.code not in _OF_THE_CALL):
                raise _SessionLost(note.describe()) from None
            raise self._unreachable(await self._why(link, error, note)) from None
        except ValidationError:
            raise self._unreachable("answered with something that is not a tool result") from None
        self._failures = 0
        return result

    async def _why(self, link: Link, error: MCPError, note: Exchange) -> str:
        if said := note.describe():
            return said
        if error.code == CONNECTION_CLOSED:
            await asyncio.wait([link.task], timeout=5)
            again = "the call may have taken effect; the server is restarted at the next call"
            return f"{link.transport.describe_end()}; {again}"
        return f"refused the call: {one_line(error.message, 2000)}"

    async def _refresh(self, link: Link, seconds: float) -> None:
        """List the tools; keep the known ones if that fails."""
        self._stale = False
        note = Exchange()
        exchange.set(note)
        try:
            async with asyncio.timeout(seconds):
                found = await self._list(link)
        except TimeoutError:
            raise self._unreachable("did not list its tools in time") from None
        except MCPError as error:
            raise self._unreachable(await self._why(link, error, note)) from None
        except ValidationError:
            raise self._unreachable("lists its tools in a form that does not conform to MCP") from None
        if found != self.tools:
            self.tools = found

    async def _list(self, link: Link) -> tuple[types.Tool, ...]:
        capabilities = link.opened.result().server_capabilities
        if capabilities is None or capabilities.tools is None:
            return ()
        found: dict[str, types.Tool] = {}
        listed, cursor = 0, ""
        for _ in range(MAX_PAGES):
            tools, cursor = await self._page(link, cursor)
            listed += len(tools)
            for tool in tools:
                if any(fnmatchcase(tool.name, pattern) for pattern in self.server.tools):
                    found.setdefault(tool.name, tool)
            if not cursor or listed > MAX_LISTED:
                break
        if len(found) > MAX_TOOLS or cursor:
            more = f"MCP server {self.server.name}: it has more tools than can be used; only the first {MAX_TOOLS} are"
            logger.warning("%s: name those you need in [mcp.%s] tools", more, self.server.name)
        return tuple(list(found.values())[:MAX_TOOLS])

    async def _page(self, link: Link, cursor: str) -> tuple[list[types.Tool], str]:
        session, dispatcher = link.opened.result(), link.dispatcher
        params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
        try:
            page = await session.list_tools(params=params)
            return page.tools, page.next_cursor or ""
        except ValidationError:
            if dispatcher is None or session.protocol_version in MODERN_PROTOCOL_VERSIONS:
                raise
        # One invalid tool must not invalidate the others: request the list again and read them one by one.
        raw = await dispatcher.send_raw_request("tools/list", {"cursor": cursor} if cursor else None)
        listed, following = raw.get("tools"), raw.get("nextCursor")
        good = [tool for entry in listed if (tool := _tool(entry))] if isinstance(listed, list) else []
        logger.warning("MCP server %s: skipped a tool whose definition does not conform to MCP", self.server.name)
        return good, following if isinstance(following, str) else ""

    async def _notified(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._stale = True

    def _unreachable(self, why: str) -> Unreachable:
        if why.startswith(prefix := f"MCP server {self.server.name}: "):
            return Unreachable(why)
        return Unreachable(prefix + hide(why, self._secrets))


_OF_THE_CALL = {METHOD_NOT_FOUND, INVALID_PARAMS}  # errors that a new session would not change


class _SessionLost(Exception):
    """The server no longer knows the session."""


def _tool(entry: Any) -> types.Tool | None:
    try:
        return types.Tool.model_validate(entry, by_name=False)
    except ValidationError:
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Mark the failure as retrieved: there may be no waiter left."""
    if not task.cancelled():
        task.exception()
