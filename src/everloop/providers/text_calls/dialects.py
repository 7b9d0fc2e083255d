"""The dialects that mark their calls: a table of what opens and ends them, and the readers of what stands in between.

A new family is one line of `FAMILIES`. Models mix the forms up, so what is inside is recognised by its looks and not by
the mark that it follows.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import Any

from .calls import CUT_OFF, MAX_CALLS, NAMES, UNREADABLE, OfferedTools, WrittenCall, calls_of
from .json_values import BROKEN, EVALUABLE, JsonReader, as_json, literal, open_brackets, value_end


@dataclass(slots=True, frozen=True)
class Family:
    """A way to mark calls: what opens and what ends them. `inside`: the opening is part of the body."""

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

# Tokens without meaning between or after calls.
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
_BODY_NAME = re.compile(r"[\w.:-]{1,120}")
_AFTER_NAME = ("<arg_key>", "(", "[ARGS]", "[CALL_ID]", "{", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>")
_CLOSERS = ("</", "<|", "<｜")


def begins_call(text: str, at: int, final: bool, offered: OfferedTools) -> bool | None:
    """Whether a call follows a mark, and not prose that mentions the mark; None while more text is needed."""
    place = after(_SPACE, text, at)
    if place >= len(text):
        return False if final else None
    if text[place] in "{[" or text.startswith(_INNER, place):
        return True
    if not final and _may_become(text[place : place + 40], _INNER):
        return None
    name = _BODY_NAME.match(text, place)
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
    """The end of a match here; `at` if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at


_BODY_FENCE = re.compile(r"```\w*\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]{0,120}\(")
_MISTRAL = re.compile(r"\s*([\w.-]{1,120})\s*(?:\[CALL_ID\][\w-]{0,80})?(?:\[ARGS\])?\s*(?=\{)")
_ANY_NAME = re.compile(rf"[\"'](?:{'|'.join(NAMES)})[\"']\s*:\s*[\"']([^\"'\n]{{1,200}})[\"']")


def read_body(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls between marks. `complete`: a mark ended them, and not the end of the answer."""
    try:
        return _read_body(body.strip(), json_reader, complete)[:MAX_CALLS] or [
            WrittenCall("unknown", problem=UNREADABLE)
        ]
    except RecursionError:
        return [WrittenCall("unknown", problem=UNREADABLE)]


def _read_body(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    body = body.removeprefix("<|plugin|>").lstrip()
    if body.startswith("```") and (fenced := _BODY_FENCE.match(body)):
        body = fenced[1]
    if body.startswith("call:"):
        return read_gemma(body, json_reader, complete)
    if "tool▁call▁begin" in body[:200] or body.startswith("<|tool_call_begin|>"):
        return read_section(body, json_reader, complete)
    if body.startswith(("<function=", "<invoke", "<｜DSML｜invoke")):
        return read_functions(body, json_reader, complete)
    if body[:1] in ("{", "["):
        python = read_python(body) if _PYTHONIC.match(body) else None
        return python if python is not None else read_objects(body, json_reader, complete)
    if "<arg_key>" in body:
        return read_pairs(body, json_reader, complete)
    if named := _MISTRAL.match(body):
        return [with_arguments(named[1], body[named.end() :], json_reader, complete)]
    return read_python(body) or read_pairs(body, json_reader, complete)


def read_objects(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls of one or more JSON values. A call that was cut off is never repaired."""
    depth, open_string = open_brackets(body)
    cut = open_string or (depth > 0 and not complete and not (depth == 1 and body.endswith("}")))
    if cut:
        return [WrittenCall(named[1] if (named := _ANY_NAME.search(body[:4096])) else "unknown", problem=CUT_OFF)]
    calls: list[WrittenCall] = []
    for value in json_reader.read_all(body):
        more = calls_of(value, json_reader) if value is not BROKEN else None
        if more is None:
            named = _ANY_NAME.search(body[:4096])
            more = [WrittenCall(named[1] if named else "unknown", problem=UNREADABLE)]
        calls += more
    return calls


def sniff_name(text: str) -> str:
    """The name of the tool that a broken object seems to call."""
    named = _ANY_NAME.search(text[:4096])
    return named[1] if named else ""


# ------------------------------------------------------------------ tags: Qwen-coder, MiniMax, GLM

_FUNCTION = re.compile(r"<function=([^>\n]{1,200})>")
_INVOKE = re.compile(r"<(?:[\w]{1,20}:|｜DSML｜)?invoke name=[\"']([^\"'\n]{1,200})[\"'][^>\n]{0,200}>")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]{1,200})>|<(?:[\w]{1,20}:|｜DSML｜)?parameter name=[\"']([^\"'\n]{1,200})[\"'][^>\n]{0,200}>"
)
_PARAMETER_END = re.compile(r"</(?:[\w]{1,20}:|｜DSML｜)?parameter>\s*(?=<|\Z)")
_CALL_END = re.compile(r"</(?:[\w]{1,20}:|｜DSML｜)?(?:function|invoke)>")
_ARG_KEY = re.compile(r"<arg_key>([^<]{0,200})</arg_key>\s*<arg_value>")


def read_functions(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls of a text with <function=…> or <invoke …> tags; the last is cut off if the text is not complete."""
    opening = _FUNCTION if _FUNCTION.search(body) else _INVOKE
    found = list(opening.finditer(body))[:MAX_CALLS]
    calls = []
    for number, start in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(body)
        inner = body[start.end() : end]
        closed = list(_CALL_END.finditer(inner))
        whole = bool(closed) or complete
        calls.append(_function(start[1].strip(), inner[: closed[-1].start()] if closed else inner, json_reader, whole))
    return calls


def _function(name: str, inner: str, json_reader: JsonReader, whole: bool) -> WrittenCall:
    name = name.strip("\"' ")
    starts = list(_PARAMETER.finditer(inner))
    if not whole:
        return WrittenCall(name, problem=CUT_OFF)
    if not starts:  # JSON inside a tag, as Llama writes it
        value = json_reader.read(inner) if inner.strip() else {}
        return WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, problem=UNREADABLE)
    arguments: dict[str, object] = {}
    for number, start in enumerate(starts):
        value_text = inner[start.end() : starts[number + 1].start() if number + 1 < len(starts) else len(inner)]
        ends = list(_PARAMETER_END.finditer(value_text))
        value_text = value_text[: ends[-1].start()] if ends else value_text
        arguments[(start[1] or start[2]).strip("\"' ")] = _value(value_text)
    return WrittenCall(name, arguments)


def _value(text: str) -> str:
    """A value without the line breaks around it; it is coerced by the tool's schema later."""
    return text.removeprefix("\n").removesuffix("\n")


def read_pairs(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """One call as GLM writes it: a name, then keys and values."""
    head, _, _ = body.partition("<arg_key>")
    name = head.strip()
    if not name or len(name) > 200 or any(character.isspace() for character in name):
        return []
    starts = list(_ARG_KEY.finditer(body))
    arguments: dict[str, object] = {}
    whole = complete and (bool(starts) or "<arg_key>" not in body)
    for number, start in enumerate(starts):
        stop = starts[number + 1].start() if number + 1 < len(starts) else len(body)
        value, end, _ = body[start.end() : stop].rpartition("</arg_value>")
        whole = whole and bool(end)
        arguments[start[1].strip()] = _value(value)
    return [WrittenCall(name, arguments) if whole else WrittenCall(name, problem=CUT_OFF)]


# --------------------------------------------------------- special tokens: DeepSeek, Kimi, Mistral

_CALL_BEGIN = re.compile(r"<｜tool▁call▁begin｜>|<\|tool_call_begin\|>|<\|tool▁call▁begin\|>")
_CALL_TOKEN_END = re.compile(
    r"<｜tool▁call▁end｜>|<\|tool_call_end\|>|<\|tool▁call▁end\|>|<｜tool▁calls▁end｜>|<\|tool_calls_section_end\|>"
)
_SEPARATOR = re.compile(r"<｜tool▁sep｜>|<\|tool▁sep\|>|<\|tool_call_argument_begin\|>|<\|tool_sep\|>")
_NAMED = re.compile(r"\s*([\w.:-]{1,200})\s*(?:```\w*\s*)?")


def read_section(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls of a section: each is a begin token, a name, a separator and arguments."""
    calls = []
    for part in _CALL_BEGIN.split(body)[1 : MAX_CALLS + 1]:
        ended = _CALL_TOKEN_END.search(part)
        inner = part[: ended.start()] if ended else part
        pieces = _SEPARATOR.split(inner, 1)
        if len(pieces) == 2 and pieces[0].strip() == "function" and (named := _NAMED.match(pieces[1])):
            name, text = named[1], pieces[1][named.end() :]  # DeepSeek's older form: the type comes first
        elif len(pieces) == 2:
            name, text = pieces[0].strip(), pieces[1]
        elif named := _NAMED.match(inner):
            name, text = named[1], inner[named.end() :]
        else:
            continue
        calls.append(with_arguments(name, text, json_reader, complete or ended is not None))
    return calls


def with_arguments(name: str, text: str, json_reader: JsonReader, complete: bool) -> WrittenCall:
    """A call whose arguments are the JSON in a text, fenced or not."""
    text = text.strip()
    if text.startswith("```"):
        text = text.partition("\n")[2]
    if text.endswith("```"):
        text = text[:-3]
    if not text.strip():
        return WrittenCall(name) if complete else WrittenCall(name, problem=CUT_OFF)
    at = text.find("{")
    end = value_end(text, at) if at >= 0 else None
    if end is None and not complete:
        return WrittenCall(name, problem=CUT_OFF)
    value = json_reader.read(text[at : end[0]] if end is not None else text)
    return WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, problem=UNREADABLE)


# ---------------------------------------------------------------- Python: Llama, Gemma's tool_code

PYTHON_BEGINS = re.compile(r"\s*(?:\w{1,60}\s*=\s*)?(?:print\(\s*)?([A-Za-z_][\w.]{0,120})\(")
PYTHON_MAY_BEGIN = re.compile(r"\s*(?:\w{1,60}\s*|(?:\w{1,60}\s*=\s*)?(?:print\(?\s*)?[\w.]{0,120})\Z")


def read_python(text: str) -> list[WrittenCall] | None:
    """The calls that a Python text consists of; None if it holds anything else."""
    text = text.strip()
    if not text or len(text) > EVALUABLE:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        calls: list[WrittenCall] = []
        for statement in tree.body:
            if isinstance(statement, ast.Expr | ast.Assign):
                calls += _python_calls(statement.value)
            else:
                return None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    return calls[:MAX_CALLS] or None


def _python_calls(node: ast.expr) -> list[WrittenCall]:
    if isinstance(node, ast.List | ast.Tuple):
        return [call for element in node.elts for call in _python_calls(element)]
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = _dotted_name(node.func)
    if name == "print" and len(node.args) == 1 and not node.keywords:
        return _python_calls(node.args[0])
    if name.endswith(".call"):  # Llama's form for its built-in tools
        name = name.removesuffix(".call")
    positional = [as_json(literal(argument)) for argument in node.args]
    named = {keyword.arg: as_json(literal(keyword.value)) for keyword in node.keywords}
    if None in named:
        raise ValueError("arguments that are not named")
    return [WrittenCall(name, {str(key): value for key, value in named.items()}, positional)]


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    raise ValueError("no name")


# ----------------------------------------------------------------------------------- FunctionGemma

_GEMMA_CALL = re.compile(r"call:\s*([\w.-]{1,200})\s*\{")
_GEMMA_TEXT = re.compile(r"<escape>(.*?)<escape>|<\|\"\|>(.*?)<\|\"\|>", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]{0,100})\s*:")


def read_gemma(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    starts = list(_GEMMA_CALL.finditer(body))[:MAX_CALLS]
    calls = []
    for number, start in enumerate(starts):
        stop = starts[number + 1].start() if number + 1 < len(starts) else len(body)
        whole = complete or number + 1 < len(starts)
        calls.append(_gemma_call(start[1], body[start.end() - 1 : stop].strip(), json_reader, whole))
    return calls


def _gemma_call(name: str, text: str, json_reader: JsonReader, whole: bool) -> WrittenCall:
    """Strings are replaced by placeholders first, so that their content is not read as structure."""
    texts: list[str] = []

    def keep(found: re.Match[str]) -> str:
        texts.append(found[1] if found[1] is not None else found[2])
        return f'"\x00{len(texts) - 1}"'

    outline = _GEMMA_KEY.sub(r'\1"\2":', _GEMMA_TEXT.sub(keep, text))
    if not whole and not outline.endswith("}"):
        return WrittenCall(name, problem=CUT_OFF)
    value = _restore_texts(json_reader.read(outline), texts)
    return WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, problem=UNREADABLE)


def _restore_texts(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _restore_texts(inner, texts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_restore_texts(inner, texts) for inner in value]
    if isinstance(value, str) and value[:1] == "\x00" and value[1:].isdecimal() and int(value[1:]) < len(texts):
        return texts[int(value[1:])]
    return value if value is not BROKEN else None
