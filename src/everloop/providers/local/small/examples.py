"""Worked examples for small models, read from `examples.toml`; which of them, and which tools, a request is shown.

A small model copies what it sees, so the examples say which tool fits, how its arguments look, and that an answer is
short and says only what a result said. `FIXED` stand in every prompt; of `NEAREST` those that look like the request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ....tools.narrow import CALLED_FOR_BY, COMMON, HARD, LOOKING, WEB, quote
from ....tools.seen import Call
from .words import (
    CHANGES,
    LATIN,
    WORK,
    data,
    features,
    is_question,
    means,
    orders,
    paths_in,
    says,
    script,
    tongue,
    words,
)


@dataclass(frozen=True, slots=True)
class Example:
    request: str
    steps: tuple[Call, ...]  # with their results
    answer: str

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(step.tool for step in self.steps)


def _example(item: dict[str, Any]) -> Example:
    steps = tuple(Call(step.pop("tool"), step, step.pop("result")) for step in item.get("steps", ()))
    return Example(item["request"], steps, item["answer"])


_DATA = data("examples")
PROMPTS: Mapping[str, str] = _DATA["prompts"]
FIXED: tuple[Example, ...] = tuple(map(_example, _DATA["fixed"]))
CLIENT: tuple[Example, ...] = tuple(map(_example, _DATA["client"]))
NEAREST: tuple[Example, ...] = tuple(map(_example, _DATA["nearest"]))


def all_examples() -> Iterator[Example]:
    yield from (*FIXED, *NEAREST, *CLIENT)


# ---------------------------------------------------------------------------------------------- those like a request

SHOWN = 2  # examples near the request
LOOKED_AT = 6  # examples whose tools are offered too
OWN_LANGUAGE = 0.15  # how much nearer an example is that is in the request's language
SURE = 0.3  # how like an example a request must be to be treated as it
KNOWN = frozenset(name for example in (*FIXED, *NEAREST) for name in example.tools)
MOST = 16  # tools offered
_SURELY = tuple(set(WORK) - {"create", "write", "web"})  # a poem needs no file, and weather no search

Weights = dict[str, float]
Tool = Mapping[str, Any]


def nearest(request: str, offered: frozenset[str], count: int) -> list[Example]:
    """The examples most like the request whose tools are all offered, the nearest first. A small model answers in the
    language that it has just seen, so they are in the request's, or else in English."""
    language = tongue(request)
    near = [(tongue(example.request), score, example) for score, example in ranked(request, offered, len(NEAREST))]
    own = [(score + OWN_LANGUAGE, example) for spoken, score, example in near if spoken == language]
    if script(request) == LATIN or not own:
        own += [(score, example) for spoken, score, example in near if spoken == LATIN != language]
    return [example for _, example in sorted(own, key=lambda pair: -pair[0])[:count]]


def _share(request: str, offered: frozenset[str], of: Callable[[Example], bool]) -> float | None:
    """How many of the examples like a request are so, weighed by their likeness; None where none is like it."""
    near = ranked(request, offered, LOOKED_AT)
    if not near or near[0][0] < SURE:
        return None
    return sum(score for score, example in near if of(example)) / sum(score for score, _ in near)


def needs_tool(request: str, offered: frozenset[str]) -> bool:
    """Whether the requests most like this one were done with a tool, and it has a word of such work."""
    share = _share(request, offered, lambda example: bool(example.steps))
    work = WORK if is_question(request) else _SURELY
    return share is not None and share >= 0.8 and means(request, *work, "show", "read", "before", "told", "every")


def asks_of_the_past(request: str, offered: frozenset[str]) -> str:
    """The tool that looks through earlier conversations, where only that can know: it was told, and no file named."""
    other = paths_in(request) or means(request, *CHANGES, "show", "remind", "file", "folder")
    near = [example.tools for _, example in ranked(request, offered, 3)]
    return "memory_search" if {"memory_search"} in near and means(request, "before", "told") and not other else ""


def goes_on(request: str, offered: frozenset[str], made: Sequence[str]) -> Literal["words", "either"]:
    """Whether the requests most like this one went on with another call after those that were made."""
    changes = sum(name not in LOOKING for name in made)
    share = _share(request, offered, lambda example: _acts(example) > changes)
    return "either" if share is None or share > 0.15 else "words"


def may_act(request: str, offered: frozenset[str]) -> bool:
    """Whether a request asks for more than a look, by its words or because most of those like it did."""
    if means(orders(request), *CHANGES, "remember", "remind") or means(request, "run", "command"):
        return True
    share = _share(request, offered, lambda example: _acts(example) > 0)
    return not is_question(request) and share is not None and share > 0.5


def shows(request: str, offered: frozenset[str], tool: str) -> bool:
    """Whether a result is the answer itself: a list is, and a file where it was for most of the requests like this."""
    near = [(score, example) for score, example in ranked(request, offered, LOOKED_AT) if tool in example.tools]
    quoted = sum(score for score, one in near if len(one.steps) == 1 and one.answer == quote(*one.steps[0]))
    return tool == "list_dir" or (tool == "read_file" and quoted > sum(score for score, _ in near) / 2)


def names_of(tools: Iterable[Tool]) -> frozenset[str]:
    return frozenset(str(tool.get("name")) for tool in tools)


def _acts(example: Example) -> int:
    return sum(tool not in LOOKING for tool, _, _ in example.steps)


def ranked(request: str, offered: frozenset[str], count: int) -> list[tuple[float, Example]]:
    bank, weights = _bank()
    wanted = _weigh(features(request), weights)
    scored = [
        (sum(weight * found[name] for name, weight in wanted.items() if name in found), -number)
        for number, (example, found) in enumerate(bank)
        if example.tools <= offered
    ]
    return [(score, bank[-number][0]) for score, number in sorted(scored, reverse=True)[:count] if score > 0]


def choose(tools: Sequence[Tool], request: str, used: Iterable[str] = ()) -> list[Tool]:
    """The tools to offer for a request, in their own order: the common ones, those of similar examples, those that
    the turn has used, and those whose own words are in the request."""
    if not (means(request, "web") or says(request, "address")):
        tools = [tool for tool in tools if tool.get("name") not in WEB]
    names = names_of(tools)
    wanted = {*used, *(name for name in COMMON if name in names)}
    for example in nearest(request, names, LOOKED_AT):
        wanted |= example.tools
    wanted |= {tool for tool, meaning in CALLED_FOR_BY.items() if tool in names and means(request, meaning)}
    others = sorted(((_mentioned(tool, request), str(tool.get("name"))) for tool in tools), reverse=True)
    wanted |= {name for score, name in others[: max(0, MOST - len(wanted))] if score}
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


@cache
def _bank() -> tuple[list[tuple[Example, Weights]], Weights]:
    """The examples with their weighed words, and the weights: what few examples have weighs most."""
    counted = [features(example.request) for example in NEAREST]
    occurrences = Counter(name for found in counted for name in found)
    weights = {name: math.log(1 + len(NEAREST) / count) for name, count in occurrences.items()}
    return [(example, _weigh(found, weights)) for example, found in zip(NEAREST, counted, strict=True)], weights
