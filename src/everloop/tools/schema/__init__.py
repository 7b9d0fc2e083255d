"""Validate values against a JSON schema, and coerce what models get slightly wrong.

A schema is compiled once into nested functions. A valid value is returned unchanged; a value that is valid after an
unambiguous repair ("5" for 5, a JSON text for an object) is returned repaired; all problems are reported at once.
Defaults are not filled in. Unknown keywords are ignored, so that a schema from outside never disables a tool.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from .values import KINDS, STRICT, WRAP, convert, fits, same, show

_MAX_PROBLEMS = 20


class InvalidArguments(ValueError):
    """A value that does not fit its schema; `problems` are lines like `items[2].count: must be an integer`."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = problems[:_MAX_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        super().__init__("; ".join(shown))


def validate(schema: Any, value: Any) -> Any:
    """Return the value, repaired where that is unambiguous; raises InvalidArguments with every problem otherwise."""
    return compile_schema(schema)(value)


def compile_schema(schema: Any, *, closed: bool = False) -> Callable[[Any], Any]:
    """Return a function that validates values against `schema`.

    `closed`: where the outermost object does not say whether it takes further properties, it takes none.
    """
    if closed and isinstance(schema, dict) and "additionalProperties" not in schema:
        schema = {**schema, "additionalProperties": False}
    try:
        check = _Compiler(schema).compile(schema)
    except RecursionError:  # too deeply nested to be meant
        check = accept

    def run(value: Any) -> Any:
        try:
            fitting, problems = _attempt(check, value, STRICT)
            if not problems:
                return fitting
            bent, problems = _attempt(check, value, WRAP)
            if not problems:  # one keyword may have coerced what another had accepted: check again
                fitting, problems = _attempt(check, bent, STRICT)
        except (TooComplex, RecursionError):
            raise InvalidArguments(["the value is nested too deeply or is too complex to check"]) from None
        if problems:
            raise InvalidArguments([render(at, problem) for at, problem in problems])
        return fitting

    return run


def _attempt(check: Check, value: Any, level: int) -> tuple[Any, list[Problem]]:
    run = Run(level)
    return check(value, None, run), run.problems


class _Compiler:
    """Compiles a schema document into check functions, each sub-schema once, recursive ones included."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._done: dict[int, list[Check]] = {}

    def compile(self, schema: Any) -> Check:
        if schema is False:
            return refuse
        if not isinstance(schema, dict) or not schema:
            return accept
        known = self._done.get(id(schema))
        if known is not None:
            return known[0] if known else later(known)
        slot = self._done[id(schema)] = []
        slot.append(sequence(list(self._parts(schema))))
        return slot[0]

    def _parts(self, schema: dict[str, Any]) -> Iterable[Check]:
        """Return the checks of one schema, in the order in which they may change the value."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self.compile(self._resolve(reference))
        for part in _list(schema.get("allOf")):
            yield self.compile(part)
        if check := type_check(schema.get("type")):
            yield check
        for keyword in ("anyOf", "oneOf"):
            if branches := _list(schema.get(keyword)):
                yield union([self.compile(branch) for branch in branches], [_is_null(branch) for branch in branches])
        if "const" in schema:
            yield one_of([schema["const"]])
        if isinstance(schema.get("enum"), list):
            yield one_of(schema["enum"])
        yield from self._objects(schema)
        if (items := schema.get("items")) is not None and not isinstance(items, list):
            yield items_of(self.compile(items))
        yield from limits(schema)

    def _objects(self, schema: dict[str, Any]) -> Iterable[Check]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        extra = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties")
        patterns = patterns if isinstance(patterns, dict) else {}
        if properties or required or patterns or extra is False or isinstance(extra, dict):
            known = {name: self.compile(part) for name, part in properties.items()}
            matched = [(read_pattern(str(pattern)), self.compile(part)) for pattern, part in patterns.items()]
            yield properties_of(known, required, matched, None if extra is False else self.compile(extra))

    def _resolve(self, reference: str) -> Any:
        """Resolve a reference inside this document. A reference to another document allows any value."""
        if not reference.startswith("#"):
            return True
        target = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                return True
        return target


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


# ---------------------------------------------------------------------------------------------- checks


_MAX_DEPTH = 100
_MAX_STEPS = 50_000
_MAX_EFFORT = 1_000_000  # estimated steps of patterns and suggestions; more expensive ones are skipped
_HINT_EFFORT = 2_000  # estimated steps of comparing two names

JsonPath = tuple[Any, str | int] | None  # (path of the parent, key or index)
Problem = tuple[JsonPath, str]


class TooComplex(Exception):
    """The value nests too deeply, or its unions branch too often, to be checked."""


class Run:
    """The state of one validation: how far values may be coerced, the problems found, the work done."""

    __slots__ = ("depth", "effort", "level", "problems", "steps")

    def __init__(self, level: int, depth: int = 0) -> None:
        self.level = level
        self.depth = depth
        self.steps = 0
        self.effort = 0
        self.problems: list[Problem] = []

    def say(self, at: JsonPath, problem: str) -> None:
        self.problems.append((at, problem))

    def enter(self) -> None:
        self.depth += 1
        self.steps += 1
        if self.depth > _MAX_DEPTH or self.steps > _MAX_STEPS:
            raise TooComplex

    def affords(self, effort: int) -> bool:
        """Spend this much effort if the budget allows it; return whether it does."""
        if self.effort + effort > _MAX_EFFORT:
            return False
        self.effort += effort
        return True


Check = Callable[[Any, JsonPath, Run], Any]


def accept(value: Any, at: JsonPath, run: Run) -> Any:
    return value


def refuse(value: Any, at: JsonPath, run: Run) -> Any:
    run.say(at, "is not allowed")
    return value


def later(slot: list[Check]) -> Check:
    """A check that is still being compiled because its schema is recursive."""

    def check(value: Any, at: JsonPath, run: Run) -> Any:
        run.enter()
        value = slot[0](value, at, run)
        run.depth -= 1
        return value

    return check


def sequence(checks: list[Check]) -> Check:
    """Run checks one after the other, until one finds a problem."""
    if len(checks) == 1:
        return checks[0]
    if not checks:
        return accept

    def check(value: Any, at: JsonPath, run: Run) -> Any:
        before = len(run.problems)
        for part in checks:
            value = part(value, at, run)
            if len(run.problems) > before:
                break
        return value

    return check


def properties_of(
    properties: dict[str, Check],
    required: list[str],
    patterns: Sequence[tuple[Pattern | None, Check]],
    extra: Check | None,
) -> Check:
    """Check the properties of an object.

    A property that is not named is checked by the patterns that its name matches; `extra` checks one that matches none,
    None refuses it. A name matches a pattern that cannot be read or would take too long to search for.
    """
    needed = frozenset(required)

    def unnamed(key: str, run: Run) -> Check | None:
        found = [
            part
            for pattern, part in patterns
            if pattern is None or not run.affords(pattern.cost(key)) or pattern.compiled.search(key)
        ]
        return sequence(found) if found else extra

    def check(value: Any, at: JsonPath, run: Run) -> Any:
        if not isinstance(value, dict):
            return value
        run.enter()
        result = value
        for key, item in value.items():
            part = properties.get(key) or (unnamed(str(key), run) if patterns else extra)
            if part is None:
                run.say(at, _unknown(key, properties, run))
                continue
            if item is None and run.level and key not in needed and not _fits(part, None, run):
                new = _MISSING  # null for an optional property means that it was not given
            else:
                new = part(item, (at, key), run)
            if new is not item:
                if result is value:
                    result = dict(value)
                if new is _MISSING:
                    del result[key]
                else:
                    result[key] = new
        for name in required:
            if name not in value:
                run.say((at, name), "is required, but missing")
        run.depth -= 1
        return result

    return check


_MISSING = object()


def _unknown(key: Any, properties: Iterable[str], run: Run) -> str:
    known = list(properties)
    message = f"unknown argument {show(str(key))}"
    close = difflib.get_close_matches(str(key)[:100], known, 1, 0.5) if run.affords(_HINT_EFFORT * len(known)) else []
    if close:
        return f"{message} (did you mean {show(close[0])}?)"
    return f"{message} (known: {', '.join(known[:20])})" if known else f"{message} (there are none)"


def items_of(item: Check) -> Check:
    def check(value: Any, at: JsonPath, run: Run) -> Any:
        if not isinstance(value, list):
            return value
        run.enter()
        result = value
        for index, old in enumerate(value):
            new = item(old, (at, index), run)
            if new is not old:
                if result is value:
                    result = list(value)
                result[index] = new
        run.depth -= 1
        return result

    return check


def union(branches: list[Check], nulls: list[bool]) -> Check:
    """Check anyOf and oneOf: take the first branch that fits unchanged, else the only result of coercing the value."""

    def check(value: Any, at: JsonPath, run: Run) -> Any:
        failures: list[list[Problem]] = []
        for level in range(run.level + 1):
            failures = []
            outcomes: list[Any] = []
            for branch, null in zip(branches, nulls, strict=True):
                new, problems = _try(branch, value, at, run, level)
                if problems and not null:
                    failures.append(problems)
                elif not problems and level == STRICT:
                    return new
                elif not problems and not any(same(new, other) for other in outcomes):
                    outcomes.append(new)
            if len(outcomes) == 1:
                return outcomes[0]
            if outcomes:
                run.say(at, f"is ambiguous, could be {' or '.join(map(show, outcomes))}: send one of these")
                return value
        if len(failures) == 1:
            run.problems.extend(failures[0])
        else:
            forms = [", ".join(render(where, what, at) for where, what in problems) for problems in failures[:5]]
            run.say(at, f"fits none of the allowed forms ({' | '.join(forms)})")
        return value

    return check


def _try(check: Check, value: Any, at: JsonPath, run: Run, level: int) -> tuple[Any, list[Problem]]:
    """Try a check: its work counts, its problems do not."""
    run.enter()
    kept, run.problems = run.problems, []
    before, run.level = run.level, level
    value = check(value, at, run)
    run.level = before
    found, run.problems = run.problems, kept
    run.depth -= 1
    return value, found


def _fits(check: Check, value: Any, run: Run) -> bool:
    return not _try(check, value, None, run, STRICT)[1]


def one_of(allowed: list[Any]) -> Check:
    """Check enum and const. A text that differs from exactly one allowed value in case or quotes is coerced to it."""
    by_text: dict[str, list[Any]] = {}
    for option in allowed:
        if isinstance(option, str | int | float):
            by_text.setdefault(_plain(option), []).append(option)

    def check(value: Any, at: JsonPath, run: Run) -> Any:
        if any(same(value, option) for option in allowed):
            return value
        if run.level and isinstance(value, str | int | float):
            close = by_text.get(_plain(value), ())
            if len(close) == 1:
                return close[0]
        what = f"must be one of {', '.join(map(show, allowed[:20]))}" if len(allowed) > 1 else _only(allowed)
        run.say(at, f"{what}, got {show(value)}")
        return value

    return check


def _only(allowed: list[Any]) -> str:
    return f"must be {show(allowed[0])}" if allowed else "has no allowed value"


def _plain(value: str | int | float) -> str:
    return value.strip().casefold() if isinstance(value, str) else show(value)


def type_check(declared: Any) -> Check | None:
    """Check the `type` keyword, one type or several; None if it names no known type."""
    names = tuple(
        name
        for name in (declared if isinstance(declared, list) else [declared])
        if isinstance(name, str) and name in KINDS
    )
    if not names:
        return None
    if names == ("string",):
        return _string
    must = f"must be {' or '.join(KINDS[name] for name in names)}"

    def check(value: Any, at: JsonPath, run: Run) -> Any:
        if fits(value, names):
            return int(value) if type(value) is float and "number" not in names else value
        found, new, reason = convert(value, names, run.level)
        if not found:
            run.say(at, f"{must}, {reason or f'got {show(value)}'}")
        return new

    return check


def _string(value: Any, at: JsonPath, run: Run) -> Any:
    """Check for type string: the most common check, kept short."""
    if isinstance(value, str):
        return value
    found, new, _ = convert(value, ("string",), run.level)
    if not found:
        run.say(at, f"must be a string, got {show(value)}")
    return new


def limits(schema: dict[str, Any]) -> Iterable[Check]:
    """Check limits of numbers and lengths, and patterns."""
    for keyword, (kinds, test, words) in _LIMITS.items():
        limit = schema.get(keyword)
        if isinstance(limit, int | float) and not isinstance(limit, bool):
            yield _limit(kinds, test, limit, f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}")
    if isinstance(text := schema.get("pattern"), str) and (pattern := read_pattern(text)) is not None:
        yield _matching(pattern, f"must match {text[:200]}")


_LIMITS: dict[str, tuple[tuple[type, ...], Callable[[Any, float], bool], str]] = {
    "minimum": ((int, float), lambda value, limit: value >= limit, "must be at least"),
    "maximum": ((int, float), lambda value, limit: value <= limit, "must be at most"),
    "exclusiveMinimum": ((int, float), lambda value, limit: value > limit, "must be more than"),
    "exclusiveMaximum": ((int, float), lambda value, limit: value < limit, "must be less than"),
    "minLength": ((str,), lambda value, limit: len(value) >= limit, "must have a length of at least"),
    "maxLength": ((str,), lambda value, limit: len(value) <= limit, "must have a length of at most"),
    "minItems": ((list,), lambda value, limit: len(value) >= limit, "must have a number of items of at least"),
    "maxItems": ((list,), lambda value, limit: len(value) <= limit, "must have a number of items of at most"),
}


def _limit(kinds: tuple[type, ...], test: Callable[[Any, float], bool], limit: float, words: str) -> Check:
    def check(value: Any, at: JsonPath, run: Run) -> Any:
        if isinstance(value, kinds) and not isinstance(value, bool) and not test(value, limit):
            run.say(at, f"{words}, got {show(value)}")
        return value

    return check


def _matching(pattern: Pattern, words: str) -> Check:
    def check(value: Any, at: JsonPath, run: Run) -> Any:
        # A search that takes hours would block all other sessions.
        if isinstance(value, str) and run.affords(pattern.cost(value)) and pattern.compiled.search(value) is None:
            run.say(at, f"{words}, got {show(value)}")
        return value

    return check


def render(at: JsonPath, problem: str, base: JsonPath = None) -> str:
    """Format a problem with its path relative to `base`, such as `items[2].count: must be …`."""
    steps: list[str] = []
    while at is not None and at is not base:
        at, step = at
        steps.append(f"[{step}]" if isinstance(step, int) else f".{str(step)[:100]}")
    path = "".join(reversed(steps)).removeprefix(".")
    return f"{path}: {problem}" if path else problem


# ----------------------------------------------------------------------------------------- patterns

# Patterns of schemas from outside are searched for only where that cannot take long: Python's regular expressions try
# every way to match, and hold up the whole process while they do. So the cost of a search is estimated beforehand, from
# how the pattern is written and from the length of the text.

MAX_PATTERN = 1_000  # characters of a pattern; longer ones are ignored
ENDLESS = 1 << 62

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?<?[:=!>]|\{\d*,?\d*\}|.", re.S)
# References to groups, and flags or conditions that change the meaning of the rest.
_ODD = re.compile(r"\\[1-9]|\(\?(?!P<|<?[:=!>])")


class Pattern(msgspec.Struct, frozen=True):
    """A compiled pattern, and an estimate of how many ways a search may have to try."""

    compiled: re.Pattern[str]
    loops: int = 0  # repetitions: each may end at any character
    choices: int = 0  # alternatives: each has two ways
    nested: bool = False  # repeated choices: every character may double the number of ways
    anchored: bool = False  # it can only match at the beginning of the text

    def cost(self, text: str) -> int:
        """Estimate the steps of a search, at most."""
        powers = self.loops + (0 if self.anchored else 1)
        doublings = self.choices + (len(text) if self.nested else 0)
        if powers > 10 or doublings > 40:
            return ENDLESS
        return int((len(text) + 1) ** powers << doublings)


def read_pattern(text: str) -> Pattern | None:
    """Compile a pattern; None if Python does not understand it, or if it is too long."""
    if len(text) > MAX_PATTERN:
        return None
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
    loops = choices = 0
    nested = _ODD.search(text) is not None
    groups = [False]  # for each open group: whether it contains a choice
    ways = False  # whether the last item contains a choice
    repeated = False  # the last token was a repetition
    for token in _TOKEN.findall(text):
        if token in ("?", "+") and repeated:  # lazy or possessive
            repeated = False
            continue
        repeated = token in ("*", "+", "?") or (token[0] == "{" and len(token) > 1)
        if token[0] == "(":
            groups.append(False)
        elif token == ")" and len(groups) > 1:
            ways = groups.pop()
            groups[-1] |= ways
            continue
        elif token in ("|", "?"):
            choices += 1
            groups[-1] = True
        elif repeated:
            nested |= ways
            if token[0] != "{" or "," in token:
                loops += 1
                groups[-1] = True
        ways = False
    return Pattern(compiled, loops, choices, nested, text.startswith(("^", r"\A")) and "|" not in text)
