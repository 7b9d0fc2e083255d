"""`everloop`: a chat in the terminal, or over pipes."""

from __future__ import annotations

import argparse
import os
import sys

from ..config import Config
from .common import check_model, hush, load_config, missing_model, prepare_workspace, session_key

LEAVE = ("/exit", "/quit")


def command(options: argparse.Namespace) -> int:
    config = load_config(options)
    key = session_key(options, "cli:direct")
    at_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal and missing_model(config):
        from .questions import ask_model

        try:
            config = ask_model(config)
        except EOFError:
            print()
    check_model(config)
    prepare_workspace(config.workspace)
    hush()
    import asyncio

    if at_terminal and os.environ.get("TERM", "dumb") != "dumb":
        from .terminal import chat

        return asyncio.run(chat(config, key))
    from .pipe import plain_chat

    return asyncio.run(plain_chat(config, key, "> " if at_terminal else ""))


def greeting(config: Config, key: str) -> str:
    return f"Everloop · {config.model} · session {key} · /help shows the commands"
