"""One connection to an MCP server, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from mcp import types
from mcp.client.session import ClientSession, MessageHandlerFnT
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp_types import CONNECTION_CLOSED
from pydantic import ValidationError

from ..._version import __version__
from ...config import McpServer
from ...text import one_line
from .http import Endpoint, exchange
from .limits import Unreachable
from .stdio import Program

logger = logging.getLogger(__name__)


class Link:
    """A connection. One task owns its contexts, enters and leaves them; calls only use the session.

    `opened` gives the session, or Unreachable with the reason.
    """

    def __init__(self, server: McpServer, notified: MessageHandlerFnT, deadline: float) -> None:
        self.transport = Program(server) if server.command else Endpoint(server)
        self.opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self.dispatcher: JSONRPCDispatcher[Any] | None = None
        self.calls = 0  # that wait for their answers
        self.retired = False  # it takes no new calls and ends with the last one
        self.doubtful = False  # a call got no answer: ask for a sign of life before the next
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
        """A call has got its answer, or waits for it no more."""
        self.calls -= 1
        if self.retired:
            self.retire()

    async def close(self) -> None:
        """End the connection and wait until nothing of it is left."""
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
            self._fail(Unreachable("the connection was given up"))
        except Exception as error:
            self._fail(error)
        finally:
            self.transport.ended.set()

    def _fail(self, error: Exception) -> None:
        if self.opened.done():
            logger.debug("a connection to the MCP server %s broke: %s", self._server.name, type(error).__name__)
            return
        while isinstance(error, ExceptionGroup):  # the SDK's contexts wrap what is raised inside them
            error = error.exceptions[0]
        self.opened.set_exception(Unreachable(self._why(error)))
        self.opened.exception()  # there may be no waiter any more

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
    """The greeting that all servers of today know; those that only speak the newest protocol are asked by its own."""
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
