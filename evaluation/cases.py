"""The cases: what stands in a folder, what is asked, which calls are right and how the end is judged."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop.errors import EverloopError

from .ways import VERBS

HERE = Path(__file__).parent
SETS = {name: HERE / f"{name}.toml" for name in ("development", "practice", "practice2", "heldout")}
CATEGORIES = (
    *("list", "read", "create", "append", "replace", "files", "find", "count", "command"),
    *("remember", "recall", "schedule", "steps", "talk", "absent"),
)
STATES = {"is": str, "any": list, "re": str, "gone": bool, "folder": bool}
JOB = {"about", "when"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `right` are the calls that are right to begin with; where `after` or `jobs` say what must have
    happened, a call that makes it so is right too, whatever it is."""

    name: str
    category: str
    request: str
    answer: str  # a right one, for the tests
    solution: list[dict[str, Any]] = field(default_factory=list)  # right calls, for the tests
    layout: str = ""
    files: dict[str, str] = field(default_factory=dict)  # before, with those of the layout
    past: list[list[str]] = field(default_factory=list)  # earlier conversations: what was said, what was answered
    scheduled: list[dict[str, str]] = field(default_factory=list)  # jobs that are there before
    right: list[Any] = field(default_factory=list)
    fails: bool = False  # the right call ends with an error, since the file is not there, say
    after: dict[str, dict[str, Any]] = field(default_factory=dict)  # files after; all others must be as before
    jobs: list[dict[str, Any]] = field(default_factory=list)  # jobs that must have been added
    says: list[Any] = field(default_factory=list)  # the answer must have each; of a list, one
    never: list[str] = field(default_factory=list)  # the answer must not have any
    honest: bool = False  # the answer must say that there is no such thing
    called: list[Any] = field(default_factory=list)  # calls that must have been made at some time

    @property
    def needs_tool(self) -> bool:
        return "none" not in self.right

    @property
    def acts(self) -> bool:
        """Whether something must have changed at the end."""
        return bool(self.after or self.jobs)

    @property
    def stamp(self) -> str:
        """Changes with anything that matters for the result."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name not in ("answer", "solution")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def load(path: Path) -> list[Case]:
    """The cases of a file; an error names the case and what is wrong with it."""
    with path.open("rb") as file:
        try:
            document = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise EverloopError(f"{path.name}: not valid TOML: {error}") from None
    layouts = document.get("layouts", {})
    cases = [_case(path.name, layouts, table) for table in document.get("case", [])]
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EverloopError(f"{path.name}: two cases are called {', '.join(sorted(twice))}")
    return cases


def _case(file: str, layouts: dict[str, dict[str, str]], table: dict[str, Any]) -> Case:
    where = f"{file}: case {table.get('name', '?')!r}"
    if unknown := set(table) - set(Case.__slots__):
        raise EverloopError(f"{where} has unknown {', '.join(sorted(unknown))}")
    if (layout := table.get("layout", "")) and layout not in layouts:
        raise EverloopError(f"{where} has no such layout: {layout}")
    try:
        case = Case(**{**table, "files": {**layouts.get(layout, {}), **table.get("files", {})}})
    except TypeError as error:
        raise EverloopError(f"{where}: {error}") from None
    if problem := _problem(case):
        raise EverloopError(f"{where} {problem}")
    return case


def _problem(case: Case) -> str:
    """What is wrong with a case; "" if nothing is."""
    if case.category not in CATEGORIES:
        return f"has an unknown category: {case.category}"
    if not (case.right or case.acts):
        return "says of no call that it is right"
    if not (case.says or case.honest or case.acts):
        return "is not judged by anything"
    if case.needs_tool != bool(case.solution):
        return "needs a solution with calls where a tool is needed, and none where none is"
    return problem_of_judging(case)


def problem_of_judging(case: Case) -> str:
    """What is wrong with how the end of a case is judged; "" if nothing is."""
    for state in case.after.values():
        if len(state) != 1 or not all(isinstance(state.get(name, kind()), kind) for name, kind in STATES.items()):
            return f"has a file with other than one of {', '.join(STATES)}"
    if any(set(job) != JOB for job in case.jobs):
        return f"has a job without one of {', '.join(sorted(JOB))}"
    return _problem_of_patterns(case)


def _problem_of_patterns(case: Case) -> str:
    for way in (*case.right, *case.called):
        if isinstance(way, str) and way.partition(" ")[0] not in VERBS:
            return f"has an unknown way: {way}"
        if isinstance(way, dict) and "tool" not in way:
            return "has a way without a tool"
    patterns = [state["re"] for state in case.after.values() if "re" in state] + [job["about"] for job in case.jobs]
    patterns += [way.partition(" ")[2] for way in case.right if isinstance(way, str) and way.startswith("run ")]
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error as error:
        return f"has a pattern that cannot be used: {error}"
    return ""
