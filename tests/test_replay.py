"""Replay: a recorded turn that runs again takes the same steps, and a forged recording is found out."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from everloop import AgentLoop, LLMResponse, MessageBus, ToolRegistry, tool
from everloop.actions import Limits
from everloop.engine import Turn, run_turn
from everloop.log import Call, CallEnded, CallsBegun, Compacted, Entry, ModelAnswered, TurnEnded, UserSaid, decode_entry
from everloop.messages import Conversation
from everloop.replay import replay
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import everloop, until
from tests.support.model_servers import server as server

KEY = "cli:direct"


class Recorder:
    """A loop on its own store, and its recordings."""

    def __init__(self, tmp_path: Path, *steps: object, **options: object) -> None:
        self.store = SQLiteStore(tmp_path / "recorded.db")
        self.model = ScriptedProvider(steps)  # type: ignore[arg-type]
        self.loop = AgentLoop(MessageBus(), self.model, tmp_path, store=self.store, **options)  # type: ignore[arg-type]

    async def log(self) -> list[Entry]:
        session = await self.store.session("me", KEY)
        assert session is not None
        return [logged.entry for logged in await self.store.read_log(session.id)]

    async def turn(self, number: int = -1) -> tuple[list[Entry], list[Entry]]:
        """Return (a turn's entries, those before it)."""
        turns = sorted(turn.first_seq for turn in await self.store.turns("me"))
        log = await self.log()
        first = turns[number] - 1
        later = [seq - 1 for seq in turns if seq - 1 > first]
        return log[first : later[0] if later else None], log[:first]


def kinds(entries: Sequence[Entry]) -> list[str]:
    return [str(entry.__struct_config__.tag) for entry in entries]


async def test_a_turn_gives_the_same_steps_again(tmp_path):
    made = Recorder(
        tmp_path, [call("list_dir"), call("write_file", path="a", content="A")], "one", call("no_tool"), "two"
    )
    async with made.loop as agent:
        await agent.process_direct("first")
        await agent.process_direct("second")
        for number, count in ((0, 6), (1, 5)):
            entries, history = await made.turn(number)
            result = await replay(entries, history)
            assert result.same, result.difference
            assert len(result.steps) == count
            assert result.cut == ""
            assert kinds(result.steps) == [kind for kind in kinds(entries) if kind != "begun"]
    assert len(made.model.requests) == 4  # all of them before the replay


async def test_results_are_given_in_the_order_in_which_they_came(tmp_path):
    there = asyncio.Event()

    @tool
    async def late() -> str:
        """Wait for the other one."""
        await there.wait()
        return "second"

    @tool
    async def early() -> str:
        """Be first."""
        there.set()
        return "first"

    made = Recorder(tmp_path, [call("late"), call("early")], "done")
    made.loop.tools.register(late)
    made.loop.tools.register(early)
    async with made.loop as agent:
        await agent.process_direct("go")
        entries, history = await made.turn()
    assert [entry.content for entry in entries if isinstance(entry, CallEnded)] == ["first", "second"]
    assert (await replay(entries, history)).same


async def test_steered_messages_are_replayed_at_their_positions(tmp_path):
    ready = asyncio.Event()

    @tool
    async def pause() -> str:
        """Wait until the second message is there."""
        await ready.wait()
        return "ok"

    made = Recorder(tmp_path, call("pause"), "both", busy="steer")
    made.loop.tools.register(pause)
    async with made.loop as agent:
        first = asyncio.create_task(agent.process_direct("one"))
        while not made.model.requests:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(agent.process_direct("two"))
        session = agent.dispatcher.session("me", KEY)
        assert session is not None
        await until(lambda: session.state.steering)
        ready.set()
        await asyncio.gather(first, second)
        entries, history = await made.turn()
    assert kinds([entry for entry in entries if not isinstance(entry, CallsBegun)]) == [
        "user", "answer", "result", "user", "answer", "end",
    ]  # fmt: skip
    result = await replay(entries, history)
    assert result.same, result.difference
    moved = [entry for entry in entries if entry != UserSaid("two", "user")]
    assert (await replay([*moved[:1], UserSaid("two", "user"), *moved[1:]], history)).same  # steered earlier: valid
    assert not (await replay([*moved[:2], UserSaid("two", "user"), *moved[2:]], history)).same  # before a result


@pytest.mark.parametrize("rounds", [1, 3])
async def test_a_turn_that_reached_its_limit_gives_the_same_steps(tmp_path, rounds):
    made = Recorder(tmp_path, *[call("list_dir") for _ in range(rounds)], max_iterations=rounds)
    async with made.loop as agent:
        await agent.process_direct("go")
        entries, history = await made.turn()
    assert isinstance(entries[-1], TurnEnded)
    assert entries[-1].reason == "max_rounds"
    assert (await replay(entries, history)).same


async def test_empty_answers_give_the_same_steps(tmp_path):
    made = Recorder(tmp_path, LLMResponse(""), LLMResponse(None))
    async with made.loop as agent:
        await agent.process_direct("go")
        entries, history = await made.turn()
    result = await replay(entries, history)
    assert result.same, result.difference
    assert len(result.steps) == 4


async def test_a_stopped_or_failed_turn_is_replayed_up_to_its_end(tmp_path):
    paused = asyncio.Event()

    @tool
    async def pause() -> str:
        """Wait forever."""
        paused.set()
        await asyncio.Event().wait()
        return ""

    made = Recorder(
        tmp_path, call("list_dir"), [call("pause"), call("list_dir")], call("list_dir"), ValueError("broken")
    )
    made.loop.tools.register(pause)
    async with made.loop as agent:
        task = asyncio.create_task(agent.process_direct("go"))
        await paused.wait()
        await agent.process_direct("/stop")
        await task
        await agent.process_direct("again")
        stopped = await replay(*await made.turn(0))
        failed = await replay(*await made.turn(1))
    assert stopped.same, stopped.difference
    assert kinds(stopped.steps)[:4] == ["user", "answer", "result", "answer"]
    assert "cancelled" in stopped.cut
    assert failed.same, failed.difference
    assert kinds(failed.steps) == ["user", "answer", "result"]
    assert "error" in failed.cut


async def test_a_turn_ended_by_a_budget_is_replayed_up_to_there():
    result = await replay([UserSaid("go"), *_round("a"), TurnEnded("budget", "no room")])
    assert result.same, result.difference
    assert kinds(result.steps) == ["user", "answer", "result"]
    assert "budget" in result.cut


async def test_a_call_id_freed_by_a_summary_gives_the_same_steps():
    history = [UserSaid("go"), *_round("call_0"), ModelAnswered("done"), TurnEnded("answer", "done")]
    summary = Compacted(5, "we went", turns=1)
    assert (result := await replay(history, [*history, summary])).same, result.difference


def _round(id: str) -> list[Entry]:
    return [ModelAnswered(calls=(Call(id, "list_dir"),)), CallEnded(id, "list_dir", "nothing")]


async def test_an_open_turn_is_replayed_as_far_as_it_goes():
    entries: list[Entry] = [UserSaid("go"), ModelAnswered(calls=(Call("a", "list_dir"),)), CallsBegun(("a",))]
    result = await replay(entries)
    assert result.same
    assert len(result.steps) == 2
    assert result.cut


async def test_a_call_interrupted_by_a_crash_gives_the_same_steps():
    begun: list[Entry] = [UserSaid("go"), ModelAnswered(calls=(Call("a", "send"),)), CallsBegun(("a",))]
    written: list[Entry] = []

    class Memory:
        def append(self, entries: Sequence[Entry], flush: bool = True) -> asyncio.Future[None]:
            written.extend(entries)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

        def park(self, entries: Sequence[Entry], question: str) -> asyncio.Future[None]:
            return self.append(entries)

        def steered(self) -> Sequence[UserSaid]:
            return ()

    async def model(conversation: Conversation, emit: object) -> LLMResponse:
        return LLMResponse("checked")

    turn = Turn("t", begun, Conversation(), Memory())
    await run_turn(turn, model, ToolRegistry(), Limits())  # type: ignore[arg-type]
    entries = [*begun, *written]
    assert (await replay(entries)).same
    forged = [_with(entry, content="sent") if isinstance(entry, CallEnded) else entry for entry in entries]
    assert not (await replay(forged)).same


def _with(entry: Entry, **changes: object) -> Entry:
    return msgspec.structs.replace(entry, **changes)


# ------------------------------------------------------------------------------------------------ what was changed


RECORDED: list[Entry] = [
    UserSaid("go"),
    ModelAnswered(calls=(Call("a", "one"), Call("b", "two"))),
    CallEnded("b", "two", "2", seconds=0.5),
    CallEnded("a", "one", "1"),
    ModelAnswered("three"),
    TurnEnded("answer", "three"),
]


async def test_the_recording_that_is_forged_below_is_valid():
    assert (await replay(RECORDED)).same
    assert (await replay([_with(one, seconds=9.0) if isinstance(one, CallEnded) else one for one in RECORDED])).same


@pytest.mark.parametrize("missing", [0, 1, 2, 3, 4])
async def test_a_missing_step_is_found(missing):
    result = await replay(RECORDED[:missing] + RECORDED[missing + 1 :])
    assert result.difference is not None
    assert result.difference.step >= 1


@pytest.mark.parametrize("place", [2, 4])
async def test_a_result_without_a_call_is_found(place):
    result = await replay([*RECORDED[:place], CallEnded("x", "three", "?"), *RECORDED[place:]])
    assert result.difference is not None
    assert result.difference.step == place + 1
    assert result.difference.recorded == CallEnded("x", "three", "?")


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (5, {"text": "four"}),
        (5, {"reason": "max_rounds"}),
        (4, {"content": "four"}),
        (4, {"content": ""}),
        (3, {"name": "other"}),
        (1, {"calls": (Call("a", "one"),)}),
        (1, {"calls": (Call("a", "one"), Call("b", "two"), Call("c", "three"))}),
    ],
)
async def test_a_changed_step_is_found(place, changes):
    result = await replay([*RECORDED[:place], _with(RECORDED[place], **changes), *RECORDED[place + 1 :]])
    assert result.difference is not None


async def test_steps_after_the_end_are_found():
    result = await replay([*RECORDED[:4], ModelAnswered("three"), ModelAnswered("more"), TurnEnded("answer", "more")])
    assert result.difference is not None
    assert not (await replay([*RECORDED, ModelAnswered("more"), TurnEnded("answer", "more")])).same


async def test_a_log_without_a_complete_turn_does_not_replay():
    assert not (await replay([])).same
    assert not (await replay([TurnEnded("answer", "x")])).same


# ------------------------------------------------------------------------------------------------ the command


async def recorded(server: FakeOpenAI) -> str:
    server.calls(call("list_dir", path="."))
    server.reply("Nothing there.")
    found: str = (await everloop("run", "--json", "look", server=server)).json["turn"]
    return found


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db")) as db, db:
        yield db


async def test_the_command_shows_each_step_and_writes_nothing(server):
    turn = await recorded(server)
    with database() as db:
        before = list(db.iterdump())
    done = await everloop("replay", turn[:16])
    assert done.status == 0
    assert done.lines[0].startswith(f"turn {turn} of session run:")
    assert [line.split()[1] for line in done.lines[1:-1]] == ["user", "answer", "result", "answer", "end"]
    assert done.lines[-1] == "same 5 steps"
    with database() as db:
        assert list(db.iterdump()) == before
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE entry SET data = replace(data, 'Nothing', 'Something') WHERE seq = 4", "different at step 5"),
        ('UPDATE entry SET data = replace(data, \'"name":"list_dir"\', \'"name":"exec"\') WHERE seq = 3', "step 3"),
        ("DELETE FROM entry WHERE seq = 3", "different at step 3"),
        ("DELETE FROM entry WHERE seq = 5", "different: the turn ended with “answer”, and its log with “nothing”"),
        ("UPDATE entry SET data = replace(data, 'answer', 'error') WHERE seq = 5", "different: the turn ended with"),
    ],
)
async def test_a_change_in_the_database_is_found(server, change, words):
    turn = await recorded(server)
    with database() as db:
        assert db.execute(change).rowcount == 1
    done = await everloop("replay", turn)
    assert done.status == 1
    assert words in done.out
    assert "same" not in done.out


def test_the_kinds_of_entries_are_the_ones_the_database_has():
    assert kinds([decode_entry('{"type":"new"}')]) == ["new"]
