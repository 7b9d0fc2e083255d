"""Calls written with tags: Qwen-coder's <function=…>, <invoke name=…>, and GLM's keys and values."""

from __future__ import annotations

import re

from .mending import Mender
from .shapes import CUT_OFF, MAX_CALLS, UNREADABLE, Written

_FUNCTION = re.compile(r"<function=([^>\n]{1,200})>")
_INVOKE = re.compile(r"<(?:[\w]{1,20}:|｜DSML｜)?invoke name=[\"']([^\"'\n]{1,200})[\"'][^>\n]{0,200}>")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]{1,200})>|<(?:[\w]{1,20}:|｜DSML｜)?parameter name=[\"']([^\"'\n]{1,200})[\"'][^>\n]{0,200}>"
)
_PARAMETER_END = re.compile(r"</(?:[\w]{1,20}:|｜DSML｜)?parameter>\s*(?=<|\Z)")
_CALL_END = re.compile(r"</(?:[\w]{1,20}:|｜DSML｜)?(?:function|invoke)>")
_KEY = re.compile(r"<arg_key>([^<]{0,200})</arg_key>\s*<arg_value>")


def read_functions(body: str, mender: Mender, complete: bool) -> list[Written]:
    """The calls of a text with <function=…> or <invoke …> tags; the last is cut off if the text is not complete."""
    opening = _FUNCTION if _FUNCTION.search(body) else _INVOKE
    found = list(opening.finditer(body))[:MAX_CALLS]
    calls = []
    for number, start in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(body)
        inner = body[start.end() : end]
        closed = list(_CALL_END.finditer(inner))
        whole = bool(closed) or complete
        calls.append(_function(start[1].strip(), inner[: closed[-1].start()] if closed else inner, mender, whole))
    return calls


def _function(name: str, inner: str, mender: Mender, whole: bool) -> Written:
    name = name.strip("\"' ")
    starts = list(_PARAMETER.finditer(inner))
    if not whole:
        return Written(name, problem=CUT_OFF)
    if not starts:  # JSON inside a tag, as Llama writes it
        value = mender.read(inner) if inner.strip() else {}
        return Written(name, value) if isinstance(value, dict) else Written(name, problem=UNREADABLE)
    arguments: dict[str, object] = {}
    for number, start in enumerate(starts):
        value_text = inner[start.end() : starts[number + 1].start() if number + 1 < len(starts) else len(inner)]
        ends = list(_PARAMETER_END.finditer(value_text))
        value_text = value_text[: ends[-1].start()] if ends else value_text
        arguments[(start[1] or start[2]).strip("\"' ")] = _value(value_text)
    return Written(name, arguments)


def _value(text: str) -> str:
    """A value without the line breaks that its tags stand on; a tool's schema says what else than text it is."""
    return text.removeprefix("\n").removesuffix("\n")


def read_pairs(body: str, mender: Mender, complete: bool) -> list[Written]:
    """One call as GLM writes it: a name, then keys and values."""
    head, _, _ = body.partition("<arg_key>")
    name = head.strip()
    if not name or len(name) > 200 or any(character.isspace() for character in name):
        return []
    starts = list(_KEY.finditer(body))
    arguments: dict[str, object] = {}
    whole = complete and (bool(starts) or "<arg_key>" not in body)
    for number, start in enumerate(starts):
        stop = starts[number + 1].start() if number + 1 < len(starts) else len(body)
        value, end, _ = body[start.end() : stop].rpartition("</arg_value>")
        whole = whole and bool(end)
        arguments[start[1].strip()] = _value(value)
    return [Written(name, arguments) if whole else Written(name, problem=CUT_OFF)]
