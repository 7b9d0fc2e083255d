"""`everloop acp`: the agent inside an editor, over standard input and output, until the editor leaves."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..config import Config
from ..errors import EverloopError
from .common import check_model, is_trusted, load_config, prepare_workspace
from .folder import enter
from .setup import with_model

if TYPE_CHECKING:
    from acp.interfaces import Agent


def command(options: argparse.Namespace) -> int:
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="everloop: %(message)s")
    try:
        import acp  # noqa: F401
    except ImportError:
        raise EverloopError('everloop acp needs the ACP SDK: pip install "everloop[acp]"') from None
    import asyncio

    asyncio.run(_serve(config, is_trusted(options)))
    return 0


async def _serve(config: Config, trust: bool) -> None:
    from acp import run_agent

    from ..acp.agent import EditorAgent

    def entered(folder: Path) -> Config:
        return enter(dataclasses.replace(config, workspace=folder), person=False, trust=trust)

    agent = EditorAgent(config, entered)
    try:
        await run_agent(cast("Agent", agent), use_unstable_protocol=True)  # resume, fork and close of a session
    finally:
        await agent.close()
