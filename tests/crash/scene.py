"""A program that is killed and resumed in its own folder."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from everloop.testing import FakeOpenAI

from .checker import violations
from .forge import Forge
from .history import History, lines, read

KILLED = -signal.SIGKILL
AT_ONCE = 3
SWEEPS = 4

Seen = TypeVar("Seen")  # the state on disk
Meets = Callable[
    [list[tuple[Seen, Seen]]], object
]  # whether the kills have hit a position, given the states before and after


def say(id: str, plan: str = "", chat: str = "a", **options: Any) -> dict[str, Any]:
    marker = f"{id}.{plan}" if plan else id
    return {"channel": "test", "sender_id": "me", "chat_id": chat, "content": f"mark:{marker}", "id": id, **options}


def places(commits: int, step: int, bus: str) -> list[tuple[int, str]]:
    """Where to kill a program: before and after each of its commits, or each second, or each fourth.

    The state on disk after a commit is also the state before the next one, so every second commit shows each state
    once; every fourth does so with both buses. How writes are grouped into commits depends on timing, so one run may
    take a commit or two more than another.
    """
    first = 1 if bus == "memory" else 1 + step // 2
    chosen = itertools.product(range(first, commits + 3, step), ("before", "after"))
    return [*([(1, "before")] if first > 1 else []), *chosen]


async def sweep(
    one: Callable[[int, int, str], Awaitable[tuple[Seen, Seen]]],
    at: Callable[[int], list[tuple[int, str]]],
    step: int,
    meets: Sequence[Meets[Seen]],
) -> list[tuple[Seen, Seen]]:
    """Kill a program at the positions of a first sweep, and at every commit in further sweeps until the kills have hit
    every required position, since the order of commits depends on timing."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def within(number: int, place: tuple[int, str]) -> tuple[Seen, Seen]:
        async with slots:
            return await one(number, *place)

    runs: list[tuple[Seen, Seen]] = []
    for number in range(SWEEPS):
        runs += await asyncio.gather(*(within(number, place) for place in at(1 if number else step)))
        if all(met(runs) for met in meets):
            return runs
    missed = [number for number, met in enumerate(meets) if not met(runs)]
    raise AssertionError(f"no kill met the places {missed} in {SWEEPS} sweeps")


@dataclass(slots=True)
class Scene:
    """A program, its messages, and how it resumes after the kill."""

    forge: Forge
    model: FakeOpenAI
    folder: Path
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    bus: str = "memory"
    then: str = "memory"
    plant_then: str = ""
    step: int = 2  # the step between the commits at which it is killed

    def named(self, name: str) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
        """The scene in its own folder, with unique markers."""
        folder = self.folder / name
        folder.mkdir()

        def own(message: dict[str, Any]) -> dict[str, Any]:
            return {**message, "content": message["content"].replace("mark:", f"mark:{name}-")}

        late = [own(message) for message in self.options.get("late", ())]
        return folder, [own(message) for message in self.messages], {**self.options, "late": late}

    def read(self, folder: Path) -> History:
        requests = [seen for seen in self.model.requests if seen.marker.startswith(f"{folder.name}-")]
        history = read(folder, requests)
        history.published = {}
        for message in [*self.messages, *self.options.get("late", ())]:
            history.published.setdefault(message["chat_id"], []).append(message["id"])
        return history

    async def undisturbed(self) -> int:
        """Return the number of commits of a run without a kill."""
        folder, messages, options = self.named("whole")
        status = await self.forge.run(
            "agent", folder=str(folder), url=self.model.base_url, bus=self.bus, messages=messages, **options
        )
        assert status == 0
        history = self.read(folder)
        assert violations(history) == []
        assert len(history.messages) == len(self.messages) + len(options["late"])
        assert history.repeats == history.interrupted == 0
        return int(lines(folder / "commits")[0]["count"])

    async def killed(self, name: str, **how: Any) -> tuple[History, History]:
        """Kill it and resume it; return the state before and after."""
        folder, messages, options = self.named(name)
        options |= how
        status = await self.forge.run(
            "agent", folder=str(folder), url=self.model.base_url, bus=self.bus, messages=messages, **options
        )
        assert status in (0, KILLED), f"{name}: the program ended with {status}"
        before = self.read(folder)
        further = {"busy": options.get("busy", "queue"), "plant": self.plant_then}
        status = await self.forge.run("agent", folder=str(folder), url=self.model.base_url, bus=self.then, **further)
        assert status == 0, f"{name}: the resumed program ended with {status}"
        return before, self.read(folder)

    async def everywhere(self, meets: Sequence[Meets[History]] = ()) -> list[tuple[History, History]]:
        """Kill it at its commits, checking each time, until the kills have hit every required position."""
        commits = await self.undisturbed()

        async def one(sweep: int, number: int, when: str) -> tuple[History, History]:
            before, after = await self.killed(f"{when}{number}" + f"-{sweep}" * (sweep > 0), die_at=(number, when))
            assert violations(after, before) == [], f"killed {when} commit {number} of {commits}"
            return before, after

        return await sweep(one, lambda step: places(commits, step, self.then), self.step, meets)
