"""`everloop`: a chat in the terminal, or over pipes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..config import Config
from ..config.sources import shown
from ..text import printable
from .common import check_model, hush, is_trusted, load_config, prepare_workspace, session_key
from .folder import enter
from .main import INTERRUPTED
from .setup import SMALL, with_model

HINT_SHOWN = "better_models_shown"  # in the home, once the user was told of better models than the local one


def command(options: argparse.Namespace) -> int:
    config = load_config(options)
    key = session_key(options, "cli:direct")
    at_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    config = with_model(config, at_terminal=at_terminal)
    check_model(config)
    prepare_workspace(config.workspace)
    config = enter(config, person=at_terminal, trust=is_trusted(options))
    hush()
    import asyncio

    if at_terminal and os.environ.get("TERM", "dumb") != "dumb":
        from .terminal import terminal_chat

        return asyncio.run(terminal_chat(config, key, greeting(config, key)))
    from .chat_plain import plain_chat

    try:
        return asyncio.run(plain_chat(config, key, greeting(config, key), "> " if at_terminal else ""))
    except asyncio.CancelledError:  # Ctrl-C, twice
        return INTERRUPTED


def greeting(config: Config, key: str) -> str:
    own = ", your home workspace. `everloop .` works in the current folder."
    place = f"{printable(shown(config.workspace))}{own if config.is_home_workspace(config.workspace) else ''}"
    line = f"Working in {place}\nEverloop · {config.model} · session {key} · /help shows the commands"
    if config.provider != "local" or not _is_first_time(config.home / HINT_SHOWN):
        return line
    return f"{line}\n{SMALL.format(config.model, _why(config))}"


def _why(config: Config) -> str:
    """Why it is this model."""
    from ..providers.local.choice import default_model
    from ..providers.local.weights import Weights

    chosen = default_model(Weights.of(config))
    return chosen.why if chosen.name == config.model else "as it is set"


def _is_first_time(mark: Path) -> bool:
    """Whether a hint was not given yet; it counts as given from now on."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # it is given again
        return True
    return True
