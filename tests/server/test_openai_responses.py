"""`/v1/responses`: the agent behind OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from everloop.server.openai_responses import continued, find
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from .chats import PIXEL
from .fixtures import shared_server
from .serving import HALF, Client, call, named_events, process, serving
from .test_choices import TEXT, TOKENS, streamed, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = shared_server
PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "forecast",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch.",
    "format": {"type": "grammar", "definition": "G"},
}


async def http(
    client: Client, method: str, path: str = "", body: Any = None, headers: Mapping[str, str] | None = None
) -> Any:
    """(status, headers, body) of a request below /v1/responses."""
    sent = {**client.headers, **({"Content-Type": "application/json"} if method != "GET" else {}), **(headers or {})}
    data = json.dumps(body).encode() if body is not None else None
    async with client.http.request(method, client.url + PATH + path, data=data, headers=sent) as response:
        return response.status, response.headers, await response.json()


async def create(client: Client, said: Any = "hello", headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
    status, _, body = await http(client, "POST", "", {"model": "scripted", "input": said, **fields}, headers)
    assert status == 200, body
    return body


async def stream(client: Client, said: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "scripted", "input": said, "stream": True, **fields}
    async with client.http.post(client.url + PATH, json=body, headers=client.headers) as response:
        assert response.status == 200, await response.text()
        return [event async for event in named_events(response)]


async def again(client: Client, id: str, after: int | None = None) -> list[dict[str, Any]]:
    """The stream of a stored response, from the beginning or behind an event."""
    query = "?stream=true" + (f"&starting_after={after}" if after is not None else "")
    async with client.http.get(f"{client.url}{PATH}/{id}{query}", headers=client.headers) as response:
        assert response.status == 200, await response.text()
        return [event async for event in named_events(response)]


async def ended(client: Client, id: str) -> Any:
    """A response, once it is over."""
    async with asyncio.timeout(30):
        while True:
            _, _, body = await http(client, "GET", f"/{id}")
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.02)


def text_of(response: Any) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def streamed_text(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_a_text_is_answered(server):
    server.fake.reply("Water the beans.")
    said = await create(server, "What needs doing?", instructions="Be brief.", temperature=0.5, max_output_tokens=50)
    assert text_of(said) == "Water the beans."
    assert (said["object"], said["status"], said["instructions"]) == ("response", "completed", "Be brief.")
    assert said["usage"]["total_tokens"] == said["usage"]["input_tokens"] + said["usage"]["output_tokens"] > 0
    sent = server.fake.requests[-1].body
    assert (sent["temperature"], sent["max_tokens"]) == (0.5, 50)
    assert "Be brief." in server.seen()[0]["content"]


async def test_log_probabilities_are_part_of_their_text(server):
    tokens = [{**one, "bytes": [*one["token"].encode()]} for one in TOKENS]
    shown = [
        {**one, "top_logprobs": [{**top, "bytes": [*top["token"].encode()]} for top in one["top_logprobs"]]}
        for one in tokens
    ]
    asked: dict[str, Any] = {
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 2,
    }
    server.fake.replies.append(whole())
    said = await create(server, "What needs doing?", **asked)
    (part,) = said["output"][0]["content"]
    assert part["logprobs"] == shown
    sent = server.fake.requests[-1].body
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 2)
    assert (await http(server, "GET", f"/{said['id']}"))[2]["output"] == said["output"]

    server.fake.replies.append(streamed())
    events = await stream(server, "What needs doing?", **asked)
    assert streamed_text(events) == TEXT
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    (closed,) = [event["part"] for event in events if event["type"] == "response.content_part.done"]
    assert done["logprobs"] == closed["logprobs"] == shown
    assert events[-1]["response"]["output"][0]["content"] == [closed]

    server.fake.reply("Hi.")
    _, headers, body = await http(server, "POST", "", {"model": "scripted", "input": "Hello.", "top_logprobs": 3})
    assert body["output"][0]["content"][0]["logprobs"] == []
    assert "top_logprobs" in headers["Warning"]
    assert "logprobs" not in server.fake.requests[-1].body
    status, _, body = await http(server, "POST", "", {"model": "scripted", "input": "Hello.", "top_logprobs": 21})
    assert (status, body["error"]["param"]) == (400, "top_logprobs")


async def test_a_stream_has_the_typed_events_in_order_and_numbered(server):
    server.fake.reply("Water the beans.", reasoning="It is dry.")
    events = await stream(server, "What needs doing?")
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for number, kind in enumerate(kinds) if kinds[number - 1 : number] != [kind]]
    assert once == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    assert streamed_text(events) == "Water the beans."
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "It is dry."}]
    assert events[0]["response"]["output"] == []
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in final["output"]]


async def test_the_agents_own_tools_run_and_the_client_sees_the_answer(server):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"), text="I write.")
    server.fake.reply("Done.")
    events = await stream(server, "Write it.")
    assert streamed_text(events) == "I write.\n\nDone."
    canary = server.owners.config.workspace / "canary.txt"
    assert canary.read_text() == "acted"
    canary.unlink()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chained", [False, True], ids=["history", "previous"])
async def test_calls_of_the_clients_tools_are_handed_back_and_their_results_accepted(server, streamed, chained):
    server.fake.calls(call("forecast", "c1", city="Oslo"), call("forecast", "c2", city="Rome"), text="I look.")
    if streamed:
        events = await stream(server, "Rain?", tools=[WEATHER])
        said = events[-1]["response"]
        assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"] == [
            "message", "function_call", "function_call",
        ]  # fmt: skip
        done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert [json.loads(event["arguments"]) for event in done] == [{"city": "Oslo"}, {"city": "Rome"}]
    else:
        said = await create(server, "Rain?", tools=[WEATHER])
    message, *calls = said["output"]
    assert message["content"][0]["text"] == "I look."
    assert [json.loads(one["arguments"]) for one in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    results = [
        {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "rain"},
        {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": "sun"},
    ]
    server.fake.reply("Go to Rome.")
    if chained:
        more = await create(server, results, tools=[WEATHER], previous_response_id=said["id"])
        assert all(word in json.dumps(server.seen()) for word in ("Rain?", "rain", "sun"))
    else:
        before = [{"role": "user", "content": "Rain?"}, *said["output"]]
        more = await create(server, [*before, *results], tools=[WEATHER])
        assert [one["role"] for one in server.seen()] == ["system", "user", "assistant", "tool", "tool"]
        assert [one["content"] for one in server.seen()[-2:]] == ["rain", "sun"]
    assert text_of(more) == "Go to Rome."


async def test_a_custom_tool_is_called_with_a_text(server):
    server.fake.calls(call("apply_patch", "c1", input="*** Begin"))
    events = await stream(server, "Patch it.", tools=[PATCH])
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"] == [
        "*** Begin"
    ]
    server.fake.reply("Patched.")
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    said = await create(server, [{"role": "user", "content": "Patch it."}, item, result], tools=[PATCH])
    assert text_of(said) == "Patched."
    assert json.loads(server.seen()[-2]["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin"}


async def test_tool_choice_is_honoured_and_allowed_tools_are_the_only_ones(server):
    other = {**WEATHER, "name": "other"}
    server.fake.calls(call("forecast", city="Oslo"))
    await create(server, "Rain?", tools=[WEATHER, other], tool_choice={"type": "function", "name": "forecast"})
    assert server.fake.requests[-1].body["tool_choice"] == {"type": "function", "function": {"name": "forecast"}}
    server.fake.calls(call("forecast", city="Oslo"))
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "forecast"}]}
    await create(server, "Rain?", tools=[WEATHER, other], tool_choice=allowed)
    sent = server.fake.requests[-1].body
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["forecast"]
    assert sent["tool_choice"] == "required"


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "none"}, {"tool_choice": "none", "tools": [WEATHER]}, {"tools": [{"type": "web_search"}]}],
    ids=["own", "client", "elsewhere"],
)
async def test_a_request_that_may_not_act_does_not(server, fields):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"))
    server.fake.reply("done")
    assert text_of(await create(server, "Go.", **fields)) == "done"
    assert not (server.owners.config.workspace / "canary.txt").exists()
    assert not server.fake.requests[0].body.get("tools")


async def test_pictures_reach_the_model_even_in_results(server):
    image = {"type": "input_image", "image_url": PIXEL}
    server.fake.reply("Red.")
    await create(server, [{"role": "user", "content": [{"type": "input_text", "text": "Which?"}, image]}])
    assert server.seen()[-1]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}
    made = [{"type": "function_call", "call_id": f"c{n}", "name": "forecast", "arguments": "{}"} for n in (1, 2)]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": [image]} for n in (1, 2)]
    server.fake.reply("Red.")
    await create(server, [{"role": "user", "content": "Look."}, *made, *results], tools=[WEATHER])
    assert [one["role"] for one in server.seen()] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert len(server.seen()[-1]["content"]) == 2


async def test_an_answer_follows_its_schema(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    server.fake.reply('{"n": 4}')
    wanted = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    said = await create(server, "2+2?", text=wanted)
    assert json.loads(text_of(said)) == {"n": 4}
    sent = server.fake.requests[-1].body["response_format"]
    assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", schema)
    assert said["text"]["format"]["name"] == "number"


# ---------------------------------------------------------------------------------------------- stored responses


async def test_a_previous_response_is_continued_and_can_be_branched(server):
    answers = {}
    server.fake.reply("Hello Ida.")
    first = await create(server, "My name is Ida.")
    for name in ("second", "third"):
        server.fake.reply(f"{name} answer")
        answers[name] = await create(server, f"{name} question", previous_response_id=first["id"])
        assert answers[name]["previous_response_id"] == first["id"]
        said = json.dumps(server.seen())
        assert "My name is Ida." in said
        assert "Hello Ida." in said
    assert "second question" not in said  # the third is another branch
    server.fake.reply("more")
    await create(server, "and?", previous_response_id=answers["second"]["id"])
    said = json.dumps(server.seen())
    assert "second question" in said
    assert "third question" not in said


async def test_concurrent_continuations_of_one_response_see_nothing_of_each_other(server):
    server.fake.reply("First.")
    first = await create(server, "begin")
    questions = [f"question {number}" for number in range(4)]
    for question in questions:
        server.fake.reply(f"An answer, though not to {question}.", delay=0.2)
    await asyncio.gather(*(create(server, said, previous_response_id=first["id"]) for said in questions))
    asked = [[message["content"] for message in server.seen(number)[1:]] for number in range(1, 5)]
    assert sorted(asked) == [["begin", "First.", question] for question in questions]


async def test_two_servers_of_a_store_continue_one_response_separately(server):
    server.fake.reply("First.")
    first = await create(server, "begin")
    agent = await server.owners.agent("me")
    previous = await find(agent, "me", first["id"])
    assert previous is not None
    other = SQLiteStore(server.owners.config.home / "everloop.db")
    try:
        keys = [
            await continued(store, "me", previous, id, copied=False) for store, id in ((agent.store, "a"), (other, "b"))
        ]
    finally:
        await other.close()
    assert keys == [previous.row.message.session_key, "api:b"]


async def test_a_stored_response_is_returned_unchanged(server):
    server.fake.calls(call("forecast", "c1", city="Oslo"), text="I look.")
    tool = {**WEATHER, "name": "weather.forecast"}
    server.fake.replies.clear()
    server.fake.calls(call("weather_forecast", "c1", city="Oslo"), text="I look.")
    made = await create(server, "Rain?", tools=[tool], metadata={"a": "b"}, instructions="Brief.", temperature=0.5)
    _, _, shown = await http(server, "GET", f"/{made['id']}")
    assert {**shown, "created_at": 0} == {**made, "created_at": 0}
    assert made["output"][1]["name"] == made["tools"][0]["name"] == "weather.forecast"


async def test_a_stream_that_is_read_again_resumes_exactly_after_an_event(server):
    server.fake.reply("Water the beans, then rest a while.", reasoning="It is dry.")
    first = await stream(server, "What needs doing?")
    id = first[0]["response"]["id"]
    whole = await again(server, id)
    assert streamed_text(whole) == streamed_text(first)
    assert whole[-1]["sequence_number"] == first[-1]["sequence_number"]
    for event in first:
        after = event["sequence_number"]
        rest = await again(server, id, after)
        before = [one for one in first if one["sequence_number"] <= after]
        assert streamed_text(before) + streamed_text(rest) == streamed_text(first)
        assert all(one["sequence_number"] > after for one in rest)


async def test_an_item_is_referenced_by_its_id(server):
    server.fake.calls(call("forecast", "c1", city="Oslo"), text="I look.", reasoning="Hm.")
    said = await create(server, "Rain?", tools=[WEATHER])
    references = [{"type": "item_reference", "id": item["id"]} for item in said["output"]]
    result = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    server.fake.reply("Wet.")
    await create(server, [{"role": "user", "content": "Rain?"}, *references, result], tools=[WEATHER])
    _, _, answered, _ = server.seen()
    assert (answered["content"], answered["tool_calls"][0]["function"]["name"]) == ("I look.", "forecast")
    wrong = {"type": "item_reference", "id": "msg_" + "0" * 24 + "_0"}
    status, _, error = await http(server, "POST", "", {"input": [wrong, {"role": "user", "content": "x"}]})
    assert (status, error["error"]["param"]) == (404, "input[0].id")


async def test_a_response_that_is_not_stored_is_not_found(server):
    server.fake.reply("hi")
    said = await create(server, store=False)
    assert said["store"] is False
    assert (await http(server, "GET", f"/{said['id']}"))[0] == 404
    status, _, error = await http(server, "POST", "", {"input": "x", "previous_response_id": said["id"]})
    assert (status, error["error"]["code"]) == (400, "previous_response_not_found")


async def test_an_unstored_response_may_continue_a_stored_one_without_changing_it(server):
    server.fake.reply("one")
    first = await create(server, "first question")
    server.fake.reply("two")
    aside = await create(server, "aside", previous_response_id=first["id"], store=False)
    assert "first question" in json.dumps(server.seen())
    assert (await http(server, "GET", f"/{aside['id']}"))[0] == 404
    server.fake.reply("three")
    await create(server, "next", previous_response_id=first["id"])
    assert "aside" not in json.dumps(server.seen())


async def test_a_deleted_response_is_gone(server):
    server.fake.reply("hi")
    said = await create(server)
    foreign = {"Origin": "https://elsewhere.example"}
    async with server.http.delete(f"{server.url}{PATH}/{said['id']}", headers=foreign) as response:
        assert response.status == 403
    async with server.http.delete(f"{server.url}{PATH}/{said['id']}") as response:  # without a Content-Type
        status, body = response.status, await response.json()
    assert (status, body) == (200, {"id": said["id"], "object": "response", "deleted": True})
    for method in ("GET", "DELETE"):
        assert (await http(server, method, f"/{said['id']}"))[0] == 404
    assert (await http(server, "POST", "", {"input": "x", "previous_response_id": said["id"]}))[0] == 400


async def test_nothing_of_another_api_or_of_another_owner_is_found(tmp_path):
    async with serving(tmp_path) as server:
        anna, berta = await server.client("anna"), await server.client("berta")
        server.fake.reply("secret")
        said = await create(anna)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            assert (await http(berta, method, f"/{said['id']}{path}"))[0] == 404
        body = {"input": "x", "previous_response_id": said["id"]}
        assert (await http(berta, "POST", "", body))[0] == 400
        assert (await http(anna, "GET", f"/{said['id']}"))[0] == 200
        server.fake.reply("hi")
        chat = await anna.ask("hi")
        assert (await http(anna, "GET", f"/{chat['id']}"))[0] == 404
        nobody = Client(server.url, server.http)
        for method, path in (("GET", "/x"), ("DELETE", "/x"), ("POST", "/x/cancel"), ("POST", "")):
            assert (await http(nobody, method, path, {} if method == "POST" else None))[0] == 401


async def test_a_command_is_text_unless_the_client_names_its_session(server):
    server.fake.reply("I cannot help.")
    assert text_of(await create(server, "/help")) == "I cannot help."
    assert "/stop" in text_of(await create(server, "/help", {"X-Session": "named"}))


async def test_a_named_session_is_kept(server):
    for said in ("My name is Ida.", "Who am I?"):
        server.fake.reply("Ida.")
        await create(server, said, {"X-Session": "responses"})
    assert [one["role"] for one in server.seen()] == ["system", "user", "assistant", "user"]


# ---------------------------------------------------------------------------------------------- in the background


async def test_a_background_response_is_queued_and_read_later(server):
    server.fake.reply("Done.", delay=0.2)
    made = await create(server, "Work.", background=True)
    assert made["status"] == "queued"
    assert text_of(await ended(server, made["id"])) == "Done."
    status, _, error = await http(server, "POST", "", {"input": "x", "background": True, "store": False})
    assert (status, error["error"]["param"]) == (400, "background")


async def test_a_background_stream_continues_without_its_client(server):
    server.fake.reply("one two three four five", token_delay=0.1)
    body = {"input": "Count.", "background": True, "stream": True}
    async with server.http.post(server.url + PATH, json=body, headers=server.headers) as response:
        async for event in named_events(response):
            if event["type"] == "response.created":
                id = event["response"]["id"]
            if event["type"] == "response.output_text.delta":
                seen, after = event["delta"], event["sequence_number"]
                break
    rest = await again(server, id, after)
    assert seen + streamed_text(rest) == "one two three four five"
    assert not server.fake.requests[-1].gone


async def test_a_background_response_can_be_cancelled_running_or_waiting(server):
    server.fake.hang(50, after_chunks=1, text="one two three")
    first = await create(server, "Count.", {"X-Session": "queue"}, background=True)
    async with asyncio.timeout(20):
        while not server.fake.requests:
            await asyncio.sleep(0.01)
    waiting = await create(server, "Again.", {"X-Session": "queue"}, background=True)
    for made in (waiting, first):
        status, _, body = await http(server, "POST", f"/{made['id']}/cancel")
        assert (status, body["status"]) == (200, "cancelled")
        assert (await ended(server, made["id"]))["status"] == "cancelled"
    await server.model_left(0)
    assert len(server.fake.requests) == 1
    server.fake.reply("hi")
    foreground = await create(server)
    assert (await http(server, "POST", f"/{foreground['id']}/cancel"))[0] == 400


@pytest.mark.parametrize("background", [True, False])
async def test_a_stored_response_is_finished_by_the_next_start_after_a_kill(tmp_path, background):
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as session:
        fake.hang(50, after_chunks=1, text="lost words")
        async with process(fake, tmp_path) as (made, url):
            client = Client(url, session)
            body = {"input": "Work.", "background": background, "stream": True}
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url + PATH, json=body) as response:
                    async for event in named_events(response):
                        if event["type"] == "response.created":
                            id = event["response"]["id"]
                        if event["type"] == "response.output_text.delta":
                            made.kill()
        fake.reply("Done.")
        async with process(fake, tmp_path) as (_, url):
            client = Client(url, session)
            assert text_of(await ended(client, id)) == "Done."
            assert streamed_text(await again(client, id)) == "Done."


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "input[0].tool_call_id"),
        ({"input": [{"type": "function_call", "call_id": "c9", "name": "x"}]}, "input[0].arguments"),
        ({"temperature": 3}, "temperature"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": [WEATHER]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(server, fields, param):
    status, _, body = await http(server, "POST", "", {"input": "hi", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert server.fake.requests == []


async def test_parameters_without_effect_are_named_in_a_header(server):
    server.fake.reply("ok")
    fields = {"max_tool_calls": 3, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "extreme"}}
    _, headers, _ = await http(server, "POST", "", {"input": "hi", **fields})
    assert headers["Warning"] == '299 everloop "no effect: max_tool_calls, reasoning.effort"'


async def test_an_interrupted_answer_is_a_failed_response(server):
    server.fake.raw(HALF)
    events = await stream(server)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"]
    stored = events[-1]["response"]["id"]
    _, _, shown = await http(server, "GET", f"/{stored}")
    assert (shown["status"], shown["error"]["code"]) == ("failed", "model_refused")


async def test_a_client_that_disconnects_stops_the_model(server):
    server.fake.hang(50, after_chunks=2, text="one two three four")
    body = {"input": "Count.", "stream": True}
    async with server.http.post(server.url + PATH, json=body, headers=server.headers) as response:
        await response.content.readuntil(b'"delta":"one')
    await server.model_left()


async def test_a_token_for_clients_only_is_limited_here_too(tmp_path):
    async with serving(tmp_path) as server:
        token = new_token()
        await server.store.add_token("editor", "me", hash_of(token), ["use"], "client")
        server.fake.calls(call("write_file", path="canary.txt", content="acted"))
        server.fake.reply("done")
        await create(Client(server.url, server.http, token), "Go.", {"X-Agent": "own"}, model="everloop/agent")
        assert not (server.owners.config.workspace / "canary.txt").exists()
        assert re.search("everloop/agent", json.dumps(server.seen())) is None
