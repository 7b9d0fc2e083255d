"""`everloop`: a chat in the terminal, or over pipes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..config import Config
from ..config.sources import shown
from ..text import printable
from .common import at_terminal, hush, load_config, open_workspace, session_key
from .main import INTERRUPTED
from .setup import SMALL, with_model

HINT_SHOWN = "better_models_shown"  # in the home, once the user has been told of better models than the local one


def command(options: argparse.Namespace) -> int:
    config = load_config(options)
    key = session_key(options, "cli:direct")
    person = at_terminal(sys.stdout)
    config = open_workspace(with_model(config, at_terminal=person), options, person=person)
    hush()
    import asyncio

    if person and os.environ.get("TERM", "dumb") != "dumb":
        from .terminal import terminal_chat

        return asyncio.run(terminal_chat(config, key, greeting(config, key)))
    from .chat_plain import plain_chat

    try:
        return asyncio.run(plain_chat(config, key, greeting(config, key), "> " if person else ""))
    except asyncio.CancelledError:  # Ctrl-C, twice
        return INTERRUPTED


def greeting(config: Config, key: str) -> str:
    own = ", your home workspace. `everloop .` works in the current folder."
    place = f"{printable(shown(config.workspace))}{own if config.is_home_workspace(config.workspace) else ''}"
    line = f"Working in {place}\nEverloop · {config.model} · session {key} · /help shows the commands"
    if config.provider != "local" or not _show_once(config.home / HINT_SHOWN):
        return line
    return f"{line}\n{SMALL.format(config.model, _why(config))}"


def _why(config: Config) -> str:
    """Return why this model is used."""
    from ..providers.local.choice import default_model
    from ..providers.local.weights import Weights

    chosen = default_model(Weights.of(config))
    return chosen.why if chosen.name == config.model else "as it is set"


def _show_once(mark: Path) -> bool:
    """Record that a hint is shown; return whether this is the first time."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # it will be shown again
        return True
    return True
