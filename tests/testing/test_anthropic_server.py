"""The fake Anthropic server: it answers like the API, and refuses what the API refuses."""

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
from everloop.providers.anthropic import AnthropicProvider
from everloop.testing import FakeAnthropic, call

HEADERS = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
ECHO = {"name": "echo", "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}}
USE = {"type": "tool_use", "id": "c", "name": "echo", "input": {}}
CALL = {"role": "assistant", "content": [USE]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}


@pytest.fixture
async def server() -> AsyncIterator[FakeAnthropic]:
    async with FakeAnthropic() as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def picture(mime: str, data: str) -> dict[str, Any]:
    return user({"type": "image", "source": {"type": "base64", "media_type": mime, "data": data}})


async def post(
    http: aiohttp.ClientSession, server: FakeAnthropic, headers: Any = HEADERS, **body: Any
) -> tuple[int, Any]:
    body = {"model": "tools-0x0", "max_tokens": 9, "messages": [user(said("hi mark:a"))]} | body
    async with http.post(server.base_url + "/v1/messages", json=body, headers=headers) as response:
        if body.get("stream") and response.status == 200:
            events = [block.split("\n") for block in (await response.text()).split("\n\n") if block]
            return 200, [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in events]
        return response.status, await response.json()


async def test_the_models_name_is_the_script(server):
    provider = AnthropicProvider("k", "tools-2x2", base_url=server.base_url)
    tools = [{"type": "function", "function": {"name": "echo", "parameters": ECHO["input_schema"]}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "mark:job-7"}]
    ran: list[Any] = []
    while (answer := await provider.chat(messages, tools)).tool_calls:
        messages.append(assistant_message(None, [(c.id, c.name, c.arguments) for c in answer.tool_calls]))
        messages += [tool_message(c.id, c.name, "ok") for c in answer.tool_calls]
        ran += [c.arguments["text"] for c in answer.tool_calls]
    assert ran == [f"job-7/{round}/{index}" for round in range(2) for index in range(2)]
    assert answer.content == "done:job-7"
    assert [(seen.marker, seen.round) for seen in server.requests] == [("job-7", round) for round in range(3)]
    assert server.invalid == 0
    await provider.close()


async def test_a_stream_has_the_events_of_the_api_in_their_order(server, http):
    server.calls(call("echo", text="x"), text="one two", reasoning="hm")
    _, events = await post(http, server, stream=True, tools=[ECHO])
    assert all(name == data["type"] for name, data in events)
    kinds = [
        name if "content_block" not in name else f"{name[14:]} {data['index']} "
        + (data.get("content_block") or data.get("delta") or {"type": ""})["type"]
        for name, data in events
    ]  # fmt: skip
    assert kinds == [
        "message_start", "ping",
        "start 0 thinking", "delta 0 thinking_delta", "delta 0 signature_delta", "stop 0 ",
        "start 1 text", "delta 1 text_delta", "delta 1 text_delta", "stop 1 ",
        "start 2 tool_use", "delta 2 input_json_delta", "delta 2 input_json_delta", "delta 2 input_json_delta",
        "stop 2 ", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0][1]["message"]["content"] == []
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["output_tokens"] > 0


BAD: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "no length": {"max_tokens": None},
    "an assistant first": {"messages": [{"role": "assistant", "content": "hi"}, user(said("a"))]},
    "two users in a row": {"messages": [user(said("a")), user(said("b"))]},
    "a system message among the others": {"messages": [{"role": "system", "content": "a"}, user(said("b"))]},
    "an empty text": {"messages": [user(said(""))]},
    "a blank text": {"messages": [user(said(" \n"))]},
    "an empty content": {"messages": [user()]},
    "an empty system block": {"system": [said("")]},
    "a last text that ends in space": {"messages": [user(said("a")), {"role": "assistant", "content": "b "}]},
    "a call without a result": {"messages": [user(said("a")), CALL, user(said("b"))], "tools": [ECHO]},
    "a call at the end": {"messages": [user(said("a")), CALL], "tools": [ECHO]},
    "a result without a call": {"messages": [user(RESULT)], "tools": [ECHO]},
    "a result behind a text": {"messages": [user(said("a")), CALL, user(said("b"), RESULT)], "tools": [ECHO]},
    "a result twice": {"messages": [user(said("a")), CALL, user(RESULT, RESULT)], "tools": [ECHO]},
    "calls without tools": {"messages": [user(said("a")), CALL, user(RESULT)]},
    "an id with a dot": {
        "messages": [
            user(said("a")),
            {"role": "assistant", "content": [{**USE, "id": "c.1"}]},
            user({**RESULT, "tool_use_id": "c.1"}),
        ],
        "tools": [ECHO],
    },
    "a tool's name with a dot": {"tools": [{**ECHO, "name": "a.b"}]},
    "a tool twice": {"tools": [ECHO, ECHO]},
    "a schema that is no object": {"tools": [{**ECHO, "input_schema": {"type": "string"}}]},
    "a union for a schema": {"tools": [{**ECHO, "input_schema": {"type": "object", "anyOf": []}}]},
    "OpenAI's tools": {"tools": [{"type": "function", "function": {"name": "echo"}}]},
    "OpenAI's pictures": {"messages": [user({"type": "image_url", "image_url": {"url": "http://a"}})]},
    "a picture of no known type": {"messages": [picture("image/tiff", "")]},
    "a picture that is not base64": {"messages": [picture("image/png", "%")]},
    "five markers": {"messages": [user(*[said("a", cache_control={"type": "ephemeral"})] * 5)]},
    "too little to think with": {"thinking": {"type": "enabled", "budget_tokens": 100}, "max_tokens": 5000},
    "more thoughts than answer": {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
    "thinking in the middle of an answer": {
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "max_tokens": 3000,
        "messages": [user(said("a")), {"role": "assistant", "content": "b"}],
    },
    "thinking without the thoughts before": {
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "max_tokens": 3000,
        "messages": [user(said("a")), CALL, user(RESULT)],
        "tools": [ECHO],
    },
}


@pytest.mark.parametrize("fault", BAD)
async def test_what_the_api_refuses_is_refused_and_counted(server, http, fault):
    status, body = await post(http, server, **BAD[fault])
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert server.invalid == 1


async def test_what_the_api_accepts_is_accepted(server, http):
    thoughts = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, *CALL["content"]],
    }
    for good in (
        {"messages": [{"role": "user", "content": "text"}], "system": "text"},
        {"messages": [user(said("a")), CALL, user(RESULT, said("b"))], "tools": [ECHO]},
        {
            "messages": [user(said("a")), thoughts, user(RESULT)], "tools": [ECHO], "max_tokens": 3000,
            "thinking": {"type": "enabled", "budget_tokens": 2000},
        },
    ):  # fmt: skip
        assert (await post(http, server, **good))[0] == 200


async def test_a_key_a_version_a_body_and_a_model_are_required(server, http):
    assert (await post(http, server, {"anthropic-version": "x"}))[1]["error"]["type"] == "authentication_error"
    assert (await post(http, server, {"x-api-key": "k"}))[0] == 400
    assert (await post(http, server, model="claude-99"))[1]["error"]["type"] == "not_found_error"
    async with http.post(server.base_url + "/v1/messages", data=b"{", headers=HEADERS) as response:
        assert response.status == 400
    async with http.get(server.base_url + "/v1/models") as response:
        assert (await response.json())["data"]


async def test_only_marked_content_is_read_from_the_cache(server, http):
    marked = {"cache_control": {"type": "ephemeral"}}
    first, second = said("long " * 100, **marked), said("more " * 100)
    asked = ([first], [first, second], [first, second], [said("x" * 500, **marked)], [said("long " * 100)])
    counts = [(await post(http, server, messages=[user(*content)]))[1]["usage"] for content in asked]
    assert [usage["cache_read_input_tokens"] > 0 for usage in counts] == [False, True, True, False, False]
    assert counts[0]["cache_creation_input_tokens"] == counts[1]["cache_read_input_tokens"]
    assert counts[1]["input_tokens"] > 100 > counts[0]["input_tokens"]
    assert counts[4]["cache_creation_input_tokens"] == 0


async def test_it_runs_as_a_process_with_a_script(tmp_path):
    script = tmp_path / "replies.jsonl"
    script.write_text('{"text": "from the file"}\n')
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everloop.testing.anthropic_server", "--port", "0", "--script", str(script),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    provider = AnthropicProvider("k", "tools-0x0", base_url=(await process.stdout.readline()).decode().strip())
    ask = [{"role": "user", "content": "mark:z"}]
    assert (await provider.chat(ask)).content == "from the file"
    assert (await provider.chat(ask)).content == "done:z"
    process.send_signal(signal.SIGTERM)
    await process.communicate()  # read to the end, so that the pipe is closed
    assert process.returncode == 0
    await provider.close()
