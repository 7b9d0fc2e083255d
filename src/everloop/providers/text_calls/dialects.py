"""The dialects that mark their calls: a table of what opens and ends them, and the readers of what stands in between.

A new family is one line of `FAMILIES`. Models mix the forms up, so what is inside is recognised by its looks and not by
the mark that it follows.
"""

from __future__ import annotations

import ast
import html
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

from .calls import CUT_OFF, MAX_CALLS, NAMES, UNREADABLE, OfferedTools, WrittenCall, calls_of
from .json_values import BROKEN, EVALUABLE, JsonReader, as_json, literal, open_brackets, value_end


@dataclass(slots=True, frozen=True)
class Family:
    """A way to mark calls: what opens and what ends them."""

    opening: str
    ends: str = ""  # a pattern; by default the tag's end
    body: str = ""  # the end of the opening that is part of the body
    argument: str = ""  # what stands between the name of an offered tool, which must follow, and its arguments

    @property
    def is_special(self) -> bool:
        """Whether a special token opens the calls, which no model writes into prose."""
        return self.opening[:2] in ("<|", "<｜", "]<")


FAMILIES = (
    Family("<tool_call>", r"</(?:tool|function)_call>|<tool_response>"),  # Hermes, Qwen, GLM and many others
    Family("<function_call>", r"</(?:tool|function)_call>"),
    Family("<tool_calls>"),  # Jamba, Hunyuan
    Family("<function_calls>"),
    Family("<TOOLCALL>"),  # Nemotron Nano 2
    Family("<longcat_tool_call>"),
    Family("<dots_function_call>"),
    Family("<minimax:tool_call>"),  # MiniMax M2
    Family("<seed:tool_call>"),
    Family("<atem:function_calls>"),  # Muse
    Family("<｜DSML｜function_calls>"),  # DeepSeek V3.2
    Family("<｜DSML｜tool_calls>"),  # DeepSeek V4
    Family("<start_function_call>", "<end_function_call>"),  # FunctionGemma
    Family("<|tool_call>", r"<tool_call\|>"),  # Gemma 4
    Family("<|tool_call|>", r"<\|/tool_call\|>|</tool_call>|<\|end_of_text\|>"),  # Granite, Phi-4-mini
    Family("<|tool_call_start|>", r"<\|tool_call_end\|>"),  # LFM2
    Family("<|tools_prefix|>", r"<\|tools_suffix\|>"),  # Apertus
    Family("<|python_tag|>", r"<\|eom_id\|>|<\|eot_id\|>"),  # Llama 3
    Family("<|python_start|>", r"<\|python_end\|>|<\|eom\|>|<\|eot\|>"),  # Llama 4
    Family("<|START_ACTION|>", r"<\|END_ACTION\|>"),  # Command A
    Family("<|action_start|>", r"<\|action_end\|>"),  # InternLM
    Family("<｜tool▁calls▁begin｜>", r"<[｜|]tool▁calls▁end[｜|]>"),  # DeepSeek
    Family("<|tool▁calls▁begin|>", r"<[｜|]tool▁calls▁end[｜|]>"),
    Family("<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>", body="<｜tool▁call▁begin｜>"),
    Family("<｜tool_calls_begin｜>", r"<｜tool_calls_end｜>"),  # Step 3
    Family("<|tool_calls_section_begin|>", r"<\|tool_calls_section_end\|>"),  # Kimi K2
    Family("<|tool_call_begin|>", r"<\|tool_call_end\|>", body="<|tool_call_begin|>"),
    Family("<|open|>tools<|sep|>", r"<\|close\|>tools<\|sep\|>"),  # Kimi K3
    Family("]<]minimax[>[<tool_call>", r"\]<\]minimax\[>\[</tool_call>"),  # MiniMax M3
    Family("[TOOL_CALLS]", r"</s>|(?=\[TOOL_CALLS\])"),  # Mistral
    Family("[TOOL_REQUEST]", r"\[END_TOOL_REQUEST\]"),  # LM Studio
    Family("<function=", r"</function>", body="<function="),  # Qwen-coder, Llama 3
    Family("<function name=", r"</function>", body="<function name="),  # MiniCPM 5
    Family("<invoke name=", r"</invoke>", body="<invoke name="),
    Family("<｜DSML｜invoke name=", r"</｜DSML｜invoke>", body="<｜DSML｜invoke name="),
    Family("<steptml:invoke name=", r"</steptml:invoke>", body="<steptml:invoke name="),
    Family("functools[", r"<\|im_end\|>|<\|end\|>", body="["),  # FireFunction, Phi-4-mini
    Family("function call<|role_sep|>", r"<\|message_sep\|>|</s>"),  # GigaChat 3
    Family("<|function_call|>", r"<\|message_sep\|>|</s>"),
    Family("<|recipient|>", r"<\|stop\|>|(?=<\|from\|>)", argument="<|content|>"),  # Functionary 2
    Family(">>>", r"<\|eot_id\|>|<\|eom_id\|>|(?=>>>)", argument="{"),  # Functionary 3
    Family("Action:", r"\n\s*(?:Observation|Thought|Final Answer):", argument="Action Input:"),  # ReAct
)
BY_OPENING = {family.opening: family for family in FAMILIES}
OPENINGS = tuple(sorted(BY_OPENING, key=len, reverse=True))
ENDS = {one.opening: re.compile(one.ends or f"</{one.opening[1:]}") for one in FAMILIES}

# Tokens without meaning between or after calls.
NOISES = (
    "</s>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>", "<|observation|>",
    "</tool_call>", "</tool_calls>", "</function_call>", "</function_calls>", "</function>", "<|/tool_call|>",
    "<|message_sep|>", "<|stop|>", "<|from|>assistant", "<｜tool_calls_end｜>", "<|close|>message<|sep|>",
    "<|end_of_msg|>", "</answer>", "</response>",
)  # fmt: skip
NOISE = re.compile(rf"(?:[\s,;]|{'|'.join(map(re.escape, NOISES))})*")

_SPACE = re.compile(r"\s*")
_INNER = (
    "<function=", "<function name=", "<invoke name=", "<｜DSML｜invoke name=", "<steptml:invoke name=",
    "<atem:invoke name=", "<｜tool▁call▁begin｜>", "<|tool▁call▁begin|>", "<｜tool_call_begin｜>",
    "<|tool_call_begin|>", "<|open|>call tool=", "]<]minimax[>[<invoke name=", "<tool_call>", "<|plugin|>",
    "```",
)  # fmt: skip
_BODY_NAME = re.compile(r"(?:call:\s*)?[\w.:-]{1,120}")
_AFTER_NAME = (
    "<arg_key>", "<longcat_arg_key>", "<tool_sep>", "(", "[ARGS]", "[CALL_ID]", "{", "<｜tool▁sep｜>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
_CLOSERS = ("</", "<|", "<｜")


def begins_call(text: str, at: int, family: Family, final: bool, offered: OfferedTools) -> bool | None:
    """Whether a call follows a mark, and not prose that mentions the mark; None while more text is needed."""
    place = after(_SPACE, text, at)
    if place >= len(text):
        return False if final else None
    if not family.argument:
        if text[place] in "{[" or text.startswith(_INNER, place):
            return True
        if not final and _may_become(text[place : place + 40], _INNER):
            return None
    name = _BODY_NAME.match(text, place)
    if name is None:
        return False
    rest = after(_SPACE, text, name.end())
    if family.argument:  # on the line behind the name
        if rest >= len(text) and not final:
            return None
        if name[0] not in offered or "\n" not in text[name.end() : rest]:
            return False
    expected = (family.argument,) if family.argument else _AFTER_NAME
    if text.startswith(expected, rest):
        return True
    if not final and _may_become(text[rest : rest + 40], expected if family.argument else (*expected, *_CLOSERS)):
        return None
    return not family.argument and name[0] in offered and (rest >= len(text) or text.startswith(_CLOSERS, rest))


def _may_become(beginning: str, whole: tuple[str, ...]) -> bool:
    return any(one.startswith(beginning) for one in whole)


def after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of a match here; `at` if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at


def parts(
    body: str, begin: re.Pattern[str], end: re.Pattern[str] | None = None, *, first: bool = False
) -> list[tuple[re.Match[str], str, bool]]:
    """What each of the marks in a body begins, and whether it is ended: by the last end before the next mark, since a
    value may hold one too, or by the `first`."""
    starts = list(begin.finditer(body))
    found = []
    for start, stop in zip(starts, [*(one.start() for one in starts[1:]), len(body)], strict=False):
        inner = body[start.end() : stop]
        ends = list(end.finditer(inner)) if end is not None else []
        found.append((start, inner[: ends[0 if first else -1].start()] if ends else inner, bool(ends)))
    return found


_BODY_FENCE = re.compile(r"```\w*\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
_TOOL_CALL, _TOOL_CALL_END = re.compile("<tool_call>"), re.compile("</tool_call>")  # inside the mark around all calls
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]{0,120}\(")
# A name and then its arguments as JSON: Mistral, Functionary, ReAct.
NAMED_JSON = re.compile(
    r"\s*(?!call:)([\w.:-]{1,120})\s*(?:\[CALL_ID\][\w-]{0,80})?(?:\[ARGS\]|<\|content\|>|Action Input:)?\s*(?=\{)"
)
_INPUT = re.compile(r"\s*([\w.:-]{1,120})\s*(?:Action Input:|<\|content\|>)(.*)", re.DOTALL)
_ANY_NAME = re.compile(rf"[\"'](?:{'|'.join(NAMES)})[\"']\s*:\s*[\"']([^\"'\n]{{1,200}})[\"']")


def read_body(body: str, json_reader: JsonReader, complete: bool, *, exact: bool = False) -> list[WrittenCall]:
    """The calls between marks. `complete`: a mark ended them, and not the end of the answer; `exact`: no line break
    around a value is the template's."""
    try:
        return _read_body(body.strip(), json_reader, complete, exact)[:MAX_CALLS] or [
            WrittenCall("unknown", problem=UNREADABLE)
        ]
    except RecursionError:
        return [WrittenCall("unknown", problem=UNREADABLE)]


def _read_body(body: str, json_reader: JsonReader, complete: bool, exact: bool) -> list[WrittenCall]:
    body = body.removeprefix("<|plugin|>").lstrip()
    if body.startswith("```") and (fenced := _BODY_FENCE.match(body)):
        body = fenced[1]
    if body.startswith("call:"):
        return read_gemma(body, json_reader, complete)
    if body.startswith("<tool_call>"):
        inside = parts(body, _TOOL_CALL, _TOOL_CALL_END)[:MAX_CALLS]
        return [one for _, call, ended in inside for one in _read_body(call.strip(), json_reader, ended, exact)]
    if _CALL_BEGIN.search(body, 0, 200):
        return read_section(body, json_reader, complete)
    if body.startswith(_NAMESPACE):
        return read_namespaced(body, complete)
    if _CALL_TAG.match(body):
        return read_tags(body, json_reader, complete, exact)
    if body[:1] in ("{", "["):
        python = read_python(body) if _PYTHONIC.match(body) else None
        return python if python is not None else read_objects(body, json_reader, complete)
    if _PAIR.search(body):
        return read_pairs(body, complete)
    if named := NAMED_JSON.match(body):
        return [with_arguments(named[1], body[named.end() :], json_reader, complete)]
    if given := _INPUT.match(body):
        return [WrittenCall(given[1], positional=[given[2].strip()])]
    return read_python(body) or read_pairs(body, complete)


def read_objects(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls of one or more JSON values. A call that was cut off is never repaired."""
    depth, open_string = open_brackets(body)
    cut = open_string or (depth > 0 and not complete and not (depth == 1 and body.endswith("}")))
    if cut:
        return [WrittenCall(sniff_name(body) or "unknown", problem=CUT_OFF)]
    calls: list[WrittenCall] = []
    for value in json_reader.read_all(body):
        more = calls_of(value, json_reader) if value is not BROKEN else None
        if more is None:
            more = _keyed_calls(value) or [WrittenCall(sniff_name(body) or "unknown", problem=UNREADABLE)]
        calls += more
    return calls


def _keyed_calls(value: Any) -> list[WrittenCall]:
    """The calls of objects whose only key is the tool's name, as Apertus writes them."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) and all(isinstance(inner, dict) for inner in item.values()) for item in items):
        return []
    return [WrittenCall(name, arguments) for item in items for name, arguments in item.items()]


def sniff_name(text: str) -> str:
    """The name of the tool that a broken object seems to call."""
    named = _ANY_NAME.search(text[:4096])
    return named[1] if named else ""


# ----------------------------------------- tags: Qwen-coder, MiniMax, DeepSeek's DSML, Step, Kimi K3

_PREFIX = r"<(?:\w{1,20}:|｜DSML｜)?"
_CALL_TAG = re.compile(
    rf"<function=([^>\n]{{1,200}})>|{_PREFIX}(?:invoke|function) name=[\"']([^\"'\n]{{1,200}})[\"'][^>\n]{{0,200}}>"
    r"|<\|open\|>call tool=\"([^\"\n]{1,200})\"[^<\n]{0,200}<\|sep\|>"
)
_CALL_END = re.compile(r"</(?:\w{1,20}:|｜DSML｜)?(?:function|invoke)>|<\|close\|>call<\|sep\|>")
_PARAMETER = re.compile(
    rf"<parameter=([^>\n]{{1,200}})>|{_PREFIX}param(?:eter)? name=[\"']([^\"'\n]{{1,200}})[\"']([^>\n]{{0,200}})>"
    r"|<\|open\|>argument key=\"([^\"\n]{1,200})\"([^<\n]{0,200})<\|sep\|>"
)
_PARAMETER_END = re.compile(r"</(?:\w{1,20}:|｜DSML｜)?param(?:eter)?>\s*(?=<|\Z)|<\|close\|>argument<\|sep\|>")
_JSON_BLOCK = re.compile(r"<\|(?:open|close)\|>json[^<\n]{0,200}<\|sep\|>")
_NOT_TEXT = re.compile(r"\bstring=[\"']false|\btype=[\"'](?!string)")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)


def read_tags(body: str, json_reader: JsonReader, complete: bool, exact: bool) -> list[WrittenCall]:
    """The calls of a text with a tag for each call and each argument; the last is cut off if the text is."""
    calls = []
    for start, inner, closed in parts(body, _CALL_TAG, _CALL_END)[:MAX_CALLS]:
        name = html.unescape(start[3]) if start[3] else (start[1] or start[2]).strip("\"' ")
        whole = closed or complete
        calls.append(_tagged_call(name, inner, json_reader, exact) if whole else WrittenCall(name, problem=CUT_OFF))
    return calls


def _tagged_call(name: str, inner: str, json_reader: JsonReader, exact: bool) -> WrittenCall:
    given = parts(inner, _PARAMETER, _PARAMETER_END)
    if not given:  # JSON inside a tag, as Llama writes it
        inner = _JSON_BLOCK.sub("", inner)
        return _with_value(name, json_reader.read(inner) if inner.strip() else {})
    arguments: dict[str, object] = {}
    for start, text, _ in given:
        if start[1] and not exact and text[:1] == text[-1:] == "\n" and len(text) > 1:
            text = text[1:-1]  # the line breaks of Qwen-coder's template
        if data := _CDATA.match(text):
            text = data[1]
        value = json_reader.read(text) if _NOT_TEXT.search(start[3] or start[5] or "") else BROKEN
        key = html.unescape(start[4]) if start[4] else (start[1] or start[2]).strip("\"' ")
        arguments[key] = text if value is BROKEN else value  # a text is coerced by the tool's schema later
    return WrittenCall(name, arguments)


_NAMESPACE = "]<]minimax[>["
_NAMESPACED = re.compile(r"\]<\]minimax\[>\[\s*<(/?)([^<>\n]{1,200})>")
_INVOKED = re.compile(r"invoke name=[\"']([^\"']{1,200})[\"']")


def read_namespaced(body: str, complete: bool) -> list[WrittenCall]:
    """The calls of MiniMax M3: a token before each tag, and arguments that are tags named after them, also nested."""
    calls: list[WrittenCall] = []
    stack: list[tuple[str, list[tuple[str, Any]]]] = []  # the open tags, and what is inside them
    text_from = 0
    for tag in _NAMESPACED.finditer(body):
        closing, name, text = tag[1], tag[2].strip(), body[text_from : tag.start()]
        if len(stack) > 1 and text.endswith(end := f"</{stack[-1][0]}>"):  # the token before it was left out
            stack[-2][1].append((stack.pop()[0], text.removesuffix(end)))
        if not closing:
            stack.append((name, []))
        elif stack and (name == stack[-1][0] or (name == "invoke" and len(stack) == 1)):
            opened, inside = stack.pop()
            if stack:
                stack[-1][1].append((name, _namespaced_value(inside, text)))
            elif (invoked := _INVOKED.match(opened)) and len(calls) < MAX_CALLS:
                calls.append(WrittenCall(invoked[1], dict(inside)))
        text_from = tag.end()
    if stack and (invoked := _INVOKED.match(stack[0][0])):
        calls.append(WrittenCall(invoked[1], problem=UNREADABLE if complete else CUT_OFF))
    return calls


def _namespaced_value(inside: list[tuple[str, Any]], text: str) -> Any:
    if not inside:
        return text
    return [value for _, value in inside] if inside[0][0] == "item" else dict(inside)


# --------------------------------------------------------------- keys and values: GLM, Hunyuan, LongCat

_PAIR = re.compile(r"<(?:\w{1,20}_)?arg_key>([^<]{0,200})</(?:\w{1,20}_)?arg_key>\s*<(?:\w{1,20}_)?arg_value>")
_PAIR_END = re.compile(r"</(?:\w{1,20}_)?arg_value>")
_PAIR_HEAD = re.compile(r"([^<]{1,200}?)\s*(?:<tool_sep>\s*)?(?=<|\Z)")


def read_pairs(body: str, complete: bool) -> list[WrittenCall]:
    """One call as GLM writes it: a name, then keys and values."""
    head = _PAIR_HEAD.match(body)
    if head is None or not head[1].strip() or any(character.isspace() for character in head[1].strip()):
        return []
    name, pairs = head[1].strip(), parts(body, _PAIR, _PAIR_END)
    whole = complete and (pairs or "arg_key>" not in body) and all(ended for _, _, ended in pairs)
    arguments = {start[1].strip(): text for start, text, _ in pairs}
    return [WrittenCall(name, arguments) if whole else WrittenCall(name, problem=CUT_OFF)]


# ------------------------------------------------------------------ special tokens: DeepSeek, Kimi, Step

_CALL_BEGIN = re.compile(r"<[｜|]tool[▁_]call[▁_]begin[｜|]>")
_CALL_TOKEN_END = re.compile(r"<[｜|]tool[▁_]calls?[▁_](?:section_)?end[｜|]>")
_SEPARATOR = re.compile(r"<[｜|]tool[▁_]sep[｜|]>|<\|tool_call_argument_begin\|>")
_NAMED = re.compile(r"\s*([\w.:-]{1,200})\s*(?:```\w*\s*)?")


def read_section(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls of a section: each is a begin token, a name, a separator and arguments."""
    calls = []
    for _, inner, ended in parts(body, _CALL_BEGIN, _CALL_TOKEN_END, first=True)[:MAX_CALLS]:
        whole = complete or ended
        pieces = _SEPARATOR.split(inner, 1)
        if len(pieces) == 2 and _CALL_TAG.match(pieces[1].lstrip()):  # Step 3
            calls += read_tags(pieces[1], json_reader, whole, True)
            continue
        if len(pieces) == 2 and pieces[0].strip() == "function" and (named := _NAMED.match(pieces[1])):
            name, text = named[1], pieces[1][named.end() :]  # DeepSeek's older form: the type comes first
        elif len(pieces) == 2:
            name, text = pieces[0].strip(), pieces[1]
        elif named := _NAMED.match(inner):
            name, text = named[1], inner[named.end() :]
        else:
            continue
        calls.append(with_arguments(name, text, json_reader, whole))
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
    return _with_value(name, json_reader.read(text[at : end[0]] if end is not None else text))


def _with_value(name: str, value: Any) -> WrittenCall:
    return WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, problem=UNREADABLE)


# ---------------------------------------------------------------- Python: Llama, Gemma's tool_code

PYTHON_BEGINS = re.compile(r"\s*(?:\w{1,60}\s*=\s*)?(?:print\(\s*)?([A-Za-z_][\w.]{0,120})\(")
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(?:\.\w+)*")
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
    if not _DOTTED_NAME.fullmatch(name := ast.unparse(node.func)):
        raise ValueError("no name")
    if name == "print" and len(node.args) == 1 and not node.keywords:
        return _python_calls(node.args[0])
    if name.endswith(".call"):  # Llama's form for its built-in tools
        name = name.removesuffix(".call")
    positional = [as_json(literal(argument)) for argument in node.args]
    named = {keyword.arg: as_json(literal(keyword.value)) for keyword in node.keywords}
    if None in named:
        raise ValueError("arguments that are not named")
    return [WrittenCall(name, {str(key): value for key, value in named.items()}, positional)]


# ----------------------------------------------------------------------------------- FunctionGemma

_GEMMA_CALL = re.compile(r"call:\s*([\w.-]{1,200})\s*\{")
_GEMMA_PARTS = re.compile(
    r"<escape>(.*?)<escape>|<\|\"\|>(.*?)<\|\"\|>|([{,]\s*)([A-Za-z_][\w.-]{0,100})\s*:", re.DOTALL
)


def read_gemma(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """The calls of FunctionGemma and Gemma 4: JSON with bare keys, and strings in marks of their own."""
    calls = []
    found = parts(body, _GEMMA_CALL)[:MAX_CALLS]
    for number, (start, inner, _) in enumerate(found, 1):
        text = _GEMMA_PARTS.sub(_as_json_part, f"{{{inner}".strip())
        cut = not complete and number == len(found) and not text.endswith("}")
        calls.append(WrittenCall(start[1], problem=CUT_OFF) if cut else _with_value(start[1], json_reader.read(text)))
    return calls


def _as_json_part(found: re.Match[str]) -> str:
    return f'{found[3]}"{found[4]}":' if found[4] else json.dumps(found[1] if found[1] is not None else found[2])
