"""Worked examples from `examples.toml`: find those similar to a request, and choose the tools to offer.

A small model copies what it sees, so the examples show which tool fits, the form of its arguments, and that an answer
is short and says only what a result said. Every prompt contains all of `FIXED` and the most similar ones of `NEAREST`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ....tools.simple_tools import (
    ADVANCED_TOOLS,
    ALWAYS_OFFERED,
    READ_ONLY_TOOLS,
    TRIGGER_MEANINGS,
    WEB_TOOLS,
    quote_result,
)
from ....tools.workspace_view import Call
from .language import CHANGES, ENGLISH, TASKS, Request, features, language_of, load_toml, paths_in, script_of, words


@dataclass(frozen=True, slots=True)
class Example:
    request: str
    steps: tuple[Call, ...]  # with their results
    answer: str

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(step.tool for step in self.steps)

    @property
    def changes(self) -> int:
        """The number of its calls that change something."""
        return sum(step.tool not in READ_ONLY_TOOLS for step in self.steps)


def _example(item: dict[str, Any]) -> Example:
    steps = tuple(Call(step.pop("tool"), step, step.pop("result")) for step in item.get("steps", ()))
    return Example(item["request"], steps, item["answer"])


_DATA = load_toml("examples")
PROMPTS: Mapping[str, str] = _DATA["prompts"]
FIXED, CLIENT, NEAREST = (tuple(map(_example, _DATA[name])) for name in ("fixed", "client", "nearest"))
EXAMPLES: Sequence[Example] = (*FIXED, *NEAREST, *CLIENT)
TOOLS_WITH_EXAMPLES = frozenset(tool for example in (*FIXED, *NEAREST) for tool in example.tools)

Tool = Mapping[str, Any]  # its name, description and parameters

# ---------------------------------------------------------------------------------------------- similarity

NEIGHBOURS = 6  # similar examples that decide what a request needs
MIN_SIMILARITY = 0.3  # an example below it is irrelevant to a request
LANGUAGE_BONUS = 0.15  # added to the similarity of an example in the request's language

Weights = dict[str, float]


def rank(request: Request, offered: frozenset[str], count: int) -> list[tuple[float, Example]]:
    """Return the examples most similar to a request whose tools are all offered, with their cosine similarities."""
    index, idf = _index()
    wanted = _unit_vector(features(request), idf)
    scored = [
        (sum(weight * vector[name] for name, weight in wanted.items() if name in vector), -number)
        for number, (example, vector) in enumerate(index)
        if example.tools <= offered
    ]
    return [(score, index[-number][0]) for score, number in sorted(scored, reverse=True)[:count] if score > 0]


def nearest(request: Request, offered: frozenset[str], count: int) -> list[Example]:
    """Return the most similar examples in the request's language, or else in English.

    A small model answers in the language that it has just read.
    """
    language = language_of(request)
    near = [(language_of(example.request), score, example) for score, example in rank(request, offered, len(NEAREST))]
    found = [(score + LANGUAGE_BONUS, example) for spoken, score, example in near if spoken == language]
    if script_of(request) == ENGLISH or not found:
        found += [(score, example) for spoken, score, example in near if spoken == ENGLISH != language]
    return [example for _, example in sorted(found, key=lambda pair: -pair[0])[:count]]


def _unit_vector(found: Weights, idf: Weights) -> Weights:
    unknown = max(idf.values())
    weighed = {name: strength * idf.get(name, unknown) for name, strength in found.items()}
    length = math.sqrt(sum(weight * weight for weight in weighed.values())) or 1.0
    return {name: weight / length for name, weight in weighed.items()}


@cache
def _index() -> tuple[list[tuple[Example, Weights]], Weights]:
    """Return the examples with their vectors, and the inverse document frequency of each feature."""
    counted = [features(example.request) for example in NEAREST]
    occurrences = Counter(name for found in counted for name in found)
    idf = {name: math.log(1 + len(NEAREST) / count) for name, count in occurrences.items()}
    return [(example, _unit_vector(found, idf)) for example, found in zip(NEAREST, counted, strict=True)], idf


# ---------------------------------------------------------------------------------------------- what similar ones need

_NEEDS_FILES = tuple(set(TASKS) - {"create", "write", "web"})  # a poem needs no file, the weather needs no search


def _share(request: Request, offered: frozenset[str], condition: Callable[[Example], bool]) -> float | None:
    """Return the share of similar examples that meet a condition, weighted by similarity; None if none are similar."""
    near = rank(request, offered, NEIGHBOURS)
    if not near or near[0][0] < MIN_SIMILARITY:
        return None
    return sum(score for score, example in near if condition(example)) / sum(score for score, _ in near)


def needs_tool(request: Request, offered: frozenset[str]) -> bool:
    """Return whether similar requests needed a tool, and this one has a word of such a task."""
    share = _share(request, offered, lambda example: bool(example.steps))
    tasks = TASKS if request.is_question else _NEEDS_FILES
    return share is not None and share >= 0.8 and request.means(*tasks, "show", "read", "before", "told", "every")


def asks_about_past(request: Request, offered: frozenset[str]) -> bool:
    """Return whether only a search through earlier conversations can answer a request."""
    if paths_in(request) or request.means(*CHANGES, "show", "remind", "file", "folder"):
        return False
    near = [example.tools for _, example in rank(request, offered, 3)]
    return {"memory_search"} in near and request.means("before", "told")


def may_continue(request: Request, offered: frozenset[str], made: Sequence[str]) -> bool:
    """Return whether similar requests needed another change after the ones made so far."""
    changes = sum(tool not in READ_ONLY_TOOLS for tool in made)
    share = _share(request, offered, lambda example: example.changes > changes)
    return share is None or share > 0.15


def may_change(request: Request, offered: frozenset[str]) -> bool:
    """Return whether a request allows changes, by its words or because most similar requests needed some."""
    if request.commands.means(*CHANGES, "remember", "remind") or request.means("run", "command"):
        return True
    share = _share(request, offered, lambda example: example.changes > 0)
    return not request.is_question and share is not None and share > 0.5


def is_answered_by(request: Request, offered: frozenset[str], tool: str) -> bool:
    """Return whether a result is the answer: a list of files is one, a file if it was one for most similar requests."""
    near = [(score, example) for score, example in rank(request, offered, NEIGHBOURS) if tool in example.tools]
    quoted = sum(score for score, one in near if len(one.steps) == 1 and one.answer == quote_result(*one.steps[0]))
    return tool == "list_dir" or (tool == "read_file" and quoted > sum(score for score, _ in near) / 2)


# ---------------------------------------------------------------------------------------------- choice of tools

MAX_TOOLS = 16


def names_of(tools: Iterable[Tool]) -> frozenset[str]:
    return frozenset(str(tool.get("name")) for tool in tools)


def select_tools(tools: Sequence[Tool], request: Request, called: Iterable[str] = ()) -> list[Tool]:
    """Return the tools to offer for a request, in their original order: the ones always offered, those of similar
    examples, those already called, and those whose name or description the request mentions."""
    if not (request.means("web") or request.matches("url")):
        tools = [tool for tool in tools if tool.get("name") not in WEB_TOOLS]
    names = names_of(tools)
    wanted = {*called, *(name for name in ALWAYS_OFFERED if name in names)}
    for example in nearest(request, names, NEIGHBOURS):
        wanted |= example.tools
    wanted |= {tool for tool, meaning in TRIGGER_MEANINGS.items() if tool in names and request.means(meaning)}
    others = sorted(((mention_score(tool, request), str(tool.get("name"))) for tool in tools), reverse=True)
    wanted |= {name for score, name in others[: max(0, MAX_TOOLS - len(wanted))] if score}
    return [tool for tool in tools if tool.get("name") in wanted]


def mention_score(tool: Tool, request: Request) -> int:
    """Return how many words of a tool's name and description a request mentions, for tools without examples."""
    if tool.get("name") in TOOLS_WITH_EXAMPLES:
        return 0
    request_words = {word for word in words(request) if len(word) > 3}
    name = set(words(str(tool.get("name")).replace("_", " ")))
    description = set(words(str(tool.get("description")))[:40])
    score = 2 * len(request_words & name) + (
        0 if tool.get("name") in ADVANCED_TOOLS else len(request_words & description)
    )
    return score if score > 1 else 0


def introduction(tools: Iterable[Tool]) -> str:
    """Return a line for each tool without examples: its name, its arguments and its purpose."""
    lines = []
    for tool in tools:
        if tool.get("name") not in TOOLS_WITH_EXAMPLES:
            arguments = ", ".join((tool.get("parameters") or {}).get("properties") or ())
            about = str(tool.get("description") or "").partition("\n")[0][:120]
            lines.append(f"(There is also the tool {tool.get('name')} with {arguments or 'no arguments'}: {about})")
    return "\n".join(lines)
