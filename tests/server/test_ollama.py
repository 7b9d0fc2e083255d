"""`/api/…`: the agent behind Ollama's API."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

from .fixtures import shared_server
from .serving import HALF, Client, call, function, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = shared_server
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 8).decode()
HELLO = [{"role": "user", "content": "hello"}]


async def post(client: Client, path: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
    """(status, headers, the lines) of a request."""
    body = {"model": "scripted:latest", **fields}
    async with client.http.post(
        f"{client.url}/api/{path}", json=body, headers={**client.headers, **(headers or {})}
    ) as said:
        return said.status, said.headers, [json.loads(line) for line in (await said.read()).splitlines()]


async def ask(client: Client, path: str = "chat", headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
    """A whole answer."""
    fields = {"messages": HELLO, **fields} if path == "chat" else fields
    status, _, (answer,) = await post(client, path, headers, stream=False, **fields)
    assert status == 200, answer
    return answer


async def test_a_chat_is_streamed_as_lines_by_default(server):
    server.fake.reply("Water the beans.", reasoning="It is dry.")
    status, headers, lines = await post(server, "chat", messages=HELLO)
    assert (status, headers["Content-Type"]) == (200, "application/x-ndjson")
    assert "".join(line["message"]["content"] for line in lines) == "Water the beans."
    assert "".join(line["message"].get("thinking", "") for line in lines) == "It is dry."
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) > 3
    last = lines[-1]
    assert (last["model"], last["done_reason"]) == ("scripted", "stop")
    assert last["prompt_eval_count"] > 0
    assert last["eval_count"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_durations_are_the_answers_in_nanoseconds(server, stream):
    server.fake.reply("Four.", delay=0.05)
    _, _, lines = await post(server, "chat", messages=HELLO, stream=stream)
    assert lines[-1]["total_duration"] >= lines[-1]["eval_duration"] >= 50_000_000


async def test_a_chat_is_answered_in_one_piece(server):
    server.fake.reply("Four.", reasoning="Two and two.")
    answer = await ask(server)
    assert answer["message"] == {"role": "assistant", "content": "Four.", "thinking": "Two and two."}
    assert answer["done"]
    server.fake.reply("Four.", reasoning="Two and two.")
    assert "thinking" not in (await ask(server, think=False))["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_text_is_generated(server, stream):
    server.fake.reply("Four.")
    _, _, lines = await post(server, "generate", prompt="2+2?", system="Be brief.", stream=stream)
    assert "".join(line["response"] for line in lines) == "Four."
    assert lines[-1]["done"]
    assert "Be brief." in server.seen()[0]["content"]
    assert server.seen()[-1]["content"] == "2+2?"


async def test_the_agents_own_tools_run_and_the_client_sees_the_answer(server):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"))
    server.fake.reply("Done.")
    assert (await ask(server))["message"]["content"] == "Done."
    canary = server.owners.config.workspace / "canary.txt"
    assert canary.read_text() == "acted"
    canary.unlink()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_calls_of_the_clients_tools_are_handed_back_and_their_results_accepted(server, stream):
    tools = [function("forecast", city={"type": "string"}), function("clock")]
    server.fake.calls(call("forecast", "c1", city="Oslo"), call("clock", "c2"))
    _, _, lines = await post(server, "chat", messages=HELLO, tools=tools, stream=stream)
    (calls,) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [one["function"] for one in calls] == [
        {"name": "forecast", "arguments": {"city": "Oslo"}},
        {"name": "clock", "arguments": {}},
    ]
    for one in calls:
        del one["id"]  # older clients know none
    server.fake.reply("Wet at noon.")
    results = [
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "rain", "tool_name": "forecast"},
    ]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    answer = await ask(server, messages=[*HELLO, asked, *results], tools=tools)
    assert answer["message"]["content"] == "Wet at noon."
    names = {one["id"]: one["function"]["name"] for one in server.seen()[2]["tool_calls"]}
    assert sorted((names[one["tool_call_id"]], one["content"]) for one in server.seen() if one["role"] == "tool") == [
        ("clock", "noon"),
        ("forecast", "rain"),
    ]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("generate", {"prompt": "def add(a, b):", "raw": True}),
        ("generate", {"prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"}),
        ("chat", {"messages": [{"role": "user", "content": "Generate a title for this chat."}]}),
        ("chat", {"messages": HELLO, "model": "everloop/chat:latest"}),
    ],
    ids=["raw", "fim", "title", "model"],
)
async def test_a_request_that_may_not_act_does_not(server, path, fields):
    server.fake.calls(call("write_file", path="canary.txt", content="acted"))
    server.fake.reply("done")
    await ask(server, path, **fields)
    assert not (server.owners.config.workspace / "canary.txt").exists()
    assert not server.fake.requests[0].body.get("tools")
    assert server.fake.requests[0].body["model"] == "scripted"


async def test_options_are_passed_on_and_others_named_in_a_header(server):
    server.fake.reply("hi")
    options = {"temperature": 0.5, "num_predict": 40, "seed": 7, "stop": ["x"], "top_k": 5, "num_ctx": 4096}
    _, headers, _ = await post(server, "chat", messages=HELLO, options=options, keep_alive="5m", stream=False)
    sent = server.fake.requests[-1].body
    assert (sent["temperature"], sent["max_tokens"], sent["seed"], sent["stop"]) == (0.5, 40, 7, ["x"])
    assert headers["Warning"] == '299 everloop "no effect: options.top_k, options.num_ctx"'
    server.fake.reply("hi")
    await ask(server, options={"num_predict": -1})
    assert "max_tokens" not in server.fake.requests[-1].body


async def test_pictures_and_formats_reach_the_model(server):
    server.fake.reply("{}")
    schema = {"type": "object", "properties": {}}
    said = [{"role": "user", "content": "Which?", "images": [PNG]}]
    await ask(server, messages=said, format=schema)
    assert server.seen()[-1]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PNG}"
    assert server.fake.requests[-1].body["response_format"]["json_schema"]["schema"] == schema
    server.fake.reply("{}")
    await ask(server, "generate", prompt="x", images=[PNG], format="json")
    assert server.fake.requests[-1].body["response_format"] == {"type": "json_object"}


async def test_a_request_without_a_message_only_loads_the_model(server):
    assert (await ask(server, messages=[]))["done_reason"] == "load"
    assert (await ask(server, "generate"))["done_reason"] == "load"
    assert server.fake.requests == []


async def test_the_models_are_listed(server):
    _, tags = await server.get("/api/tags")
    assert [one["name"] for one in tags["models"]] == [
        "scripted:latest", "everloop/agent:latest", "everloop/chat:latest",
    ]  # fmt: skip
    assert all(len(one["digest"]) == 64 for one in tags["models"])
    _, loaded = await server.get("/api/ps")
    assert [one["name"] for one in loaded["models"]] == ["scripted:latest"]
    _, version = await server.get("/api/version")
    assert version["version"].count(".") == 2
    status, _, (shown,) = await post(server, "show")
    assert status == 200
    assert "tools" in shown["capabilities"]
    assert shown["model_info"]["everloop.context_length"] > 0
    assert (await post(server, "show", model="nothing"))[0] == 404


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat", {"messages": "x"}, "messages"),
        ("chat", {"messages": HELLO, "options": {"temperature": 9}}, "options.temperature"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["no"]}]}, "messages[0].images[0]"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
async def test_an_error_has_ollamas_format_and_names_the_cause(server, path, fields, words):
    status, _, (body,) = await post(server, path, **fields)
    assert status == 400
    assert body.keys() == {"error"}
    assert words in body["error"]
    assert server.fake.requests == []


async def test_an_interrupted_answer_ends_with_an_error(server):
    server.fake.raw(HALF)
    _, _, lines = await post(server, "chat", messages=HELLO)
    assert lines[-1].keys() == {"error"}
    assert not any(line.get("done") for line in lines)


async def test_a_silent_stream_sends_keep_alive_lines(tmp_path):
    async with serving(tmp_path, ping_seconds=0.05) as server:
        server.fake.reply("late", delay=0.5)
        _, _, lines = await post(server, "chat", messages=HELLO)
        assert sum(line["message"]["content"] == "" and not line["done"] for line in lines) > 2
        assert "".join(line["message"]["content"] for line in lines) == "late"


async def test_a_body_without_a_content_type_is_accepted_and_a_pages_is_not(server):
    body = json.dumps({"model": "scripted", "messages": HELLO, "stream": False}).encode()

    async def status(**headers: str) -> int:
        skipped = ("Content-Type",) if not headers.get("Content-Type") else ()
        async with server.http.post(
            f"{server.url}/api/chat", data=body, headers={**server.headers, **headers}, skip_auto_headers=skipped
        ) as response:
            return int(response.status)

    server.fake.reply("hi")
    assert await status() == 200
    assert await status(Origin="https://elsewhere.example") == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert await status(**{"Content-Type": kind}) == 415
    assert len(server.fake.requests) == 1


async def test_a_client_that_disconnects_stops_the_model(server):
    server.fake.hang(50, after_chunks=2, text="one two three four")
    body = {"model": "scripted", "messages": HELLO}
    async with server.http.post(f"{server.url}/api/chat", json=body, headers=server.headers) as response:
        await response.content.readuntil(b"one")
    await server.model_left()


async def test_a_session_is_kept_and_a_token_needed(tmp_path):
    async with serving(tmp_path) as server:
        for _ in range(2):
            server.fake.reply("Ida.")
            await ask(server, headers={"X-Session": "home"})
        assert [one["role"] for one in server.seen()] == ["system", "user", "assistant", "user"]
        await server.client("anna")
        nobody = Client(server.url, server.http)
        for path in ("chat", "generate", "show"):
            status, _, (body,) = await post(nobody, path)
            assert (status, body.keys()) == (401, {"error"})
        for path in ("tags", "ps", "version"):
            assert (await nobody.get(f"/api/{path}"))[0] == 401
