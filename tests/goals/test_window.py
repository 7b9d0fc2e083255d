"""A run that reads more than fits its window continues: older results are left out, the newest stay."""

from __future__ import annotations

from typing import Any

import pytest

from everloop.config import Config
from everloop.log import CallEnded
from everloop.providers.base import LLMResponse, ProviderError
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import tool

from .goals import executor, results

LONG = "word " * 4_000  # about 4,000 tokens


@tool(replay="safe", untrusted=True)
async def read(number: int) -> str:
    """Gives a long text."""
    return f"begin-{number} {LONG}"


def longest(provider: ScriptedProvider) -> int:
    return max(sum(len(str(message["content"])) for message in request.messages) for request in provider.requests)


async def test_older_results_are_left_out_before_the_window_is_full(folder):
    steps: list[Any] = [call("read", number=number) for number in range(20)]
    provider = ScriptedProvider([*steps, "ok", "done"])
    output = await (await executor(folder, provider, read, config=Config(window=20_000))).run({})
    assert (output.result, output.terminate_reason, output.turns) == ("done", "goal", 21)
    assert longest(provider) < 4 * 20_000
    last = results(provider.requests[19].messages)
    assert "begin-18" in last[-1][1]
    assert "begin-0" not in repr(last)
    for number, request in enumerate(provider.requests[1:21]):  # the newest is always complete
        assert results(request.messages)[-1][1].count("word") == 4_000, number
    assert len(last) == 19
    assert all("begin-" in entry.content for entry in output.log if isinstance(entry, CallEnded))


@pytest.mark.parametrize("text", ["maximum context length is 9000 tokens", "prompt is too long"])
async def test_a_request_refused_as_too_long_is_retried_with_less(folder, text):
    def refuse(messages, tools):
        return ProviderError(text, status=400) if "begin-0" in repr(messages) else "ok"

    calls = [call("read", number=number) for number in range(3)]
    provider = ScriptedProvider([calls, refuse, refuse, "done"])
    output = await (await executor(folder, provider, read, config=Config(window=1_000_000))).run({})
    assert (output.result, output.terminate_reason) == ("done", "goal")


async def test_any_other_error_of_the_model_leaves_nothing_out(folder):
    provider = ScriptedProvider([call("read", number=0), ProviderError("HTTP 401: wrong key", status=401)])
    output = await (await executor(folder, provider, read)).run({})
    assert output.terminate_reason == "error"
    assert len(provider.requests) == 2


async def test_a_request_that_cannot_be_made_shorter_ends_in_an_error(folder):
    provider = ScriptedProvider([ProviderError("prompt is too long", status=400)])
    output = await (await executor(folder, provider, query="x " * 50)).run({})
    assert output.terminate_reason == "error"
    assert len(provider.requests) == 1


async def test_taint_remains_when_an_untrusted_result_is_left_out(folder):
    def refuse(messages, tools):
        return ProviderError("prompt is too long", status=400) if "begin-0" in repr(messages) else fetch

    fetch = call("web_fetch", url="http://127.0.0.1:9/canary")
    provider = ScriptedProvider([call("read", number=0), refuse, refuse, "ok", "done"])
    output = await (await executor(folder, provider, read, tools=["read", "web_fetch"])).run({})
    assert "begin-0" not in repr(provider.requests[2].messages)
    assert [entry.status for entry in output.log if isinstance(entry, CallEnded)] == ["ok", "denied"]


async def test_the_estimate_learns_from_the_providers_usage(folder):
    """Its tokenizer counts ten times more tokens than estimated, so less fits."""

    def counted(step: Any) -> Any:
        def answer(messages, tools):
            units = sum(len(str(message["content"])) for message in messages)
            return LLMResponse(None, [step], "tool_calls", usage={"prompt_tokens": units})

        return answer

    steps: list[Any] = [counted(call("read", number=number)) for number in range(6)]
    provider = ScriptedProvider([*steps, "ok", "done"])
    output = await (await executor(folder, provider, read, config=Config(window=60_000))).run({})
    assert output.terminate_reason == "goal"
    assert longest(provider) < 80_000  # all six results together have 120,000
