"""`everloop model`: the files of the local models."""

from __future__ import annotations

import argparse
import sys
from typing import Literal

from ..errors import EverloopError
from ..providers.local.catalogue import DEFAULT, ModelCard, role
from ..providers.local.choice import default_model
from ..providers.local.progress import ProgressReporter, WeightsError
from ..providers.local.weights import Weights, megabytes
from .common import load_config
from .output import as_json
from .setup import ProgressBar

State = Literal["there", "partly", "damaged", "not there"]


def command(options: argparse.Namespace) -> int:
    return ACTIONS[options.action](Weights.of(load_config(options)), options)


def _list(weights: Weights, options: argparse.Namespace) -> int:
    rows = [(card, *_state(weights, card, options.check)) for card in weights.catalogue.values()]
    if options.json:
        chosen = default_model(weights).name if DEFAULT in weights.catalogue else ""
        for card, state, path in rows:
            facts = {"name": card.name, "size": card.size, "licence": card.licence, "sha256": card.sha256}
            print(as_json({**facts, "state": state, "path": path, "default": card.name == chosen}))
    else:
        print(_table(weights, rows))
    if damaged := [card.name for card, state, _ in rows if state == "damaged"]:
        what = " and ".join(f"`everloop model pull {name}`" for name in damaged)
        raise WeightsError(f"damaged, and not used: {', '.join(damaged)}; {what} downloads it again")
    return 0


def _pull(weights: Weights, options: argparse.Namespace) -> int:
    bar = ProgressBar(options.name, sys.stderr)
    try:
        path = weights.pull(options.name, ProgressReporter(bar.show))
    except KeyboardInterrupt:
        bar.close()
        print("everloop: stopped; the next pull continues from here", file=sys.stderr)
        raise
    finally:
        bar.close()
    print(path)
    return 0


def _path(weights: Weights, options: argparse.Namespace) -> int:
    if (path := weights.find(options.name)) is None:
        raise WeightsError(f"{weights.missing(options.name)}: `everloop model pull {options.name}` downloads it")
    print(path)
    return 0


def _remove(weights: Weights, options: argparse.Namespace) -> int:
    if weights.remove(options.name):
        print(f"Removed {options.name}.")
        return 0
    if (path := weights.find(options.name)) is not None:
        raise EverloopError(f"{path} is your own file, named by EVERLOOP_WEIGHTS: delete it yourself if you want to")
    raise EverloopError(f"{options.name} is not downloaded: nothing was removed")


ACTIONS = {"list": _list, "pull": _pull, "path": _path, "remove": _remove}


def _state(weights: Weights, card: ModelCard, again: bool) -> tuple[State, str | None]:
    if (path := weights.find(card.name, again=again)) is not None:
        return "there", str(path)
    if weights.installed(card.name).exists():
        return "damaged", None
    return ("partly" if weights.downloaded_bytes(card.name) else "not there"), None


def _table(weights: Weights, rows: list[tuple[ModelCard, State, str | None]]) -> str:
    lines = [("name", "size", "licence", "file", "")]
    for card, state, _ in rows:
        shown = f"{weights.downloaded_bytes(card.name) * 100 // card.size}% there" if state == "partly" else state
        lines.append((card.name, megabytes(card.size), card.licence, shown, card.about + role(card)))
    wide = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(f"{cell:<{wide[n]}}" for n, cell in enumerate(line)).rstrip() for line in lines)
