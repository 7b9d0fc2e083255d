"""Planned restarts under load: of PostgreSQL, and of all workers and servers in turn."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from ..crash.checker import violations
from ..crash.forge import Forge
from ..store.postgres.server import Server
from .test_company import Load, run_company, seed_of

UNHURRIED = 5.0  # seconds of a lease; none may expire
pytestmark = pytest.mark.timeout(300)


async def test_a_postgresql_restarted_under_load_costs_nothing_and_all_continue_unaided(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load = Load(100, 10, ["restart fast", "restart immediate"], seed=seed_of(), lease=UNHURRIED)
    _, history, figures = await run_company(forge, tmp_path, load, workers=2, servers=1)
    with capfd.disabled():
        print(f"\n{figures}", file=sys.stderr)
    assert violations(history) == []
    assert history.takeovers == history.interrupted == history.refused == 0


async def test_a_rolling_restart_under_load_loses_nothing_and_repeats_no_step(
    forge: Forge, tmp_path: Path, postgres: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    load = Load(120, 12, ["roll all"], seed=seed_of(), pause=0.1, lease=UNHURRIED)
    _, history, figures = await run_company(forge, tmp_path, load, workers=3, servers=2, on=postgres)
    with capfd.disabled():
        print(f"\n{figures}", file=sys.stderr)
    assert violations(history) == []
    assert history.takeovers == history.interrupted == history.refused == 0
    left = history.hung_up
    asked = Counter((one["marker"], one["round"]) for one in history.requests if one["marker"] not in {"?", *left})
    ran = Counter(run["text"] for run in history.runs if run["what"] == "start")
    again = [what for what, times in asked.items() if times > 1]
    again += [(text, 0) for text, times in ran.items() if times > 1 and text.split("/")[0] not in left]
    assert again == []
