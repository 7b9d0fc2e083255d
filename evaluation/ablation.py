"""Switches off helps of small models, to measure what they bring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from everloop.providers.base import LLMResponse
from everloop.providers.local.small import conversation, examples, grammar, prompt, routing, shaping
from everloop.providers.local.small.conversation import Turn, current_turn, referenced_file, text_of
from everloop.providers.local.small.examples import names_of, needs_tool
from everloop.providers.local.small.language import paths_in
from everloop.providers.local.small.shaping import Step
from everloop.tools.workspace_view import WorkspaceView

Replaced = tuple[Any, str, Any]  # a module, a name in it, and what stands there instead


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


def _by_examples(turn: Turn, offered: Sequence[Any]) -> Turn | None:
    """The route by the examples nearest to the request alone."""
    return turn if needs_tool(turn.text, names_of(offered)) else None


def _on_no_file(turn: Turn) -> Turn:
    return replace(turn, file="", corrects=False, continues=False)


def _every_line(request: str, lines: Iterable[str]) -> list[str]:
    return [line for line in dict.fromkeys(lines) if line.strip()]


_context_messages = prompt.context_messages


def _without_files(system: str, _: WorkspaceView) -> list[Any]:
    return _context_messages(system, WorkspaceView())


def _every_tool(offered: Sequence[Any], request: str, called: Any = ()) -> list[Any]:
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
        turn = current_turn(messages)
        if not tools or turn.calls:
            return super().prepare(messages, tools)
        shown = [{"role": "system", "content": "Say work if it needs files, reminders, memory or commands, else talk."}]
        for request, answer in _ROUTES:
            shown += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        files = ", ".join(turn.workspace_before.files)
        said = turn.messages[max(0, turn.start - 2) : turn.start]
        before = " / ".join(text_of(one)[:200] for one in said)
        facts = f"(Files: {files or 'none'}. Before: {before or 'nothing'})"
        shown.append({"role": "user", "content": f"{facts}\n{turn.text}"})
        return {
            "messages": shown,
            "stable": len(shown) - 1,
            "grammar": 'root ::= "talk" | "work"',
            "temperature": 0,
            "max_tokens": 4,
            "cache_prompt": True,
            "_step": Step(turn),
            "_asked": (messages, tools),
        }

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        if "_asked" not in request:
            return super().read(answer, request)
        talk = "talk" in str(answer["choices"][0]["message"]["content"])

        def chosen(turn: Turn, offered: Sequence[Any]) -> Turn | None:
            file = "" if paths_in(turn.text) else referenced_file(turn.text, turn.workspace_before)
            return None if talk else routing.route(turn, offered) or replace(turn, file=file)

        with patch.object(shaping, "route", chosen):
            return super().prepare(*request["_asked"])


# By name, what stands in the place of what.
HELPS: Mapping[str, Sequence[Replaced]] = {
    "route words": [(shaping, "route", _by_examples)],
    "route words, by the model": [(shaping, "SmallShaping", _AsksForTheRoute)],
    "meant file": [(shaping, "with_listed_file", _on_no_file)],
    "leak check": [(shaping, "leaked_text", _always("")), (shaping, "uses_unknown_file", _always(False))],
    "leaked text": [(shaping, "leaked_text", _always(""))],
    "unknown files": [(shaping, "uses_unknown_file", _always(False))],
    "simple tools": [
        (shaping, "SIMPLE_TOOLS", {}),
        (conversation, "simplify_call", lambda name, arguments: (name, arguments)),
    ],
    "retries": [(shaping, "_retry_if_false", _always(None))],
    "certain calls": [(shaping, "certain_call", _always(None))],
    "quotes": [(shaping, "is_answered_by", _always(False))],
    "sentences": [(shaping, "final_sentence", _always(""))],
    "examples": [(shaping, "nearest", _always([]))],
    "known values": [(shaping, "argument_values", _always({}))],
    "replacements": [(grammar, "replacement_places", _always({})), (grammar, "new_phrases", _always([]))],
    "named lines": [(grammar, "names_key", _always(False)), (grammar, "most_similar", _every_line)],
    "kept beginnings": [(grammar, "kept_beginning", _always(""))],
    "times": [(grammar, "cron_time", _always(("", ""))), (grammar, "cron_weekday", _always(""))],
    "only tool": [(routing, "only_tool", _always(""))],
    "fitting tools": [(routing, "is_possible", _always(True))],
    "call or words": [(routing, "expected_next", _always("either"))],
    "chosen tools": [(shaping, "select_tools", _every_tool)],
    "next step": [(routing, "may_continue", _always(True))],
    "code files": [(shaping, "code_file", _always(""))],
    "language of examples": [(examples, "language_of", _always("english"))],
    "files in the prompt": [(prompt, "context_messages", _without_files)],
}


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch off some helps while it lasts."""
    with contextlib.ExitStack() as held:
        for name in names:
            for module, attribute, instead in HELPS[name]:
                held.enter_context(patch.object(module, attribute, instead))
        yield
