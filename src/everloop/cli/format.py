"""Formats log entries and events as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..activity import ActivityEvent
from ..log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Compacted,
    Entry,
    ModelAnswered,
    Noted,
    TurnEnded,
    UserSaid,
    kind_of,
    text_of,
)
from ..text import one_line
from .output import as_json, mark_of, short_arguments, short_result

KINDS = {"model_called": "model", "tool_started": "tool", "feedback": "feedback"}


def line_of(activity: ActivityEvent, *, full: bool = False) -> tuple[str, str, str]:
    """Return the kind, text and facts of an event: on one line, or in full."""
    entry, facts = activity.entry, activity.facts
    kind = KINDS[activity.event] if entry is None else kind_of(entry)
    match activity.event:
        case "model_called":
            text = "called"
        case "tool_started":
            text = f"{facts['tool'] or facts['call']} started"
        case "feedback":
            text = _cut(facts["text"], full)
        case _:
            assert entry is not None
            text = described(entry, full=full)
    return kind, text, ", ".join(one_line(fact, 100) for fact in _facts(activity))


def described(entry: Entry, *, full: bool = False) -> str:
    """Return the text of an entry: on one line, or in full."""
    match entry:
        case UserSaid():
            return _cut(text_of(entry.with_note()), full)
        case ModelAnswered():
            return _answer(entry, full)
        case CallsBegun():
            return f"begun: {', '.join(entry.ids)}"
        case CallsAsked():
            return _cut(entry.question, full)
        case CallsDecided():
            word = f"approved{' for the session' if entry.always else ''}" if entry.allowed else "denied"
            return f"{word}{f': {_cut(entry.note, full)}' if entry.note else ''}"
        case CallEnded():
            mark = mark_of(entry.name, entry.status, entry.content)
            status = "" if entry.status in ("ok", "error") else f" {entry.status}"
            content = entry.content if full else short_result(entry.content)
            return f"{mark} {entry.name}{status}: {content}"
        case TurnEnded():
            # The answer is the line above.
            return entry.reason if entry.reason == "answer" else f"{entry.reason}: {_cut(entry.text, full)}"
        case Noted():
            message = entry.message
            return f"{message.get('role')}: {_cut(text_of(message.get('content')), full)}"
        case Cleared():
            return "a new conversation begins here"
        case Compacted():
            return _compacted(entry, full)


def _compacted(entry: Compacted, full: bool) -> str:
    parts = [f"{entry.turns} earlier turns are shown as a summary"] if entry.summary else []
    parts += [f"{len(entry.aside)} long results as pointers"] if entry.aside else []
    parts += ["older pictures and long arguments no more"] if entry.trimmed else []
    text = ", ".join(parts) or "everything is shown again"
    return f"{text}: {_cut(entry.summary, full)}" if entry.summary else text


def _answer(entry: ModelAnswered, full: bool) -> str:
    parts = [f"({_cut(entry.reasoning, full)})"] if entry.reasoning and full else []
    parts += [_cut(entry.content, full)] if entry.content else []
    parts += [f"→ {_call(call, full)}" for call in entry.calls]
    return ("\n" if full else " ").join(parts) or "(empty)"


def _call(call: Call, full: bool) -> str:
    error = f" (not run: {one_line(call.error, 100)})" if call.error else ""
    if full:
        return f"{call.name}({as_json(call.arguments)}) {call.id}{error}"
    return f"{call.name}({short_arguments(call.arguments)}){error}"


def _facts(activity: ActivityEvent) -> Iterator[str]:
    """Return the facts of an event, the most important first."""
    facts = activity.facts
    match activity.event:
        case "request" | "steered":
            yield from ["steered"] if activity.event == "steered" else []
            yield from ["from inside"] if facts.get("inside") else []
            yield from [str(facts[name]) for name in ("channel", "sender") if facts.get(name)]
            yield _count(facts["size"], "character")
        case "model_called":
            yield f"round {facts['round']}"
            yield from [facts["model"]] if "model" in facts else []
        case "model_answered":
            yield f"{facts['seconds']:.2f} s"
            yield from [f"first token {facts['first_token']:.2f} s"] if "first_token" in facts else []
            yield from _tokens(facts)
            yield from [facts["model"]] if "model" in facts else []
            yield from [facts["finish_reason"]] if facts["finish_reason"] not in ("stop", "tool_calls") else []
        case "tool_ended":
            yield "handed to the client" if "handed" in facts else f"{facts['seconds']:.2f} s"
            yield _count(facts["size"], "character")
        case "feedback":
            yield facts["kind"]
        case "decided":
            yield from [f"by {facts['by']}"] if "by" in facts else []
        case "compacted":
            yield from _tokens(facts)
        case "turn_ended":
            yield _count(facts["rounds"], "round")
            yield f"{facts['seconds']:.2f} s"
            yield from _tokens(facts)
            yield from [f"cost {facts['cost']:.4f}"] if "cost" in facts else []


def _tokens(facts: dict[str, Any]) -> Iterator[str]:
    if "input_tokens" in facts or "output_tokens" in facts:
        yield f"{facts.get('input_tokens', 0)}+{facts.get('output_tokens', 0)} tokens"
    if facts.get("cached_tokens"):
        yield f"{facts['cached_tokens']} cached"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cut(text: str, full: bool) -> str:
    return text if full else one_line(text, 100)
