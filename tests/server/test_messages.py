"""`POST /v1/messages`: the agent behind Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from everloop.store.tokens import hash_of, new_token

from .chats import PIXEL
from .fixtures import shared_server
from .serving import HALF, Serving, call, named_events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = shared_server
PATH = "/v1/messages"
WEATHER = {
    "name": "forecast",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}


def body(said: Any = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said}] if not isinstance(said, list) or "role" not in said[0] else said
    return {"model": "scripted", "max_tokens": 100, "messages": messages, **fields}


async def ask(
    server: Serving, asked: dict[str, Any], headers: Mapping[str, str] | None = None, path: str = PATH
) -> Any:
    """(status, headers, body) of a request."""
    async with server.http.post(
        server.url + path, json=asked, headers={**server.headers, **(headers or {})}
    ) as response:
        return response.status, response.headers, await response.json()


async def stream(server: Serving, asked: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream, each with its name."""
    async with server.http.post(server.url + PATH, json={**asked, "stream": True}, headers=server.headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        return [(event["type"], event) async for event in named_events(response)]


def blocks(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The content of a streamed message, put together as clients do: a block is opened, filled and closed."""
    content: list[dict[str, Any]] = []
    is_open = False
    for name, data in events:
        match name:
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(content)
                content.append(dict(data["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert data["index"] == len(content) - 1
                block, delta = content[-1], data["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        block["input"] = json.loads(delta["partial_json"])
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    return content


async def test_a_message_is_answered(server):
    server.fake.reply("Water the beans.")
    status, _, said = await ask(server, body("What needs doing?", system="Be brief.", temperature=0.5))
    assert status == 200
    assert said["content"] == [{"type": "text", "text": "Water the beans."}]
    assert (said["type"], said["role"], said["stop_reason"]) == ("message", "assistant", "end_turn")
    assert said["id"].startswith("msg_")
    assert said["usage"]["input_tokens"] > 0
    assert said["usage"]["output_tokens"] > 0
    sent = server.fake.requests[-1].body
    assert (sent["temperature"], sent["max_tokens"]) == (0.5, 100)
    assert server.seen()[0]["content"].rstrip().find("Be brief.") > 0


async def test_a_stream_has_anthropics_events_in_order(server):
    server.fake.reply("Water the beans.", reasoning="It is dry.")
    events = await stream(server, body("What needs doing?", thinking={"type": "enabled", "budget_tokens": 2000}))
    names = [name for name, _ in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert events[0][1]["message"]["content"] == []
    thinking, text = blocks(events)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "It is dry.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Water the beans."}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] > 0


async def test_thoughts_are_sent_only_to_a_client_that_wants_them(server):
    server.fake.reply("Four.", reasoning="Two and two.")
    assert [block["type"] for block in blocks(await stream(server, body("2+2?")))] == ["text"]
    for wanted, types in ((None, ["text"]), ({"type": "adaptive"}, ["thinking", "text"])):
        server.fake.reply("Four.", reasoning="Two and two.")
        _, _, said = await ask(server, body("2+2?", **({"thinking": wanted} if wanted else {})))
        assert [block["type"] for block in said["content"]] == types


async def test_the_agents_own_tools_run_and_the_client_sees_the_answer(server):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"), text="I write.")
    server.fake.reply("Done.")
    events = await stream(server, body("Write it."))
    (text,) = blocks(events)
    assert text["text"] == "I write.\n\nDone."
    canary = server.owners.config.workspace / "canary.txt"
    assert canary.read_text() == "acted"
    canary.unlink()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_calls_of_the_clients_tools_are_handed_back_and_their_results_accepted(server, streamed):
    server.fake.calls(call("forecast", "c1", city="Oslo"), call("forecast", "c2", city="Rome"), text="I look.")
    asked = body("Rain?", tools=[WEATHER])
    if streamed:
        events = await stream(server, asked)
        content, reason = blocks(events), events[-2][1]["delta"]["stop_reason"]
    else:
        _, _, said = await ask(server, asked)
        content, reason = said["content"], said["stop_reason"]
    assert reason == "tool_use"
    assert [block["type"] for block in content] == ["text", "tool_use", "tool_use"]
    assert [block["input"] for block in content[1:]] == [{"city": "Oslo"}, {"city": "Rome"}]
    results = [
        {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "rain"},
        {"type": "tool_result", "tool_use_id": content[2]["id"], "content": [{"type": "text", "text": "sun"}]},
        {"type": "text", "text": "Well?"},
    ]
    server.fake.reply("Go to Rome.")
    turns = [*asked["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    _, _, said = await ask(server, {**asked, "messages": turns})
    assert said["content"][0]["text"] == "Go to Rome."
    roles = [message["role"] for message in server.seen()]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [message["content"] for message in server.seen()[-3:]] == ["rain", "sun", "Well?"]


async def test_tool_choice_is_honoured(server):
    for choice, sent in (
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "forecast"}, {"type": "function", "function": {"name": "forecast"}}),
    ):
        server.fake.calls(call("forecast", city="Oslo"))
        await ask(server, body("Rain?", tools=[WEATHER], tool_choice=choice))
        assert server.fake.requests[-1].body["tool_choice"] == sent


@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["own", "client"])
async def test_with_tool_choice_none_no_tool_is_called(server, tools):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"))
    server.fake.reply("done")
    status, _, said = await ask(server, body("Go.", tools=tools, tool_choice={"type": "none"}))
    assert (status, said["content"]) == (200, [{"type": "text", "text": "done"}])
    assert not (server.owners.config.workspace / "canary.txt").exists()
    assert not server.fake.requests[0].body.get("tools")


async def test_a_client_whose_tools_run_elsewhere_does_not_get_the_agents(server):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"))
    server.fake.reply("done")
    search = {"type": "web_search_20250305", "name": "web_search"}
    _, headers, _ = await ask(server, body("Go.", tools=[search]))
    assert not (server.owners.config.workspace / "canary.txt").exists()
    assert "tools.web_search" in headers["Warning"]


async def test_pictures_reach_the_model_even_in_results(server):
    picture = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
    image = {"type": "image", "source": picture}
    server.fake.reply("Red.")
    await ask(server, body([{"type": "text", "text": "Which colour?"}, image]))
    assert server.seen()[-1]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}
    used = {"type": "tool_use", "id": "t1", "name": "forecast", "input": {}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}]},
    ]
    server.fake.reply("Red.")
    await ask(server, body(turns, tools=[WEATHER]))
    *_, result, shown = server.seen()
    assert (result["role"], result["content"]) == ("tool", "[a picture, which follows]")
    assert shown["content"] == [{"type": "image_url", "image_url": {"url": PIXEL}}]


async def test_earlier_thoughts_and_cache_marks_are_accepted(server):
    mark = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "secret", "signature": "x"}, {"type": "text", "text": "ho"}],
        },
        {"role": "user", "content": "again"},
    ]
    server.fake.reply("ok")
    status, _, _ = await ask(server, body(turns, system=[{"type": "text", "text": "S", **mark}]))
    assert status == 200
    assert "secret" not in json.dumps(server.seen())


async def test_parameters_without_effect_are_named_in_a_header(server):
    server.fake.reply("ok")
    status, headers, _ = await ask(server, body(top_k=5, context_management={"edits": []}))
    assert status == 200
    assert headers["Warning"] == '299 everloop "no effect: context_management, top_k"'
    server.fake.reply("ok")
    assert "Warning" not in (await ask(server, body()))[1]


async def test_tokens_are_counted_without_a_model(server):
    counts = []
    for asked in (body("hi"), body("hi " * 400), body("hi " * 400, tools=[WEATHER])):
        del asked["max_tokens"]
        status, _, said = await ask(server, asked, path=f"{PATH}/count_tokens")
        assert status == 200
        counts.append(said["input_tokens"])
    assert 0 < counts[0] < counts[1] < counts[2]
    assert server.fake.requests == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages[1]"),
        ({"tool_choice": {"type": "tool", "name": "nothing"}, "tools": [WEATHER]}, "tool_choice"),
    ],
)
async def test_an_error_has_anthropics_format_and_names_the_cause(server, fields, words):
    status, _, said = await ask(server, {**body(), **fields})
    assert status == 400
    assert said.keys() == {"type", "error"}
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert words in said["error"]["message"]
    assert server.fake.requests == []


async def test_an_interrupted_answer_ends_with_an_error_event(server):
    server.fake.raw(HALF)
    events = await stream(server, body())
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "invalid_request_error"
    assert "message_stop" not in [name for name, _ in events]


async def test_a_failure_of_the_model_is_an_error_of_the_api(server):
    server.fake.fail(500)
    status, _, said = await ask(server, body())
    assert (status, said["error"]["type"]) == (502, "api_error")


async def test_a_session_is_kept(server):
    for said in ("My name is Ida.", "Who am I?"):
        server.fake.reply("Ida.")
        await ask(server, body(said), {"X-Session": "anthropic"})
    assert [message["role"] for message in server.seen()] == ["system", "user", "assistant", "user"]


async def test_a_client_that_disconnects_stops_the_model(server):
    server.fake.hang(50, after_chunks=2, text="one two three four")
    async with server.http.post(server.url + PATH, json={**body(), "stream": True}, headers=server.headers) as response:
        await response.content.readuntil(b"one")
    await server.model_left()


async def test_a_long_tool_name_is_restored_in_the_answer(server):
    name = "mcp__a-server-with-a-long-name__" + "a_tool_with_a_long_name" * 2
    server.fake.calls(call("forecast", city="x"))
    server.fake.reply("unknown")
    await ask(server, body("Rain?", tools=[{**WEATHER, "name": name}]))
    (offered,) = server.fake.requests[0].body["tools"]
    assert len(offered["function"]["name"]) <= 64
    server.fake.replies.clear()
    server.fake.calls(call(offered["function"]["name"], city="Oslo"))
    _, _, said = await ask(server, body("Rain?", tools=[{**WEATHER, "name": name}]))
    assert said["content"][0]["name"] == name


async def test_the_models_are_listed_in_anthropics_format_for_its_clients(server):
    for headers, shape in (({"anthropic-version": "2023-06-01"}, "has_more"), ({}, "object")):
        async with server.http.get(f"{server.url}/v1/models", headers=headers) as response:
            listed = await response.json()
        assert shape in listed
        assert listed["data"][0]["id"] == "scripted"


async def test_a_key_in_anthropics_header_is_a_token(tmp_path):
    async with serving(tmp_path) as server:
        token = new_token()
        await server.store.add_token("sdk", "anna", hash_of(token))
        server.fake.reply("hi")
        assert (await ask(server, body(), {"X-Api-Key": token}))[0] == 200
        for path in (PATH, f"{PATH}/count_tokens"):
            for wrong in ({"X-Api-Key": new_token()}, {}):
                status, _, said = await ask(server, body(), wrong, path)
                assert (status, said["error"]["type"]) == (401, "authentication_error")
