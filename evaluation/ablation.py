"""Switches off helps of small models, to measure what they bring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from everloop.providers.base import LLMResponse
from everloop.providers.local.small import conversation, decide, examples, prompt, shaping, values
from everloop.providers.local.small.conversation import Seen, last_request, meant, parted, seen_in, text_of, turn_of
from everloop.providers.local.small.decide import Decision, Route
from everloop.providers.local.small.words import paths_in

Replaced = tuple[Any, str, Any]  # a module, a name in it, and what stands there instead


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


def _by_examples(request: str, seen: Any, recent: bool, needs: str) -> Decision:
    """The route by the examples nearest to the request alone."""
    return Decision("work" if needs == "call" else "talk")


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

    def prepare(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, certain: bool = True
    ) -> dict[str, Any] | LLMResponse:
        _, said = parted(messages)
        last = last_request(said)
        if not tools or turn_of(said[last:]).calls:
            return super().prepare(messages, tools, certain)
        shown = [{"role": "system", "content": "Say work if it needs files, reminders, memory or commands, else talk."}]
        for request, answer in _ROUTES:
            shown += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        files = ", ".join(seen_in(said[:last]).files)
        before = " / ".join(text_of(one)[:200] for one in said[max(0, last - 2) : last])
        asked = turn_of(said[last:]).request
        shown.append({"role": "user", "content": f"(Files: {files or 'none'}. Before: {before or 'nothing'})\n{asked}"})
        return {
            "messages": shown,
            "stable": len(shown) - 1,
            "grammar": 'root ::= "talk" | "work"',
            "temperature": 0,
            "max_tokens": 4,
            "cache_prompt": True,
            "_asked": (messages, tools, certain),
        }

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        if "_asked" not in request:
            return super().read(answer, request)
        chosen_route: Route = "talk" if "talk" in str(answer["choices"][0]["message"]["content"]) else "work"

        def chosen(request: str, seen: Seen, recent: bool, needs: str) -> Decision:
            by_words = decide.decide(request, seen, recent, needs)
            if chosen_route == "talk" or by_words.route == "work":
                return replace(by_words, route=chosen_route)
            return Decision("work", "" if paths_in(request) else meant(request, seen))

        with patch.object(shaping, "decide", chosen):
            return super().prepare(*request["_asked"])


# By name, what stands in the place of what.
HELPS: Mapping[str, Sequence[Replaced]] = {
    "route words": [(shaping, "decide", _by_examples)],
    "route words, by the model": [(shaping, "SmallShaping", _AsksForTheRoute)],
    "meant file": [(shaping, "_resolved", lambda turn, *_: turn)],
    "leak check": [(shaping, "leak", _always("")), (shaping, "invented", _always(False))],
    "leaked text": [(shaping, "leak", _always(""))],
    "invented names": [(shaping, "invented", _always(False))],
    "narrow tools": [(shaping, "NARROW", {}), (conversation, "narrowed", lambda name, arguments: (name, arguments))],
    "claims": [(shaping, "claims_work", _always(False))],
    "certain calls": [(shaping, "first_call", _always(None))],
    "sentences": [(shaping, "report", _always(""))],
    "quotes": [(shaping, "_begin", _always(""))],
    "examples": [(shaping, "nearest", _always([]))],
    "known values": [(shaping, "values_for", _always({}))],
    "swaps": [(values, "swaps", _always({})), (values, "names_both", _always(False))],
    "named lines": [(values, "names_key", _always(False)), (values, "alike", _every_line)],
    "kept beginnings": [(values, "kept", _always(""))],
    "clock": [(values, "clock", _always(("", ""))), (values, "weekday", _always(""))],
    "only tool": [(shaping, "only", _always(frozenset()))],
    "fitting tools": [(shaping, "fits", _always(True))],
    "call or words": [(shaping, "wanted_next", _always("either"))],
    "chosen tools": [(shaping, "choose", _every_tool)],
    "next step": [(decide, "next_step", _always("either"))],
    "arithmetic": [(shaping, "arithmetic", _always(""))],
    "code files": [(shaping, "writes_code", _always(""))],
    "saved answers": [(decide, "saves_answer", _always(False))],
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
