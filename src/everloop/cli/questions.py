"""The questions of a first start: which model, and whether to remember it."""

from __future__ import annotations

import dataclasses
import getpass
import os
import tomllib
from pathlib import Path

from ..config import Config
from ..errors import ConfigError
from .output import as_json

OLLAMA = "http://127.0.0.1:11434/v1"


def ask_model(config: Config) -> Config:
    """Ask for what is missing and offer to keep it."""
    print("No model is set yet. Any server that speaks the OpenAI API will do.")
    base_url = config.base_url or _ask_url()
    model = config.model or _ask("Model (for example qwen3:8b)")
    api_key = config.api_key or getpass.getpass("API key (leave empty if it needs none): ").strip()
    if not api_key.isprintable():
        raise ConfigError("the API key must be one line of text: copy it again")
    Config.load({"model": model})  # refuses what the file would refuse later
    answered = dataclasses.replace(config, base_url=base_url, model=model, api_key=api_key)
    path = config.home / "config.toml"
    if input(f"Write this to {path}? [Y/n] ").strip().lower() in ("", "y", "yes"):
        print(remember(path, {"base_url": base_url, "model": model, "api_key": api_key}))
    return answered


def remember(path: Path, values: dict[str, str]) -> str:
    """Append a [provider] section, unless the file has one; says what was done."""
    try:
        before = path.read_bytes().decode("utf-8-sig") if path.exists() else ""
        if "provider" in tomllib.loads(before):
            return f"{path} has a [provider] section already, which is left alone: add the lines there yourself."
        lines = "".join(f"{name} = {as_json(value)}\n" for name, value in values.items() if value)
        parting = "" if not before else "\n" if before.endswith("\n") else "\n\n"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # It may hold a key, so it is this user's alone from its first byte on.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(f"{parting}[provider]\n{lines}")
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
