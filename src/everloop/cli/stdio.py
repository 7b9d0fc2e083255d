"""`everloop acp` and `everloop mcp`: the agent for an editor or an MCP client, over standard input and output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config import Config
from ..errors import EverloopError
from ..text import one_line
from .common import check_model, is_trusted, load_config, open_workspace, prepare_workspace
from .folder import enter
from .setup import with_model

if TYPE_CHECKING:
    import asyncio

    from acp.interfaces import Agent

log = logging.getLogger(__name__)
MAX_MESSAGE = 50 << 20  # bytes of a message from an editor


class _OneLine(logging.Formatter):
    """Formats a log record as one line, with the kind and text of its exception but without the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        return one_line(
            f"everloop: {record.getMessage()}" + (f": {type(error).__name__}: {error}" if error else ""), 500
        )


def _log_warnings() -> None:
    """Log to standard error: standard output belongs to the protocol."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _announce(partner: str) -> None:
    """Report in a terminal what the command waits for."""
    if sys.stdin is not None and sys.stdin.isatty():
        print(f"everloop: waiting for {partner}, which starts this command; Ctrl-D ends it", file=sys.stderr)


def acp(options: argparse.Namespace) -> int:
    """Run the agent of an editor until the editor disconnects."""
    _check_pipes()
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    _log_warnings()
    try:
        import acp  # noqa: F401
    except ImportError:
        raise EverloopError('everloop acp needs the ACP SDK: pip install "everloop[acp]"') from None
    _announce("an editor")
    import asyncio

    asyncio.run(_serve_editor(config, is_trusted(options)))
    return 0


def _check_pipes() -> None:
    """Raise an EverloopError if a file or a device such as /dev/null is in the place of the editor."""
    for descriptor, name in ((0, "input"), (1, "output")):
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
            raise EverloopError(
                f"everloop acp speaks to an editor, so its standard {name} must be a pipe: let the editor start it"
            )


class _Messages:
    """An editor's messages, one a line. A line that is no message is logged and skipped: it ends no session."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> dict[str, Any] | None:
        while True:
            try:
                if not (line := await self._reader.readline()):
                    return None
                message = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError) as error:  # not JSON, or longer than MAX_MESSAGE
                log.warning("the editor sent a line that is not JSON: %s", error)
                continue
            if isinstance(message, dict) and message:
                return message
            if line.strip():
                log.warning("the editor sent JSON that is not a message: %s", one_line(line[:100].decode(), 100))

    async def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        await self._writer.drain()

    async def close(self) -> None:
        """Do nothing: the streams belong to the process, and every message has been written."""


async def _serve_editor(config: Config, trust: bool) -> None:
    from acp import run_agent, stdio_streams

    from ..acp.agent import EditorAgent

    def entered(folder: Path) -> Config:
        return enter(dataclasses.replace(config, workspace=folder), person=False, trust=trust)

    agent = EditorAgent(config, entered)
    try:
        messages = _Messages(*await stdio_streams(limit=MAX_MESSAGE))
        # The unstable protocol has the resuming, forking and closing of sessions.
        await run_agent(cast("Agent", agent), messages, use_unstable_protocol=True)
    finally:
        await agent.close()


def mcp(options: argparse.Namespace) -> int:
    """Run the agent as an MCP server until its client disconnects."""
    config = open_workspace(with_model(load_config(options)), options)
    _log_warnings()
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise EverloopError('everloop mcp needs the MCP SDK: pip install "everloop[mcp]"') from None
    _announce("an MCP client")
    import asyncio

    asyncio.run(_serve_client(config))
    return 0


async def _serve_client(config: Config) -> None:
    from ..mcp_server import make_server
    from ..runtime.attached import working

    async with working(config) as agent:
        await make_server(agent).run_stdio_async()
