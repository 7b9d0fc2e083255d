"""The checker detects planted bugs and doctored histories."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everloop.log import CallEnded
from everloop.testing import FakeOpenAI

from ..crash.checker import violations
from ..crash.forge import Forge
from ..crash.history import History, read
from ..crash.scene import Scene, say
from .channel import finished, publish, until

# Left in a log by two concurrent writers, and by no turn that is merely in progress.
HARM = re.compile(r"mixed up|has [2-9]\d* (?:ends|answers in the outbox)")


def uses(pid: int, store: Path) -> bool:
    """Whether a process has a store open."""
    with contextlib.suppress(OSError):
        return any(os.readlink(link) == str(store) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


async def robbers(
    forge: Forge, folder: Path, model: FakeOpenAI, plant: str, seen: Callable[[History], object]
) -> History:
    """Two workers that consider each other dead, until the effect is seen; when they collide is random."""
    children = [forge.start("worker", folder=str(folder), url=model.base_url, plant=plant) for _ in range(2)]
    pids = [await asyncio.wrap_future(child.pid) for child in children]
    store = (folder / "store.db").resolve()
    await until(lambda: all(uses(pid, store) for pid in pids))  # or one may have all the work to itself
    for crowd in range(8):
        for number in range(12 * crowd, 12 * crowd + 12):
            await publish(folder, say(f"m{number}", "nw.s", chat=str(number % 3)))
        with contextlib.suppress(AssertionError):
            await until(lambda n=12 * crowd + 12: len(read(folder).answers) >= n, 4.0)  # type: ignore[misc]
        if seen(read(folder, model.requests)):
            break
    for child in children:
        await child.kill()
        await child.wait()
    return read(folder, model.requests)


async def test_workers_that_consider_each_other_dead_cannot_harm_the_log(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    """They are wrong, and the fence holds: work may be repeated, but nothing unsafe, and one answer counts."""
    await robbers(forge, tmp_path, model, "thief", lambda history: history.takeovers)
    history = await finished(forge, tmp_path, model)
    assert history.takeovers
    harm = [line for line in violations(history) if "asked again" not in line and "ran again" not in line]
    assert harm == []


async def test_the_checker_sees_a_missing_fence(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> None:
    def harm(history: History) -> list[str]:
        return [line for line in violations(history) if HARM.search(line)]

    assert harm(await robbers(forge, tmp_path, model, "no-fence", harm))


async def test_the_checker_sees_writes_that_are_acknowledged_too_early(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    found: list[str] = []
    signs = (
        ("acknowledged and is lost",),
        ("the model was asked before the message was on disk",),
        ("without its intent on disk", "must not be repeated"),
    )

    def all_seen() -> bool:
        return all(any(one in line for one in sign for line in found) for sign in signs)

    for attempt in range(4):  # on a busy machine a write that was acknowledged too early may still be on disk in time
        for bus in ("durable", "memory"):
            # Before the first request its prompt is stored, after the message; the late one in another session has no
            # such wait.
            options: dict[str, Any] = {"plant": "early", "late": [say("m3", chat="b")] if bus == "memory" else []}
            messages = [say("m1", "n"), say("m2")][: 2 if bus == "durable" else 1]
            scene = Scene(forge, model, tmp_path, messages, options, bus, bus)
            for number in range(2, 8):
                before, after = await scene.killed(f"{bus}{number}-{attempt}", die_at=(number, "before"))
                found += violations(after, before)
        if all_seen():
            break
    assert all_seen(), found


async def test_the_checker_sees_unsafe_calls_that_are_run_again(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    scene = Scene(forge, model, tmp_path, [say("m1", "K")], {"plant": "rerun"}, plant_then="rerun")
    before, after = await scene.killed("again")
    assert any("must not be repeated and ran 2 times" in line for line in violations(after, before))


def lose(history: History) -> None:
    history.messages.pop()


def forget(history: History) -> None:
    history.delivered.pop()


def say_twice(history: History) -> None:
    history.delivered.append({**history.delivered[0], "repeat": False})


def swap_messages(history: History) -> None:
    history.messages[0], history.messages[1] = history.messages[1], history.messages[0]


def swap_answers(history: History) -> None:
    history.answers.reverse()


def ask_again(history: History) -> None:
    history.requests.append({**history.requests[0], "time": history.requests[0]["time"] + 100})


def run_again(history: History) -> None:
    run = next(run for run in history.runs if run["tool"] == "safe")
    history.runs.append({**run, "at": run["at"] + 100})


def run_unsafe_again(history: History) -> None:
    history.runs.append(next(run for run in history.runs if run["tool"] == "never"))


def change_key(history: History) -> None:
    run = next(run for run in history.runs if run["tool"] == "safe")
    history.runs.append({**run, "key": "other"})


def drop_result(history: History) -> None:
    log = next(iter(history.logs.values()))
    log.remove(next(place for place in log if isinstance(place.entry, CallEnded)))


def hide_interruption(history: History) -> None:
    for place in next(iter(history.logs.values())):
        if isinstance(place.entry, CallEnded) and place.entry.name == "never":
            place.entry = CallEnded(place.entry.id, "never", "all is well", "interrupted")


def answer_something_else(history: History) -> None:
    session, reply_to, _ = history.answers[0]
    history.answers[0] = (session, reply_to, "what?")


DOCTORED: list[tuple[Callable[[History], None], str]] = [
    (lose, "acknowledged and is lost"),
    (forget, "got no answer"),
    (say_twice, "twice without a repeat mark"),
    (swap_messages, "published as"),
    (swap_answers, "answered in the order"),
    (ask_again, "asked again after its answer was on disk"),
    (run_again, "ran again after its result was on disk"),
    (run_unsafe_again, "must not be repeated and ran 2 times"),
    (change_key, "more than one idempotency key"),
    (drop_result, "has gaps"),
    (drop_result, "no valid conversation"),
    (hide_interruption, "the model is not told so"),
    (answer_something_else, "and answered 'what?'"),
    (lambda history: history.held.append((1, "somebody")), "is still held by somebody"),
    (lambda history: history.open_turns.append("t"), "turn t is still open"),
    (lambda history: setattr(history, "integrity", "torn"), "damaged: torn"),
    (lambda history: setattr(history, "unsent", 1), "were not sent"),
    (lambda history: history.requests[0].update(problems=["no result"]), "an invalid conversation was sent"),
]


async def test_the_checker_sees_every_doctored_history(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> None:
    messages = [say("m1", "s.n"), say("m2", "s")]
    scene = Scene(forge, model, tmp_path, messages, {}, "durable", "durable")
    await scene.undisturbed()
    good = scene.read(tmp_path / "whole")
    assert good.acknowledged == ["m1", "m2"]
    assert violations(good) == []
    for doctor, sign in DOCTORED:
        bad = copy.deepcopy(good)
        doctor(bad)
        assert any(sign in line for line in violations(bad)), f"{sign}: {violations(bad)}"
    assert violations(good) == []


async def test_the_checker_sees_changes_of_what_was_on_disk(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> None:
    scene = Scene(forge, model, tmp_path, [say("m1", "s.n")], {})
    await scene.undisturbed()
    good = scene.read(tmp_path / "whole")
    earlier = dataclasses.replace(good, requests=good.requests[:-1], runs=good.runs[:-2])
    signs = ("had answered before the kill and was asked again", "had finished before the kill and ran again")
    for sign in signs:
        assert any(sign in line for line in violations(good, earlier))
