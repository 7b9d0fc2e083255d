"""A program killed anywhere resumes: SIGKILL at every write to disk, and between writes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.log import UserSaid
from everloop.store.sqlite import SQLiteStore
from everloop.testing import FakeOpenAI, ScriptedProvider

from .crash.checker import violations
from .crash.forge import Forge
from .crash.history import History, lines, read
from .crash.programs import HOLD
from .crash.scene import KILLED, Meets, Scene, say

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def scene(forge: Forge, model: FakeOpenAI, tmp_path: Path) -> Any:
    def make(*messages: dict[str, Any], bus: str = "memory", then: str = "memory", **options: Any) -> Scene:
        return Scene(forge, model, tmp_path, list(messages), options, bus, then)

    return make


@pytest.fixture
def everywhere(scene: Any, step: int) -> Any:
    """Kills a scene at all of its commits with `make chaos`; otherwise at every second one if the scene is `shared`
    with the other bus, and at every fourth if it is `long`.
    """

    async def kill(
        *messages: dict[str, Any],
        shared: bool = False,
        long: bool = False,
        meets: Sequence[Meets[History]] = (),
        **options: Any,
    ) -> list[tuple[History, History]]:
        made: Scene = scene(*messages, **options)
        made.step = step if step == 1 or shared else 2 * step if long else 1
        return await made.everywhere(meets)

    return kill


def interrupted(runs: list[tuple[History, History]]) -> int:
    return sum(after.interrupted for _, after in runs)


# ---------------------------------------------------------------------------------------------- at every write


@pytest.mark.parametrize("then", ["memory", "durable"])
async def test_a_turn_killed_at_any_write_is_finished_by_the_next_start(everywhere: Any, then: str) -> None:
    meets: list[Meets[History]] = [
        interrupted,  # a `never` call was interrupted, and reported
        lambda runs: any(not before.messages for before, _ in runs),
        lambda runs: any(after.repeats for _, after in runs),  # an answer was on disk and perhaps sent
    ]
    await everywhere(say("m1", "s.n"), then=then, shared=True, meets=meets)


@pytest.mark.parametrize("then", ["memory", "durable"])
async def test_parallel_calls_killed_at_any_write_keep_the_results_they_had(everywhere: Any, then: str) -> None:
    def one_was_cut_off(runs: list[tuple[History, History]]) -> bool:
        return any(0 < after.interrupted < 2 for _, after in runs)  # the long one, but not the quick one

    await everywhere(say("m1", "snl"), then=then, shared=True, meets=[one_was_cut_off])


async def test_calls_that_must_run_alone_are_each_on_disk_before_the_next(everywhere: Any) -> None:
    await everywhere(say("m1", "aas"), meets=[interrupted])


async def test_queued_messages_are_answered_in_order_whichever_write_is_the_last(everywhere: Any) -> None:
    await everywhere(say("m1", "n"), say("m2", "s"), say("m3"))


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_sessions_side_by_side_do_not_disturb_each_other_when_killed(everywhere: Any, bus: str) -> None:
    messages = [say(f"{chat}{n}", plan, chat) for chat in "abc" for n, plan in enumerate(("n", "s"))]
    await everywhere(*messages, bus=bus, then=bus, long=True)


@pytest.mark.parametrize("then", ["memory", "durable"])
async def test_an_acknowledged_message_survives_a_kill_at_any_write(everywhere: Any, then: str) -> None:
    def one_was_acknowledged(runs: list[tuple[History, History]]) -> bool:
        return any(len(before.acknowledged) == 1 for before, _ in runs)

    await everywhere(say("m1", "n"), say("m2"), bus="durable", then=then, shared=True, meets=[one_was_acknowledged])


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_a_question_survives_a_kill_at_any_write_and_nothing_runs_before_its_answer(
    everywhere: Any, bus: str
) -> None:
    def one_was_parked(runs: list[tuple[History, History]]) -> bool:
        return any(message.state == "parked" for before, _ in runs for message in before.messages)

    await everywhere(say("m1", "ps.n"), say("m2"), bus=bus, then=bus, long=True, meets=[one_was_parked])


async def test_a_message_of_a_tool_is_sent_once_or_marked_whichever_write_is_the_last(everywhere: Any) -> None:
    def one_was_marked(runs: list[tuple[History, History]]) -> bool:
        return any(aside["repeat"] for _, after in runs for aside in after.asides)

    await everywhere(say("m1", "m.ms"), meets=[one_was_marked])


async def test_a_new_conversation_begins_once_whichever_write_is_the_last(everywhere: Any) -> None:
    new = {**say("new"), "content": "/new"}
    runs = await everywhere(say("m1", "s"), new, say("m2"))
    assert all(
        sum(type(place.entry).__name__ == "Cleared" for place in log) == 1
        for before, after in runs
        if len(before.messages) == 3
        for log in after.logs.values()
    )


async def test_a_steered_message_is_in_the_turn_or_after_it_and_never_lost(everywhere: Any) -> None:
    def one_was_steered(runs: list[tuple[History, History]]) -> bool:
        return any(len({each.turn for each in after.messages}) == 1 for _, after in runs if len(after.messages) == 2)

    await everywhere(say("m1", "l.s"), late=[say("m2", "s")], busy="steer", meets=[one_was_steered])


async def test_a_message_that_replaces_a_turn_does_so_or_waits_and_is_never_lost(everywhere: Any) -> None:
    def answers(runs: list[tuple[History, History]]) -> set[int]:
        return {len(after.answers) for _, after in runs if len(after.messages) == 2}

    runs = await everywhere(
        say("m1", "l.s"), late=[say("m2", "s")], busy="interrupt", meets=[lambda runs: answers(runs) >= {1, 2}]
    )
    assert answers(runs) == {1, 2}  # replaced where it ran, finished where it was killed


async def test_a_message_with_an_attachment_is_taken_once_whichever_write_is_the_last(everywhere: Any) -> None:
    def while_the_attachment_was_read(runs: list[tuple[History, History]]) -> bool:
        return any(before.messages and not before.logs for before, _ in runs)

    await everywhere(say("m1", "n", media=["notes.txt"]), say("m2", "s"), meets=[while_the_attachment_was_read])


async def test_a_message_published_again_after_a_kill_is_taken_once(scene: Any) -> None:
    one = scene(*[say(f"m{n}", "s", chat=f"{n % 2}") for n in range(3)], then="durable")
    for number, when in itertools.product(range(1, 4), ("before", "after")):
        folder, messages, _ = one.named(f"again-{when}{number}")
        assert await one.forge.run("publisher", folder=str(folder), messages=messages, die_at=(number, when)) == KILLED
        assert await one.forge.run("publisher", folder=str(folder), messages=messages) == 0
        assert await one.forge.run("agent", folder=str(folder), url=one.model.base_url, bus="durable") == 0
        history = one.read(folder)
        assert violations(history) == []
        assert len(history.messages) == 3


async def test_a_publisher_killed_at_any_write_loses_nothing_it_acknowledged(scene: Any) -> None:
    one = scene(*[say(f"m{n}", chat=f"{n % 2}") for n in range(5)], then="durable")
    for number, when in itertools.product(range(1, 6), ("before", "after")):
        folder, messages, _ = one.named(f"{when}{number}")
        status = await one.forge.run("publisher", folder=str(folder), messages=messages, die_at=(number, when))
        assert status == KILLED
        before = one.read(folder)
        assert len(before.acknowledged) == number - 1
        assert len(before.messages) == number - (when == "before")
        assert await one.forge.run("agent", folder=str(folder), url=one.model.base_url, bus="durable") == 0
        assert violations(one.read(folder), before) == []


# ---------------------------------------------------------------------------------------------- between the writes


@pytest.mark.parametrize("then", ["memory", "durable"])
@pytest.mark.parametrize("plan", ["k", "K", "kK", "sK", "nK", "n.K.s", "aK"])
async def test_a_process_killed_inside_a_tool_resumes_as_the_tool_declares(scene: Any, plan: str, then: str) -> None:
    before, after = await scene(say("m1", plan), say("m2"), then=then).killed("inside")
    assert before.open_turns
    assert violations(after, before) == []
    starts = [run["tool"] for run in after.runs if run["what"] == "start"]
    assert starts.count("fatal_never") == (1 if plan in ("K", "sK", "nK", "n.K.s", "aK") else 0)
    assert after.interrupted >= plan.count("K")
    if plan in ("k", "kK"):
        assert starts.count("fatal_safe") == 2


@pytest.mark.parametrize("piece", [1, 3])
async def test_a_process_killed_during_the_models_answer_asks_again(scene: Any, piece: int) -> None:
    one = scene(say("m1", "s"))
    before, after = await one.killed("speaking", die_at_text=piece)
    assert violations(after, before) == []
    assert [request["round"] for request in after.requests] == [0, 1, 1]
    assert after.repeats == 0


@pytest.mark.parametrize("bus", ["memory", "durable"])
async def test_an_answer_that_was_written_and_not_delivered_is_delivered_by_the_next_start(
    scene: Any, bus: str
) -> None:
    before, after = await scene(say("m1", "s"), bus=bus, then=bus).killed("unsent", die_unsent=True)
    assert before.unsent == 1
    assert before.delivered == []
    assert violations(after, before) == []
    assert len(after.delivered) == 1


async def test_many_answers_left_behind_are_all_delivered(scene: Any) -> None:
    """There are more answers than one read of the outbox returns."""
    one = scene(*[say(f"m{n}", chat=str(n)) for n in range(120)])
    folder, messages, _ = one.named("many")
    url = one.model.base_url
    # A worker that sends nothing answers everything, and is then killed.
    worker = one.forge.start("worker", folder=str(folder), url=url)
    assert await one.forge.run("publisher", folder=str(folder), messages=messages) == 0
    while len((before := one.read(folder)).answers) < 120:
        await asyncio.sleep(0.05)
    await worker.kill()
    await worker.wait()
    assert await one.forge.run("agent", folder=str(folder), url=url) == 0
    assert violations(one.read(folder), before) == []


async def test_a_store_opened_by_many_at_once_or_killed_during_creation_is_whole(forge: Forge, tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        children = [forge.start("opener", folder=str(folder)) for _ in range(4)]
        await asyncio.wrap_future(children[0].pid)
        await asyncio.sleep(0.002 * number)
        await children[0].kill()
        statuses = [await child.wait() for child in children]
        assert statuses[1:] == [0, 0, 0]
        history = read(folder)
        assert history.integrity == "ok"
        assert len(history.messages) in (3, 4)


def hold_commit(store: SQLiteStore, number: int) -> tuple[threading.Event, threading.Event]:
    """Hold this commit of a store; return the event that it has been reached, and the one that lets it continue."""
    reached, go_on = threading.Event(), threading.Event()

    def hook(when: str) -> None:
        if when == "before" and store.writer.commits == number - 1:
            reached.set()
            go_on.wait(30)

    store.writer.commit_hooks.add(hook)
    return reached, go_on


async def test_messages_that_arrive_while_earlier_ones_are_written_keep_their_order(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    second, go_on = hold_commit(store, 3)  # the first ones: a look into the outbox, and the first message
    bus = MessageBus()
    async with AgentLoop(bus, ScriptedProvider(["ok"] * 5), tmp_path, store=store) as loop:
        running = asyncio.create_task(loop.run())
        for number in range(4):
            await bus.publish_inbound(InboundMessage("test", "me", "a", f"m{number}"))
        assert await asyncio.to_thread(second.wait, 30)
        await bus.publish_inbound(InboundMessage("test", "me", "a", "m4"))
        await asyncio.sleep(0.05)
        go_on.set()
        for _ in range(5):
            await bus.consume_outbound()
        loop.stop()
        await running
        log = await store.read_log(1)
    said = [one.entry.content for one in log if isinstance(one.entry, UserSaid)]
    assert said == ["m0", "m1", "m2", "m3", "m4"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_program_that_waits_for_a_session_gets_its_answer_when_the_other_ends_or_dies(
    scene: Any, killed: bool
) -> None:
    one = scene(say("m1", "ll.ll" if killed else "ll"))
    folder, messages, _ = one.named("two")
    url = one.model.base_url
    (folder / HOLD).touch()  # until another program waits for it
    first = one.forge.start("agent", folder=str(folder), url=url, messages=messages)
    while len(lines(folder / "runs")) < 2:
        await asyncio.sleep(0.005)
    second = one.forge.start("direct", folder=str(folder), url=url, content="mark:two-m2.s")
    while len((await asyncio.to_thread(one.read, folder)).messages) < 2:
        await asyncio.sleep(0.005)
    if killed:
        await first.kill()
    (folder / HOLD).unlink()
    assert await second.wait() == 0
    assert [told["content"] for told in lines(folder / "told")] == ["I am done:two-m2.s and glad"]
    assert await first.wait() == (KILLED if killed else 0)
    history = one.read(folder)
    assert killed or history.interrupted == 0
    assert not history.open_turns


async def test_messages_taken_from_the_bus_are_kept_when_the_loop_is_stopped(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    holding, go_on = hold_commit(store, 2)  # that of the first message, after a look into the outbox
    bus = MessageBus()
    async with AgentLoop(bus, ScriptedProvider(["ok"] * 3), tmp_path, store=store) as loop:
        running = asyncio.create_task(loop.run())
        for number in range(3):
            await bus.publish_inbound(InboundMessage("test", "me", "a", f"m{number}"))
        assert await asyncio.to_thread(holding.wait, 30)
        while bus.inbound_size:
            await asyncio.sleep(0.001)
        loop.stop()
        await asyncio.sleep(0.01)
        go_on.set()
        await running
        running = asyncio.create_task(loop.run())
        for _ in range(3):
            await asyncio.wait_for(bus.consume_outbound(), 30)
        loop.stop()
        await running
        log = await store.read_log(1)
    said = [one.entry.content for one in log if isinstance(one.entry, UserSaid)]
    assert said == ["m0", "m1", "m2"]
