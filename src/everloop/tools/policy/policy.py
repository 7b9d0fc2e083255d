"""The policy: decides by rules, and by defaults where none matches, whether a tool call is allowed, asked or denied.

Patterns of rules are globs, matched against text of which parts may be unknown.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum
from fnmatch import fnmatchcase, translate
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from ...config import Decision, Rule, Taint
from ...messages import Message
from ...sandbox.reach import within, within_any
from ...text import cut_inline, visible
from ..base import Plan, ToolError
from ..context import CallContext
from .shell_line import TEXT, WORDS, CommandLine, SimpleCommand, unknown, written_files
from .steering import named_by_command, steers
from .taint import objection

MAX_SHOWN = 20_000  # characters of a command or message; a person cannot judge longer ones
MAX_ARGUMENT = 2_000
ALWAYS = "allowed for this session"
QUICK_LENGTH = 500  # characters of an argument that are judged in less time than a thread takes to start
_DEVICE = re.compile(r"/dev/(null|zero|full|stdin|stdout|stderr|fd/[0-9]+)")
_STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}


class Verdict(msgspec.Struct, frozen=True):
    """The decision about a call; `shown` is exactly what would run, for the person who is asked."""

    decision: Decision
    why: str = ""
    shown: str = ""
    grants: tuple[str, ...] = ()  # granted to the session if the person answers "always"
    once: tuple[str, ...] = ()  # granted even by a plain yes
    granted: bool = False  # allowed by an earlier answer of "always"


class _Unit(msgspec.Struct, frozen=True):
    """One thing that a call does: a simple command, a path, both or neither."""

    command: SimpleCommand | None = None
    path: str | None = None  # relative to the workspace when inside it, absolute otherwise, as in rules
    absolute: str = ""
    opaque: str = ""  # why the command could not be parsed, or the call not planned
    altered: bool = False  # a variable may change what the command does
    network: bool | None = False  # the call asks for the network; None: not known
    leaves: bool = False  # a redirection to a file outside the workspace, or to one that is not known
    runs: bool = False  # the call runs a command


class _Outcome(msgspec.Struct, frozen=True):
    decision: Decision
    why: str
    tainted: bool = False  # still applies after untrusted content was read
    grants: tuple[str, ...] = ()  # as in `Verdict`
    once: tuple[str, ...] = ()


class Policy:
    """Judges calls by rules, in order: the first match decides, and of several parts of a call the strictest."""

    def __init__(
        self, rules: Sequence[Rule] = (), *, taint: Taint = True, addresses: Collection[str] = frozenset()
    ) -> None:
        self.rules = tuple(enumerate(rules, 1))
        self.taint = taint
        self.addresses = frozenset(addresses)  # addresses in the settings
        self._paths = any(rule.path for rule in rules)
        if any(rule.command or rule.path for rule in rules):
            from . import shell_syntax  # noqa: F401 - imported here rather than in a running event loop

    def judge(
        self,
        name: str,
        arguments: dict[str, Any],
        plan: Plan,
        context: CallContext,
        conversation: Sequence[Message],
        tainted: bool,
    ) -> Verdict:
        """Decide about one call. Without rules about commands and paths this is only a few comparisons."""
        if plan.failure is not None:
            return self._by_name(name, arguments, context)
        outcome = self._decide(name, arguments, plan, context)
        if outcome.decision == "ask":
            names = _grants(name, arguments, plan)
            granted = context.granted.issuperset(names)
            outcome = _Outcome("allow", ALWAYS, grants=names) if granted else replace(outcome, grants=names)
        if tainted and self.taint and outcome.decision == "allow" and not outcome.tainted:
            against = objection(plan, context, conversation, self.addresses, partial(_steers, arguments))
            if against is not None:
                outcome = _Outcome("ask", against.why, grants=against.always, once=against.once)
        if outcome.decision != "ask":
            # A command that was granted before untrusted content was read is no more trusted than any other.
            granted = bool(outcome.grants) and (bool(plan.paths) or not tainted)
            return Verdict(outcome.decision, outcome.why, granted=granted)
        if outcome.grants and context.granted.issuperset(outcome.grants):
            return Verdict("allow", ALWAYS, granted=True)
        shown = _shown(name, arguments, plan)
        if shown is None:
            why = f"it needs approval ({outcome.why}), but is too long to show: split it into shorter calls"
            return Verdict("deny", why)
        return Verdict("ask", outcome.why, shown, outcome.grants, outcome.once)

    def takes_long(self, arguments: dict[str, Any]) -> bool:
        """Return whether judging a call may take long enough to block the event loop noticeably."""
        if self.rules:
            return any(_size(value) > QUICK_LENGTH for value in arguments.values())
        return bool(self.taint) and _size(arguments.get("command")) > QUICK_LENGTH

    def guard(
        self,
        context: CallContext,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        paths: Callable[[], Sequence[str]] = tuple,
    ) -> Callable[[str, bool], None] | None:
        """Return a check that file tools call with the real path of each file they open: a link could bypass a rule.

        Returns None if no rule is about paths. Without the name of the tool, rules about any tool count. `paths`
        returns the paths that the call names, as a person saw them.
        """
        if not self._paths:
            return None
        rules = self._candidates(name, arguments or {}, context)
        root = ""

        def check(path: str, writing: bool) -> None:
            nonlocal root
            root = root or os.path.realpath(context.workspace)
            unit = _at(path, root)
            number, rule = next(((number, rule) for number, rule in rules if _fit(rule, unit)), (0, None))
            if rule is None or rule.do == "allow":
                return
            # A person who approved the call has seen its path, but not the target of a link.
            asked = os.path.normpath(context.workspace)
            known = not rule.path or any(_fit(rule, _at(path, asked)) for path in paths())
            if rule.do == "deny" or not (context.approved and known):
                how = "written" if writing else "read"
                raise ToolError(f"{path} may not be {how} this way: {_reason(number, rule, unit, Fit.YES)}.")

        return check

    def _by_name(self, name: str, arguments: dict[str, Any], context: CallContext) -> Verdict:
        """Decide about a call if only its name and arguments are known.

        It is denied unless a rule allows it by these alone, before any other rule that matches or may match. If no rule
        denies it for certain, the failure itself is the reason, and `why` is empty.
        """
        runs = name == "exec" and bool(arguments.get("network"))
        unit = _Unit(opaque="what the call would do is not known", network=runs or None, runs=runs)
        for number, rule in self._candidates(name, arguments, context):
            fit = _fit(rule, unit)
            if fit is Fit.YES and rule.do != "ask":
                return Verdict(rule.do, _reason(number, rule, unit, fit))
            if fit and rule.do != "allow":
                break
        return Verdict("deny")

    def _decide(self, name: str, arguments: dict[str, Any], plan: Plan, context: CallContext) -> _Outcome:
        default = _default(plan, context)
        rules = self._candidates(name, arguments, context)
        if not rules:
            return default
        runs = plan.command is not None
        units = self._units(arguments, plan, context, rules)
        units = (replace(unit, network=plan.network, runs=runs) for unit in units)
        return max((_weigh(rules, unit, default) for unit in units), key=_rank)

    def _candidates(self, name: str, arguments: dict[str, Any], context: CallContext) -> list[tuple[int, Rule]]:
        """Return the rules whose tool, origin and arguments match this call.

        A message with files reads them: files that a rule forbids `read_file` to read are not sent either.
        """
        origin = f"{context.channel}:{context.chat_id}"
        reads = name == "message" and bool(arguments.get("media"))
        return [
            (number, rule)
            for number, rule in self.rules
            if (
                not rule.tool
                or not name
                or fnmatchcase(name, rule.tool)
                or (reads and rule.do != "allow" and fnmatchcase("read_file", rule.tool))
            )
            and (not rule.origin or fnmatchcase(origin, rule.origin))
            and all(_argument_fits(pattern, arguments, key) for key, pattern in rule.arguments.items())
        ]

    def _units(
        self, arguments: dict[str, Any], plan: Plan, context: CallContext, rules: list[tuple[int, Rule]]
    ) -> Iterator[_Unit]:
        root = os.path.normpath(context.workspace)
        roots = (root, str(context.real_workspace or root))
        places = [_at(path, *roots) for path in plan.paths] or [_Unit()]
        if plan.command is None or not any(rule.command or rule.path for _, rule in rules):
            yield from places
            return
        from .shell_syntax import read  # most policies have no rule about commands

        line = read(plan.command)
        if line.opaque:
            yield _Unit(opaque=line.opaque)
        if all(command.wrapper for command in line.commands):
            yield from (replace(place, command=SimpleCommand(())) for place in places)
        base = _working_folder(arguments, root)
        paths = [rule.path for _, rule in rules if rule.path and rule.do != "allow"]
        for command in line.commands:
            yield from (replace(place, command=command, altered=line.altered) for place in places)
            yield from _leaving(command, line, base, roots)
            for unit in _files(command, line, base, roots) if paths else ():
                if any(_fit_path(path, unit) for path in paths):
                    yield unit


def _leaving(command: SimpleCommand, line: CommandLine, base: str, roots: tuple[str, ...]) -> Iterator[_Unit]:
    """Yield a command's redirections to files that are, or may be, outside the workspace."""
    for target in command.targets:
        path = _joined(TEXT if line.moves else base, target.path)
        if not _DEVICE.fullmatch(path) and (unknown(path) or not within_any(path, roots)):
            judged = replace(command, wrapper=False)  # a wrapper does nothing by itself, but opens its redirections
            yield replace(_at(path, *roots), command=judged, altered=line.altered, leaves=True)


def _files(command: SimpleCommand, line: CommandLine, base: str, roots: tuple[str, ...]) -> Iterator[_Unit]:
    """Yield the files that a command's redirections open, and its words that may name files."""
    for target in command.targets:
        yield replace(
            _at(_joined(TEXT if line.moves else base, target.path), *roots), command=command, altered=line.altered
        )
    for word in command.words[1:]:
        for name in {word, word.partition("=")[2]} - {""}:
            if not unknown(name):
                yield replace(_at(_joined(base, name), *roots), command=command, altered=line.altered)


def _joined(start: str, path: str) -> str:
    if path.startswith("~") or unknown(path[:1]):
        return TEXT + path[1:]
    joined = f"{start}/{path}" if not os.path.isabs(path) else path
    return joined if unknown(joined) else os.path.normpath(joined)


def _at(path: str, *roots: str) -> _Unit:
    """Return a path in the form that rules match; `roots` are the paths of the workspace."""
    for root in roots:
        if within(path, root):
            return _Unit(path=path[len(root) :].lstrip("/") or ".", absolute=path)
    return _Unit(path=path, absolute=path)


def _default(plan: Plan, context: CallContext) -> _Outcome:
    if context.restricted and plan.paths:
        places = [context.workspace, context.real_workspace]
        places += [] if plan.writes else [context.outputs, *context.readable]
        roots = [os.path.normpath(place) for place in places if place is not None]
        for path in plan.paths:
            if within_any(path, map(str, context.protected)) and not within_any(path, roots):
                return _Outcome("deny", f"{cut_inline(path, 200)} belongs to the runtime itself")
            if not within_any(path, roots):
                why = "access outside the workspace needs approval by default"
                return _Outcome("ask", f"{why}: {cut_inline(path, 200)}")
    if plan.network:
        return _Outcome("ask", "network access needs approval by default")
    if plan.unconfined and context.restricted:
        return _Outcome("ask", "a command without a sandbox needs approval by default")
    return _Outcome("allow", "by default")


def _working_folder(arguments: dict[str, Any], root: str) -> str:
    return os.path.join(root, str(arguments.get("working_dir") or ""))


def _steers(arguments: dict[str, Any], plan: Plan, context: CallContext) -> str:
    """Return why a workspace file that a call writes must not be planted; "" if it is harmless.

    For a command, only what its text shows is known: anything else that it turns out to have written is undone when it
    ends.
    """
    root = os.path.normpath(context.workspace)
    roots = (root, str(context.real_workspace or root))
    if plan.command is None:
        return next((why for path in plan.paths if (why := steers(_at(path, *roots).path or ""))), "")
    from .shell_syntax import read

    line = read(plan.command)
    for name in written_files(line):
        path = _joined(_working_folder(arguments, root), name)
        if not unknown(path) and within_any(path, roots) and (why := named_by_command(_at(path, *roots).path or "")):
            return f"{name}: {why}"
    return ""


def _argument_fits(pattern: str, arguments: dict[str, Any], key: str) -> bool:
    if key not in arguments:
        return False
    value = arguments[key]
    return fnmatchcase(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), pattern)


def _weigh(rules: list[tuple[int, Rule]], unit: _Unit, default: _Outcome) -> _Outcome:
    """Judge one unit: by the first rule that matches for certain, or a stricter one before it that may match."""
    outcomes = []
    wrapper = unit.command is not None and unit.command.wrapper
    for number, rule in rules:
        # A wrapper has no effect of its own, and the command it runs is judged separately: only a rule that names
        # the wrapper counts.
        fit = Fit.NO if wrapper and not rule.path and rule.command in ("", "*") else _fit(rule, unit)
        if fit is Fit.YES or (fit is Fit.MAYBE and rule.do != "allow"):
            outcomes.append(_Outcome(rule.do, _reason(number, rule, unit, fit), rule.tainted))
        if fit is Fit.YES:
            break
    else:
        outcomes.append(_Outcome("allow", "", tainted=True) if wrapper else default)
    return max(outcomes, key=_rank)


def _rank(outcome: _Outcome) -> tuple[int, bool]:
    return _STRICTNESS[outcome.decision], not outcome.tainted


def _fit(rule: Rule, unit: _Unit) -> Fit:
    if rule.do == "allow":
        # To allow a command is to allow it neither the network nor files outside, unless the rule names them; to allow
        # the whole tool is to allow it files, but not the network.
        named = rule.network or "network" in rule.arguments
        if unit.network and not named and (unit.runs or rule.command or rule.path):
            return Fit.NO
        if unit.leaves and rule.command and not rule.path:
            return Fit.NO
    if rule.do != "allow" and rule.network and not unit.network:
        return Fit.MAYBE if unit.network is None else Fit.NO
    fit = _fit_command(rule, unit) if rule.command else Fit.YES
    return min(fit, _fit_path(rule.path, unit)) if rule.path and fit else fit


def _fit_path(pattern: str, unit: _Unit) -> Fit:
    if unit.path is None:
        return Fit.MAYBE if unit.opaque else Fit.NO
    pattern = os.path.expanduser(pattern) if pattern.startswith("~") else pattern.removeprefix("./")
    return fits_path(pattern, unit.absolute if pattern.startswith("/") else unit.path)


def _fit_command(rule: Rule, unit: _Unit) -> Fit:
    if unit.opaque:
        return Fit.MAYBE
    command = unit.command
    if command is None or (unit.altered and rule.do == "allow"):
        return Fit.NO
    fit = fits_command(rule.command, command.text)
    if rule.do != "allow" and fit is not Fit.YES and command.words:
        # `ask` and `deny` treat /bin/rm as rm and `git -C x push` as `git push`; `allow` takes the words literally.
        short = SimpleCommand((command.words[0].rsplit("/", 1)[-1], *command.words[1:]))
        fit = max(fit, fits_command(rule.command, short.text), fits_past_options(rule.command, short.words))
    return fit


def _reason(number: int, rule: Rule, unit: _Unit, fit: Fit) -> str:
    about = [f'{key} "{value}"' for key in ("tool", "command", "path", "origin") if (value := getattr(rule, key))]
    about += [f'{key} "{pattern}"' for key, pattern in rule.arguments.items()]
    about += ["network"] if rule.network else []
    text = f"rule {number} of the policy ({rule.do} {', '.join(about) or 'everything'})"
    if unit.opaque and rule.command:
        text += f" may match, since the command cannot be parsed completely: {unit.opaque}"
    elif fit is Fit.MAYBE:
        text += " may match, since a part of the command is unknown until it runs"
    return f"{text}: {rule.why}" if rule.why else text


def _size(value: Any) -> int:
    """Estimate the length of an argument in characters."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 1


def _grants(name: str, arguments: dict[str, Any], plan: Plan) -> tuple[str, ...]:
    """Return what the answer "always" grants for a call: the same command, the same files, or the tool."""
    if plan.command is not None:
        how = "".join(f"+{flag}" for flag in ("network", "background", "keep") if arguments.get(flag))
        folder = f"@{quote(str(given))}" if (given := arguments.get("working_dir")) else ""
        return (f"{name}{how}{folder}:{plan.command}",)
    if plan.paths:
        # permission to read a file is not permission to send it
        sending = (f"tool:{name}",) if name == "message" else ()
        return (*sending, *(f"path{'+write' if plan.writes else ''}:{path}" for path in plan.paths))
    return (f"tool:{name}",)


def _shown(name: str, arguments: dict[str, Any], plan: Plan) -> str | None:
    """Return what the person is shown; None if it must be shown whole and is too long."""
    whole = plan.command is not None or plan.sends or plan.writes
    values = arguments if whole else {key: _brief(value) for key, value in arguments.items()}
    text = plan.shown or f"{name} {json.dumps(values, indent=2, ensure_ascii=False, default=str)}"
    if plan.command is not None and plan.shown and plan.command not in text:
        text = f"{text}\n{plan.command}"
    if whole and len(text) > MAX_SHOWN:
        return None  # checked before making it visible, which takes time
    text = visible(text)
    if whole:
        return text if len(text) <= MAX_SHOWN else None
    return cut_inline(text, MAX_SHOWN)


def _brief(value: Any) -> Any:
    return cut_inline(value, MAX_ARGUMENT) if isinstance(value, str) else value


_TOKEN = re.compile(r"\*+|\?|\[(?:!?\]?[^]]*)\]|.", re.S)
_PATH_TOKEN = re.compile(r"\*\*/|/\*\*\Z|\*\*|\*|\?|\[!?\]?[^]/]*\]|.", re.S)
_PATH_WILD = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_WILD = re.compile(r"[*?[]")


class Fit(IntEnum):
    """Whether a pattern matches, as far as the text is known."""

    NO = 0
    MAYBE = 1
    YES = 2


def fits(pattern: str, text: str) -> Fit:
    """Match a shell glob against a whole text, in which TEXT and WORDS stand for unknown parts."""
    if not unknown(text):
        return Fit.YES if _compiled(pattern).match(text) else Fit.NO
    if _walk(pattern, text, sure=True):
        return Fit.YES
    return Fit.MAYBE if _walk(pattern, text, sure=False) else Fit.NO


def fits_command(pattern: str, text: str) -> Fit:
    """Match a command. A pattern without wildcards also matches a command with further words."""
    if _WILD.search(pattern):
        return fits(pattern, text)
    if text == pattern or (text.startswith(pattern) and text[len(pattern)] in (" ", WORDS)):
        return Fit.YES
    return Fit.MAYBE if unknown(text) and max(fits(pattern, text), fits(pattern + " *", text)) else Fit.NO


def fits_past_options(pattern: str, words: Sequence[str]) -> Fit:
    """Match a pattern without wildcards, ignoring options: `git push` matches `git -C folder push`.

    A word after an option may be the option's value.
    """
    wanted = pattern.split(" ")
    if _WILD.search(pattern) or not words or words[0] != wanted[0]:
        return Fit.NO
    place, value = 1, False  # index of the next wanted word; whether this word may be an option's value
    for word in words[1:]:
        if place == len(wanted):
            break
        if word == wanted[place]:
            place, value = place + 1, False
        elif unknown(word):
            return Fit.MAYBE
        elif word.startswith("-"):
            value = "=" not in word
        elif value:
            value = False
        else:
            return Fit.NO
    return Fit.YES if place == len(wanted) else Fit.NO


def fits_path(pattern: str, path: str) -> Fit:
    """Match a path: `*` stays inside a folder, `**` crosses folders.

    A pattern whose last part has no wildcard also matches everything inside that folder.
    """
    if not unknown(path):
        return Fit.YES if _path(pattern).match(path) else Fit.NO
    wide = re.sub(r"\*\*/|/\*\*", "*", pattern)
    return Fit.MAYBE if _walk(wide, path, sure=False) or _walk(wide + "/*", path, sure=False) else Fit.NO


@lru_cache(1000)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


@lru_cache(1000)
def _path(pattern: str) -> re.Pattern[str]:
    pattern = pattern.rstrip("/") or "/"
    pieces = []
    for token in _PATH_TOKEN.findall(pattern):
        if token in _PATH_WILD:
            pieces.append(_PATH_WILD[token])
        elif token[0] == "[" and len(token) > 1:
            pieces.append("(?!/)" + translate(token).removeprefix("(?s:").removesuffix(r")\Z"))
        else:
            pieces.append(re.escape(token))
    folder = "" if _WILD.search(pattern.rpartition("/")[2]) else "(?:/.*)?"
    return re.compile("".join(pieces) + folder + r"\Z", re.S)


@lru_cache(1000)
def _tokens(pattern: str) -> tuple[tuple[str, re.Pattern[str] | None], ...]:
    found = (token[:1] if token[:1] == "*" else token for token in _TOKEN.findall(pattern))
    return tuple((token, _compiled(token) if len(token) > 1 else None) for token in found)


def _walk(pattern: str, text: str, sure: bool) -> bool:
    """Return whether the pattern matches for every (`sure`) or for some value of the unknown parts.

    Simulates the pattern as a state machine. Unknown text matches for certain only where a star consumes all of it;
    otherwise it may lead to any later state.
    """
    tokens = _tokens(pattern)
    places = _closed({0}, tokens)
    for character in text:
        if character in (TEXT, WORDS):
            stars = {place for place in places if place < len(tokens) and tokens[place][0] == "*"}
            if sure:
                places = stars
            elif character == TEXT:
                places = set(range(min(places), len(tokens) + 1))
            elif spaced := _step(places, " ", tokens):
                places |= set(range(min(spaced), len(tokens) + 1))
        else:
            places = _step(places, character, tokens)
        places = _closed(places, tokens)
        if not places:
            return False
    return len(tokens) in places


def _step(places: set[int], character: str, tokens: tuple[tuple[str, re.Pattern[str] | None], ...]) -> set[int]:
    following = set()
    for place in places:
        if place == len(tokens):
            continue
        token, group = tokens[place]
        if token == "*":
            following.add(place)
        elif token == "?" or token == character or (group is not None and group.match(character)):
            following.add(place + 1)
    return following


def _closed(places: set[int], tokens: tuple[tuple[str, re.Pattern[str] | None], ...]) -> set[int]:
    """Add the states that are reached by stars that match nothing."""
    for place in sorted(places):
        while place < len(tokens) and tokens[place][0] == "*":
            place += 1
            places.add(place)
    return places
