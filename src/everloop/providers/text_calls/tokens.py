"""Calls between special tokens: DeepSeek's and Kimi's sections, Mistral's name[ARGS]{…}."""

from __future__ import annotations

import re

from .mending import Mender, value_end
from .shapes import CUT_OFF, MAX_CALLS, UNREADABLE, Written

_BEGIN = re.compile(r"<｜tool▁call▁begin｜>|<\|tool_call_begin\|>|<\|tool▁call▁begin\|>")
_END = re.compile(
    r"<｜tool▁call▁end｜>|<\|tool_call_end\|>|<\|tool▁call▁end\|>|<｜tool▁calls▁end｜>|<\|tool_calls_section_end\|>"
)
_SEPARATOR = re.compile(r"<｜tool▁sep｜>|<\|tool▁sep\|>|<\|tool_call_argument_begin\|>|<\|tool_sep\|>")
_NAMED = re.compile(r"\s*([\w.:-]{1,200})\s*(?:```\w*\s*)?")


def read_section(body: str, mender: Mender, complete: bool) -> list[Written]:
    """The calls of a section: each has a begin, a name, a separator and arguments."""
    calls = []
    for part in _BEGIN.split(body)[1 : MAX_CALLS + 1]:
        ended = _END.search(part)
        inner = part[: ended.start()] if ended else part
        pieces = _SEPARATOR.split(inner, 1)
        if len(pieces) == 2 and pieces[0].strip() == "function" and (named := _NAMED.match(pieces[1])):
            name, text = named[1], pieces[1][named.end() :]  # DeepSeek's older form: the kind comes first
        elif len(pieces) == 2:
            name, text = pieces[0].strip(), pieces[1]
        elif named := _NAMED.match(inner):
            name, text = named[1], inner[named.end() :]
        else:
            continue
        calls.append(with_arguments(name, text, mender, complete or ended is not None))
    return calls


def with_arguments(name: str, text: str, mender: Mender, complete: bool) -> Written:
    """A call whose arguments are the JSON in a text, fenced or not."""
    text = text.strip()
    if text.startswith("```"):
        text = text.partition("\n")[2]
    if text.endswith("```"):
        text = text[:-3]
    if not text.strip():
        return Written(name) if complete else Written(name, problem=CUT_OFF)
    at = text.find("{")
    end = value_end(text, at) if at >= 0 else None
    if end is None and not complete:
        return Written(name, problem=CUT_OFF)
    value = mender.read(text[at : end[0]] if end is not None else text)
    return Written(name, value) if isinstance(value, dict) else Written(name, problem=UNREADABLE)
