"""Parse what models write between the marks of calls: JSON, tags for each call and argument, Python, or other forms.

Models mix the forms, so a body is recognised by its content and not by the mark that precedes it.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .calls import CUT_OFF, MAX_CALLS, NAMES, UNREADABLE, WrittenCall, calls_of
from .json_values import BROKEN, UNPARSABLE, JsonReader, is_cut_off, literal, parse_python, value_end


class Tag:
    """The patterns that begin and end a part of a body. The first group of `begin` is the part's name."""

    def __init__(self, begin: str, end: str = "(?!)") -> None:
        self.begin, self.end = re.compile(begin), re.compile(end)

    def parts(self, body: str, complete: bool = False) -> list[tuple[re.Match[str], str, bool]]:
        """Return what each of these tags begins, and whether it is complete.

        The last end before the next tag counts, since a value may contain one, too.
        """
        found = []
        starts = list(self.begin.finditer(body))
        for start, stop in zip(starts, [*(one.start() for one in starts[1:]), len(body)], strict=False):
            inner = body[start.end() : stop]
            ends = list(self.end.finditer(inner))
            found.append((start, inner[: ends[-1].start()] if ends else inner, complete or bool(ends)))
        return found[:MAX_CALLS]


_PREFIX = r"(?:\w{1,20}:|｜DSML｜ ?)?"
_NAMED = r"[\"']([^\"'\n]{1,200})[\"']"
_ARG = r"(?:\w{1,20}_)?arg"
_SEPARATOR = r"<[｜|]tool[▁_]sep[｜|]>|<\|tool_call_argument_begin\|>"

# The tags around each call, inside the mark around all calls: Hunyuan; DeepSeek, Kimi K2, Step 3.
_NESTED = (
    Tag("<tool_call>", "</tool_call>"),
    Tag(r"<[｜|]tool[▁_]call[▁_]begin[｜|]>", r"(?:<[｜|]tool[▁_]calls?[▁_](?:section_)?end[｜|]>\s*)+"),
)
_CALLS = (
    Tag(r"<function=([^>\n]{1,200})>", "</function>"),  # Qwen-coder, Llama
    Tag(rf"<{_PREFIX}(?:invoke|function) name={_NAMED}[^>\n]{{0,200}}>", rf"</{_PREFIX}(?:function|invoke)>"),
    Tag(rf"<\|open\|>call tool={_NAMED}[^<\n]{{0,200}}<\|sep\|>", r"<\|close\|>call<\|sep\|>"),  # Kimi K3
    Tag(rf"\A([^<\s]{{1,200}})\s*(?:<tool_sep>\s*)?(?=<{_ARG}_key>)"),  # GLM, Hunyuan, LongCat
)
# The second group contains the other attributes.
_LINES = Tag(r"<parameter=([^>\n]{1,200})>()", r"</parameter>\s*(?=<|\Z)")
_PAIRS = Tag(rf"<{_ARG}_key>([^<]{{0,200}})</{_ARG}_key>\s*<{_ARG}_value>()", rf"</{_ARG}_value>")
_PARAMETERS = (
    _LINES,
    Tag(rf"<{_PREFIX}param(?:eter)? name={_NAMED}([^>\n]{{0,200}})>", rf"</{_PREFIX}param(?:eter)?>\s*(?=<|\Z)"),
    Tag(rf"<\|open\|>argument key={_NAMED}([^<\n]{{0,200}})<\|sep\|>", r"<\|close\|>argument<\|sep\|>"),
    _PAIRS,
)
# A name, followed by its arguments as JSON: Mistral, Functionary, ReAct, DeepSeek, Kimi.
NAMED_JSON = re.compile(
    r"\s*(?!call:)([\w.:-]{1,120})\s*(?:\[CALL_ID\][\w-]{0,80})?"
    rf"(?:\[ARGS\]|{_SEPARATOR}|(?:<\|content\|>|Action Input:)?\s*(?:```\w*\s*)?(?=\{{))\s*"
)
_INPUT = re.compile(r"\s*([\w.:-]{1,120})\s*(?:Action Input:|<\|content\|>)(.*)", re.DOTALL)
_ALONE = re.compile(r"([^<\s]{1,200})\s*(?:<tool_sep>\s*)?\Z")
_TYPE = re.compile(rf"\A(?:<\|plugin\|>|function\s*(?:{_SEPARATOR})(?!\s*\{{))\s*")  # InternLM; DeepSeek, Step
_FENCE = re.compile(r"```\w*\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
PYTHON_LIST = re.compile(r"\[\s*([A-Za-z_][\w.]{0,160})\s*\(")
_ANY_NAME = re.compile(rf"[\"'](?:{'|'.join(NAMES)})[\"']\s*:\s*[\"']([^\"'\n]{{1,200}})[\"']")


def read_body(body: str, json_reader: JsonReader, complete: bool, *, exact: bool = False) -> list[WrittenCall]:
    """Return the calls between marks.

    `complete`: a mark ended them, not the end of the answer. `exact`: line breaks around a value belong to the value.
    """
    try:
        calls = _read_body(_TYPE.sub("", body.strip()), json_reader, complete, exact)[:MAX_CALLS]
    except RecursionError:
        calls = []
    return calls or [WrittenCall("unknown", problem=UNREADABLE)]


def _read_body(body: str, json_reader: JsonReader, complete: bool, exact: bool) -> list[WrittenCall]:
    if fenced := _FENCE.match(body):
        body = fenced[1]
    if body.startswith("call:"):
        return read_gemma(body, json_reader, complete)
    for tag in _NESTED:
        if tag.begin.match(body):
            parts = tag.parts(body, complete)
            return [call for _, inner, whole in parts for call in read_body(inner, json_reader, whole, exact=exact)]
    for tag in _CALLS:
        if tag.begin.match(body):
            parts = tag.parts(body, complete)
            return [_tagged_call(_name(start), inner, json_reader, whole, exact) for start, inner, whole in parts]
    if body.startswith(_NAMESPACE):
        return read_namespaced(body, complete)
    if body[:1] in ("{", "["):
        return (read_python(body) if PYTHON_LIST.match(body) else None) or read_objects(body, json_reader, complete)
    if named := NAMED_JSON.match(body):
        return [with_arguments(named[1], body[named.end() :], json_reader, complete)]
    if given := _INPUT.match(body):
        return [WrittenCall(given[1], positional=[given[2].strip()])]
    alone = _ALONE.match(body)
    return read_python(body) or ([with_arguments(alone[1], "", json_reader, complete)] if alone else [])


def read_objects(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """Return the calls in one or more JSON values. A truncated call is never repaired."""
    name = sniff_name(body) or "unknown"
    if is_cut_off(body, complete):
        return [WrittenCall(name, problem=CUT_OFF)]
    calls: list[WrittenCall] = []
    for value in json_reader.read_all(body):
        calls += calls_of(value, json_reader) or _keyed_calls(value) or [WrittenCall(name, problem=UNREADABLE)]
    return calls


def _keyed_calls(value: Any) -> list[WrittenCall]:
    """Return the calls in objects whose only key is the tool's name, as Apertus writes them."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) and all(isinstance(inner, dict) for inner in item.values()) for item in items):
        return []
    return [WrittenCall(name, arguments) for item in items for name, arguments in item.items()]


def sniff_name(text: str) -> str:
    """Return the name of the tool that a malformed object seems to call."""
    named = _ANY_NAME.search(text[:4096])
    return named[1] if named else ""


def with_arguments(name: str, text: str, json_reader: JsonReader, complete: bool) -> WrittenCall:
    """Return a call whose arguments are the JSON in a text, fenced or not."""
    if not text.strip():
        return WrittenCall(name, problem="" if complete else CUT_OFF)
    at = text.find("{")
    end = value_end(text, at) if at >= 0 else None
    if end is None and not complete:
        return WrittenCall(name, problem=CUT_OFF)
    return _with_value(name, json_reader.read(text[at : end[0]] if end is not None else text))


def _with_value(name: str, value: Any) -> WrittenCall:
    return WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, problem=UNREADABLE)


_JSON_BLOCK = re.compile(r"<\|(?:open|close)\|>json[^<\n]{0,200}<\|sep\|>")
_NOT_TEXT = re.compile(r"\bstring=[\"']false|\btype=[\"'](?!string)")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)


def _tagged_call(name: str, inner: str, json_reader: JsonReader, complete: bool, exact: bool) -> WrittenCall:
    """Return a call whose tag contains a tag for each argument, or JSON."""
    if not complete:
        return WrittenCall(name, problem=CUT_OFF)
    used = [(found.start(), tag) for tag in _PARAMETERS if (found := tag.begin.search(inner))]
    if not used:  # JSON inside a tag, as Llama writes it
        inner = _JSON_BLOCK.sub("", inner)
        return _with_value(name, json_reader.read(inner) if inner.strip() else {})
    _, tag = min(used, key=lambda one: one[0])  # the first one: a value may contain tags of other dialects
    arguments: dict[str, object] = {}
    for start, text, ended in tag.parts(inner):
        if tag is _PAIRS and not ended:
            return WrittenCall(name, problem=CUT_OFF)
        if tag is _LINES and not exact and text[:1] == text[-1:] == "\n" and len(text) > 1:
            text = text[1:-1]  # the line breaks of Qwen-coder's template
        if data := _CDATA.match(text):
            text = data[1]
        value = json_reader.read(text) if _NOT_TEXT.search(start[2]) else BROKEN
        arguments[_name(start)] = text if value is BROKEN else value  # the tool's schema coerces a text later
    return WrittenCall(name, arguments)


def _name(start: re.Match[str]) -> str:
    return html.unescape(start[1].strip("\"' \n"))


_NAMESPACE = "]<]minimax[>["
_TOKEN = re.escape(_NAMESPACE)  # precedes each tag, but models omit it before the end of a value
_NAMESPACED = re.compile(rf"(?:{_TOKEN}\s*<(/?)|<(/)(?=[^<>\n]{{1,200}}>\s*{_TOKEN}))([^<>\n]{{1,200}})>")
_INVOKED = re.compile(r"invoke name=[\"']([^\"']{1,200})[\"']")


def read_namespaced(body: str, complete: bool) -> list[WrittenCall]:
    """Return the calls of MiniMax M3: a token precedes each tag; an argument is a tag with its name, also nested."""
    calls: list[WrittenCall] = []
    tags = _NAMESPACED.finditer(body)
    for tag in tags:
        if (invoked := _INVOKED.match(tag[3])) and len(calls) < MAX_CALLS:
            value = _namespaced_value(tag, tags)
            if isinstance(value, str) and not value.strip():
                value = {}
            cut = value is BROKEN and not complete
            calls.append(WrittenCall(invoked[1], problem=CUT_OFF) if cut else _with_value(invoked[1], value))
    return calls


def _namespaced_value(opened: re.Match[str], tags: Iterator[re.Match[str]]) -> Any:
    """Return the value in a tag: a text, the items of a list, or an object; BROKEN if the tag is not closed."""
    inside: list[tuple[str, Any]] = []
    for tag in tags:
        name = tag[3].strip()
        if not tag[1] and not tag[2]:
            inside.append((name, _namespaced_value(tag, tags)))
        elif name == opened[3].split()[0]:
            if not inside:
                return opened.string[opened.end() : tag.start()]
            return [value for _, value in inside] if inside[0][0] == "item" else dict(inside)
    return BROKEN


_STRING = re.compile(r"(['\"])(?:\\.|(?!\1)[^\\])*+(?:\1|\\?\Z)", re.DOTALL)  # LFM2.5 writes line breaks in strings
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(?:\.\w+)*")


def read_python(text: str) -> list[WrittenCall] | None:
    """Return the calls that a Python text consists of; None if it contains anything else."""
    for source in (text, _STRING.sub(lambda string: string[0].replace("\n", "\\n"), text)):
        with suppress(*UNPARSABLE):
            statements = parse_python(source.strip(), "exec").body
            if not all(isinstance(one, ast.Expr | ast.Assign) for one in statements):
                return None
            return [call for one in statements for call in _python_calls(one.value)][:MAX_CALLS] or None
    return None


def _python_calls(node: ast.expr) -> list[WrittenCall]:
    if isinstance(node, ast.List | ast.Tuple):
        return [call for element in node.elts for call in _python_calls(element)]
    if not isinstance(node, ast.Call) or not _DOTTED_NAME.fullmatch(name := ast.unparse(node.func)):
        raise ValueError("no call of a name")
    if name == "print" and len(node.args) == 1 and not node.keywords:
        return _python_calls(node.args[0])
    positional = [literal(argument) for argument in node.args]
    if not all(keyword.arg for keyword in node.keywords):
        raise ValueError("arguments that are not named")
    arguments = {str(keyword.arg): literal(keyword.value) for keyword in node.keywords}
    return [WrittenCall(name.removesuffix(".call"), arguments, positional)]  # Llama's form for its built-in tools


_GEMMA = Tag(r"call:\s*([\w.-]{1,200})\s*\{")
_GEMMA_PARTS = re.compile(
    r"<escape>(.*?)<escape>|<\|\"\|>(.*?)<\|\"\|>|([{,]\s*)([A-Za-z_][\w.-]{0,100})\s*:", re.DOTALL
)


def read_gemma(body: str, json_reader: JsonReader, complete: bool) -> list[WrittenCall]:
    """Return the calls of FunctionGemma and Gemma 4: JSON with unquoted keys, and strings between special marks."""
    calls = []
    for start, inner, _ in _GEMMA.parts(body):
        text = _GEMMA_PARTS.sub(_as_json_part, f"{{{inner}".strip(" \r\n,;"))
        cut = not complete and not text.endswith("}")
        calls.append(WrittenCall(start[1], problem=CUT_OFF) if cut else _with_value(start[1], json_reader.read(text)))
    return calls


def _as_json_part(found: re.Match[str]) -> str:
    return f'{found[3]}"{found[4]}":' if found[4] else json.dumps(found[1] if found[1] is not None else found[2])
