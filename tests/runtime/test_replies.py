"""One word answers a question: y, n, or a for the rest of the session."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.bus import CronOrigin
from everloop.commands import Answer, answer_of, kind_of
from everloop.config import Config, Rule
from everloop.log import CallsAsked, CallsDecided
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call

from .test_approvals import ASK, LAUNCH, agent_of, log_of, pad

__all__ = ["pad"]

TWICE = [call("launch", name="ada"), "first", call("launch", name="bob"), "second"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("y", Answer(True)), (" YES\n", Answer(True)), ("N", Answer(False)), ("no", Answer(False)),
        ("a", Answer(True, always=True)), ("Always ", Answer(True, always=True)),
        ("/approve", Answer(True)), ("/approve always", Answer(True, always=True)),
        ("/approve@bot ALWAYS", Answer(True, always=True)), ("/deny", Answer(False)),
        ("/deny not now", Answer(False, note="not now")),
        ("yes please", None), ("yep", None), ("", None), ("/approve all", None), ("n.", None), ("ja", None),
    ],
)  # fmt: skip
def test_what_a_message_answers(text, answer):
    assert answer_of(text) == answer


def test_only_a_bare_word_from_a_user_is_a_reply():
    def kind(content: str = "y", channel: str = "test", **more: Any) -> str:
        return kind_of(InboundMessage(channel, "ann", "1", content, **more))

    assert kind() == "reply"
    assert kind("/approve always") == "urgent"
    assert kind(media=["a.png"]) == "message"
    assert kind(channel="system") == "message"
    assert kind(channel="sub") == "message"
    assert kind("/approve", cause=CronOrigin("job")) == "message"
    assert kind(cause=CronOrigin("job")) == "message"


@pytest.mark.parametrize(("word", "launched"), [("y", ["ada"]), (" Yes ", ["ada"]), ("n", []), ("NO", [])])
async def test_a_word_answers_the_open_question(tmp_path, pad, word, launched):
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        question = await agent.process_direct("up!", attended=True)
        assert "y (yes), n (no) or a (always" in question.splitlines()[-1]
        assert await agent.process_direct(word, attended=True) == "it flies"
        assert await agent.question() is None
    assert pad.launched == launched


async def test_without_a_question_the_words_are_messages(tmp_path, pad):
    async with agent_of(tmp_path, pad, ["one", "two", *LAUNCH]) as agent:
        assert isinstance(agent.provider, ScriptedProvider)
        assert await agent.process_direct("y", attended=True) == "one"
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "no"))
        assert (await agent.bus.consume_outbound()).content == "two"
        agent.stop()
        await running
        assert [message["content"] for message in agent.provider.requests[-1].messages][-1].startswith("no")


async def test_always_is_for_the_session_and_ends_with_it(tmp_path, pad):
    steps = [*TWICE, call("launch", name="cy"), "third", "fourth", call("launch", name="dan")]
    async with agent_of(tmp_path, pad, steps[:2]) as agent:
        await agent.process_direct("up!", attended=True)
        assert await agent.process_direct("a", attended=True) == "first"
        asked = next(entry for entry in await log_of(agent) if isinstance(entry, CallsAsked))
        decided = next(entry for entry in await log_of(agent) if isinstance(entry, CallsDecided))
        assert asked.grants == ("tool:launch",)
        assert decided.always
        assert await agent.store.grants("me", "cli:direct") == {"tool:launch"}
    async with agent_of(tmp_path, pad, [*steps[2:4], steps[4], steps[6], steps[7]]) as agent:  # after a restart
        assert await agent.process_direct("again!", attended=True) == "second"
        other = await agent.process_direct("up!", "cli:other", attended=True)
        assert "May I" in other  # another session was granted nothing
        await agent.process_direct("n", "cli:other", attended=True)
        await agent.process_direct("/new", attended=True)
        assert await agent.store.grants("me", "cli:direct") == set()
        assert "May I" in await agent.process_direct("again!", attended=True)
    assert pad.launched == ["ada", "bob"]


async def test_a_rule_that_denies_wins_over_a_grant(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        await agent.process_direct("up!", attended=True)
        await agent.process_direct("/approve always", attended=True)
    rules = Config(policy=(Rule(do="deny", tool="launch"),))
    async with agent_of(tmp_path, pad, LAUNCH, rules) as agent:
        await agent.process_direct("up!", attended=True)
    assert pad.launched == ["ada"]


async def test_a_plain_yes_grants_nothing(tmp_path, pad):
    async with agent_of(tmp_path, pad, TWICE) as agent:
        await agent.process_direct("up!", attended=True)
        assert await agent.process_direct("y", attended=True) == "first"
        assert "May I" in await agent.process_direct("again!", attended=True)
    assert pad.launched == ["ada"]


async def test_a_grant_outside_the_workspace_covers_exactly_one_path(tmp_path):
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    workspace.mkdir()
    outside.mkdir()
    for name in "ab":
        (outside / name).write_text(f"text of {name}")
    a, b = str(outside / "a"), str(outside / "b")
    steps: list[Any] = [call("read_file", path=a), "1", call("read_file", path=a), "2", call("read_file", path=b), "3",
             call("write_file", path=a, content="gone"), "4"]  # fmt: skip
    options = {"restrict_to_workspace": True, "store": tmp_path / "store.db"}
    model = ScriptedProvider(steps)
    async with AgentLoop(MessageBus(), model, workspace, **options) as agent:
        assert a in await agent.process_direct("read", attended=True)
        assert await agent.process_direct("a", attended=True) == "1"
        assert await agent.process_direct("again", attended=True) == "2"
        seen = [message for message in model.requests[-1].messages if message["role"] == "tool"]
        assert all("text of a" in message["content"] for message in seen)
        assert b in await agent.process_direct("the other", attended=True)
        assert await agent.process_direct("n", attended=True) == "3"
        assert "May I" in await agent.process_direct("write", attended=True)
    assert (outside / "a").read_text() == "text of a"


async def test_a_grant_for_a_command_covers_exactly_that_command(tmp_path):
    rules = Config(policy=(Rule(do="ask", command="touch"),))
    lines = ["touch a", "rm a", "touch a", "touch b", "touch a; touch b"]
    steps: list[Any] = [step for line in lines for step in (call("exec", command=line), line)]
    options = {"restrict_to_workspace": True, "store": tmp_path / "store.db", "config": rules}
    async with AgentLoop(MessageBus(), ScriptedProvider(steps), tmp_path / "workspace", **options) as agent:
        agent.workspace.mkdir()
        await agent.process_direct("go", attended=True)
        assert await agent.process_direct("a", attended=True) == "touch a"
        assert await agent.process_direct("go", attended=True) == "rm a"
        assert await agent.process_direct("go", attended=True) == "touch a"
        for _ in range(2):
            assert "May I" in await agent.process_direct("go", attended=True)
            await agent.process_direct("n", attended=True)
        assert sorted(path.name for path in agent.workspace.iterdir()) == ["a"]


# ---------------------------------------------------------------------------------------------- over a bus


async def test_in_a_group_any_member_may_answer_and_other_chats_may_not(tmp_path, pad):
    async with agent_of(tmp_path, pad, [LAUNCH[0], "hm?", LAUNCH[1]]) as agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "group", "up!"))
        await agent.bus.consume_outbound()
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "2", "y"))  # another chat: an ordinary message
        assert (await agent.bus.consume_outbound()).content == "hm?"
        assert pad.launched == []
        await agent.bus.publish_inbound(InboundMessage("test", "bob", "group", "Y"))
        said = [(await agent.bus.consume_outbound()).content for _ in range(2)]
        assert sorted(said) == ["Approved.", "it flies"]
        info = await agent.store.session("me", "test:group")
        assert info is not None
        log = [one.entry for one in await agent.store.read_log(info.id)]
        agent.stop()
        await running
    assert [entry.by for entry in log if isinstance(entry, CallsDecided)] == ["bob"]
    assert pad.launched == ["ada"]


@pytest.mark.parametrize("word", ["y", "a", "always", "/approve always"])
async def test_internal_messages_do_not_answer_a_question(tmp_path, pad, word):
    async with agent_of(tmp_path, pad, [*LAUNCH, "heard"]) as agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "up!"))
        await agent.bus.consume_outbound()
        await agent.bus.publish_inbound(InboundMessage("system", "sub", "test:1", word))
        assert "still waiting" in (await agent.bus.consume_outbound()).content
        job = InboundMessage("test", "cron", "1", word, cause=CronOrigin("job"))
        await agent.bus.publish_inbound(job)
        assert "still waiting" in (await agent.bus.consume_outbound()).content
        assert pad.launched == []
        assert await agent.question("test:1") is not None
        agent.stop()
        await running


@pytest.mark.parametrize("busy", ["queue", "steer", "interrupt"])
async def test_a_word_answers_whatever_other_messages_do(tmp_path, pad, busy):
    async with agent_of(tmp_path, pad, LAUNCH, busy=busy) as agent:
        await agent.process_direct("up!", attended=True)
        assert await agent.process_direct("y", attended=True) == "it flies"
    assert pad.launched == ["ada"]


async def test_a_redelivered_reply_neither_answers_again_nor_becomes_a_message(tmp_path, pad):
    steps = [call("launch", name="ada"), call("launch", name="bob"), "both"]
    async with agent_of(tmp_path, pad, steps) as agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "up!", id="m1"))
        await agent.bus.consume_outbound()
        word = InboundMessage("test", "ann", "1", "y", id="m2")
        await agent.bus.publish_inbound(word)
        said = [(await agent.bus.consume_outbound()).content for _ in range(2)]  # approved, and the next question
        assert any('"bob"' in text for text in said)
        await agent.bus.publish_inbound(word)
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "n", id="m3"))
        said = [(await agent.bus.consume_outbound()).content for _ in range(2)]
        assert sorted(said) == ["Denied.", "both"]
        agent.stop()
        await running
    assert pad.launched == ["ada"]


# ---------------------------------------------------------------------------------------------- killed in between


def rows(folder: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(folder / "store.db")) as db:
        return db.execute(sql).fetchall()


def checked(folder: Path) -> bool:
    """Return whether the question is answered; check that the grant is on disk exactly then, and that nothing ran
    before."""
    answered = [json.loads(data) for (data,) in rows(folder, "SELECT data FROM entry WHERE kind = 'decided'")]
    granted = rows(folder, "SELECT name FROM session_grant")
    assert granted == ([("tool:launch",)] if answered else [])
    assert len(answered) <= 1
    if not answered:
        assert not (folder / "launched").exists()
    return bool(answered)


@pytest.mark.timeout(300)
async def test_killed_between_question_and_answer_and_at_every_write_of_the_answer(forge, tmp_path):
    async def one(at: int) -> bool:
        folder = tmp_path / str(at)
        folder.mkdir()
        assert await forge.run("questioner", folder=str(folder), what="ask") == -signal.SIGKILL
        assert not checked(folder)
        status = await forge.run("questioner", folder=str(folder), what="answer", at=at)
        checked(folder)
        if status == 0:
            return False
        assert status == -signal.SIGKILL
        assert await forge.run("questioner", folder=str(folder), what="answer") == 0  # delivered once more
        assert checked(folder)
        launched = (folder / "launched").read_text().split() if (folder / "launched").exists() else []
        assert launched in (["ada"], [])  # if it was interrupted, it is not repeated
        return True

    killed = [await one(at) for at in range(1, 11)]
    assert killed[:4] == [True] * 4


async def test_an_answer_accepted_before_a_kill_is_taken_by_the_next_start(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH[:1]) as agent:
        await agent.process_direct("up!", attended=True)
    store = SQLiteStore(tmp_path / "store.db")
    await DurableBus(store).publish_inbound(InboundMessage("cli", "ann", "direct", "y"))  # and no agent is running
    await store.close()
    store = SQLiteStore(tmp_path / "store.db")
    bus = DurableBus(store)
    agent = AgentLoop(bus, ScriptedProvider(["it flies"]), tmp_path, config=ASK, store=store)
    agent.tools.register(pad.tool())
    running = asyncio.create_task(agent.run())
    assert (await bus.consume_outbound()).content == "Approved."
    while not pad.launched:
        await asyncio.sleep(0.01)
    agent.stop()
    await running
    await agent.close()
    assert pad.launched == ["ada"]
