"""What a small model's answer is held to: words for the person, or one call of an offered tool, in a grammar.

Small models garble names and lines when they are free to, so a call can name only what was named or shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ....tools.narrow import NARROW, failed, lines_of
from ....tools.seen import is_file
from .conversation import Turn, text_of
from .examples import all_examples
from .words import (
    BEHIND,
    PATTERNS,
    alike,
    clock,
    data,
    folders_in,
    in_every_place,
    kept,
    key_of,
    means,
    names_key,
    paths_in,
    says,
    spans,
    tokens,
    weekday,
    whole,
    word_set,
)

Wanted = Literal["either", "call", "words"]
_Shape = tuple[tuple[str, str | None], ...]
# By tool and argument, all that it can be, or a rule of the grammar; `must` are arguments that the call must have.
# Under `words`, what an answer in words begins with.
Values = Mapping[str, Mapping[str, str | Sequence[str]]]

_BASE, _MOMENT = data("grammar")["base"], data("grammar")["moment"]
_RULES: Values = {"find_files": {"pattern": "glob"}, "cron": {"at": _MOMENT}}
_FIXED = frozenset({"action", "deliver", "replace_all"})  # what the other arguments depend on
_KINDS = ("integer", "number", "boolean", "string")
# These say what or where: empty, they say nothing.
_FILLED = frozenset(
    {"path", "command", "pattern", "query", "url", "message", "text", "at", "every", "cron", "old_text", "to"}
)


def grammar(tools: Iterable[Mapping[str, Any]], wanted: Wanted = "either", values: Values | None = None) -> str:
    """The GBNF grammar of an answer; with no tools it can only be words."""
    base, begin = _BASE, (values or {}).get("words", {}).get("begin")
    if begin:
        base = _BASE.replace("words ::= text", f'words ::= {_literal(str(begin))} ("\\n" text)?')
    calls = [_call(number, tool, (values or {}).get(str(tool.get("name")), {})) for number, tool in enumerate(tools)]
    if not calls or wanted == "words":
        return f"root ::= words\n{base}"
    root = "call" if wanted == "call" else "call | words"
    names = " | ".join(f"call{number}" for number in range(len(calls)))
    rules = "\n".join(calls)
    return f'root ::= {root}\ncall ::= "{{\\"tool\\": " ({names}) "}}"\n{rules}\n{base}'


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it: one flat object, so that there is little to get wrong."""
    return json.dumps({"tool": name, **arguments}, ensure_ascii=False)


def _call(number: int, tool: Mapping[str, Any], values: Mapping[str, str | Sequence[str]]) -> str:
    name, schema = str(tool.get("name", "")), tool.get("parameters") or {}
    rules = {key: _rule(key, kind) for key, kind in (schema.get("properties") or {}).items()}
    rules |= {key: _rule(key, value) for key, value in {**_RULES.get(name, {}), **values}.items() if key in rules}
    must = {*values.get("must", ())}
    shapes = [shape for shape in _SHAPES.get(name, ()) if must <= dict(shape).keys() <= rules.keys()]
    if isinstance(values.get("old_text"), str):  # the rule of what is replaced has what replaces it
        edit = f"{_pair('path', rules['path'])} {_pair('old_text', rules['old_text'])}"
        return f"call{number} ::= {_literal(json.dumps(name))} {edit}"
    forms = [
        " ".join(_pair(key, _literal(json.dumps(fixed)) if fixed else rules[key]) for key, fixed in shape)
        for shape in shapes
    ]
    if not shapes:  # what is required, and then what else is known, in the schema's order
        required = schema.get("required") or ()
        parts = [_pair(key, rule) for key, rule in rules.items() if key in required]
        forms = [" ".join([*parts, *(f"({_pair(key, rule)})?" for key, rule in rules.items() if key not in required)])]
    return f"call{number} ::= {_literal(json.dumps(name))} ({' | '.join(form or _literal('') for form in forms)})"


def _pair(key: str, rule: str) -> str:
    return f"{_literal(f', {json.dumps(key)}: ')} {rule}"


def _rule(key: str, kind: Any) -> str:
    """The rule of an argument: one that is given, one of several values, or whatever its schema lets it be."""
    if isinstance(kind, str):
        return kind
    choices = kind.get("enum") if isinstance(kind, Mapping) else kind
    if isinstance(choices, list) and choices:
        return f"({' | '.join(_literal(json.dumps(choice, ensure_ascii=False)) for choice in choices)})"
    type_ = kind.get("type") if isinstance(kind, Mapping) else None
    return "filled" if type_ == "string" and key in _FILLED else type_ if type_ in _KINDS else "value"


def _literal(text: str) -> str:
    """A text as a literal of the grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _part(text: str, start: bool = False, end: bool = False) -> str:
    """A piece of a JSON string."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return _literal('"' * start + inner + '"' * end)


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


# ---------------------------------------------------------------------------------------------- values of a call

RECENT = 8  # messages whose files are known
MOST_PATHS = 40
MOST_LINES = 30  # that an edit can choose from


def values_for(turn: Turn) -> dict[str, dict[str, Any]]:
    """What a call can name: a file that was named or that a result has shown, a line of what was read.

    Small models garble names and lines when they are free to. After a call that failed they are.
    """
    there = turn.there
    if turn.calls and failed(turn.calls[-1][2]):
        name, arguments, _ = turn.calls[-1]
        return {"read_file": {"path": [str(arguments.get("path"))]}} if name == "edit_file" else {}
    seen = [path for _, _, result in turn.calls for path in paths_in(result)][:MOST_PATHS]
    named = paths_in(turn.request)
    said = [path for message in turn.conversation[-RECENT:] for path in paths_in(text_of(message))]
    known = [*reversed(there.touched), *there.files]
    files = list(dict.fromkeys([*named, *seen] or [*known, *said][:MOST_PATHS]))
    beside = folders_in(turn.request)
    folders = [path for path in [*files, *tokens(turn.request)[:MOST_PATHS]] if not is_file(path)]
    values: dict[str, dict[str, Any]] = {"read_file": {"path": files}, "list_dir": {"path": [".", *folders]}}
    sure = [path for path in named if is_file(path)]
    values["grep"] = {"path": [".", *files, *folders_in(turn.request, inside=False)], "must": ["path"] if sure else []}
    values["write_file"] = {"path": _new_files(turn, sure, beside)}
    values["edit_file"] = {"path": files, **_edits(turn, files)}
    values |= _narrow(turn, sure, beside)
    for given in values.values():
        given["path"] = list(dict.fromkeys(given["path"]))
    any_day = "*" if (day := weekday(turn.request)) else ""
    if any(fields := [*clock(turn.request), any_day, any_day, day]):  # those that were named, the others free
        parts = ' " " '.join(_literal(field) if field else "field" for field in fields)
        # What comes again and again at a time of day is by the calendar, and not once.
        must = ["cron"] if fields[0] and means(turn.request, "every") else []
        values["cron"] = {"cron": " ".join([_literal('"'), parts, _literal('"')]), "must": must}
    return {tool: {key: choices for key, choices in given.items() if choices} for tool, given in values.items()}


def _new_files(turn: Turn, named: Sequence[str], folders: Sequence[str]) -> list[str]:
    """What a file can be called that is written: as it was named, but not like one that was only to be read."""
    read = {str(arguments.get("path")) for name, arguments, _ in turn.calls if name == "read_file"}
    names = [path for path in named if path not in read] or list(named)
    return [*names, *(f"{folder}/{name}" for folder in folders for name in names if "/" not in name)]


def _narrow(turn: Turn, named: Sequence[str], folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the narrow tools can name: files that are known, and of the others those that the request names."""
    there = turn.there
    known = [path for path in named if there.has(path)]
    rest = [path for path in named if path not in known]
    files = [turn.file] if turn.file else known or list(named) or [*reversed(there.touched), *there.files]
    lines = [line for path in files for line in there.texts.get(path, ())]
    runs = [run for run in spans(turn.request) if not is_file(run)]
    text = [run for run in runs if any(run in line for line in lines)] if lines else runs
    places = [f"{folder}/" for folder in folders] or [f"{folder}/" for folder in there.folders[-1:] if not rest]
    to = places or [path for path in (rest or named) if path != turn.file]
    if len(named) > 1 and not places and not turn.file:
        files, to = [named[0]], list(named[1:])
    given = {tool: {"path": list(files)} for tool in NARROW}
    given["remove_line"]["text"] = text or lines[:MOST_LINES]
    given["move"]["to"] = given["copy"]["to"] = to
    if not turn.file:
        given["append"]["path"] = list(named) or files
    return given


def _edits(turn: Turn, files: Sequence[str]) -> dict[str, Any]:
    """What an edit can replace: a line of what was read or found, or words that the person has named."""
    lines = [line for name, _, result in turn.calls for line in lines_of(name, result)]
    if not files:
        return {}
    every = in_every_place(turn.request)
    named = spans(turn.request, "\n".join(lines))
    if lines and not (every and named):
        places = swaps(turn.request, lines)
        old = alike(turn.request, places or lines)[:MOST_LINES]
        old = [line for line in old if names_key(turn.request, line)] or old
        if turn.corrects and not places and turn.there.last_edit in lines and len(old) == len(set(lines)):
            old = [turn.there.last_edit]  # no line was spoken of, so it is the one that was changed last
        changes = [(line, *place) for line in old for place in places.get(line, ())]
        said = new_words(turn.request, [line[len(one) : len(line) - len(two)] for line, one, two in changes])
        pairs = " | ".join(_edit(line, places.get(line, ()), said, kept(turn.request, line)) for line in old)
        return {"old_text": f"({pairs})"}
    said = new_words(turn.request, named if lines else ()) if named and names_both(turn.request) else []
    return {"old_text": named, "new_text": said, "must": ["replace_all"] if every else []}


def _edit(line: str, places: Iterable[tuple[str, str]], said: Sequence[str], beginning: str) -> str:
    """A line and what replaces it: the line with other words of the request in it, where it is known which are to be
    replaced, or one that begins like it."""
    parts = " | ".join(map(_part, said))
    forms = [f"{_part(before, start=True)} ({parts}) {_part(after, end=True)}" for before, after in places if said]
    end = line[-1] if line.endswith((",", ";")) else ""
    new = f"({' | '.join(forms)})" if forms else f"{_part(beginning, start=True)} rest {_part(end, end=True)}"
    return f"{_literal(json.dumps(line, ensure_ascii=False) + ', ' + json.dumps('new_text') + ': ')} {new}"


# ---------------------------------------------------------------------------------------------- edits

_BEFORE, _AFTER = PATTERNS["before_old"].pattern, PATTERNS["after_old"].pattern
_JOINS = word_set("joins")
_WITHIN = re.compile(r"[.,;!?]\s")  # the end of a sentence, or of a part of one
_STOPS = ".,:;!?\"'“”«»()"


def swaps(request: str, lines: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """By line, what stands before and after the words that are to be replaced in it; empty where none were named."""
    found = list(dict.fromkeys(lines))
    named = spans(request, "\n".join(found))
    surely: dict[str, list[tuple[str, str]]] = {}
    perhaps: dict[str, list[tuple[str, str]]] = {}
    for old in named:
        said = re.search(rf"{_BEFORE}{re.escape(old)}{BEHIND}|(?<!\w){re.escape(old)}{_AFTER}", request, re.I)
        places = surely if said else perhaps
        for line in found:
            around = [(line[: one.start()], line[one.end() :]) for one in whole(old).finditer(line, len(key_of(line)))]
            if around:
                places.setdefault(line, []).extend(around)
    unsure = says(request, "both") and not any(names_key(request, line) for line in found)
    return surely or (perhaps if unsure else {})


def names_both(request: str) -> bool:
    """Whether the words that are to be there are named as well as those that are."""
    return says(request, "pair")


def new_words(request: str, old: Sequence[str]) -> list[str]:
    """What can be put in their place: words of the request without those that are replaced."""
    said = dict.fromkeys(run.strip(_STOPS) for run in spans(request))
    right = [run for run in said if run and not _WITHIN.search(run) and not any(whole(one).search(run) for one in old)]
    return [run for run in right if not _JOINS & {run.lower().split()[0], run.lower().split()[-1]}]
