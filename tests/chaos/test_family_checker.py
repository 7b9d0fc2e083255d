"""The checker of sub-agents and scheduled work detects planted bugs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..crash.family_history import FamilyScene
from ..crash.forge import Forge
from ..test_kill_family import message

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("bug", "signs"),
    [
        ("late-report", ("there are sub-agents", "the reports are of []")),
        ("new-ids", ("there are sub-agents",)),
        ("late-slot", ("the job came in the slots []",)),
        ("made-again", ("the job came in the slots ['cron:",)),
        ("rerun", ("must not be repeated",)),
    ],
)
async def test_the_checker_sees_a_planted_bug(forge: Forge, tmp_path: Path, bug: str, signs: tuple[str, ...]) -> None:
    assert await FamilyScene(forge, tmp_path, [message("family apples")], plant=bug).unseen(*signs) == set()
