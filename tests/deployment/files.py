"""The files of a deployment, as data."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = (DEPLOY / "everloop-serve.service", DEPLOY / "everloop-worker@.service")
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text()))


def filled_in(text: str, variables: dict[str, str]) -> str:
    """A value with its variables expanded, as by Compose."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        given = variables.get(name, "")
        assert given or kind == "-", f"{name} has no default: {rest}"
        return given or rest

    return VARIABLE.sub(value, text)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's lines as (instruction, arguments)."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(head, " ".join(rest.split())) for head, _, rest in (line.partition(" ") for line in joined.splitlines())]


def only(name: str) -> str:
    """Return the arguments of an instruction that occurs once."""
    (found,) = [rest for head, rest in instructions() if head == name]
    return found


def health_command() -> list[str]:
    return list(json.loads(only("HEALTHCHECK").partition("CMD ")[2]))


def unit(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return {name: dict(parser[name]) for name in parser.sections()}
