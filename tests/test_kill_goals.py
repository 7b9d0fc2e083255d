"""An executor's run killed at any write to disk is resumed by running it again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from everloop.log import CallEnded, ModelAnswered
from everloop.replay import replay
from everloop.store.sqlite import SQLiteStore

from .crash.forge import Forge
from .crash.goals import STEPS
from .crash.history import lines

pytestmark = pytest.mark.timeout(300)
KILLED = -9


async def entries(folder: Path) -> dict[str, list[Any]]:
    """Return the log of each session."""
    if not (folder / "store.db").exists():
        return {}
    store = SQLiteStore(folder / "store.db")
    try:
        found = {info.key: info.id for info in await store.sessions("me")}
        return {key: [one.entry for one in await store.read_log(id)] for key, id in found.items()}
    finally:
        await store.close()


def answers(logs: dict[str, list[Any]]) -> int:
    return sum(isinstance(entry, ModelAnswered) for log in logs.values() for entry in log)


async def check_killed(forge: Forge, folder: Path, at: int, when: str) -> tuple[bool, int]:
    """Kill a run at a commit, run it again and check that everything came once: (it was killed, interrupted calls)."""
    folder.mkdir()
    status = await forge.run("run_goal", folder=str(folder), at=at, when=when)
    assert status in (0, KILLED)
    before, again = await entries(folder), 0
    if status == KILLED:
        child = forge.start("run_goal", folder=str(folder))
        again = await asyncio.wrap_future(child.pid)
        assert await child.wait() == 0
    output = json.loads(await asyncio.to_thread((folder / "output").read_text))
    assert (output["result"], output["reason"]) == ({"n": 2}, "goal"), output
    after = await entries(folder)
    over = status == KILLED and answers(before) == STEPS  # it had ended, so this is another run
    assert len([key for key in after if key.startswith("executor:counter/")]) == 1 + over
    assert output["session"] in after
    if over:
        return True, 0
    assert answers(after) == STEPS
    asked = await asyncio.to_thread(lines, folder / "asked")
    assert sum(one["pid"] == again for one in asked) == (STEPS - answers(before) if again else 0)
    ran = Counter((one["tool"], one["what"]) for one in await asyncio.to_thread(lines, folder / "runs"))
    results = [entry for log in after.values() for entry in log if isinstance(entry, CallEnded)]
    cut_off = [entry.name for entry in results if entry.status == "interrupted"]
    assert len(results) == 4
    assert ran["never", "start"] == 1 or (cut_off == ["never"] and ran["never", "start"] == 0)
    return status == KILLED, len(cut_off)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_run_killed_at_any_write_is_resumed_and_repeats_nothing(forge: Forge, tmp_path: Path, when: str):
    found: list[tuple[bool, int]] = []
    while all(was_killed for was_killed, _ in found):
        batch = range(len(found) + 1, len(found) + 5)
        found += await asyncio.gather(*(check_killed(forge, tmp_path / f"{at}", at, when) for at in batch))
    assert len(found) > 12
    assert any(cut_off for _, cut_off in found)


async def test_the_turns_of_a_run_can_be_replayed(forge: Forge, tmp_path: Path):
    assert await forge.run("run_goal", folder=str(tmp_path)) == 0
    store = SQLiteStore(tmp_path / "store.db")
    turns = await store.turns("me")
    assert len(turns) == 4
    for turn in turns:
        logged = await store.read_turn(turn.session, turn.first_seq)
        assert (await replay([one.entry for one in logged])).same
    await store.close()
