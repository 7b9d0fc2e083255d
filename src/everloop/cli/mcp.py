"""`everloop mcp`: the agent as an MCP server on standard input and output, until its client leaves."""

from __future__ import annotations

import argparse
import logging
import sys

from ..config import Config
from ..errors import EverloopError
from .common import check_model, is_trusted, load_config, prepare_workspace
from .folder import enter
from .setup import with_model


def command(options: argparse.Namespace) -> int:
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    config = enter(config, person=False, trust=is_trusted(options))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise EverloopError('everloop mcp needs the MCP SDK: pip install "everloop[mcp]"') from None
    import asyncio

    asyncio.run(_serve(config))
    return 0


async def _serve(config: Config) -> None:
    from ..mcp_server import make_server
    from ..runtime.attached import working

    async with working(config) as agent:
        await make_server(agent).run_stdio_async()
