"""The model's state survives a restart, and a damaged file counts as missing."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.states import States, fingerprint

from .real import TINY, weights
from .real import found_tiny as found_tiny
from .test_engine import text_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.may_block]

# Long enough to be kept, in few tokens, which take the time.
RULES = " ".join(f"Rule {n}: respect international environmental regulations everywhere." for n in range(16))


async def first_turn(states: Path, question: str = "Who is there?", rules: str = RULES) -> dict[str, Any]:
    """The first turn after a start."""
    engine = Engine(Settings(weights(TINY), window=1024, threads=1, states=states))
    try:
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
        return await engine.complete({"messages": messages, "stable": 1, "max_tokens": 6, "temperature": 0})
    finally:
        await engine.close()


def only_state(folder: Path) -> Path:
    [found] = folder.glob("*.state")
    return found


async def test_after_a_restart_the_beginning_of_a_prompt_is_not_read_again(tmp_path):
    first = await first_turn(tmp_path)
    second = await first_turn(tmp_path)
    assert first["timings"]["prefix_read"] > 100
    assert "prefix_read" not in second["timings"]
    assert second["timings"]["prefix_restored"] == first["timings"]["prefix_read"]
    assert second["timings"]["prompt_n"] < 30
    assert text_of(second) == text_of(first)
    other = await first_turn(tmp_path, "What is the first rule?")
    assert other["timings"]["prefix_restored"] == first["timings"]["prefix_read"]


async def test_a_changed_or_truncated_file_counts_as_missing(tmp_path):
    first = await first_turn(tmp_path)
    state = only_state(tmp_path)
    right = state.read_bytes()
    for wrong in (right[: len(right) // 2], right[:5000] + b"\xff" * 300 + right[5300:], b""):
        state.write_bytes(wrong)
        again = await first_turn(tmp_path)
        assert "prefix_read" in again["timings"]
        assert text_of(again) == text_of(first)
    assert "prefix_restored" in (await first_turn(tmp_path))["timings"]  # it was rewritten


async def test_only_its_owner_can_read_a_state_and_the_question_is_not_in_it(tmp_path):
    await first_turn(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    for path in (tmp_path / "cache").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_read_only_folder_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    first = await first_turn(tmp_path / "file" / "cache")
    assert text_of(first)


async def test_a_different_prompt_beginning_has_a_different_file(tmp_path):
    await first_turn(tmp_path)
    other = await first_turn(tmp_path, rules=RULES.replace("respect", "honour"))
    assert "prefix_read" in other["timings"]
    assert len(list(tmp_path.glob("*.state"))) == 2


async def test_a_concurrent_second_conversation_does_not_read_the_beginning_again(tmp_path):
    engine = Engine(Settings(weights(TINY), window=1024, threads=1, states=tmp_path))
    try:
        system = {"role": "system", "content": RULES}
        long = {"messages": [system, {"role": "user", "content": "Who is there?"}], "stable": 1, "ignore_eos": True}
        begun = asyncio.Event()

        def seen(delta: dict[str, Any]) -> None:
            if "content" in delta:
                begun.set()

        one = asyncio.create_task(engine.complete({**long, "max_tokens": 400}, seen, session="one"))
        await begun.wait()
        asked = {"messages": [system, {"role": "user", "content": "And who else?"}], "stable": 1, "max_tokens": 3}
        for _ in range(2):
            two = await engine.complete(asked, session="two")
            assert two["timings"]["prompt_n"] < 40
        assert not one.done()
        one.cancel()
    finally:
        await engine.close()


def test_states_of_another_model_or_version_are_other_files(tmp_path):
    names = {States(tmp_path, model, version).name("text") for model in "ab" for version in "12"}
    assert len(names) == 4


def states_by_age(folder: Path, count: int, most_bytes: int) -> States:
    """Write states of 1,000 bytes, `0.state` being the oldest."""
    states, now = States(folder, "model", most_bytes=most_bytes), time.time()
    for n in range(count):
        (folder / "new").write_bytes(bytes(1_000 - 64))
        states.add("new", f"{n}.state")
        for path in folder.glob(f"{n}.state*"):
            os.utime(path, (now - 100 + n, now - 100 + n))
    return states


def test_the_oldest_states_are_removed_when_there_are_too_many(tmp_path):
    tmp_path /= "cache"
    states = states_by_age(tmp_path, 5, most_bytes=3_000)
    assert not states.is_intact("0.state")
    assert not states.is_intact("1.state")
    assert states.is_intact("4.state")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3_000


def test_a_state_in_use_is_not_the_oldest(tmp_path):
    tmp_path /= "cache"
    states = states_by_age(tmp_path, 2, most_bytes=2_200)
    assert states.is_intact("0.state")
    (tmp_path / "new").write_bytes(bytes(1_000 - 64))
    states.add("new", "2.state")
    assert states.is_intact("0.state")
    assert not states.is_intact("1.state")


def test_models_are_distinguished_by_their_content(tmp_path):
    data = bytes(5_000_000)
    one, two, three = (tmp_path / name for name in "abc")
    one.write_bytes(data)
    two.write_bytes(data[:-1] + b"!")
    three.write_bytes(data)
    assert fingerprint(one) == fingerprint(three) != fingerprint(two)
