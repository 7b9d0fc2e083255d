"""A worker that dies or is frozen, and another that lives."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from pathlib import Path

from everloop.testing import FakeOpenAI

from ..crash.checker import violations
from ..crash.forge import Forge
from ..crash.history import read
from ..crash.scene import say
from .channel import finished, held, publish, started, until


async def test_a_dead_workers_turn_is_taken_over_though_nothing_else_happens(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    chance = random.Random(7)
    workers = [forge.start("worker", folder=str(tmp_path), url=model.base_url) for _ in range(2)]
    for number in range(15):
        await publish(tmp_path, say(f"m{number}", "sw", chat=str(number)))
        await asyncio.sleep(chance.random() * 0.03)
        victim = number % 2
        await workers[victim].kill()
        if number % 3 == 0:  # the new one joins while the other takes over
            workers[victim] = forge.start("worker", folder=str(tmp_path), url=model.base_url)
        await until(lambda n=number: len(read(tmp_path).answers) == n + 1)  # type: ignore[misc]
        if number % 3:
            workers[victim] = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    for worker in workers:
        await worker.kill()
        await worker.wait()
    assert violations(await finished(forge, tmp_path, model)) == []


async def test_leftovers_of_killed_workers_in_the_runtime_folder_are_removed(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as runtime:  # a socket's path must be short
        for number in range(1, 4):
            worker = forge.start("worker", folder=str(tmp_path), url=model.base_url, runtime=runtime)
            await publish(tmp_path, say(f"m{number}"))
            await until(lambda n=number: len(read(tmp_path).answers) == n)  # type: ignore[misc]
            assert len(list(Path(runtime).glob("everloop-*/*"))) == 1
            await worker.kill()
            await worker.wait()


async def test_a_frozen_worker_keeps_its_session_and_continues_where_it_was(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    """A frozen process is alive, so no other takes its turn; all other turns continue."""
    frozen = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    with held(tmp_path):
        await publish(tmp_path, say("m1", "l.n"), say("m2", "s"))
        await until(started(tmp_path))
        await frozen.kill(signal.SIGSTOP)
    other = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    await publish(tmp_path, say("b1", "n", chat="b"), say("m3"))
    await until(lambda: len(read(tmp_path).answers) == 1)
    await asyncio.sleep(0.6)  # longer than the frozen tool takes
    assert [reply_to for _, reply_to, _ in read(tmp_path).answers] == ["b1"]
    await frozen.kill(signal.SIGCONT)
    await until(lambda: len(read(tmp_path).answers) == 4)
    for worker in (frozen, other):
        await worker.kill()
        await worker.wait()
    history = await finished(forge, tmp_path, model)
    history.published = {"a": ["m1", "m2", "m3"], "b": ["b1"]}
    assert violations(history) == []
    assert history.takeovers == history.interrupted == 0


async def test_a_frozen_worker_that_is_killed_is_taken_over(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> None:
    frozen = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    with held(tmp_path):
        await publish(tmp_path, say("m1", "l.n"), say("m2", "s"))
        await until(started(tmp_path))
        await frozen.kill(signal.SIGSTOP)
    other = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    await asyncio.sleep(0.1)
    await frozen.kill()
    await until(lambda: len(read(tmp_path).answers) == 2)
    await other.kill()
    await other.wait()
    history = await finished(forge, tmp_path, model)
    assert violations(history) == []
    assert history.interrupted == history.takeovers == 1
