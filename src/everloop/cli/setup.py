"""The model of a first start: the local one once its weights are downloaded, or one that the user names."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..config import Config
from ..errors import ConfigError
from .common import EXAMPLE, is_local, missing_model
from .output import as_json

if TYPE_CHECKING:
    from ..providers.local.progress import Progress
    from ..providers.local.weights import Weights

OLLAMA = "http://127.0.0.1:11434/v1"

PULL = "EVERLOOP_PULL"  # set to 1, the weights are downloaded without a question; `make chat` sets it
SMALL = (
    "{} runs on this machine ({}). It is a small model: good for files, notes and simple commands, but it makes "
    "mistakes. To connect a better one, leave and start with one of these:"
    "\n EVERLOOP_PROVIDER=ollama EVERLOOP_MODEL=qwen3:8b"
    "\n EVERLOOP_PROVIDER=openai EVERLOOP_API_KEY=… EVERLOOP_MODEL=gpt-4.1-mini"
    "\n EVERLOOP_PROVIDER=anthropic EVERLOOP_API_KEY=… EVERLOOP_MODEL=claude-sonnet-4-5"
)


def with_model(config: Config, *, at_terminal: bool = False) -> Config:
    """Return the settings with a model. At a terminal the user is asked for what is missing; elsewhere that is an
    error.
    """
    if not is_local(config):
        if missing_model(config) and at_terminal:
            return _asked(config)
        return config
    from ..providers.local.choice import default_model
    from ..providers.local.engine import WINDOW, installed
    from ..providers.local.weights import Weights

    weights = Weights.of(config)
    model = config.model or default_model(weights).name
    local = dataclasses.replace(config, provider="local", model=model, window=config.window or WINDOW)
    if local.weights and not os.path.exists(os.path.expanduser(local.weights)):
        raise ConfigError(f"weights: {local.weights} does not exist; EVERLOOP_WEIGHTS (or [local] weights) names it")
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
                f"{weights.missing(local.model)}: `everloop model pull {local.model}` downloads it "
                f"({size_of(local.model)}); or set another model, {EXAMPLE}"
            )
        pull(weights, local.model)
    return local


def pull(weights: Weights, name: str) -> None:
    """Download the weights with a progress bar."""
    from ..providers.local.progress import ProgressReporter

    bar = ProgressBar(name, sys.stderr)
    try:
        weights.pull(name, ProgressReporter(bar.show))
    finally:
        bar.close()


def size_of(name: str) -> str:
    """Return the size of the download, for a message."""
    from ..providers.local.catalogue import CATALOGUE
    from ..providers.local.weights import megabytes

    card = CATALOGUE.get(name)
    return megabytes(card.size) if card is not None else "of unknown size"


def _may_pull(name: str, weights: Weights, at_terminal: bool) -> bool:
    card = weights.card(name)  # or an error that lists the known ones
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
    try:
        return ask_model(config)
    except EOFError:
        print()
        return config


# ---------------------------------------------------------------------------------------------- questions


def ask_model(config: Config) -> Config:
    """Ask for what is missing, and offer to save it."""
    import getpass

    print("No model is set yet. Any server that speaks the OpenAI API will do.")
    base_url = config.base_url or _ask_url()
    model = config.model or _ask("Model (for example qwen3:8b)")
    api_key = config.api_key or getpass.getpass("API key (leave empty if it needs none): ").strip()
    if not api_key.isprintable():
        raise ConfigError("the API key must be one line of text: copy it again")
    Config.load({"model": model})  # refuse now what the file would refuse later
    answered = dataclasses.replace(config, base_url=base_url, model=model, api_key=api_key)
    path = config.home / "config.toml"
    if input(f"Write this to {path}? [Y/n] ").strip().lower() in ("", "y", "yes"):
        print(remember(path, {"base_url": base_url, "model": model, "api_key": api_key}))
    return answered


def append_table(path: Path, before: str, name: str, values: Mapping[str, str | bool]) -> None:
    """Append a table to a settings file, whose text is `before`."""
    lines = "".join(f"{key} = {as_json(value)}\n" for key, value in values.items())
    parting = "" if not before else "\n" if before.endswith("\n") else "\n\n"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # It may contain secrets, so only this user may read it, from its first byte on.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(f"{parting}[{name}]\n{lines}")


def remember(path: Path, values: dict[str, str]) -> str:
    """Append a [provider] section unless the file has one; return what was done."""
    import tomllib

    try:
        before = path.read_bytes().decode("utf-8-sig") if path.exists() else ""
        if "provider" in tomllib.loads(before):
            return f"{path} already has a [provider] section, which is not changed: add the lines there yourself."
        append_table(path, before, "provider", {name: value for name, value in values.items() if value})
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): set EVERLOOP_BASE_URL and EVERLOOP_MODEL instead."
    return f"Written to {path}."


def _ask_url() -> str:
    while True:
        url = _ask(f"Base URL [{OLLAMA}]", OLLAMA)
        try:
            return Config.load({"base_url": url}).base_url
        except ConfigError as error:
            print(str(error).removeprefix("--base-url "))


def _ask(question: str, default: str = "") -> str:
    while True:
        if answer := input(f"{question}: ").strip() or default:
            return answer


# ---------------------------------------------------------------------------------------------- download progress

_WINDOW = 5.0  # seconds over which the rate is averaged
_SECONDS = 15.0  # between two lines without a terminal
_WIDTH = 10


class ProgressBar:
    """Shows the progress of a download: a bar on a terminal, an occasional line elsewhere."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name = name
        self._stream = stream
        self._moves = stream.isatty()
        self._seen: deque[tuple[float, int]] = deque()
        self._shown: tuple[str, str, str] = ("", "", "")
        self._at = 0.0
        self._drawn = False

    def show(self, now: Progress) -> None:
        what = (now.stage, now.source, now.holder)
        if what != self._shown:
            self._seen.clear()
        self._seen.append((time.monotonic(), now.done))
        while self._seen[-1][0] - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        if self._moves:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{self._line(now, columns - 1)[: columns - 1]}")
            self._stream.flush()
            self._drawn = True
        elif what != self._shown or time.monotonic() - self._at >= _SECONDS:
            self._at = time.monotonic()
            print(f"everloop: {self._line(now)}", file=self._stream, flush=True)
        self._shown = what

    def close(self) -> None:
        """End the line of the bar."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False

    def _line(self, now: Progress, columns: int | None = None) -> str:
        """Return the state of a download. If it does not fit into so many columns, the source is left out, then the
        bar.
        """
        from ..providers.local.weights import megabytes

        share = now.done / now.total if now.total else 1.0
        amount = f"{megabytes(now.done)} of {megabytes(now.total)}"
        if now.stage == "wait":
            return f"{self._name}: the process {now.holder} is pulling it, {amount}; waiting"
        if now.stage == "check":
            return f"{self._name}: checking, {amount}"
        name, done, source = f"{self._name}:", [f"{share:4.0%}", amount, *self._rate(now)], f"from {now.source}"
        if columns is None:
            return " ".join([name, *done, source])
        full = round(share * _WIDTH)
        bar = f"[{'#' * full}{'.' * (_WIDTH - full)}]"
        lines = (" ".join(parts) for parts in ([name, bar, *done, source], [name, bar, *done], [name, *done]))
        return next((line for line in lines if len(line) <= columns), " ".join([name, *done]))

    def _rate(self, now: Progress) -> list[str]:
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        if end - start < 0.5 or after <= before:
            return []
        rate = (after - before) / (end - start)
        left = round((now.total - now.done) / rate)
        return [f"{rate / 1e6:.1f} MB/s", f"{left // 60}:{left % 60:02} left"] if now.done < now.total else []
