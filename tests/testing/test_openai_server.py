"""The fake OpenAI server: queued replies, and models whose names are scripts."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from everloop.messages import assistant_message, tool_message
from everloop.providers.openai import OpenAIProvider
from everloop.testing import FakeOpenAI, call
from tests.support.model_servers import server as server

ECHO = [{"type": "function", "function": {"name": "echo", "parameters": {"properties": {"text": {"type": "string"}}}}}]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def post(http: aiohttp.ClientSession, server: FakeOpenAI, **body: Any) -> tuple[int, Any]:
    body = {"model": "tools-0x0", "messages": [user("hi mark:a")]} | body
    async with http.post(server.base_url + "/chat/completions", json=body) as response:
        if body.get("stream") and response.status == 200:
            assert response.content_type == "text/event-stream"
            return 200, [line[6:] for line in (await response.text()).split("\n\n") if line]
        return response.status, await response.json()


async def run_turn(
    provider: OpenAIProvider, messages: list[dict[str, Any]], tools: Any = ECHO
) -> tuple[list[str], str]:
    """Run a turn like an agent; return the texts passed to its tools, and the answer."""
    ran: list[str] = []
    while True:
        answer = await provider.chat(messages, tools)
        if not answer.tool_calls:
            return ran, answer.content or ""
        messages.append(assistant_message(None, [(c.id, c.name, c.arguments) for c in answer.tool_calls]))
        for made in answer.tool_calls:
            ran += made.arguments.values()
            messages.append(tool_message(made.id, made.name, "ok"))


async def test_the_models_name_is_the_script(server):
    provider = OpenAIProvider(server.base_url, model="tools-2x3")
    messages = [user("do it mark:job-7")]
    ran, answer = await run_turn(provider, messages)
    assert ran == [f"job-7/{round}/{index}" for round in range(2) for index in range(3)]
    assert answer == "done:job-7"
    messages += [{"role": "assistant", "content": answer}, user("again mark:job-8"), user("and hurry")]
    ran, answer = await run_turn(provider, messages)
    assert (len(ran), answer) == (6, "done:job-8")
    assert [(seen.marker, seen.round) for seen in server.requests] == [
        (job, round) for job in ("job-7", "job-8") for round in range(3)
    ]
    assert server.invalid == 0
    await provider.close()


async def test_a_turn_can_continue_on_another_stateless_server(server):
    messages = [user("mark:x"), assistant_message(None, [("c", "echo", {})]), tool_message("c", "echo", "ok")]
    provider = OpenAIProvider(server.base_url, model="tools-2x1")
    assert await run_turn(provider, messages) == (["x/1/0"], "done:x")
    await provider.close()


async def test_without_a_marker_the_last_user_message_opens_the_turn(server):
    provider = OpenAIProvider(server.base_url, model="tools-1x1")
    messages = [user("first")]
    assert await run_turn(provider, messages) == (["?/0/0"], "done:?")
    messages += [{"role": "assistant", "content": "done"}, user("second")]
    assert await run_turn(provider, messages) == (["?/0/0"], "done:?")
    await provider.close()


async def test_options_set_the_tool_the_length_and_the_pace(server, http):
    tools = [{"type": "function", "function": {"name": "write_it", "parameters": {"required": ["path", "content"]}}}]
    provider = OpenAIProvider(server.base_url, model="tools-1x1-fwrite_it-n4-d30-t10")
    started = asyncio.get_running_loop().time()
    ran, answer = await run_turn(provider, [user("mark:q")], tools)
    assert (ran, answer) == (["q/0/0", "q/0/0"], "done:q token token token")
    assert asyncio.get_running_loop().time() - started > 0.06 + 0.04
    status, body = await post(http, server, model="tools-1x1", tools=tools)
    assert (status, "wants to call echo" in body["error"]["message"]) == (400, True)
    await provider.close()


async def test_without_tools_there_is_only_an_answer(server, http):
    _, body = await post(http, server, model="provider/tools-3x1")
    assert body["choices"][0]["message"]["content"] == "done:a"
    _, body = await post(
        http, server, messages=[{"role": "user", "content": [{"type": "text", "text": "mark:in-parts"}]}]
    )
    assert body["choices"][0]["message"]["content"] == "done:in-parts"


async def test_a_stream_has_the_shape_that_every_client_accepts(server, http):
    server.calls(call("echo", text="x"))
    _, lines = await post(http, server, stream=True, stream_options={"include_usage": True})
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    first, *more = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "echo", "arguments": ""}
    assert all(piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"} for piece in more)
    assert json.loads("".join(piece["function"]["arguments"] for piece in more)) == {"text": "x"}
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_usage_is_streamed_only_on_request(server, http):
    _, lines = await post(http, server, stream=True)
    assert not any("usage" in line for line in lines)


async def test_an_invalid_conversation_is_refused_and_counted(server, http):
    status, body = await post(http, server, messages=[user("hi"), assistant_message(None, [("c", "echo", {})])])
    assert status == 400
    assert "call 'c' has no result" in body["error"]["message"]
    assert server.invalid == 1
    assert server.requests[0].problems


async def test_invalid_json_and_an_unknown_model_are_refused(server, http):
    async with http.post(server.base_url + "/chat/completions", data=b"{") as response:
        assert response.status == 400
    status, body = await post(http, server, model="gpt-9")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_the_log_can_be_read_over_http(server, http):
    await post(http, server, stream=True)
    async with http.get(server.base_url.removesuffix("/v1") + "/_log") as response:
        (entry,) = await response.json()
    assert (entry["model"], entry["messages"], entry["marker"], entry["round"], entry["stream"], entry["problems"]) == (
        "tools-0x0", 1, "a", 0, True, [],
    )  # fmt: skip
    assert entry["time"] > 0
    async with http.get(server.base_url + "/models") as response:
        assert (await response.json())["object"] == "list"


async def test_queued_replies_come_first_and_failures_are_as_scripted(server, http):
    server.fail(418, {"odd": True}, {"X-Why": "tea"})
    server.reply("text", reasoning="r", finish_reason="length")
    assert await post(http, server) == (418, {"odd": True})
    _, body = await post(http, server)
    assert body["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "text", "reasoning_content": "r"},
        "finish_reason": "length",
    }
    _, body = await post(http, server)
    assert body["choices"][0]["message"]["content"] == "done:a"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_scripted_cut_breaks_the_connection(server, http, stream):
    server.cut(1)
    with pytest.raises(aiohttp.ClientPayloadError):
        await post(http, server, stream=stream)


async def test_it_runs_as_a_process_with_a_script(tmp_path, http):
    script = tmp_path / "replies.jsonl"
    script.write_text('{"text": "from the file"}\n\n{"calls": [{"id": "c", "name": "echo", "arguments": {"n": 1}}]}\n')
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everloop.testing.openai_server", "--port", "0", "--script", str(script),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    provider = OpenAIProvider((await process.stdout.readline()).decode().strip(), model="tools-0x0")
    ask = [user("mark:z")]
    assert (await provider.chat(ask)).content == "from the file"
    assert (await provider.chat(ask)).tool_calls[0].arguments == {"n": 1}
    assert (await provider.chat(ask)).content == "done:z"
    process.send_signal(signal.SIGTERM)
    await process.communicate()  # read to the end, so that the pipe is closed
    assert process.returncode == 0
    await provider.close()


async def test_a_scripted_call_of_a_tool_without_required_arguments_has_none(server):
    function = {"name": "list_dir", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
    provider = OpenAIProvider(server.base_url, model="tools-1x1-flist_dir")
    answer = await provider.chat([{"role": "user", "content": "mark:x"}], [{"type": "function", "function": function}])
    assert answer.tool_calls[0].arguments == {}
    await provider.close()
