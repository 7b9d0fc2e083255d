"""A model that repeats a failing call is told so, and then its turn ends."""

from __future__ import annotations

import json
from typing import Any

from everloop import AgentLoop, MessageBus, ToolRegistry, tool
from everloop.actions import failed_before
from everloop.log import Call, CallEnded, Entry, ModelAnswered, TurnEnded, UserSaid
from everloop.replay import replay
from everloop.testing import ScriptedProvider, call
from everloop.tools.context import CallContext


@tool
async def fail(n: int = 0) -> str:
    """Always fails."""
    raise RuntimeError("no luck")


async def turn_of(folder: Any, *steps: Any) -> tuple[ScriptedProvider, str, list[Any]]:
    model = ScriptedProvider(steps)
    async with AgentLoop(MessageBus(), model, folder, store=folder / "store.db") as agent:
        agent.tools.register(fail)
        answer = await agent.process_direct("go")
        info = await agent.store.session("me", "cli:direct")
        assert info is not None
        log = [one.entry for one in await agent.store.read_log(info.id)]
    assert (await replay(log)).same
    return model, answer, log


def results(model: ScriptedProvider) -> list[dict[str, Any]]:
    return [json.loads(m["content"]) for m in model.requests[-1].messages if m["role"] == "tool"]


async def test_a_failed_call_tells_the_model_what_to_do(tmp_path):
    model, _, _ = await turn_of(tmp_path, call("fail"), "sorry")
    (result,) = results(model)
    assert result["status"] == "error"
    assert "no luck" in result["message"]
    assert "notice" not in result


async def test_the_same_failing_call_is_noticed_and_then_the_turn_ends(tmp_path):
    model, answer, log = await turn_of(tmp_path, call("fail"), call("fail"), call("fail"))
    assert [("notice" in result) for result in results(model)] == [False, True]
    assert len(model.requests) == 3
    assert log[-1].reason == "repeating"
    assert "fail" in answer


async def test_other_arguments_are_another_call(tmp_path):
    _, answer, _ = await turn_of(tmp_path, *(call("fail", n=n) for n in range(6)), "found it")
    assert answer == "found it"


async def test_something_new_that_works_in_between_starts_the_count_again(tmp_path):
    steps: list[Any] = []
    for n in range(4):
        steps += [call("fail"), call("write_file", path="a.txt", content=str(n))]
    _, answer, _ = await turn_of(tmp_path, *steps, "fixed")
    assert answer == "fixed"


async def test_doing_the_same_old_thing_in_between_does_not(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    steps: list[Any] = []
    for _ in range(4):
        steps += [call("fail"), call("read_file", path="a.txt")]
    _, _, log = await turn_of(tmp_path, *steps)
    assert log[-1].reason == "repeating"


async def test_calls_of_tools_that_do_not_exist_count_too(tmp_path):
    _, _, log = await turn_of(tmp_path, *(call("nonsense") for _ in range(3)))
    assert log[-1].reason == "repeating"


def test_an_earlier_turn_does_not_count():
    failed: list[Entry] = [ModelAnswered(None, (Call("a", "x"),)), CallEnded("a", "x", "no", "error")]
    again: list[Entry] = [ModelAnswered(None, (Call("b", "x"),))]
    assert failed_before([UserSaid("1"), *failed, TurnEnded("answer"), UserSaid("2"), *again], Call("b", "x")) == 0
    assert failed_before([UserSaid("1"), *failed, *again], Call("b", "x")) == 1


async def test_a_result_beyond_its_budget_is_cut_in_the_middle_and_the_whole_can_be_read(tmp_path):
    @tool
    async def talk() -> str:
        """Says much."""
        return "head " + "".join(f"line {n}\n" for n in range(1000)) + " tail"

    context = CallContext(
        "me", "s", "t", "c", "cli", "d", tmp_path, True, "k", lambda text: None, outputs=tmp_path / "out"
    )
    result = await ToolRegistry([talk], result_limit=1000).run(Call("c", "talk"), context)
    assert len(result.content) <= 1000
    assert result.content.startswith("head ")
    assert result.content.endswith(" tail")
    (saved,) = (tmp_path / "out").iterdir()
    assert str(saved) in result.content
    assert "line 500\n" in saved.read_text()
    assert "line 500\n" not in result.content
