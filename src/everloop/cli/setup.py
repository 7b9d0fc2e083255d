"""Which model answers where none is set: the local one, once its weights are there."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import ConfigError
from .common import EXAMPLE, missing_model

if TYPE_CHECKING:
    from ..providers.local.weights import Weights

PULL = "EVERLOOP_PULL"  # set to 1, the weights are fetched without a question; `make chat` does
SMALL = (
    "{} runs on this machine: a small model, good for files, notes and simple commands, that makes mistakes. "
    "To connect a better one:"
    "\n  Ollama     EVERLOOP_PROVIDER=ollama EVERLOOP_MODEL=qwen3:8b"
    "\n  OpenAI     EVERLOOP_PROVIDER=openai EVERLOOP_API_KEY=… EVERLOOP_MODEL=gpt-4.1-mini"
    "\n  Anthropic  EVERLOOP_PROVIDER=anthropic EVERLOOP_API_KEY=… EVERLOOP_MODEL=claude-sonnet-4-5"
)


def with_model(config: Config, *, at_terminal: bool = False) -> Config:
    """The settings with a model to ask. At a terminal whatever is missing is asked for; elsewhere it is an error."""
    if not is_local(config):
        if missing_model(config) and at_terminal:
            return _asked(config)
        return config
    from ..providers.local.catalogue import DEFAULT
    from ..providers.local.engine import WINDOW, installed
    from ..providers.local.weights import Weights

    local = dataclasses.replace(config, provider="local", model=config.model or DEFAULT, window=config.window or WINDOW)
    weights = Weights.of(local)
    if local.weights and not os.path.exists(os.path.expanduser(local.weights)):
        raise ConfigError(f"weights: {local.weights} is not there; EVERLOOP_WEIGHTS (or [local] weights) names it")
    if not installed():
        if at_terminal and not config.provider:
            return _asked(config)
        raise ConfigError(
            f'the local model needs an extra: pip install "everloop[local]"; or set another model, {EXAMPLE}'
        )
    if weights.find(local.model) is None:
        if not _may_pull(local.model, weights, at_terminal):
            if at_terminal:
                return _asked(config)
            raise ConfigError(
                f"{weights.missing(local.model)}: `everloop model pull {local.model}` gets it "
                f"({size_of(local.model)}); or set another model, {EXAMPLE}"
            )
        pull(weights, local.model)
    return local


def is_local(config: Config) -> bool:
    """Whether the local model is meant: by its name, or because nothing else is."""
    if config.provider:
        return config.provider == "local"
    if config.base_url or config.api_key:
        return False
    if not config.model:
        return True
    from ..providers.local.catalogue import CATALOGUE
    from ..providers.local.weights import is_path

    return config.model in CATALOGUE or is_path(config.model)


def pull(weights: Weights, name: str) -> None:
    """Fetch the weights, with a bar that shows how far it is."""
    from ..providers.local.progress import Watch
    from .progress import Bar

    bar = Bar(name, sys.stderr)
    try:
        weights.pull(name, Watch(bar.show))
    finally:
        bar.close()


def size_of(name: str) -> str:
    """How much is to be fetched, in words."""
    from ..providers.local.catalogue import CATALOGUE
    from ..providers.local.weights import megabytes

    card = CATALOGUE.get(name)
    return megabytes(card.size) if card is not None else "of unknown size"


def _may_pull(name: str, weights: Weights, at_terminal: bool) -> bool:
    card = weights.card(name)  # or an error that names those there are
    if os.environ.get(PULL) == "1":
        return True
    if not at_terminal:
        return False
    what = f"{size_of(name)}, {card.licence}"
    print(f"No model is set, and {weights.missing(name)}. It can run on this machine, without a key: {what}.")
    try:
        return input("Download it? [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        print()
        return False


def _asked(config: Config) -> Config:
    from .questions import ask_model

    try:
        return ask_model(config)
    except EOFError:
        print()
        return config
