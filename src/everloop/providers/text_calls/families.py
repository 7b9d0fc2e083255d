"""The table of dialects that mark their calls, and the one reader of what stands between the marks.

A new family is one line of `FAMILIES`. Models mix the forms up, so what is inside is told by its looks and not by the
mark that it follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .gemma import read_gemma
from .markup import read_functions, read_pairs
from .mending import BROKEN, Mender, shape
from .objects import NAMES, calls_of
from .offered import Offered
from .pythonic import read_python
from .shapes import CUT_OFF, MAX_CALLS, UNREADABLE, Written
from .tokens import read_section, with_arguments


@dataclass(slots=True, frozen=True)
class Family:
    """A way to mark calls: what opens it, and what ends it. `inside`: the opening is part of what is read."""

    name: str
    openings: tuple[str, ...]
    ends: str = ""
    inside: bool = False

    @property
    def end(self) -> re.Pattern[str]:
        return re.compile(self.ends or r"(?!)")


FAMILIES = (
    Family("hermes", ("<tool_call>", "<function_call>"), r"</(?:tool|function)_call>|<tool_response>"),
    Family("jamba", ("<tool_calls>",), r"</tool_calls>"),
    Family("granite", ("<|tool_call|>",), r"<\|/tool_call\|>|</tool_call>|<\|end_of_text\|>"),
    Family("llama", ("<|python_tag|>",), r"<\|eom_id\|>|<\|eot_id\|>"),
    Family("llama4", ("<|python_start|>",), r"<\|python_end\|>|<\|eom\|>|<\|eot\|>"),
    Family("functions", ("<function=",), r"</function>", inside=True),
    Family("mistral", ("[TOOL_CALLS]",), r"</s>|(?=\[TOOL_CALLS\])"),
    Family("lmstudio", ("[TOOL_REQUEST]",), r"\[END_TOOL_REQUEST\]"),
    Family("deepseek", ("<｜tool▁calls▁begin｜>", "<|tool▁calls▁begin|>"), r"<[｜|]tool▁calls▁end[｜|]>"),
    Family("deepseek-call", ("<｜tool▁call▁begin｜>",), r"<｜tool▁call▁end｜>", inside=True),
    Family("deepseek-dsml", ("<｜DSML｜function_calls>",), r"</｜DSML｜function_calls>"),
    Family("kimi", ("<|tool_calls_section_begin|>",), r"<\|tool_calls_section_end\|>"),
    Family("kimi-call", ("<|tool_call_begin|>",), r"<\|tool_call_end\|>", inside=True),
    Family("gemma", ("<start_function_call>",), r"<end_function_call>"),
    Family("gemma4", ("<|tool_call>",), r"<tool_call\|>"),
    Family("invoke", ("<invoke name=",), r"</invoke>", inside=True),
    Family("invokes", ("<function_calls>",), r"</function_calls>"),
    Family("minimax", ("<minimax:tool_call>",), r"</minimax:tool_call>"),
    Family("seed", ("<seed:tool_call>",), r"</seed:tool_call>"),
    Family("cohere", ("<|START_ACTION|>",), r"<\|END_ACTION\|>"),
    Family("internlm", ("<|action_start|>",), r"<\|action_end\|>"),
)
BY_OPENING = {opening: family for family in FAMILIES for opening in family.openings}
OPENINGS = tuple(sorted(BY_OPENING, key=len, reverse=True))
ENDS = {family.name: family.end for family in FAMILIES}

# What may stand between or after calls and says nothing.
NOISE = re.compile(
    r"(?:[\s,;]|</s>|<\|eom_id\|>|<\|eot_id\|>|<\|eom\|>|<\|eot\|>|<\|im_end\|>|<\|end_of_text\|>|<\|endoftext\|>"
    r"|<end_of_turn>|<｜end▁of▁sentence｜>|<｜tool▁calls▁end｜>|<\|tool_calls_section_end\|>|<\|observation\|>"
    r"|</tool_calls?>|</function_calls?>|</function>|<\|/tool_call\|>)*"
)
NOISES = (
    "</s>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>", "<|observation|>",
    "</tool_call>", "</tool_calls>", "</function_call>", "</function_calls>", "</function>", "<|/tool_call|>",
)  # fmt: skip

_SPACE = re.compile(r"\s*")
_INNER = (
    "<function=", "<invoke name=", "<｜DSML｜invoke name=", "<｜tool▁call▁begin｜>", "<|tool▁call▁begin|>",
    "<|tool_call_begin|>", "<|plugin|>", "call:", "```",
)  # fmt: skip
_NAME = re.compile(r"[\w.:-]{1,120}")
_AFTER_NAME = ("<arg_key>", "(", "[ARGS]", "[CALL_ID]", "{", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>")
_CLOSERS = ("</", "<|", "<｜")


def begins_call(text: str, at: int, final: bool, offered: Offered) -> bool | None:
    """Whether what follows a mark is a call, and not a text that speaks of the mark; None while that is open."""
    place = after(_SPACE, text, at)
    if place >= len(text):
        return False if final else None
    if text[place] in "{[" or text.startswith(_INNER, place):
        return True
    if not final and _may_become(text[place : place + 40], _INNER):
        return None
    name = _NAME.match(text, place)
    if name is None:
        return False
    rest = after(_SPACE, text, name.end())
    if text.startswith(_AFTER_NAME, rest):
        return True
    if not final and _may_become(text[rest : rest + 40], (*_AFTER_NAME, *_CLOSERS)):
        return None
    return name[0] in offered and (rest >= len(text) or text.startswith(_CLOSERS, rest))


def _may_become(beginning: str, whole: tuple[str, ...]) -> bool:
    return any(one.startswith(beginning) for one in whole)


def after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The place behind what a pattern that may be empty matches here."""
    found = pattern.match(text, at)
    return found.end() if found else at


_FENCE = re.compile(r"```\w*\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]{0,120}\(")
_MISTRAL = re.compile(r"\s*([\w.-]{1,120})\s*(?:\[CALL_ID\][\w-]{0,80})?(?:\[ARGS\])?\s*(?=\{)")
_ANY_NAME = re.compile(rf"[\"'](?:{'|'.join(NAMES)})[\"']\s*:\s*[\"']([^\"'\n]{{1,200}})[\"']")


def read_body(body: str, mender: Mender, complete: bool) -> list[Written]:
    """The calls between marks. `complete`: it was ended by a mark, and not by the end of the answer."""
    try:
        return _read_body(body.strip(), mender, complete)[:MAX_CALLS] or [Written("unknown", problem=UNREADABLE)]
    except RecursionError:
        return [Written("unknown", problem=UNREADABLE)]


def _read_body(body: str, mender: Mender, complete: bool) -> list[Written]:
    body = body.removeprefix("<|plugin|>").lstrip()
    if body.startswith("```") and (fenced := _FENCE.match(body)):
        body = fenced[1]
    if body.startswith("call:"):
        return read_gemma(body, mender, complete)
    if "tool▁call▁begin" in body[:200] or body.startswith("<|tool_call_begin|>"):
        return read_section(body, mender, complete)
    if body.startswith(("<function=", "<invoke", "<｜DSML｜invoke")):
        return read_functions(body, mender, complete)
    if body[:1] in ("{", "["):
        python = read_python(body) if _PYTHONIC.match(body) else None
        return python if python is not None else read_objects(body, mender, complete)
    if "<arg_key>" in body:
        return read_pairs(body, mender, complete)
    if named := _MISTRAL.match(body):
        return [with_arguments(named[1], body[named.end() :], mender, complete)]
    return read_python(body) or read_pairs(body, mender, complete)


def read_objects(body: str, mender: Mender, complete: bool) -> list[Written]:
    """The calls of one or more JSON values. What was recovered from a text that was cut off is never run."""
    depth, open_string = shape(body)
    cut = open_string or (depth > 0 and not complete and not (depth == 1 and body.endswith("}")))
    if cut:
        return [Written(named[1] if (named := _ANY_NAME.search(body[:4096])) else "unknown", problem=CUT_OFF)]
    calls: list[Written] = []
    for value in mender.read_all(body):
        more = calls_of(value, mender) if value is not BROKEN else None
        if more is None:
            named = _ANY_NAME.search(body[:4096])
            more = [Written(named[1] if named else "unknown", problem=UNREADABLE)]
        calls += more
    return calls


def sniff_name(text: str) -> str:
    """The name of the call that a broken object seems to be."""
    named = _ANY_NAME.search(text[:4096])
    return named[1] if named else ""
