"""Switches off helps of small models, to measure what they bring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from everloop.providers.base import LLMResponse
from everloop.providers.local.small import conversation, decide, examples, grammar, prompt, shaping
from everloop.providers.local.small.conversation import Turn, meant, text_of, turn_of
from everloop.providers.local.small.examples import names_of, needs_tool
from everloop.providers.local.small.words import paths_in
from everloop.tools.seen import Seen

Replaced = tuple[Any, str, Any]  # a module, a name in it, and what stands there instead


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


def _by_examples(turn: Turn, offered: Sequence[Any]) -> Turn | None:
    """The route by the examples nearest to the request alone."""
    return turn if needs_tool(turn.said, names_of(offered)) else None


def _on_no_file(turn: Turn) -> Turn:
    return replace(turn, file="", corrects=False, goes_on=False)


def _every_line(request: str, lines: Iterable[str]) -> list[str]:
    return [line for line in dict.fromkeys(lines) if line.strip()]


def _every_tool(offered: Sequence[Any], request: str, used: Any = ()) -> list[Any]:
    return list(offered)


_ROUTES = (
    ("hello there!", "talk"),
    ("add bread to shopping.txt", "work"),
    ("explain how a bicycle works", "talk"),
    ("what is on the list?", "work"),
    ("write me a poem about rain", "talk"),
    ("delete the second file", "work"),
    ("remind me at 5 to call Ida", "work"),
    ("¿cuál es la capital de Perú?", "talk"),
    ("Füge Milch hinzu", "work"),
    ("谢谢!", "talk"),
)


class _AsksForTheRoute(shaping.SmallShaping):
    """Lets the model itself say whether a request is talk or work: one constrained word, after a few examples."""

    def prepare(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> dict[str, Any] | LLMResponse:
        turn = turn_of(messages)
        if not tools or turn.calls:
            return super().prepare(messages, tools)
        shown = [{"role": "system", "content": "Say work if it needs files, reminders, memory or commands, else talk."}]
        for request, answer in _ROUTES:
            shown += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        files = ", ".join(turn.before.files)
        said = turn.conversation[max(0, turn.start - 2) : turn.start]
        before = " / ".join(text_of(one)[:200] for one in said)
        facts = f"(Files: {files or 'none'}. Before: {before or 'nothing'})"
        shown.append({"role": "user", "content": f"{facts}\n{turn.said}"})
        return {
            "messages": shown,
            "stable": len(shown) - 1,
            "grammar": 'root ::= "talk" | "work"',
            "temperature": 0,
            "max_tokens": 4,
            "cache_prompt": True,
            "_asked": (messages, tools),
        }

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        if "_asked" not in request:
            return super().read(answer, request)
        talk = "talk" in str(answer["choices"][0]["message"]["content"])

        def chosen(turn: Turn, offered: Sequence[Any]) -> Turn | None:
            file = "" if paths_in(turn.said) else meant(turn.said, turn.before)
            return None if talk else decide.decide(turn, offered) or replace(turn, file=file)

        with patch.object(shaping, "decide", chosen):
            return super().prepare(*request["_asked"])


# By name, what stands in the place of what.
HELPS: Mapping[str, Sequence[Replaced]] = {
    "route words": [(shaping, "decide", _by_examples)],
    "route words, by the model": [(shaping, "SmallShaping", _AsksForTheRoute)],
    "meant file": [(shaping, "resolved", _on_no_file)],
    "leak check": [(shaping, "leak", _always("")), (shaping, "invented", _always(False))],
    "leaked text": [(shaping, "leak", _always(""))],
    "invented names": [(shaping, "invented", _always(False))],
    "narrow tools": [(shaping, "NARROW", {}), (conversation, "narrowed", lambda name, arguments: (name, arguments))],
    "claims": [(shaping, "claims_work", _always(False))],
    "certain calls": [(shaping, "first_call", _always(None))],
    "sentences": [(shaping, "report", _always(""))],
    "examples": [(shaping, "nearest", _always([]))],
    "known values": [(shaping, "values_for", _always({}))],
    "swaps": [(grammar, "swaps", _always({})), (grammar, "names_both", _always(False))],
    "named lines": [(grammar, "names_key", _always(False)), (grammar, "alike", _every_line)],
    "kept beginnings": [(grammar, "kept", _always(""))],
    "clock": [(grammar, "clock", _always(("", ""))), (grammar, "weekday", _always(""))],
    "only tool": [(decide, "only", _always(frozenset()))],
    "fitting tools": [(decide, "fits", _always(True))],
    "call or words": [(decide, "wanted_next", _always("either"))],
    "chosen tools": [(shaping, "choose", _every_tool)],
    "next step": [(decide, "goes_on", _always("either"))],
    "code files": [(shaping, "writes_code", _always(""))],
    "language of examples": [(examples, "tongue", _always("§latin"))],
    "files in the prompt": [(shaping, "notes", lambda system, _: prompt.notes(system, Seen()))],
}


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch off some helps while it lasts."""
    with contextlib.ExitStack() as held:
        for name in names:
            for module, attribute, instead in HELPS[name]:
                held.enter_context(patch.object(module, attribute, instead))
        yield
