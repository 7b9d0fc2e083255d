"""A model that repeats a failing call is warned, and then its turn ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


async def test_different_arguments_make_a_different_call(tmp_path):
    _, answer, _ = await turn_of(tmp_path, *(call("fail", n=n) for n in range(6)), "found it")
    assert answer == "found it"


async def test_a_new_successful_call_in_between_resets_the_count(tmp_path):
    steps: list[Any] = []
    for n in range(4):
        steps += [call("fail"), call("write_file", path="a.txt", content=str(n))]
    _, answer, _ = await turn_of(tmp_path, *steps, "fixed")
    assert answer == "fixed"


async def test_a_repeated_successful_call_in_between_does_not_reset_the_count(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    steps: list[Any] = []
    for _ in range(4):
        steps += [call("fail"), call("read_file", path="a.txt")]
    _, _, log = await turn_of(tmp_path, *steps)
    assert log[-1].reason == "repeating"


async def test_calls_of_unknown_tools_count_too(tmp_path):
    _, _, log = await turn_of(tmp_path, *(call("nonsense") for _ in range(3)))
    assert log[-1].reason == "repeating"


def test_an_earlier_turn_does_not_count():
    failed: list[Entry] = [ModelAnswered(None, (Call("a", "x"),)), CallEnded("a", "x", "no", "error")]
    again: list[Entry] = [ModelAnswered(None, (Call("b", "x"),))]
    assert failed_before([UserSaid("1"), *failed, TurnEnded("answer"), UserSaid("2"), *again], Call("b", "x")) == 0
    assert failed_before([UserSaid("1"), *failed, *again], Call("b", "x")) == 1


async def test_a_long_result_is_shortened_in_the_middle_and_saved_in_full(tmp_path):
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


# ---------------------------------------------------------------------------------------------- failures in results

FAILURES: list[dict[str, Any]] = [
    {"success": False, "reason": "no luck"},
    {"success": False, "data": [1]},
    {"ok": False},
    {"status": "error", "message": "no luck"},
    {"status": "Failed"},
    {"error": "no luck"},
    {"error": {"code": 3}, "results": []},
]
SUCCESSES: list[Any] = [
    {"success": True, "error": "a warning"},
    {"ok": True},
    {"status": "ok", "error": "old"},
    {"error": "", "beans": 3},
    {"error": None},
    {"error": "one of two failed", "results": [1]},
    {"result": {"success": False}},
    [{"success": False}],
    {"success": "no"},
    {"status": "pending"},
    "success: false",
    '{"success": false} was the answer',
    None,
]


def returning(value: Any) -> Any:
    @tool(name="report")
    def report() -> Any:
        """Return a value."""
        return value

    return report


async def status_of(value: Any) -> str:
    context = CallContext("me", "s", "", "c", "cli", "direct", Path(), False, "k", lambda text: None)
    return (await ToolRegistry([returning(value)]).run(Call("c", "report"), context)).status


@pytest.mark.parametrize("value", FAILURES)
async def test_an_object_that_reports_a_failure_is_a_failed_call(value):
    assert await status_of(value) == "error"
    assert await status_of(json.dumps(value)) == "error"


@pytest.mark.parametrize("value", SUCCESSES)
async def test_any_other_result_is_not(value):
    assert await status_of(value) == "ok"
    assert await status_of(json.dumps(value)) == "ok"


async def test_a_repeated_call_that_reports_failure_is_noticed_and_then_the_turn_ends(tmp_path):
    model = ScriptedProvider([call("report"), call("report"), call("report")])
    async with AgentLoop(MessageBus(), model, tmp_path, store=tmp_path / "store.db") as agent:
        agent.tools.register(returning({"success": False, "error": "the shop is closed"}))
        answer = await agent.process_direct("go")
        info = await agent.store.session("me", "cli:direct")
        assert info is not None
        log = [one.entry for one in await agent.store.read_log(info.id)]
    assert [("notice" in result) for result in results(model)] == [False, True]
    assert "the shop is closed" in results(model)[0]["message"]
    assert [one.status for one in log if isinstance(one, CallEnded)] == ["error"] * 3
    assert isinstance(log[-1], TurnEnded)
    assert log[-1].reason == "repeating"
    assert "report" in answer


async def test_a_file_or_an_output_that_holds_such_an_object_is_not_a_failure(tmp_path):
    (tmp_path / "a.json").write_text('{"success": false}')
    steps = [call("read_file", path="a.json"), call("exec", command="cat a.json"), "read"]
    _, answer, log = await turn_of(tmp_path, *steps)
    assert answer == "read"
    assert [one.status for one in log if isinstance(one, CallEnded)] == ["ok", "ok"]
