"""Worked examples for small models, read from `examples.toml`.

A small model copies what it sees, so these say which tool fits, how its arguments look, and that an answer is short
and says only what a result said. `FIXED` stand in every prompt; of `NEAREST` those that look like the request.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """A call and what it gave."""

    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Example:
    request: str
    steps: tuple[Step, ...]
    answer: str

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(step.tool for step in self.steps)


def _example(item: dict[str, Any]) -> Example:
    steps = tuple(Step(step.pop("tool"), step, step.pop("result")) for step in item.get("steps", ()))
    return Example(item["request"], steps, item["answer"])


_DATA = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
FIXED: tuple[Example, ...] = tuple(map(_example, _DATA["fixed"]))
NEAREST: tuple[Example, ...] = tuple(map(_example, _DATA["nearest"]))


def all_examples() -> Iterator[Example]:
    yield from FIXED
    yield from NEAREST
