"""Sub-agents, scheduled work and compaction, killed at every write to disk: each result and each slot arrives once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everloop import CronService
from everloop.store.sqlite import SQLiteStore

from .crash.family import LONG
from .crash.family_history import FamilyScene, Kinship, broken
from .crash.forge import Forge
from .crash.scene import Meets

pytestmark = pytest.mark.timeout(300)


def message(content: str, id: str = "m1") -> dict[str, Any]:
    return {"channel": "test", "sender_id": "me", "chat_id": "a", "content": content, "id": id}


def interrupted(runs: list[tuple[Kinship, Kinship]]) -> int:
    return sum(after.interrupted for _, after in runs)


@pytest.mark.parametrize(("bus", "waited"), [("memory", "apples"), ("durable", "beans")])
async def test_sub_agents_and_a_job_killed_at_any_write_report_once_and_come_once(
    forge: Forge, step: int, tmp_path: Path, bus: str, waited: str
) -> None:
    meets: list[Meets[Kinship]] = [
        interrupted,  # a sub-agent's call was interrupted, and reported
        lambda runs: any(before.called("cron:") and before.history.open_turns for before, _ in runs),
    ]
    scene = FamilyScene(forge, tmp_path, [message(f"family {waited}")], bus, bus, step=step)
    _, found = await scene.everywhere(meets=meets)
    assert found == []


async def test_a_family_killed_again_and_again_while_it_runs_keeps_its_promises(
    forge: Forge, step: int, tmp_path: Path
) -> None:
    scene = FamilyScene(forge, tmp_path, [message("family beans")], "durable", "memory", again=(5, 3), step=step)
    _, found = await scene.everywhere("after")
    assert found == []


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_no_slot_of_a_job_is_missed_or_doubled_whichever_write_is_the_last(
    forge: Forge, step: int, tmp_path: Path, bus: str
) -> None:
    scene = FamilyScene(forge, tmp_path, [message("ticks")], bus, bus, steps=True, step=step)
    _, found = await scene.everywhere(
        meets=[lambda runs: {len(before.called("cron:")) for before, _ in runs} == {0, 1, 2, 3}]
    )
    assert found == []


async def test_a_call_whose_job_fired_before_it_had_a_result_makes_no_second_job(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    now = 1_900_000_000.0
    service = CronService(store, clock=lambda: now)
    call: dict[str, Any] = {"at": "in 1 minute", "channel": "test", "chat_id": "a", "key": "turn/call"}
    first = await service.add("water the beans", **call)
    now += 3600
    await service.fire_due()
    again = await service.add("water the beans", **call)
    assert (again.id, again.next_due, again.message) == (first.id, first.next_due, "water the beans")
    other = await service.add("water the beans", **call | {"key": "turn/other"})
    assert [job.id for job in await service.list()] == [other.id]
    await store.close()


# ---------------------------------------------------------------------------------------------- compaction


@pytest.fixture
async def talked(forge: Forge, tmp_path: Path) -> Path:
    """The folder of an agent after four long turns."""
    messages = [message(f"hello{n} {LONG * 60}", f"old{n}") for n in range(4)]
    folder, _ = await FamilyScene(forge, tmp_path, messages, settings={"compact_at": 100.0}).undisturbed("talked")
    return folder


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_a_turn_compacted_midway_and_killed_at_any_write_is_shown_as_the_log_says(
    forge: Forge, step: int, tmp_path: Path, talked: Path, bus: str
) -> None:
    settings = {"window": 7_000, "compact_at": 100.0}  # never in the background
    scene = FamilyScene(forge, tmp_path, [message("dig here")], bus, bus, settings, made=talked, step=step)

    def taken(runs: list[tuple[Kinship, Kinship]]) -> list[tuple[Kinship, Kinship]]:
        return [(before, after) for before, after in runs if len(after.history.messages) == 5]

    meets: list[Meets[Kinship]] = [
        interrupted,
        lambda runs: any(before.compacted and before.history.open_turns for before, _ in taken(runs)),
    ]
    runs, found = await scene.everywhere(meets=meets)
    assert found == []
    assert all(after.compacted and after.summaries for _, after in taken(runs))


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_compact_killed_at_any_write_is_done_once_and_answered(
    forge: Forge, step: int, tmp_path: Path, talked: Path, bus: str
) -> None:
    messages = [message("/compact"), message("dig here", "m2")]
    runs, found = await FamilyScene(forge, tmp_path, messages, bus, bus, made=talked, step=step).everywhere()
    assert found == []
    taken = [after for _, after in runs if any(one.id == "m1" for one in after.history.messages)]
    assert all(after.compacted == 1 for after in taken)


@pytest.mark.parametrize("content", ["/compact", "dig here"])
async def test_a_process_killed_while_a_summary_is_written_requests_it_again(
    forge: Forge, tmp_path: Path, talked: Path, content: str
) -> None:
    settings = {"window": 7_000, "compact_at": 100.0}
    scene = FamilyScene(forge, tmp_path, [message(content)], settings=settings, made=talked)
    folder = scene.named("asking")
    await scene.die(folder, messages=scene.messages, die_at_summary=True)
    before, after = await scene.go_on(folder)
    assert broken(after, before) == []
    assert (before.summaries, before.compacted) == (1, 0)
    assert after.summaries == 2
    assert after.compacted


async def test_compaction_in_the_background_killed_at_any_write_loses_nothing(
    forge: Forge, step: int, tmp_path: Path, talked: Path
) -> None:
    messages = [message(f"dig {n}", f"m{n}") for n in range(2)]
    settings = {"window": 8_000, "compact_at": 0.3}
    scene = FamilyScene(forge, tmp_path, messages, settings=settings, made=talked, step=step)
    _, found = await scene.everywhere(meets=[lambda runs: any(after.compacted for _, after in runs)])
    assert found == []
