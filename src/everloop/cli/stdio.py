"""`everloop acp` and `everloop mcp`: the agent for an editor or an MCP client, over standard input and output."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..config import Config
from ..errors import EverloopError
from ..text import one_line
from .common import check_model, is_trusted, load_config, prepare_workspace
from .folder import enter
from .setup import with_model

if TYPE_CHECKING:
    from acp.interfaces import Agent


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


def acp(options: argparse.Namespace) -> int:
    """Run the agent of an editor until the editor disconnects."""
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    _log_warnings()
    try:
        import acp  # noqa: F401
    except ImportError:
        raise EverloopError('everloop acp needs the ACP SDK: pip install "everloop[acp]"') from None
    import asyncio

    asyncio.run(_serve_editor(config, is_trusted(options)))
    return 0


async def _serve_editor(config: Config, trust: bool) -> None:
    from acp import run_agent

    from ..acp.agent import EditorAgent

    def entered(folder: Path) -> Config:
        return enter(dataclasses.replace(config, workspace=folder), person=False, trust=trust)

    agent = EditorAgent(config, entered)
    try:
        await run_agent(cast("Agent", agent), use_unstable_protocol=True)  # resume, fork and close of a session
    finally:
        await agent.close()


def mcp(options: argparse.Namespace) -> int:
    """Run the agent as an MCP server until its client disconnects."""
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    config = enter(config, person=False, trust=is_trusted(options))
    _log_warnings()
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise EverloopError('everloop mcp needs the MCP SDK: pip install "everloop[mcp]"') from None
    import asyncio

    asyncio.run(_serve_client(config))
    return 0


async def _serve_client(config: Config) -> None:
    from ..mcp_server import make_server
    from ..runtime.attached import working

    async with working(config) as agent:
        await make_server(agent).run_stdio_async()
