"""The examples of the specification, run as written: only the provider and the path are filled in."""

from __future__ import annotations

import asyncio

import everloop
from everloop import AgentLoop, InboundMessage, LLMProvider, LLMResponse, MessageBus, Tool, ToolCallRequest
from everloop.testing import ScriptedProvider, call


async def test_the_bus_example_runs_as_written(tmp_path, capsys):
    my_provider, path = ScriptedProvider(["hello"]), tmp_path / "workspace"
    path.mkdir()

    bus = MessageBus()
    agent = AgentLoop(bus=bus, provider=my_provider, workspace=path, model="…", max_iterations=5)
    task = asyncio.create_task(agent.run())
    await bus.publish_inbound(InboundMessage(channel="cli", sender_id="user", chat_id="direct", content="hi"))
    print((await bus.consume_outbound()).content); agent.stop(); await task  # noqa: E702  # fmt: skip

    assert capsys.readouterr().out == "hello\n"
    assert my_provider.requests[0].model == "…"
    assert my_provider.requests[0].messages[-1] == {"role": "user", "content": "hi"}


async def test_the_direct_example_runs_as_written_after_the_loop_was_stopped(tmp_path, capsys):
    my_provider = ScriptedProvider(["first", call("write_file", path="a.txt", content="made"), "It is made."])
    bus = MessageBus()
    agent = AgentLoop(bus=bus, provider=my_provider, workspace=tmp_path, model="m", max_iterations=5)
    task = asyncio.create_task(agent.run())
    await bus.publish_inbound(InboundMessage(channel="cli", sender_id="user", chat_id="direct", content="hi"))
    await bus.consume_outbound(); agent.stop(); await task  # noqa: E702  # fmt: skip

    print(await agent.process_direct("make a file", session_key="cli:interactive", channel="cli", chat_id="user"))

    assert capsys.readouterr().out == "It is made.\n"
    assert (tmp_path / "a.txt").read_text() == "made"
    await agent.close()


async def test_a_provider_is_one_method_and_a_tool_can_be_added_at_run_time(tmp_path):
    class MyTool(Tool):
        name = "shout"
        description = "Says it louder."
        parameters = {  # noqa: RUF012
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        }

        async def execute(self, text):
            return text.upper()

    seen = []

    class MyProvider(LLMProvider):  # the whole of a custom provider
        async def chat(self, messages, tools=None, model=None):
            seen.append(list(messages))
            if messages[-1]["role"] == "user":
                assert "shout" in [tool["function"]["name"] for tool in tools]
                return LLMResponse(content=None, tool_calls=[ToolCallRequest("c1", "shout", {"text": "hey"})])
            return LLMResponse(content=f"it said {messages[-1]['content']}")

    async with AgentLoop(bus=MessageBus(), provider=MyProvider(), workspace=tmp_path) as agent:
        agent.tools.register(MyTool())
        assert await agent.process_direct("shout") == "it said HEY"
    assert [message["role"] for message in seen[-1]] == ["system", "user", "assistant", "tool"]
    assert seen[-1][-1] == {"role": "tool", "tool_call_id": "c1", "name": "shout", "content": "HEY"}


def test_a_session_key_is_channel_and_chat():
    message = InboundMessage("telegram", "u", "12:34", "hi")
    assert message.session_key == "telegram:12:34"
    assert message.media == []
    assert message.metadata == {}


def test_a_response_needs_only_its_content():
    assert not LLMResponse("hi").has_tool_calls
    assert LLMResponse(None, [ToolCallRequest("1", "t", {})]).has_tool_calls


def test_the_public_names_come_from_the_root():
    names = (
        "AgentLoop AgentExecutor AgentDefinition OutputObject MessageBus InboundMessage OutboundMessage LLMProvider "
        "LLMResponse ToolCallRequest Tool tool ToolRegistry ContextBuilder SessionManager SubagentManager CronService "
        "Config"
    )
    for name in names.split():
        assert getattr(everloop, name) is not None
