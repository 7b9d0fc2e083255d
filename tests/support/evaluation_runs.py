"""Runs of the evaluation's cases, made up or through the real loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation.cases import CATEGORIES, SETS, Case, load
from evaluation.judge import Job, Made, Run, World
from evaluation.runner import Desk, Outcome, run_case

from everloop.config import Config
from everloop.cron.schedules import parse_schedule
from everloop.providers.base import ToolCallRequest
from everloop.testing import ScriptedProvider, call

ALL = {name: load(path) for name, path in SETS.items()}
GROUPS = [
    pytest.param([case for case in cases if case.category == category], id=f"{name}-{category}")
    for name, cases in ALL.items()
    for category in CATEGORIES
]


def named(name: str) -> Case:
    return next(case for cases in ALL.values() for case in cases if case.name == name)


def calls_of(case: Case) -> list[ToolCallRequest]:
    return [call(step["tool"], **arguments_of(step)) for step in case.solution]


def arguments_of(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "tool"}


def before(case: Case) -> World:
    jobs = tuple(Job(job["message"], parse_schedule(at=job["at"], now=1e9)) for job in case.scheduled)
    return World(dict(case.files), frozenset(), jobs)


def did(case: Case, *calls: Made, answer: str, after: World | None = None) -> Run:
    """Return a run with these results; by default, nothing changed."""
    return Run("/w", before(case), calls, after or before(case), answer)


async def attempt(case: Case, steps: list[Any], folder: Path) -> Outcome:
    return await run_case(case, ScriptedProvider(steps), Config(), Desk(folder / "desk"))
