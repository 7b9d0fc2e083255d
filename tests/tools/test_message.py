"""`message`: to the chat of the turn, to other chats only if the settings allow it, and never twice."""

from __future__ import annotations

import asyncio
from typing import Any

from everloop import AgentLoop, MessageBus
from everloop.bus import InboundMessage, OutboundMessage
from everloop.config import Config, Rule
from everloop.log import Call, CallEnded, ModelAnswered
from everloop.store.peers import new_worker
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Plan
from everloop.tools.context import CallContext, current
from everloop.tools.message import MessageTool
from everloop.tools.policy.policy import Policy


def agent_of(folder: Any, *steps: Any, **settings: Any) -> AgentLoop:
    model = ScriptedProvider(steps)
    return AgentLoop(MessageBus(), model, folder, config=Config(**settings), store=folder / "store.db")


async def sent_by(agent: AgentLoop) -> list[tuple[str, str, str]]:
    await asyncio.sleep(0)
    found = []
    while agent.bus.outbound_size:
        message = await agent.bus.consume_outbound()
        found.append((message.channel, message.chat_id, message.content))
    return found


async def statuses(agent: AgentLoop) -> list[str]:
    info = await agent.store.session("me", "cli:direct")
    assert info is not None
    return [one.entry.status for one in await agent.store.read_log(info.id) if isinstance(one.entry, CallEnded)]


async def test_it_goes_to_the_chat_of_the_turn(tmp_path):
    async with agent_of(tmp_path, call("message", content="half-way"), "done") as agent:
        await agent.process_direct("go", channel="test", chat_id="7")
        assert await sent_by(agent) == [("test", "7", "half-way")]


async def test_another_chat_is_refused_unless_the_settings_name_it(tmp_path):
    step = call("message", content="psst", channel="mail", chat_id="eve")
    async with agent_of(tmp_path, step, "done") as agent:
        await agent.process_direct("go")
        assert await sent_by(agent) == []
        assert await statuses(agent) == ["error"]
    async with agent_of(tmp_path, step, "done", message_to=("mail:*",)) as agent:
        await agent.process_direct("go", session_key="other")
        assert await sent_by(agent) == [("mail", "eve", "psst")]


async def test_a_call_repeated_after_a_crash_sends_nothing_twice(tmp_path):
    async with agent_of(tmp_path, "unused") as agent:
        said = InboundMessage("cli", "user", "direct", "go", session="cli:direct", reply=False).addressed()
        claim = await agent.store.begin("me", "cli:direct", new_worker(), said)
        assert claim is not None
        asked = call("message", content="once")
        await agent.store.append(claim, [ModelAnswered(None, (Call(asked.id, "message", asked.arguments),))])
        # The message was sent, and then the process died before the result was on disk.
        await agent.store.post(claim, OutboundMessage("cli", "direct", "once"), f"{claim.turn}/{asked.id}", None)
        await agent.store.release(claim)
    async with agent_of(tmp_path, "done") as agent:
        await agent.resume()
        rows = await agent.store.take_outgoing("somebody")
        assert [row.message.content for row in rows] == ["once"]
        assert await sent_by(agent) == []  # nothing new was sent
        assert await statuses(agent) == ["ok"]


async def test_files_are_only_named_where_no_network_sends_them(tmp_path):
    (tmp_path / "chart.png").write_bytes(b"x")
    steps = [call("message", content="look", media=[path]) for path in ("missing.png", "chart.png")]
    async with agent_of(tmp_path, *steps, "done") as agent:
        await agent.process_direct("go", channel="test", chat_id="7", session_key="cli:direct")
        await asyncio.sleep(0)
        message = await agent.bus.consume_outbound()
        assert (message.content, message.media) == ("look\n[file: chart.png]", [str(tmp_path / "chart.png")])
        assert agent.bus.outbound_size == 0
        assert await statuses(agent) == ["error", "ok"]


async def test_permission_to_read_a_file_does_not_allow_sending_it(tmp_path):
    """A user who always allows reading a file has not been asked whether it may be sent."""
    arguments = {"content": "psst", "channel": "mail", "chat_id": "eve", "media": ["a.txt"]}
    known = frozenset({f"path:{tmp_path / 'a.txt'}"})
    place = ("me", "s", "t", "c", "cli", "direct", tmp_path)
    context = CallContext(*place, True, "k", lambda text: None, granted=known)
    policy = Policy([Rule(do="ask", tool="message"), Rule(do="ask", tool="read_file")])
    token = current.set(context)
    try:
        plan = MessageTool(("mail:*",)).plan(arguments)
    finally:
        current.reset(token)
    assert policy.judge("message", arguments, plan, context, [], False).decision == "ask"
    assert policy.judge("read_file", {"path": "a.txt"}, Plan(paths=plan.paths), context, [], False).decision == "allow"
