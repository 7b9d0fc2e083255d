"""Workers that die at random while messages pour in; and proof that the checker would see it go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop import InboundMessage, OutboundMessage
from everloop.dispatch.durable import DurableBus
from everloop.errors import StaleLease
from everloop.log import CallEnded, ModelAnswered, TurnEnded, UserSaid
from everloop.store.base import Claim
from everloop.store.sqlite import SQLiteStore
from everloop.store.workers import new_worker, retire
from everloop.testing import FakeOpenAI

from .crash.forge import Child, Forge
from .crash.history import History, lines, read, violations
from .crash.scene import KILLED, Scene, say

PLANS = ["", "", "", "s", "s", "n", "sn", "w", "s.n", "nw.s", "aa"]
WORKERS = 3


@contextlib.asynccontextmanager
async def model_process() -> AsyncIterator[str]:
    """The model in a process of its own, so that it does not slow the test down."""
    command = (sys.executable, "-m", "tests.crash.model")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1]
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


class Chaos:
    """Workers and a sender that are killed and started again while messages are fed in."""

    def __init__(self, forge: Forge, folder: Path, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.forge = forge
        self.folder = folder
        self.url = url
        self.published: dict[str, list[str]] = {}
        self.count = 0
        self.killed: set[int] = set()
        self.kills = 0
        self.sender_kills = 0
        self._db: sqlite3.Connection | None = None
        self.workers = [self.start_worker() for _ in range(WORKERS)]
        self.sender = forge.start("sender", folder=str(folder))

    def start_worker(self) -> Child:
        return self.forge.start("worker", folder=str(self.folder), url=self.url)

    def plan(self, messages: int, sessions: int) -> list[InboundMessage]:
        """Each session's messages in order, the sessions mixed up."""
        chats = [self.random.randrange(sessions) for _ in range(messages - sessions)] + list(range(sessions))
        made = []
        for number, chat in enumerate(chats):
            plan = self.random.choice(PLANS)
            content = "/new" if self.random.random() < 0.02 else f"mark:{number}.{plan}" if plan else f"mark:{number}"
            made.append(InboundMessage("test", "me", str(chat), content, id=str(number)))
        return made

    async def feed(self, bus: DurableBus, messages: list[InboundMessage], at_once: int) -> None:
        """Publish in order, no more than so many ahead of the answers."""
        for start in range(0, len(messages), 10):
            while self.count - self.scalar("SELECT count(*) FROM outbox") > at_once:
                await asyncio.sleep(0.01)
            chats: dict[str, list[InboundMessage]] = {}
            for message in messages[start : start + 10]:
                chats.setdefault(message.chat_id, []).append(message)
            await asyncio.gather(*(self.feed_chat(bus, some) for some in chats.values()))

    async def feed_chat(self, bus: DurableBus, messages: list[InboundMessage]) -> None:
        for message in messages:
            await bus.publish_inbound(message)
            self.published.setdefault(message.chat_id, []).append(message.id or "")
            self.count += 1

    async def kill(self, messages: int, kills: int) -> None:
        """Kill a worker so many times, spread over the run; now and then the sender as well."""
        for number in range(kills):
            while self.count < (number + 0.5) * messages / (kills + 1):
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.random.random() * 0.1)
            victim = self.random.randrange(WORKERS)
            await self.end(self.workers[victim])
            self.kills += 1
            self.workers[victim] = self.start_worker()
            if self.random.random() < 0.3:
                await self.end(self.sender)
                self.sender_kills += 1
                self.sender = self.forge.start("sender", folder=str(self.folder))

    async def end(self, child: Child) -> None:
        self.killed.add(await asyncio.wrap_future(child.pid))
        await child.kill()
        assert await child.wait() == KILLED

    async def rest(self, seconds: float) -> bool:
        """Wait until everything is answered and sent."""
        give_up = time.monotonic() + seconds
        busy = (
            "SELECT (SELECT count(*) FROM inbox WHERE state <> 'done')"
            " + (SELECT count(*) FROM outbox WHERE sent_at IS NULL)"
        )
        while self.scalar(busy):
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.02)
        return True

    def scalar(self, sql: str) -> int:
        self._db = self._db or sqlite3.connect(self.folder / "store.db", isolation_level=None)
        return int(self._db.execute(sql).fetchone()[0])

    async def close(self) -> None:
        """Workers that are told to end do so cleanly."""
        for worker in self.workers:
            await worker.kill(signal.SIGTERM)
        assert [await worker.wait() for worker in self.workers] == [0] * WORKERS
        await self.end(self.sender)
        if self._db is not None:
            self._db.close()


async def run_chaos(
    forge: Forge, folder: Path, *, messages: int, sessions: int, kills: int, seed: int, patience: float
) -> tuple[Chaos, History]:
    async with model_process() as url:
        store = SQLiteStore(folder / "store.db")
        await store.sessions("me")
        chaos = Chaos(forge, folder, url, seed)
        bus = DurableBus(store)
        plan = chaos.plan(messages, sessions)
        await asyncio.gather(chaos.feed(bus, plan, at_once=80), chaos.kill(messages, kills))
        at_rest = await chaos.rest(patience)
        await store.close()
        await chaos.close()
        async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/_log") as answer:
            requests = await answer.json()
    history = read(folder, requests)
    history.acknowledged = [message.id or "" for message in plan]
    history.published = chaos.published
    history.killed = chaos.killed
    assert at_rest, f"still at work after {patience} s: {violations(history)[:10]}"
    return chaos, history


async def chaos_test(forge: Forge, folder: Path, capfd: pytest.CaptureFixture[str], **size: Any) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"chaos: CHAOS_SEED={seed}")
    began = time.monotonic()
    chaos, history = await run_chaos(forge, folder, seed=seed, **size)
    seconds = time.monotonic() - began
    with capfd.disabled():
        print(
            f"\nchaos: {len(history.messages)} messages, {len(history.logs)} sessions, {chaos.kills} workers and"
            f" {chaos.sender_kills} senders killed, {history.takeovers} take-overs, {history.repeats} repeats,"
            f" {history.interrupted} interrupted calls, {len(history.requests)} model calls,"
            f" {seconds:.1f} s (seed {seed})",
            file=sys.stderr,
        )
    assert violations(history) == []
    assert len(history.messages) == size["messages"]
    assert len(history.logs) == size["sessions"]
    assert chaos.kills == size["kills"]
    assert history.takeovers > 0


@pytest.mark.timeout(150)
async def test_a_thousand_messages_survive_workers_that_are_killed_at_random(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await chaos_test(forge, tmp_path, capfd, messages=1000, sessions=50, kills=20, patience=60)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_ten_thousand_messages_survive_workers_that_are_killed_at_random(
    forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await chaos_test(forge, tmp_path, capfd, messages=10_000, sessions=500, kills=200, patience=300)


# ---------------------------------------------------------------------------------------------- two workers


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        await asyncio.sleep(0.005)


def started(folder: Path, runs: int = 1) -> Callable[[], bool]:
    return lambda: len([run for run in lines(folder / "runs") if run["what"] == "start"]) >= runs


async def publish(folder: Path, *messages: dict[str, Any]) -> None:
    """As a channel does that is a process of its own."""
    store = SQLiteStore(folder / "store.db")
    bus = DurableBus(store)
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
    await store.close()


async def finished(forge: Forge, folder: Path, model: FakeOpenAI) -> History:
    """Send what is in the outbox, and read it all."""
    assert await forge.run("agent", folder=str(folder), url=model.base_url, bus="durable") == 0
    return read(folder, model.requests)


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


async def test_what_killed_workers_leave_in_the_runtime_folder_is_swept_up(
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


async def test_a_frozen_worker_keeps_its_session_and_goes_on_where_it_was(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    """A stopped process is alive, so nobody takes its turn; everybody else's goes on."""
    frozen = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    await publish(tmp_path, say("m1", "l.n"), say("m2", "s"))
    await until(started(tmp_path))
    await frozen.kill(signal.SIGSTOP)
    other = forge.start("worker", folder=str(tmp_path), url=model.base_url)
    await publish(tmp_path, say("b1", "n", chat="b"), say("m3"))
    await until(lambda: len(read(tmp_path).answers) == 1)
    await asyncio.sleep(0.6)  # longer than the tool that was frozen takes
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


# ---------------------------------------------------------------------------------------------- leases


def dump(path: Path) -> list[str]:
    db = sqlite3.connect(path)
    try:
        return list(db.iterdump())
    finally:
        db.close()


@pytest.fixture
async def robbed(tmp_path: Path) -> AsyncIterator[tuple[SQLiteStore, Claim, Claim]]:
    """A store, the claim of a worker that was taken for dead, and the claim of the one that has its session now."""
    store = SQLiteStore(tmp_path / "store.db")
    old, new = new_worker(), new_worker()
    message = InboundMessage("test", "me", "a", "hello", id="m1").addressed()
    stale = await store.begin("me", "test:a", old, message)
    retire(old)
    fresh = await store.begin("me", "test:a", new)
    assert stale is not None
    assert fresh is not None
    assert fresh.fence > stale.fence
    yield store, stale, fresh
    retire(new)
    await store.close()


async def test_a_worker_that_lost_its_lease_can_append_nothing(robbed: tuple[SQLiteStore, Claim, Claim]) -> None:
    store, stale, fresh = robbed
    before = dump(store.path)
    with pytest.raises(StaleLease):
        await store.append(stale, [ModelAnswered("stale")])
    with pytest.raises(StaleLease):
        await store.append(stale, [ModelAnswered("stale"), ModelAnswered("stale")], took=[1])
    assert dump(store.path) == before
    await store.append(fresh, [ModelAnswered("fresh")])
    assert [one.entry for one in await store.read_log(fresh.session)] == [
        UserSaid("hello", "me"),
        ModelAnswered("fresh"),
    ]


async def test_a_worker_that_lost_its_lease_can_neither_finish_nor_release(
    robbed: tuple[SQLiteStore, Claim, Claim],
) -> None:
    store, stale, fresh = robbed
    before = dump(store.path)
    with pytest.raises(StaleLease):
        await store.finish(stale, [TurnEnded("answer", "stale")], [OutboundMessage("test", "a", "stale")])
    await store.release(stale)
    assert dump(store.path) == before
    await store.finish(fresh, [TurnEnded("answer", "fresh")], [OutboundMessage("test", "a", "fresh")])
    assert [row.message.content for row in await store.take_outgoing("someone")] == ["fresh"]


async def test_a_stale_write_does_not_take_the_writes_beside_it_down(
    robbed: tuple[SQLiteStore, Claim, Claim],
) -> None:
    store, stale, fresh = robbed
    writes = [
        store.append(claim, [ModelAnswered(f"{n}")])
        for n, claim in enumerate((fresh, stale, fresh, stale, stale, fresh))
    ]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [isinstance(result, StaleLease) for result in results] == [False, True, False, True, True, False]
    texts = [getattr(one.entry, "content", "") for one in await store.read_log(fresh.session)]
    assert texts == ["hello", "0", "2", "5"]


# ---------------------------------------------------------------------------------------------- planted bugs


async def robbers(forge: Forge, folder: Path, model: FakeOpenAI, plant: str) -> History:
    """Two workers that take each other for dead, for a while."""
    children = [forge.start("worker", folder=str(folder), url=model.base_url, plant=plant) for _ in range(2)]
    await until(lambda: (folder / "store.db").exists())
    for number in range(12):
        await publish(folder, say(f"m{number}", "nw.s", chat=str(number % 3)))
    with contextlib.suppress(AssertionError):
        await until(lambda: len(read(folder).answers) >= 12, 4.0)
    for child in children:
        await child.kill()
        await child.wait()
    return read(folder, model.requests)


async def test_workers_that_take_each_other_for_dead_cannot_harm_the_log(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    """The verdict is wrong, and the fence holds: work may be done twice, but nothing unsafe, and one answer counts."""
    await robbers(forge, tmp_path, model, "thief")
    history = await finished(forge, tmp_path, model)
    assert history.takeovers
    harm = [line for line in violations(history) if "asked again" not in line and "ran again" not in line]
    assert harm == []


async def test_the_checker_sees_a_missing_fence(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> None:
    found = violations(await robbers(forge, tmp_path, model, "no-fence"))
    assert any(sign in line for line in found for sign in ("mixed up", "results", "ends", "answers in the outbox"))


async def test_the_checker_sees_writes_that_are_acknowledged_too_early(
    forge: Forge, model: FakeOpenAI, tmp_path: Path
) -> None:
    found: list[str] = []
    for bus in ("durable", "memory"):
        messages = [say("m1", "n"), say("m2")][: 2 if bus == "durable" else 1]
        scene = Scene(forge, model, tmp_path, messages, {"plant": "early"}, bus, bus)
        for number in range(2, 6):
            before, after = await scene.killed(f"{bus}{number}", die_at=(number, "before"))
            found += violations(after, before)
    assert any("acknowledged and is lost" in line for line in found)
    assert any("the model was asked before the message was on disk" in line for line in found)
    assert any("without its intent on disk" in line or "must not be repeated" in line for line in found)


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


async def test_the_checker_sees_what_was_on_disk_change(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> None:
    scene = Scene(forge, model, tmp_path, [say("m1", "s.n")], {})
    await scene.undisturbed()
    good = scene.read(tmp_path / "whole")
    earlier = dataclasses.replace(good, requests=good.requests[:-1], runs=good.runs[:-2])
    signs = ("had answered before the kill and was asked again", "had finished before the kill and ran again")
    for sign in signs:
        assert any(sign in line for line in violations(good, earlier))
