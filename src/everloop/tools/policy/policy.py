"""The policy: whether a tool call is allowed, asked for or denied, by rules and, where none fits, by defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ...config import Decision, Rule
from ...messages import Message
from ...sandbox.paths import within, within_any
from ..base import Plan, ToolError
from ..context import CallContext
from .commands import CommandLine, SimpleCommand, read
from .commands.parts import TEXT, unknown
from .mentions import mentioned
from .patterns import Fit, fits_command, fits_past_options, fits_path
from .steering import steers
from .visible import shortened, visible

MAX_SHOWN = 20_000  # characters of a command or of what would be sent: beyond, nobody can judge it
MAX_ARGUMENT = 2_000
_STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a call; `shown` is exactly what would run, for the person who is asked."""

    decision: Decision
    why: str = ""
    shown: str = ""
    grants: tuple[str, ...] = ()  # what the session is granted when the person answers "always"


@dataclass(frozen=True, slots=True)
class _Unit:
    """One thing that a call does: a simple command, a path, both or neither."""

    command: SimpleCommand | None = None
    path: str | None = None  # as rules name it: relative to the workspace when inside it, absolute otherwise
    absolute: str = ""
    opaque: str = ""  # why a command could not be read
    altered: bool = False  # the command does not do what its words say


@dataclass(frozen=True, slots=True)
class _Outcome:
    decision: Decision
    why: str
    tainted: bool = False  # holds after untrusted content was read


class Policy:
    """Judges calls by the rules, in order: the first that fits decides, and of several parts the strictest."""

    def __init__(self, rules: Sequence[Rule] = (), *, taint: bool = True) -> None:
        self.rules = tuple(enumerate(rules, 1))
        self.taint = taint
        self._paths = any(rule.path for rule in rules)
        if any(rule.command or rule.path for rule in rules):
            from .commands import grammar  # noqa: F401 - now, and not while an event loop waits

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
        outcome = self._decide(name, arguments, plan, context)
        if tainted and self.taint and outcome.decision == "allow" and not outcome.tainted:
            if plan.sends and not (plan.url and mentioned(plan.url, conversation)):
                outcome = _Outcome("ask", "untrusted content was read before, and this call could send data out")
            elif plan.writes and (why := _steers(plan, context)):
                outcome = _Outcome("ask", f"untrusted content was read before, and this file is not just data: {why}")
        if outcome.decision != "ask":
            return Verdict(outcome.decision, outcome.why)
        shown = _shown(name, arguments, plan)
        if shown is None:
            why = f"it must be asked for ({outcome.why}), but is too long to be shown: split it into shorter calls"
            return Verdict("deny", why)
        return Verdict("ask", outcome.why, shown)

    def guard(
        self,
        context: CallContext,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        paths: Callable[[], Sequence[str]] = tuple,
    ) -> Callable[[str, bool], None] | None:
        """What a file tool calls with the real path of a file that it opened: a link must not lead around a rule.

        None where no rule is about paths. Without the name of the tool, rules about any tool count. `paths` gives those
        that the call names, as a person saw them.
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
            # A person who approved a call has seen the path in it, but not where a link leads.
            asked = os.path.normpath(context.workspace)
            known = not rule.path or any(_fit(rule, _at(path, asked)) for path in paths())
            if rule.do == "deny" or not (context.approved and known):
                how = "written" if writing else "read"
                raise ToolError(f"{path} may not be {how} this way: {_reason(number, rule, unit, Fit.YES)}.")

        return check

    def _decide(self, name: str, arguments: dict[str, Any], plan: Plan, context: CallContext) -> _Outcome:
        default = _default(plan, context)
        rules = self._candidates(name, arguments, context)
        if not rules:
            return default
        units = self._units(arguments, plan, context, rules)
        return max((_weigh(rules, unit, default) for unit in units), key=_rank)

    def _candidates(self, name: str, arguments: dict[str, Any], context: CallContext) -> list[tuple[int, Rule]]:
        """The rules that may fit this call, whatever it does."""
        origin = f"{context.channel}:{context.chat_id}"
        return [
            (number, rule)
            for number, rule in self.rules
            if (not rule.tool or not name or fnmatchcase(name, rule.tool))
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
        line = read(plan.command)
        if line.opaque:
            yield _Unit(opaque=line.opaque)
        if all(command.wrapper for command in line.commands):
            yield from (replace(place, command=SimpleCommand(())) for place in places)
        base = os.path.join(root, str(arguments.get("working_dir") or ""))
        paths = [rule.path for _, rule in rules if rule.path and rule.do != "allow"]
        for command in line.commands:
            yield from (replace(place, command=command, altered=line.altered) for place in places)
            for unit in _files(command, line, base, roots) if paths else ():
                if any(_fit_path(path, unit) for path in paths):
                    yield unit


def _files(command: SimpleCommand, line: CommandLine, base: str, roots: tuple[str, ...]) -> Iterator[_Unit]:
    """The files that a command's redirections open, and the words of it that may name files."""
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
    """A path as rules see it; `roots` are the names that the workspace has."""
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
                return _Outcome("deny", f"{shortened(path, 200)} belongs to the runtime itself")
            if not within_any(path, roots):
                return _Outcome("ask", f"by default what is outside the workspace is asked for: {shortened(path, 200)}")
    if plan.network:
        return _Outcome("ask", "by default the network is asked for")
    if plan.unconfined and context.restricted:
        return _Outcome("ask", "by default a command outside of any sandbox is asked for")
    return _Outcome("allow", "by default")


def _steers(plan: Plan, context: CallContext) -> str:
    """Why a file of the workspace that is written must not be planted; "" where that does not matter."""
    root = os.path.normpath(context.workspace)
    roots = (root, str(context.real_workspace or root))
    return next((why for path in plan.paths if (why := steers(_at(path, *roots).path or ""))), "")


def _argument_fits(pattern: str, arguments: dict[str, Any], key: str) -> bool:
    if key not in arguments:
        return False
    value = arguments[key]
    return fnmatchcase(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), pattern)


def _weigh(rules: list[tuple[int, Rule]], unit: _Unit, default: _Outcome) -> _Outcome:
    """What the rules say of one thing: the first that fits for certain, or a stricter one before it that may fit."""
    outcomes = []
    wrapper = unit.command is not None and unit.command.wrapper
    for number, rule in rules:
        # A wrapper does nothing by itself: what it runs is judged for itself, so only a rule that means it counts.
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
        # To be kept from running, /bin/rm is rm and `git -C x push` is `git push`; only what is written out is allowed.
        short = SimpleCommand((command.words[0].rsplit("/", 1)[-1], *command.words[1:]))
        fit = max(fit, fits_command(rule.command, short.text), fits_past_options(rule.command, short.words))
    return fit


def _reason(number: int, rule: Rule, unit: _Unit, fit: Fit) -> str:
    about = [f'{key} "{value}"' for key in ("tool", "command", "path", "origin") if (value := getattr(rule, key))]
    about += [f'{key} "{pattern}"' for key, pattern in rule.arguments.items()]
    text = f"rule {number} of the policy ({rule.do} {', '.join(about) or 'everything'})"
    if unit.opaque and rule.command:
        text += f" might fit, since the command cannot be read to its end: {unit.opaque}"
    elif fit is Fit.MAYBE:
        text += " might fit, since a part of the command is only known when it runs"
    return f"{text}: {rule.why}" if rule.why else text


def _shown(name: str, arguments: dict[str, Any], plan: Plan) -> str | None:
    """What a person sees; None where it must be seen whole and is too long for that."""
    whole = plan.command is not None or plan.sends or plan.writes
    values = arguments if whole else {key: _brief(value) for key, value in arguments.items()}
    text = plan.shown or f"{name} {json.dumps(values, indent=2, ensure_ascii=False, default=str)}"
    if plan.command is not None and plan.shown and plan.command not in text:
        text = f"{text}\n{plan.command}"
    if whole and len(text) > MAX_SHOWN:
        return None  # before it is made visible, which takes its time
    text = visible(text)
    if whole:
        return text if len(text) <= MAX_SHOWN else None
    return shortened(text, MAX_SHOWN)


def _brief(value: Any) -> Any:
    return shortened(value, MAX_ARGUMENT) if isinstance(value, str) else value
