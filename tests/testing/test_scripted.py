"""The scripted model, and the contract it enforces on conversations."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from everloop.providers.base import Delta, LLMResponse, ProviderError, StreamingProvider
from everloop.testing import ChatOnlyProvider, ScriptedProvider, call, check_conversation

ASK = [{"role": "user", "content": "hello"}]


async def test_each_request_takes_the_next_step():
    echo = call("echo", text="x")

    async def last(messages: Any, tools: Any) -> str:
        return f"{len(messages)} messages, {tools}"

    model = ScriptedProvider(["one", [echo], call("now"), LLMResponse("four", finish_reason="length"), last])
    answers = [await model.chat(ASK) for _ in range(5)]
    assert [answer.content for answer in answers] == ["one", None, None, "four", "1 messages, None"]
    assert answers[1].tool_calls == [echo]
    assert (answers[1].finish_reason, answers[3].finish_reason) == ("tool_calls", "length")
    assert answers[2].tool_calls[0].name == "now"


async def test_a_step_can_be_an_error_or_a_function():
    model = ScriptedProvider([ProviderError("busy"), lambda messages, tools: ValueError("odd")])
    with pytest.raises(ProviderError, match="busy"):
        await model.chat(ASK)
    with pytest.raises(ValueError, match="odd"):
        await model.chat(ASK)


async def test_requests_are_recorded_as_they_were():
    model = ScriptedProvider(["a", "b"])
    messages, tools = [dict(ASK[0])], [{"type": "function"}]
    await model.chat(messages, tools, "m")
    messages[0]["content"] = "changed"
    tools.clear()
    [item async for item in model.stream(messages)]
    first, second = model.requests
    assert (first.messages, first.tools, first.model, first.streamed) == (ASK, [{"type": "function"}], "m", False)
    assert (second.messages[0]["content"], second.tools, second.streamed) == ("changed", None, True)


async def test_an_exhausted_script_raises_a_clear_error():
    model = ScriptedProvider(["only"])
    await model.chat(ASK)
    with pytest.raises(AssertionError, match="has 1 steps and was asked 2 times"):
        await model.chat(ASK)


async def test_the_last_step_can_repeat_with_fresh_call_ids():
    model = ScriptedProvider(["one", [call("echo")]], repeat_last=True)
    ids = [answer.tool_calls[0].id for answer in [await model.chat(ASK) for _ in range(4)][1:]]
    assert len(set(ids)) == 3


async def test_a_stream_yields_words_and_ends_with_the_answer():
    model = ScriptedProvider([LLMResponse(" one  two\nthree", reasoning="so be it")])
    items: list[Any] = [item async for item in model.stream(ASK)]
    assert [item.text for item in items[:-1] if item.text] == [" one ", " two\n", "three"]
    assert [item.reasoning for item in items[:-1] if item.reasoning] == ["so ", "be ", "it"]
    assert items[-1].content == " one  two\nthree"
    assert Delta(text="three") in items


async def test_answers_can_be_slow():
    model = ScriptedProvider(["a b"], delay=0.02, token_delay=0.02)
    started = asyncio.get_running_loop().time()
    [item async for item in model.stream(ASK)]
    assert asyncio.get_running_loop().time() - started >= 0.055


async def test_the_chat_only_model_has_no_stream():
    model = ChatOnlyProvider(["hi"])
    assert not hasattr(model, "stream")
    assert not isinstance(model, StreamingProvider)
    assert isinstance(ScriptedProvider(), StreamingProvider)
    assert (await model.chat(ASK)).content == "hi"
    await model.close()
    assert model.closed


async def test_an_invalid_conversation_fails_unless_the_check_is_off():
    broken = [{"role": "tool", "tool_call_id": "x", "content": "?"}]
    with pytest.raises(AssertionError, match="request 1 is not a valid conversation"):
        await ScriptedProvider(["ok"]).chat(broken)
    assert (await ScriptedProvider(["ok"], check=False).chat(broken)).content == "ok"


async def test_a_step_of_the_wrong_kind_is_named():
    with pytest.raises(TypeError, match="int"):
        await ScriptedProvider([5]).chat(ASK)  # type: ignore[list-item]


def test_importing_the_doubles_loads_nothing_heavy():
    code = "import sys, everloop.testing; print([m for m in ('aiohttp', 'msgspec', 'asyncio') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() in ("['asyncio']", "[]")


# The contract


def asks(*ids: str, **changes: Any) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "echo", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | changes


def result(id: Any, content: Any = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, USER],
        [USER, asks("a", "b"), result("b"), result("a"), {"role": "assistant", "content": "done"}, USER],
        [USER, asks("a"), result("a"), asks("b", content="and"), result("b", [{"type": "text", "text": "x"}])],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:"}}],
            }
        ],
        [USER, {"role": "assistant", "content": None, "refusal": "no"}],
    ],
)
def test_a_valid_conversation_has_no_problems(messages):
    assert check_conversation(messages) == []


def function(**changes: Any) -> dict[str, Any]:
    made = {"id": "a", "type": "function", "function": {"name": "echo", "arguments": "{}"} | changes}
    return asks(tool_calls=[made])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], "role None"),
        ([{"role": "robot", "content": "x"}], "role 'robot'"),
        ([{"role": "user"}], "must have content"),
        ([{"role": "user", "content": 5}], "not int"),
        ([{"role": "user", "content": []}], "not list"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "must contain a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}], "must contain a string"),
        (
            [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "part of type 'image_url'",
        ),
        ([USER, {"role": "assistant", "content": None}], "must have content"),
        ([USER, asks()], "at least one call"),
        ([USER, asks("a")], "call 'a' has no result"),
        ([USER, asks("a"), USER], "call 'a' has no result"),
        ([USER, asks("a", "b"), result("a"), asks("c"), result("c")], "call 'b' has no result"),
        ([USER, asks("a"), USER, result("a")], "not an open call"),
        ([USER, asks("a"), result("a"), result("a")], "not an open call"),
        ([USER, result("a")], "not an open call"),
        ([USER, asks("a"), result(None)], "not an open call"),
        ([USER, asks("a"), result("a", None)], "must have content"),
        ([USER, asks("a", "a"), result("a")], "in one message twice"),
        ([USER, asks("a"), result("a"), asks("a"), result("a")], "occurs in the conversation twice"),
        ([USER, asks(tool_calls=[{"id": ""}])], "is not a string"),
        ([USER, asks(tool_calls=["x"])], "is not a string"),
        ([USER, asks(tool_calls=[{"id": "a", "type": "tool"}]), result("a")], "is not 'function'"),
        ([USER, function(name="my tool"), result("a")], "is not a valid tool name"),
        ([USER, function(arguments={}), result("a")], "JSON object in a string"),
        ([USER, function(arguments="[]"), result("a")], "JSON object in a string"),
        ([USER, function(arguments="{"), result("a")], "JSON object in a string"),
    ],
)
def test_each_problem_of_an_invalid_conversation_is_named(messages, problem):
    problems = check_conversation(messages)
    assert any(problem in line for line in problems), problems
