"""A session as a document: Markdown, JSON lines or one HTML page, with secrets redacted."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

from ..log import CallEnded, Cleared, Logged, ModelAnswered, Noted, TurnEnded, UserSaid, text_of
from .output import as_json, mark_of

Format = Literal["md", "jsonl", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)


def exported(entries: Sequence[Logged], title: str, form: Format, redact: Callable[[str], str]) -> str:
    """Return the session as text in this format."""
    match form:
        case "jsonl":
            return "".join(f"{redact(as_json(row))}\n" for row in _rows(entries))
        case "md":
            return redact(_markdown(entries, title))
        case "html":
            return _page(redact(title), [(kind, redact(text)) for kind, text in _parts(entries)])


def _rows(entries: Sequence[Logged]) -> Iterable[dict[str, object]]:
    import msgspec

    for one in entries:
        yield {"seq": one.seq, "turn": one.turn, "at": one.at, **msgspec.to_builtins(one.entry)}


def _parts(entries: Sequence[Logged]) -> Iterable[tuple[str, str]]:
    """Return the kind and text of each entry."""
    for one in entries:
        match one.entry:
            case UserSaid() as said:
                yield ("system" if said.inside else "user"), text_of(said.with_note())
            case ModelAnswered() as answered:
                if answered.content:
                    yield "agent", answered.content
                for call in answered.calls:
                    yield "call", f"{call.name} {as_json(call.arguments)}"
            case CallEnded() as ended:
                yield "result", f"{mark_of(ended.name, ended.status, ended.content)} {ended.name}\n{ended.content}"
            case TurnEnded() as ended if ended.reason != "answer":
                yield "system", f"{ended.reason}: {ended.text}"
            case Noted(message=message):
                yield str(message.get("role", "system")), text_of(message.get("content"))
            case Cleared():
                yield "system", "A new conversation begins here."


def _markdown(entries: Sequence[Logged], title: str) -> str:
    names = {"user": "You", "agent": "Everloop", "assistant": "Everloop"}
    lines = [f"# {title}", "", f"_Exported {time.strftime('%Y-%m-%d %H:%M')}_", ""]
    last = ""
    for kind, text in _parts(entries):
        name = names.get(kind, "")
        if name and name != last:
            lines += [f"## {name}", ""]
        last = name or last
        lines += [_fenced(text) if kind in ("call", "result") else text if name else f"_{text}_", ""]
    return "\n".join(lines)


def _fenced(text: str) -> str:
    """Return the text as a code block, whatever fences it contains."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem}
body{color:#222;background:#fff}
div{white-space:pre-wrap;overflow-wrap:anywhere;margin:.6rem 0;padding:.6rem .9rem;border-radius:.5rem}
.user{background:#e8f0fe}.agent,.assistant{background:#f4f4f4}.system{color:#666;font-style:italic}
.call,.result{font:13px/1.45 ui-monospace,monospace;border:1px solid #ddd}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181d}.user{background:#1f3358}
.agent,.assistant{background:#23262d}.call,.result{border-color:#444}.system{color:#999}}"""


def _page(title: str, parts: Iterable[tuple[str, str]]) -> str:
    """Return one page without scripts, and without anything to load."""
    known = ("user", "agent", "assistant", "call", "result")
    body = "\n".join(
        f'<div class="{kind if kind in known else "system"}">{html.escape(text)}</div>' for kind, text in parts
    )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html><head>{head}</head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
