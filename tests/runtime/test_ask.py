"""`AgentLoop.ask`: an answer with the details of its turn."""

from __future__ import annotations

from typing import Any

from everloop import AgentLoop, Config, LLMResponse, MessageBus
from everloop.config import Rule
from everloop.runtime.agent import TurnResult
from everloop.testing import ScriptedProvider, call


async def test_ask_gives_the_answer_its_reason_and_what_it_used(tmp_path):
    script = [
        LLMResponse(content, calls, usage={"total_tokens": n})
        for content, calls, n in ((None, [call("list_dir")], 5), ("It is empty.", [], 7))
    ]
    async with AgentLoop(MessageBus(), ScriptedProvider(script), tmp_path) as agent:
        result = await agent.ask("What is here?")
    assert (result.text, result.reason, result.error, result.rounds) == ("It is empty.", "answer", None, 2)
    assert result.usage == {"total_tokens": 12}
    assert result.turn


async def test_an_error_is_distinguished_from_an_answer_that_looks_like_one(tmp_path):
    script: list[Any] = [ValueError("no such model"), "Sorry, I encountered an error: no such model"]
    async with AgentLoop(MessageBus(), ScriptedProvider(script), tmp_path) as agent:
        failed, answered = await agent.ask("one"), await agent.ask("two")
    assert failed.text == answered.text == "Sorry, I encountered an error: no such model"
    assert (failed.reason, failed.error) == ("error", "no such model")
    assert (answered.reason, answered.error) == ("answer", None)


async def test_a_limit_is_a_reason_and_not_an_error(tmp_path):
    provider = ScriptedProvider([call("list_dir")], repeat_last=True)
    async with AgentLoop(MessageBus(), provider, tmp_path, max_iterations=2) as agent:
        result = await agent.ask("go on")
    assert (result.reason, result.error, result.rounds) == ("max_rounds", None, 2)


async def test_a_question_and_its_approval_are_results_of_one_turn(tmp_path):
    provider = ScriptedProvider([call("write_file", path="a.txt", content="x"), "written"])
    config = Config(policy=(Rule(do="ask", tool="write_file"),), restrict_to_workspace=False)
    async with AgentLoop(MessageBus(), provider, tmp_path, config=config) as agent:
        asked = await agent.ask("write", attended=True)
        done = await agent.ask("/approve", attended=True)
    assert asked.reason == "question"
    assert (done.text, done.reason, done.turn) == ("written", "answer", asked.turn)


async def test_a_command_is_answered_without_a_turn(tmp_path):
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path) as agent:
        assert await agent.ask("/new") == TurnResult("This is a new conversation. The old one is kept in the log.")
        assert "/stop" in (await agent.ask("/help")).text
