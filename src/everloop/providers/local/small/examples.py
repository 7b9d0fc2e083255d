"""Worked examples for small models, read from `examples.toml`; which of them, and which tools, a request is shown.

A small model copies what it sees, so the examples say which tool fits, how its arguments look, and that an answer is
short and says only what a result said. `FIXED` stand in every prompt; of `NEAREST` those that look like the request.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ....tools.narrow import LOOKING, NARROW, quote
from .words import (
    CHANGES,
    LATIN,
    WORK,
    features,
    is_question,
    means,
    names_an_address,
    orders,
    paths_in,
    script,
    tongue,
    words,
)


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
PROMPTS: Mapping[str, str] = _DATA["prompts"]
FIXED: tuple[Example, ...] = tuple(map(_example, _DATA["fixed"]))
CLIENT: tuple[Example, ...] = tuple(map(_example, _DATA["client"]))
NEAREST: tuple[Example, ...] = tuple(map(_example, _DATA["nearest"]))


def all_examples() -> Iterator[Example]:
    yield from (*FIXED, *NEAREST, *CLIENT)


# ---------------------------------------------------------------------------------------------- those like a request

COMMON = ("list_dir", "read_file", "write_file", "edit_file", "grep", "find_files", "exec", *NARROW)
WEB = frozenset({"web_search", "web_fetch"})
HARD = frozenset({"spawn", "message", "process"})  # beyond a small model, unless it is told their names
SHOWN = 2  # examples near the request
LOOKED_AT = 6  # examples whose tools are offered too
OWN_LANGUAGE = 0.15  # how much nearer an example is that is in the request's language
SURE = 0.3  # how like an example a request must be to be treated as it
KNOWN = frozenset(name for example in (*FIXED, *NEAREST) for name in example.tools)
MOST = 16  # tools offered
_SURELY = tuple(
    one for one in WORK if one not in ("create", "write", "web")
)  # a poem needs no file, and weather no search
_MEANT_BY = {"remind": "cron", "remember": "remember", "told": "memory_search"}
_LOOKED_UP = ("show", "read", "before", "told", "every")

Weights = dict[str, float]
Tool = Mapping[str, Any]


def nearest(request: str, offered: frozenset[str], count: int) -> list[Example]:
    """The examples most like the request whose tools are all offered, the nearest first. A small model answers in the
    language that it has just seen, so they are in the request's, or else in English."""
    language = tongue(request)
    ranked = [
        (score + (OWN_LANGUAGE if tongue(example.request) == language else 0.0), example)
        for score, example in _ranked(request, offered, len(NEAREST))
        if tongue(example.request) in (language, LATIN)
    ]
    if script(request) != LATIN:
        ranked = [pair for pair in ranked if tongue(pair[1].request) == language] or ranked
    return [example for _, example in sorted(ranked, key=lambda pair: -pair[0])[:count]]


def needs_tool(request: str, offered: frozenset[str]) -> Literal["call", "words", "either"]:
    """Whether the requests most like this one were done with a tool, all of them or none."""
    ranked = _ranked(request, offered, LOOKED_AT)
    total = sum(score for score, _ in ranked)
    if not ranked or ranked[0][0] < SURE:
        return "either"
    share = sum(score for score, example in ranked if example.steps) / total
    if share >= 0.8:
        surely = means(request, *(WORK if is_question(request) else _SURELY), *_LOOKED_UP)
        return "call" if surely else "either"
    return "words" if share <= 0.2 and not means(request, *WORK) else "either"


def asks_of_the_past(request: str, offered: frozenset[str]) -> str:
    """The tool that looks through earlier conversations, where only that can know: it was told, and no file named."""
    meant = means(request, "before", "told") and not means(request, *CHANGES, "show", "remind", "file", "folder")
    if not meant or paths_in(request):
        return ""
    near = [example.tools for _, example in _ranked(request, offered, 3)]
    return "memory_search" if {"memory_search"} in near else ""


def next_step(request: str, offered: frozenset[str], made: Sequence[str]) -> Literal["call", "words", "either"]:
    """Whether the requests most like this one went on with another call after those that were made."""
    ranked = _ranked(request, offered, LOOKED_AT)
    if not ranked or ranked[0][0] < SURE:
        return "either"
    acts = sum(name not in LOOKING for name in made)
    total = sum(score for score, _ in ranked)
    share = sum(score for score, example in ranked if _acts(example) > acts) / total
    return "either" if share > 0.15 else "words"


def may_act(request: str, offered: frozenset[str]) -> bool:
    """Whether a request asks for more than a look, by its words or because most of those like it did."""
    if means(orders(request), *CHANGES, "remember", "remind") or means(request, "run", "command"):
        return True
    ranked = _ranked(request, offered, LOOKED_AT)
    if is_question(request) and not (ranked and _acts(ranked[0][1])):
        return False
    return sum(score for score, example in ranked if _acts(example)) > sum(score for score, _ in ranked) / 2


def shows(request: str, offered: frozenset[str], tool: str) -> bool:
    """Whether a result of a tool is the answer itself: it was for most of the requests like this one."""
    if tool == "list_dir":
        return True
    alike = [(score, example) for score, example in _ranked(request, offered, LOOKED_AT) if tool in example.tools]
    quoted = sum(score for score, example in alike if len(example.steps) == 1 and _quotes(example))
    return bool(alike) and quoted > sum(score for score, _ in alike) / 2


def _quotes(example: Example) -> bool:
    step = example.steps[0]
    return example.answer == quote(step.tool, step.arguments, step.result)


def acts(tool: str) -> bool:
    """Whether a tool may change something, and does not only look."""
    return tool not in LOOKING


def _acts(example: Example) -> int:
    return sum(step.tool not in LOOKING for step in example.steps)


def _ranked(request: str, offered: frozenset[str], count: int) -> list[tuple[float, Example]]:
    bank, weights = _bank()
    wanted = _weigh(features(request), weights)
    scored = [
        (_likeness(wanted, found), -number) for number, (example, found) in enumerate(bank) if example.tools <= offered
    ]
    return [(score, bank[-number][0]) for score, number in sorted(scored, reverse=True)[:count] if score > 0]


def choose(tools: Sequence[Tool], request: str, used: Iterable[str] = ()) -> list[Tool]:
    """The tools to offer for a request, in their own order: the common ones, those of similar examples, those that
    the turn has used, and those whose own words are in the request."""
    if not (means(request, "web") or names_an_address(request)):
        tools = [tool for tool in tools if tool.get("name") not in WEB]
    names = frozenset(str(tool.get("name")) for tool in tools)
    wanted = {*used, *(name for name in COMMON if name in names)}
    for example in nearest(request, names, LOOKED_AT):
        wanted |= example.tools
    wanted |= {tool for meaning, tool in _MEANT_BY.items() if tool in names and means(request, meaning)}
    room = MOST - len(wanted)
    if room > 0:
        others = [tool for tool in tools if tool.get("name") not in wanted]
        scored = [(score, str(tool["name"])) for tool in others if (score := _mentioned(tool, request)) > 0]
        wanted |= {name for _, name in sorted(scored, reverse=True)[:room]}
    return [tool for tool in tools if tool.get("name") in wanted]


def introduce(tools: Iterable[Tool]) -> str:
    """A line for each tool that no example shows: its name, its arguments and what it does."""
    lines = []
    for tool in tools:
        if tool.get("name") not in KNOWN:
            arguments = ", ".join((tool.get("parameters") or {}).get("properties") or ())
            about = str(tool.get("description") or "").partition("\n")[0][:120]
            lines.append(f"(There is also the tool {tool.get('name')} with {arguments or 'no arguments'}: {about})")
    return "\n".join(lines)


def mentions(tools: Iterable[Tool], request: str) -> bool:
    """Whether a request has words of a tool that no example shows."""
    return any(_mentioned(tool, request) for tool in tools)


def _mentioned(tool: Tool, request: str) -> int:
    """How much of a tool's name and description the request has; a tool with examples of its own needs no such help."""
    if tool.get("name") in KNOWN:
        return 0
    said = {word for word in words(request) if len(word) > 3}
    name = set(words(str(tool.get("name")).replace("_", " ")))
    about = set(words(str(tool.get("description")))[:40])
    score = 2 * len(said & name) + (0 if tool.get("name") in HARD else len(said & about))
    return score if score > 1 else 0


# ---------------------------------------------------------------------------------------------- likeness


def _weigh(found: Weights, weights: Weights) -> Weights:
    unknown = max(weights.values())
    weighed = {name: strength * weights.get(name, unknown) for name, strength in found.items()}
    length = math.sqrt(sum(weight * weight for weight in weighed.values())) or 1.0
    return {name: weight / length for name, weight in weighed.items()}


def _likeness(one: Weights, other: Weights) -> float:
    return sum(weight * other[name] for name, weight in one.items() if name in other)


@cache
def _bank() -> tuple[list[tuple[Example, Weights]], Weights]:
    """The examples with their weighed words, and the weights: what few examples have weighs most."""
    counted = [features(example.request) for example in NEAREST]
    occurrences = Counter(name for found in counted for name in found)
    weights = {name: math.log(1 + len(NEAREST) / count) for name, count in occurrences.items()}
    return [(example, _weigh(found, weights)) for example, found in zip(NEAREST, counted, strict=True)], weights
