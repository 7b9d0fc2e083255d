"""The grammar of a small model's answer: words, or one call of an offered tool with consistent arguments.

Small models garble names and lines when they write them freely, so a call can contain only those that were mentioned or
shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ....tools.simple_tools import SIMPLE_TOOLS, file_lines, is_failure
from ....tools.workspace_view import is_file
from .conversation import Turn, text_of
from .examples import EXAMPLES, Tool
from .language import (
    PATTERNS,
    WORD_END,
    WORD_SETS,
    Request,
    content_words,
    cron_time,
    cron_weekday,
    folders_in,
    load_toml,
    paths_in,
    phrases_in,
    tokens,
    whole_words,
    without_paths,
    words,
)

Expected = Literal["either", "call", "words"]
_Shape = tuple[tuple[str, str | None], ...]
# By tool and argument: the possible values, or a rule of the grammar. `must` lists the arguments that the call must
# have. Under `words`, `begin` is the beginning of an answer in words.
Values = Mapping[str, Mapping[str, str | Sequence[str]]]

_BASE, _MOMENT = load_toml("grammar")["base"], load_toml("grammar")["moment"]
_RULES: Values = {"find_files": {"pattern": "glob"}, "cron": {"at": _MOMENT}}
_MODES = frozenset({"action", "deliver", "replace_all"})  # arguments on whose value the other arguments depend
_TYPES = ("integer", "number", "boolean", "string")
_NON_EMPTY = frozenset(
    {"path", "command", "pattern", "query", "url", "message", "text", "at", "every", "cron", "old_text", "to"}
)
# By tool: the combinations of arguments in the examples. A small model is offered no others.
_SHAPES: dict[str, dict[_Shape, None]] = {}
for _step in (step for example in EXAMPLES for step in example.steps):
    _shape = tuple((key, value if key in _MODES else None) for key, value in _step.arguments.items())
    _SHAPES.setdefault(_step.tool, {})[_shape] = None


def grammar(tools: Iterable[Tool], expected: Expected = "either", values: Values | None = None) -> str:
    """Return the GBNF grammar of an answer; without tools, only words are possible."""
    values, base = values or {}, _BASE
    if begin := values.get("words", {}).get("begin"):
        base = _BASE.replace("words ::= text", f'words ::= {_literal(str(begin))} ("\\n" text)?')
    calls = [_call_rule(number, tool, values.get(str(tool.get("name")), {})) for number, tool in enumerate(tools)]
    if not calls or expected == "words":
        return f"root ::= words\n{base}"
    root = "call" if expected == "call" else "call | words"
    names = " | ".join(f"call{number}" for number in range(len(calls)))
    rules = "\n".join(calls)
    return f'root ::= {root}\ncall ::= "{{\\"tool\\": " ({names}) "}}"\n{rules}\n{base}'


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the model writes it: one flat object, which leaves little to get wrong."""
    return json.dumps({"tool": name, **arguments}, ensure_ascii=False)


def _call_rule(number: int, tool: Tool, values: Mapping[str, str | Sequence[str]]) -> str:
    name, schema = str(tool.get("name", "")), tool.get("parameters") or {}
    rules = {key: _argument_rule(key, kind) for key, kind in (schema.get("properties") or {}).items()}
    given = {**_RULES.get(name, {}), **values}
    rules |= {key: _argument_rule(key, value) for key, value in given.items() if key in rules}
    must = {*values.get("must", ())}
    shapes = [shape for shape in _SHAPES.get(name, ()) if must <= dict(shape).keys() <= rules.keys()]
    if isinstance(values.get("old_text"), str):  # this rule includes the new text
        edit = f"{_pair('path', rules['path'])} {_pair('old_text', rules['old_text'])}"
        return f"call{number} ::= {_literal(json.dumps(name))} {edit}"
    forms = [
        " ".join(_pair(key, _literal(json.dumps(mode)) if mode else rules[key]) for key, mode in shape)
        for shape in shapes
    ]
    if not shapes:  # the required arguments, then the others, in the schema's order
        required = schema.get("required") or ()
        parts = [_pair(key, rule) for key, rule in rules.items() if key in required]
        forms = [" ".join([*parts, *(f"({_pair(key, rule)})?" for key, rule in rules.items() if key not in required)])]
    return f"call{number} ::= {_literal(json.dumps(name))} ({' | '.join(form or _literal('') for form in forms)})"


def _pair(key: str, rule: str) -> str:
    return f"{_literal(f', {json.dumps(key)}: ')} {rule}"


def _argument_rule(key: str, kind: Any) -> str:
    """Return the rule of an argument, given a rule, its possible values, or its schema."""
    if isinstance(kind, str):
        return kind
    choices = kind.get("enum") if isinstance(kind, Mapping) else kind
    if isinstance(choices, list) and choices:
        return f"({' | '.join(_literal(json.dumps(choice, ensure_ascii=False)) for choice in choices)})"
    type_ = kind.get("type") if isinstance(kind, Mapping) else None
    return "filled" if type_ == "string" and key in _NON_EMPTY else type_ if type_ in _TYPES else "value"


def _literal(text: str) -> str:
    """Return a text as a literal of the grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _string_part(text: str, start: bool = False, end: bool = False) -> str:
    """Return a part of a JSON string as a literal."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return _literal('"' * start + inner + '"' * end)


# ---------------------------------------------------------------------------------------------- values of arguments

RECENT_MESSAGES = 8  # messages whose paths a call can name
MAX_PATHS = 40
MAX_LINES = 30  # lines from which an edit can choose one


def argument_values(turn: Turn) -> dict[str, dict[str, Any]]:
    """Return the possible values of arguments: paths that were named or shown, lines that were read.

    After a failed call, arguments are free.
    """
    workspace = turn.workspace
    if turn.calls and is_failure(turn.calls[-1].result):
        name, arguments, _ = turn.calls[-1]
        return {"read_file": {"path": [str(arguments.get("path"))]}} if name == "edit_file" else {}
    shown = [path for call in turn.calls for path in paths_in(call.result)][:MAX_PATHS]
    named = paths_in(turn.request)
    recent = [path for message in turn.messages[-RECENT_MESSAGES:] for path in paths_in(text_of(message))]
    known = [*reversed(workspace.touched), *workspace.files, *recent][:MAX_PATHS]
    files = list(dict.fromkeys([*named, *shown] or known))
    folders = folders_in(turn.request)
    listed = [path for path in [*files, *tokens(turn.request)[:MAX_PATHS]] if not is_file(path)]
    values: dict[str, dict[str, Any]] = {"read_file": {"path": files}, "list_dir": {"path": [".", *listed]}}
    named_files = [path for path in named if is_file(path)]
    searched = [".", *files, *folders_in(turn.request, after_prepositions=False)]
    values["grep"] = {"path": searched, "must": ["path"] if named_files else []}
    values["write_file"] = {"path": _new_paths(turn, named_files, folders)}
    values["edit_file"] = {"path": files, **_edit_values(turn, files)}
    values |= _simple_tool_values(turn, named_files, folders)
    for given in values.values():
        given["path"] = list(dict.fromkeys(given["path"]))
    any_day = "*" if (day := cron_weekday(turn.request)) else ""
    if any(fields := [*cron_time(turn.request), any_day, any_day, day]):  # fields that were not named are free
        parts = ' " " '.join(_literal(field) if field else "field" for field in fields)
        # Something that recurs at a time of day is a cron job.
        must = ["cron"] if fields[0] and turn.request.means("every") else []
        values["cron"] = {"cron": " ".join([_literal('"'), parts, _literal('"')]), "must": must}
    return {tool: {key: choices for key, choices in given.items() if choices} for tool, given in values.items()}


def _new_paths(turn: Turn, named: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return the possible paths of a new file: those that were named, except for files that were only read."""
    read = {str(call.arguments.get("path")) for call in turn.calls if call.tool == "read_file"}
    paths = [path for path in named if path not in read] or list(named)
    return [*paths, *(f"{folder}/{path}" for folder in folders for path in paths if "/" not in path)]


def _simple_tool_values(turn: Turn, named: Sequence[str], folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the possible arguments of simple tools: known files, and the new names in the request."""
    workspace = turn.workspace
    known = [path for path in named if workspace.has(path)]
    unknown = [path for path in named if path not in known]
    files = [turn.file] if turn.file else known or list(named) or [*reversed(workspace.touched), *workspace.files]
    lines = [line for path in files for line in workspace.texts.get(path, ())]
    phrases = [phrase for phrase in phrases_in(turn.request) if not is_file(phrase)]
    text = [phrase for phrase in phrases if any(phrase in line for line in lines)] if lines else phrases
    targets = [f"{folder}/" for folder in folders] or [f"{folder}/" for folder in workspace.folders[-1:] if not unknown]
    to = targets or [path for path in (unknown or named) if path != turn.file]
    if len(named) > 1 and not targets and not turn.file:
        files, to = [named[0]], list(named[1:])
    values = {tool: {"path": list(files)} for tool in SIMPLE_TOOLS}
    values["remove_line"]["text"] = text or lines[:MAX_LINES]
    values["move"]["to"] = values["copy"]["to"] = to
    if not turn.file:
        values["append"]["path"] = list(named) or files
    return values


# ---------------------------------------------------------------------------------------------- edits

_KEY = re.compile(r"\s*[\"']?[\w.-]+[\"']?\s*[=:]\s*")
_BEFORE_OLD, _AFTER_OLD = PATTERNS["before_old"].pattern, PATTERNS["after_old"].pattern
_JOINING_WORDS = WORD_SETS["joining"]
_CLAUSE_END = re.compile(r"[.,;!?]\s")
_PUNCTUATION = ".,:;!?\"'“”«»()"


def _edit_values(turn: Turn, files: Sequence[str]) -> dict[str, Any]:
    """Return what an edit can replace: a line that was read or found, or each occurrence of a phrase of the request."""
    lines = [line for name, _, result in turn.calls for line in file_lines(name, result)]
    if not files:
        return {}
    every = turn.request.replaces_all
    named = phrases_in(turn.request, "\n".join(lines))
    if lines and not (every and named):
        places = replacement_places(turn.request, lines)
        old = most_similar(turn.request, places or lines)[:MAX_LINES]
        old = [line for line in old if names_key(turn.request, line)] or old
        if turn.corrects and not places and turn.workspace.last_edit in lines and len(old) == len(set(lines)):
            old = [turn.workspace.last_edit]  # no line stands out, so take the one changed last
        replaced = [line[len(one) : len(line) - len(two)] for line in old for one, two in places.get(line, ())]
        new = new_phrases(turn.request, replaced)
        return {
            "old_text": f"({' | '.join(_edit_rule(line, places.get(line, ()), new, turn.request) for line in old)})"
        }
    new = new_phrases(turn.request, named if lines else ()) if named and turn.request.matches("pair") else []
    return {"old_text": named, "new_text": new, "must": ["replace_all"] if every else []}


def _edit_rule(line: str, places: Iterable[tuple[str, str]], new: Sequence[str], request: Request) -> str:
    """Return the rule for a line and its replacement.

    The replacement is the line with another phrase of the request in one of the places, or a line with the same
    beginning and the same punctuation at its end.
    """
    phrases = " | ".join(map(_string_part, new))
    forms = [
        f"{_string_part(before, start=True)} ({phrases}) {_string_part(after, end=True)}"
        for before, after in places
        if new
    ]
    end = line[-1] if line.endswith((",", ";")) else ""
    free = f"{_string_part(kept_beginning(request, line), start=True)} rest {_string_part(end, end=True)}"
    begin = _literal(f'{json.dumps(line, ensure_ascii=False)}, "new_text": ')
    return f"{begin} ({' | '.join(forms)})" if forms else f"{begin} {free}"


def replacement_places(request: Request, lines: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return, by line, the text before and after the phrase to replace; empty if the request names none."""
    found = list(dict.fromkeys(lines))
    certain: dict[str, list[tuple[str, str]]] = {}
    possible: dict[str, list[tuple[str, str]]] = {}
    for old in phrases_in(request, "\n".join(found)):
        is_old = rf"{_BEFORE_OLD}{re.escape(old)}{WORD_END}|(?<!\w){re.escape(old)}{_AFTER_OLD}"
        places = certain if re.search(is_old, request, re.I) else possible
        for line in found:
            occurrences = whole_words(old).finditer(line, len(key_of(line)))
            if around := [(line[: one.start()], line[one.end() :]) for one in occurrences]:
                places.setdefault(line, []).extend(around)
    names_both = request.matches("both") and not any(names_key(request, line) for line in found)
    return certain or (possible if names_both else {})


def new_phrases(request: Request, old: Sequence[str]) -> list[str]:
    """Return the phrases of a request that can replace the old ones."""
    stripped = dict.fromkeys(phrase.strip(_PUNCTUATION) for phrase in phrases_in(request))
    within = [phrase for phrase in stripped if phrase and not _CLAUSE_END.search(phrase)]
    new = [phrase for phrase in within if not any(whole_words(one).search(phrase) for one in old)]
    return [phrase for phrase in new if not _JOINING_WORDS & {phrase.lower().split()[0], phrase.lower().split()[-1]}]


def most_similar(request: Request, lines: Iterable[str]) -> list[str]:
    """Return the lines that share the most words with a request; all lines if none shares any."""
    request_words = content_words(without_paths(request))
    shared = {line: len(request_words & set(words(line))) for line in lines if line.strip()}
    most = max(shared.values(), default=0)
    return [line for line, count in shared.items() if count == most]


def key_of(line: str) -> str:
    """Return the beginning of a setting up to its value, or ""."""
    found = _KEY.match(line)
    return found[0] if found else ""


def names_key(request: Request, line: str) -> bool:
    """Return whether a line is a setting whose key the request names."""
    key = content_words(key_of(line))
    return bool(key) and key <= {*words(without_paths(request))}


def kept_beginning(request: Request, line: str) -> str:
    """Return what a replaced line keeps: its key, or a first word that the request does not mention."""
    if key := key_of(line):
        return key
    indent = line[: len(line) - len(line.lstrip())]
    first = (line.split() or [""])[0]
    return indent if set(words(first)) & set(words(request)) else indent + first
