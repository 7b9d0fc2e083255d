"""The checker detects bugs planted in processes of one PostgreSQL store, and doctored histories."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from everloop import InboundMessage
from everloop.log import CallEnded
from everloop.runtime.durable_bus import DurableBus
from everloop.server.sse import RESTARTED
from everloop.store.postgres.store import PostgresStore
from everloop.testing import FakeOpenAI

from ..crash.checker import violations
from ..crash.company import named
from ..crash.forge import Forge
from ..crash.history import History, lines, seen_in
from ..crash.scene import KILLED, say
from ..crash.witness import read_postgres
from ..store.postgres.server import Server
from .channel import held, started, until
from .company import REFUSED, Company, Member, company
from .test_company import Load, run_company

EVERY = 3  # seconds between two slots of a job; some must fall into the short run


class Place(NamedTuple):
    """What a company needs."""

    forge: Forge
    folder: Path
    model: FakeOpenAI
    server: Server


@pytest.fixture
def place(forge: Forge, tmp_path: Path, model: FakeOpenAI, postgres: Server) -> Place:
    return Place(forge, tmp_path, model, postgres)


@contextlib.asynccontextmanager
async def at_work(place: Place, plant: str, lease: float) -> AsyncIterator[Company]:
    options: dict[str, Any] = {"workers": 2, "servers": 0, "on": place.server, "plant": plant, "lease": lease}
    async with company(place.forge, place.folder, place.model.base_url, **options) as made:
        await made.start()
        yield made


async def publish(made: Company, *messages: dict[str, Any]) -> None:
    store = PostgresStore(named(made.dsn), lease_seconds=made.lease)
    bus = DurableBus(store)
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
    await store.close()


async def wake(made: Company) -> None:
    store = PostgresStore(named(made.dsn), lease_seconds=made.lease)
    await store.wake()
    await store.close()


async def holder(made: Company) -> Member:
    """Return the worker that holds a session now."""
    (pid,) = await made.holders()
    return next(one for one in made.members if one.pid == pid)


def left(made: Company, model: FakeOpenAI) -> History:
    history = read_postgres(made.dsn, seen_in(made.folder, model.requests))
    history.killed, history.ended = set(made.ended), made.ended
    return history


async def robbery(place: Place, plant: str, over: Callable[[Company], bool]) -> History:
    """Freeze a worker past its lease in the middle of a turn, and wake it when another has its session; return the
    final history.
    """
    async with at_work(place, plant, lease=3.0) as made:
        with held(place.folder):
            await publish(made, say("m1", "l.n"))
            await until(started(place.folder))
            await (await holder(made)).freeze_until_robbed()
        await made.rest(30)
        await until(lambda: over(made))
        return left(made, place.model)


async def test_a_worker_that_wakes_after_its_lease_harms_nothing(place: Place) -> None:
    history = await robbery(place, "", lambda made: REFUSED in made.said())
    assert history.takeovers == history.interrupted == 1
    assert violations(history) == []


async def test_the_checker_sees_a_missing_fence(place: Place) -> None:
    signs = ("message m1 has 2 answers in the outbox", "wrote an answer under the lease of")
    await robbery(place, "no-fence", lambda made: finds(made, place.model, *signs))


def finds(made: Company, model: FakeOpenAI, *signs: str) -> bool:
    """Whether the checker has seen all of this by now."""
    found = "\n".join(violations(left(made, model)))
    return all(sign in found for sign in signs)


async def test_the_checker_sees_a_lease_that_is_taken_while_its_holder_lives(place: Place) -> None:
    async with at_work(place, "thief", lease=30.0) as made:
        with held(place.folder):
            await publish(made, say("m1", "l.n"))
            await until(started(place.folder))
            await publish(made, say("m2"))
            await wake(made)  # the other one looks for work too while the first has the session
            stolen = ("took the lease and the fence is still", "which lived")
            await until(lambda: finds(made, place.model, *stolen))


async def test_the_checker_sees_a_message_that_is_acknowledged_before_it_is_committed(place: Place) -> None:
    folder = place.folder
    async with at_work(place, "", lease=30.0) as made:
        messages = [say(f"m{number}") for number in range(3)]
        options: dict[str, Any] = {"folder": str(folder), "dsn": made.dsn, "messages": messages}
        child = place.forge.start("announcer", **options, plant="early")
        await until(lambda: len(lines(folder / "acknowledged")) >= 1)
        await child.kill()
        assert await child.wait() == KILLED
        await made.rest(30)
        found = violations(left(made, place.model))
    assert any("was acknowledged and is lost" in line for line in found), found


# ---------------------------------------------------------------------------------------------- doctored


def first_answered(history: History) -> Any:
    return next(asked for asked in history.clients if asked.answers and not asked.hung_up)


def change_stream(history: History) -> None:
    first_answered(history).answers.append((True, "something else"))


def change_whole(history: History) -> None:
    asked = first_answered(history)
    asked.answers.append((False, f"half{RESTARTED}{asked.answers[0][1]}"))


def lose_turn(history: History) -> None:
    mark = first_answered(history).mark
    history.messages = [message for message in history.messages if message.content != f"mark:{mark}"]


def answer_nobody(history: History) -> None:
    first_answered(history).answers.clear()


def ask_twice(history: History) -> None:
    mark = first_answered(history).mark
    message = next(message for message in history.messages if message.content == f"mark:{mark}")
    history.messages.append(dataclasses.replace(message, id="again"))


def leave_out_slot(history: History) -> None:
    """Let a job also come two slots before its first one, but not in the slot between."""
    fired = next(message for message in history.messages if message.id.startswith("cron:"))
    job = fired.id.split(":")[1]
    times = [int(one.id.split(":")[2]) for one in history.messages if one.id.startswith(f"cron:{job}:")]
    history.messages.append(dataclasses.replace(fired, id=f"cron:{job}:{min(times) - 2 * EVERY}"))


def fire_twice(history: History) -> None:
    history.messages.append(next(message for message in history.messages if message.id.startswith("cron:")))


def no_slots(history: History) -> None:
    history.messages = [message for message in history.messages if not message.id.startswith("cron:")]


def lower_fence(history: History) -> None:
    lease = next(lease for lease in history.leases if lease.after)
    lease.fence = lease.fence_before - 1


def same_fence(history: History) -> None:
    lease = next(lease for lease in history.leases if lease.after)
    lease.fence = lease.fence_before


def hidden_lease(history: History) -> None:
    history.leases.remove(next(lease for lease in history.leases if lease.after))


def rob(history: History) -> None:
    lease = next(lease for lease in history.leases if lease.after)
    other = ".".join([*lease.after.split(".")[:2], "1", "2", "3"]) if lease.after else None
    lease.before, lease.alive = other, True


def write_as_another(history: History) -> None:
    history.writes[-1].writer = 1


def end_before_results(history: History) -> None:
    log = next(log for log in history.logs.values() if any(isinstance(place.entry, CallEnded) for place in log))
    number = next(n for n, place in enumerate(log) if isinstance(place.entry, CallEnded))
    log[number].entry, log[-1].entry = log[-1].entry, log[number].entry


def end_twice(history: History) -> None:
    log = next(log for log in history.logs.values() if any(isinstance(place.entry, CallEnded) for place in log))
    log.append(next(place for place in log if isinstance(place.entry, CallEnded)))


DOCTORED: list[tuple[Callable[[History], None], str]] = [
    (change_stream, "its client was told 'something else'"),
    (change_whole, "its client was told 'half"),
    (lose_turn, "was answered to its client and is lost"),
    (answer_nobody, "its client got no answer"),
    (ask_twice, "a client asked once, and there are 2 turns"),
    (leave_out_slot, "did not come in the slot"),
    (fire_twice, "came twice in the slot"),
    (no_slots, "never came"),
    (lower_fence, "the fence fell from"),
    (same_fence, "took the lease and the fence is still"),
    (hidden_lease, "unseen"),
    (rob, "which lived"),
    (write_as_another, "process 1 wrote"),
    (end_before_results, "precedes the results of"),
    (end_twice, "is a result without an open call"),
    (lambda history: history.complaints.append("Traceback"), "Traceback"),
    (lambda history: first_answered(history).refused.append("its client was refused: 400"), "refused: 400"),
]


@pytest.mark.timeout(300)
async def test_the_checker_sees_every_doctored_history_of_many_processes(place: Place) -> None:
    load, size = Load(40, 6, seed=11, pause=0.5, every=EVERY, lease=30.0), {"workers": 2, "servers": 1}
    _, good, _ = await run_company(place.forge, place.folder, load, on=place.server, **size)
    assert violations(good) == []
    assert good.takeovers == good.repeats == good.interrupted == good.refused == 0
    for doctor, sign in DOCTORED:
        bad = copy.deepcopy(good)
        doctor(bad)
        assert any(sign in line for line in violations(bad)), f"{sign}: {violations(bad)}"
