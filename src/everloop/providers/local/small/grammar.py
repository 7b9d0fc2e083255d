"""The grammar that a small model's answer is held to: one call of an offered tool, or words for the person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from .examples import all_examples

Wanted = Literal["either", "call", "words"]
_Shape = tuple[tuple[str, str | None], ...]
Values = Mapping[str, Mapping[str, Sequence[str]]]  # by tool and argument, all that it can be

_BASE = r"""
text ::= [^{<\[\]}\n\t ] ([^\n] | "\n")*
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" hex hex hex hex))* "\""
filled ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" hex hex hex hex))+ "\""
glob ::= "\"" [^"\\$^|()\x00-\x1F]+ "\""
rest ::= ([^"\\\x00-\x1F] | "\\" ["\\/])*
hex ::= [0-9a-fA-F]
field ::= [0-9*] [0-9*,/-]*
integer ::= "-"? [0-9] [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]?
number ::= integer ("." [0-9] [0-9]? [0-9]? [0-9]?)?
boolean ::= "true" | "false"
value ::= string | number | boolean | "null" | array | object
array ::= "[" (value (", " value)*)? "]"
object ::= "{" (string ": " value (", " string ": " value)*)? "}"
"""
# A time as the scheduler reads it: small models write `now + 1 minute`, or `1:00` for a minute.
_MOMENT = (
    r""""\"" ("in " [1-9] [0-9]? [0-9]? " " ("minute" | "hour" | "day" | "week") "s"?"""
    r""" | ("today " | "tomorrow ") [0-9] [0-9]? ":" [0-9] [0-9]"""
    r''' | "2" [0-9] [0-9] [0-9] "-" [0-9] [0-9] "-" [0-9] [0-9] "T" [0-9] [0-9] ":" [0-9] [0-9]) "\""'''
)
_FIXED = frozenset({"action", "deliver", "replace_all"})  # what the other arguments depend on
_KINDS = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "string"}
_GLOB: Mapping[str, Any] = {"rule": "glob"}  # a name with stars, which small models take for a regular expression
# These say what or where: empty, they say nothing.
_FILLED = frozenset(
    {"path", "command", "pattern", "query", "url", "message", "text", "at", "every", "cron", "old_text", "to"}
)


def grammar(
    tools: Iterable[Mapping[str, Any]], wanted: Wanted = "either", values: Values | None = None, begin: str = ""
) -> str:
    """The GBNF grammar of an answer; with no tools it can only be words.

    `values` are, by tool and argument, all that can be given, where not anything can; words `begin` with a text.
    """
    calls = [_call(number, tool, (values or {}).get(str(tool.get("name")), {})) for number, tool in enumerate(tools)]
    base = f'words ::= {_literal(begin)} ("\\n" text)?{_BASE}' if begin else f"words ::= text{_BASE}"
    if not calls or wanted == "words":
        return f"root ::= words\n{base}"
    root = "call" if wanted == "call" else "call | words"
    names = " | ".join(f"call{number}" for number in range(len(calls)))
    rules = "\n".join(calls)
    return f'root ::= {root}\ncall ::= "{{\\"tool\\": " ({names}) "}}"\n{rules}\n{base}'


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it: one flat object, so that there is little to get wrong."""
    return json.dumps({"tool": name, **arguments}, ensure_ascii=False)


def _call(number: int, tool: Mapping[str, Any], values: Mapping[str, Sequence[str]]) -> str:
    name = str(tool.get("name", ""))
    schema = tool.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    must = {*values.get("must", ())}
    known = [
        shape
        for shape in _SHAPES.get(name, ())
        if must <= {key for key, _ in shape} and all(key in properties for key, _ in shape)
    ]
    given: dict[str, Any] = {key: {"enum": list(choices)} for key, choices in values.items() if key in properties}
    if (lines := values.get("old_text")) and {"old_text", "new_text"} <= given.keys():
        return _edit(number, name, given["path"], lines, values)
    if named := values.get("named"):
        given["old_text"] = {"enum": list(named)}
        if said := values.get("said"):
            given["new_text"] = {"enum": list(said)}
    if fields := values.get("fields"):
        given["cron"] = {"fields": fields}
    if name == "find_files":
        given["pattern"] = _GLOB
    if name == "cron":
        given["at"] = {"rule": _MOMENT}
    properties = {**properties, **given}
    forms = [_form(shape, properties) for shape in known] or [_any_form(properties, schema.get("required") or ())]
    return f"call{number} ::= {_literal(json.dumps(name))} ({' | '.join(forms)})"


def _edit(
    number: int, name: str, path: Mapping[str, Any], lines: Sequence[str], values: Mapping[str, Sequence[str]]
) -> str:
    """A call that puts one line in the place of another, which it begins like, wherever that stands."""
    pairs = " | ".join(
        f"{_literal(json.dumps(line, ensure_ascii=False) + ', ' + json.dumps('new_text') + ': ')} "
        f"{_new_line(line, beginning, values)}"
        for line, beginning in zip(lines, values["new_text"], strict=True)
    )
    place = _pair("path", _rule("path", path))
    return f"call{number} ::= {_literal(json.dumps(name))} {place} {_pair('old_text', f'({pairs})')}"


def _new_line(line: str, beginning: str, values: Mapping[str, Sequence[str]]) -> str:
    """The line with other words of the request in it, where it is known which are to be replaced, or one like it."""
    places = [place.split("\0")[1:] for place in values.get("swaps", ()) if place.split("\0")[0] == line]
    if not places or not values.get("said"):
        end = line[-1] if line.endswith((",", ";")) else ""
        return f"{_part(beginning, start=True)} rest {_part(end, end=True)}"
    said = " | ".join(_part(words) for words in values["said"])
    forms = [f"{_part(before, start=True)} ({said}) {_part(after, end=True)}" for before, after in places]
    return f"({' | '.join(forms)})"


def _part(text: str, start: bool = False, end: bool = False) -> str:
    """A piece of a JSON string."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return _literal(f"{chr(34) if start else ''}{inner}{chr(34) if end else ''}")


def _form(shape: Sequence[tuple[str, str | None]], properties: Mapping[str, Any]) -> str:
    parts = [_pair(key, _literal(json.dumps(fixed)) if fixed else _rule(key, properties[key])) for key, fixed in shape]
    return " ".join(parts) or '""'


def _any_form(properties: Mapping[str, Any], required: Sequence[str]) -> str:
    """What is required, and then what else is known, in the schema's order."""
    must = [_pair(key, _rule(key, properties[key])) for key in properties if key in required]
    may = [f"({_pair(key, _rule(key, properties[key]))})?" for key in properties if key not in required]
    return " ".join(must + may) or '""'


def _pair(key: str, rule: str) -> str:
    return f"{_literal(f', {json.dumps(key)}: ')} {rule}"


def _rule(key: str, schema: Mapping[str, Any]) -> str:
    if fields := schema.get("fields"):  # of a time: those that were named, the others free
        parts = (_literal(field) if field else "field" for field in fields)
        return " ".join([_literal('"'), ' " " '.join(parts), _literal('"')])
    if rule := schema.get("rule"):
        return str(rule)
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return f"({' | '.join(_literal(json.dumps(choice, ensure_ascii=False)) for choice in choices)})"
    kind = schema.get("type")
    if kind == "string" and key in _FILLED:
        return "filled"
    return _KINDS.get(kind, "value") if isinstance(kind, str) else "value"


def _literal(text: str) -> str:
    """A text as a literal of the grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _shapes() -> dict[str, list[_Shape]]:
    """By tool, which arguments go together, as the examples have them: a small model is offered no others."""
    shapes: dict[str, list[_Shape]] = {}
    for example in all_examples():
        for step in example.steps:
            shape = tuple((key, value if key in _FIXED else None) for key, value in step.arguments.items())
            if shape not in shapes.setdefault(step.tool, []):
                shapes[step.tool].append(shape)
    return shapes


_SHAPES = _shapes()
