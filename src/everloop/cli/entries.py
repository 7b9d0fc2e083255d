"""Entries of a log in words."""

from __future__ import annotations

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
    text_of,
)
from .paper import as_json, one_line, short_arguments, short_result


def described(entry: Entry, waited: float | None = None, *, full: bool = False) -> tuple[str, str]:
    """(what it says, facts about it): on one line, or in full. `waited` is the seconds since the entry before."""
    match entry:
        case UserSaid():
            return _cut(text_of(entry.content), full), ""
        case ModelAnswered():
            return _answer(entry, full), ", ".join(_facts(entry, waited))
        case CallsBegun():
            return f"begun: {', '.join(entry.ids)}", ""
        case CallsAsked():
            return _cut(entry.question, full), ""
        case CallsDecided():
            word = "approved" if entry.allowed else "denied"
            return f"{word}{f': {_cut(entry.note, full)}' if entry.note else ''}", f"by {entry.by}" if entry.by else ""
        case CallEnded():
            mark = "✓" if entry.status == "ok" else "✗"
            status = "" if entry.status in ("ok", "error") else f" {entry.status}"
            content = entry.content if full else short_result(entry.content)
            return f"{mark} {entry.name}{status}: {content}", f"{entry.seconds:.2f} s"
        case TurnEnded():
            # The answer stands right above.
            return entry.reason if entry.reason == "answer" else f"{entry.reason}: {_cut(entry.text, full)}", ""
        case Noted():
            message = entry.message
            return f"{message.get('role')}: {_cut(text_of(message.get('content')), full)}", ""
        case Cleared():
            return "a new conversation begins here", ""
        case Compacted():
            return _compacted(entry, full), ""


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
    error = f" (not run: {one_line(call.error)})" if call.error else ""
    if full:
        return f"{call.name}({as_json(call.arguments)}) {call.id}{error}"
    return f"{call.name}({short_arguments(call.arguments)}){error}"


def _facts(entry: ModelAnswered, waited: float | None) -> list[str]:
    facts = [f"{waited:.2f} s"] if waited is not None and waited >= 0 else []
    if entry.usage:
        facts.append(f"{entry.usage.get('prompt_tokens', 0)}+{entry.usage.get('completion_tokens', 0)} tokens")
    if entry.model:
        facts.append(entry.model)
    if entry.finish_reason not in ("stop", "tool_calls"):
        facts.append(entry.finish_reason)
    return [one_line(fact) for fact in facts]


def _cut(text: str, full: bool) -> str:
    return text if full else one_line(text)
