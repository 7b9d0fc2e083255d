"""A chat completion over real HTTP: the agent behind it, its tools, the client's tools, streams, errors."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from everloop.log import CallEnded, ModelAnswered, TurnEnded, UserSaid

from .serving import Serving, Streamed, call, function, serving, text_of

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001"
        "a5f645400000000049454e44ae426082"
    )
).decode()


async def test_the_agent_uses_its_own_tools_and_answers(server: Serving):
    (server.owners.config.workspace / "notes.md").write_text("buy milk")
    server.fake.calls(call("read_file", path="notes.md"))
    server.fake.reply("You are to buy milk.")
    body = await server.ask("what is in my notes?", model="gpt-4o")
    assert text_of(body) == "You are to buy milk."
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] > 0
    assert "buy milk" in server.seen()[-1]["content"]
    assert [type(entry) for entry in await server.entries()][:3] == [UserSaid, ModelAnswered, CallEnded]


async def test_the_requests_messages_are_the_history(server: Serving):
    server.fake.reply("Ada.")
    history = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert text_of(await server.ask(history)) == "Ada."
    system, *rest = server.seen()
    assert rest == history[1:]
    assert system["content"].startswith("# Everloop")
    assert "Answer in one word." in system["content"]


async def test_two_requests_share_no_history(server: Serving):
    server.fake.reply("one")
    server.fake.reply("two")
    await server.ask("the canary is blue")
    await server.ask("and now?")
    assert "canary" not in str(server.seen())


async def test_the_prompt_is_the_same_from_request_to_request(server: Serving):
    for _ in range(2):
        server.fake.reply("yes")
        await server.ask("are you there?")
    first, second = (seen.raw for seen in server.fake.requests)
    assert first == second


async def test_the_first_token_is_sent_as_soon_as_it_arrives(server: Serving):
    server.fake.hang(30, after_chunks=1, text="early and late", tokens=["early", " and late"])
    async with server.post({"messages": [{"role": "user", "content": "go"}], "stream": True}) as response:
        streamed = Streamed()
        async with asyncio.timeout(10):
            while not streamed.text:
                streamed.take((await response.content.readline()).decode().removesuffix("\n"))
        assert streamed.text == "early"


async def test_a_stream_is_what_clients_expect(server: Serving):
    server.fake.reply("Hello there, friend.", reasoning="be polite")
    streamed = await server.stream("hi", stream_options={"include_usage": True})
    assert streamed.text == "Hello there, friend."
    assert streamed.reasoning == "be polite"
    assert streamed.finish == "stop"
    assert streamed.done
    assert streamed.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert streamed.usage is not None
    assert streamed.chunks[-1]["choices"] == []
    assert len({chunk["id"] for chunk in streamed.chunks}) == 1


async def test_tool_activity_is_sent_as_comments(server: Serving):
    server.fake.calls(call("list_dir", path="."), text="Let me look.")
    server.fake.reply("Nothing is here.")
    streamed = await server.stream("what is here?")
    assert streamed.text == "Let me look.\n\nNothing is here."
    told = [comment for comment in streamed.comments if comment.startswith("tool ")]
    assert [("started" in one, "list_dir" in one) for one in told] == [(True, True), (False, True)]


async def test_keep_alives_are_sent_during_a_long_tool_call(tmp_path: Path):
    async with serving(tmp_path, ping_seconds=0.05) as server:
        server.fake.calls(call("exec", command="sleep 0.6"))
        server.fake.reply("slept")
        streamed = await server.stream("sleep a little")
        assert streamed.comments.count("ping") >= 3
        assert streamed.text == "slept"


async def test_calls_of_the_clients_tools_are_handed_back(server: Serving):
    tools = [function("get_weather", city={"type": "string"}), function("get_time")]
    server.fake.calls(call("get_weather", "w1", city="Oslo"), call("get_time", "t1"))
    body = await server.ask("weather?", tools=tools)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["get_weather", "get_time"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    server.fake.reply("It rains at noon.")
    results = [
        {"role": "tool", "tool_call_id": "w1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t1", "content": "12:00"},
    ]
    history = [{"role": "user", "content": "weather?"}, choice["message"], *results]
    assert text_of(await server.ask(history, tools=tools)) == "It rains at noon."
    assert [message["role"] for message in server.seen()] == ["system", "user", "assistant", "tool", "tool"]
    assert server.fake.requests[-1].body is not None
    assert server.fake.requests[-1].body["tools"] == tools


async def test_with_its_own_tools_the_client_is_the_agent(server: Serving):
    server.fake.reply("fine")
    history = [{"role": "developer", "content": "You are Hal."}, {"role": "user", "content": "open the doors"}]
    await server.ask(history, tools=[function("open_doors")])
    system, said = server.seen()
    assert (system["role"], system["content"]) == ("system", "You are Hal.")
    assert said["content"] == "open the doors"


async def test_a_streamed_call_comes_in_the_pieces_that_clients_assemble(server: Serving):
    server.fake.calls(call("get_weather", "w1", city="Oslo"), text="I look.")
    streamed = await server.stream("weather?", tools=[function("get_weather", city={"type": "string"})])
    assert streamed.calls() == [("w1", "get_weather", {"city": "Oslo"})]
    assert streamed.text == "I look."
    assert streamed.finish == "tool_calls"


async def test_a_call_of_an_unknown_tool_is_returned_to_the_model_and_not_to_the_client(server: Serving):
    server.fake.calls(call("get_weather", "w1", city="Oslo"), call("nonsense", "n1"))
    server.fake.calls(call("get_weather", "w2", city="Oslo"))
    body = await server.ask("weather?", tools=[function("get_weather", city={"type": "string"})])
    assert [one["id"] for one in body["choices"][0]["message"]["tool_calls"]] == ["w2"]
    said = [message["content"] for message in server.seen() if message["role"] == "tool"]
    assert len(said) == 2
    assert all('"status":"error"' in one for one in said)


async def test_a_picture_reaches_the_model(server: Serving):
    server.fake.reply("a dot")
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    ]
    await server.ask([{"role": "user", "content": parts}])
    sent = server.seen()[-1]["content"]
    assert {"type": "text", "text": "what is this?"} in sent
    assert any(part["type"] == "image_url" and PIXEL in part["image_url"]["url"] for part in sent)


async def test_the_options_of_a_client_reach_the_model(server: Serving):
    server.fake.reply("{}")
    wishes: dict[str, Any] = {
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["END"],
        "seed": 3,
        "response_format": {"type": "json_object"},
    }
    await server.ask("as JSON", **wishes)
    body = server.fake.requests[-1].body
    assert body is not None
    assert {name: body[name] for name in wishes} == wishes


async def test_a_request_ends_after_its_rounds(server: Serving):
    for number in range(5):
        server.fake.calls(call("list_dir", f"c{number}", path="."))
    streamed = await server.stream("go round")
    assert "5 rounds" in streamed.text
    assert streamed.finish == "stop"
    assert len(server.fake.requests) == 5


async def test_the_models_finish_reason_is_passed_on(server: Serving):
    server.fake.reply("cut", finish_reason="length")
    assert (await server.ask("long"))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("status", "message", "then"),
    [
        (401, "wrong key", 502),
        (404, "no such model", 502),
        (429, "slow down", 429),
        (503, "busy", 503),
        (500, "boom", 502),
        (400, "This model's maximum context length is 100 tokens", 400),
    ],
)
async def test_each_failure_of_the_model_has_its_own_status(server: Serving, status: int, message: str, then: int):
    for stream in (False, True):
        server.fake.fail(status, message)
        found, error = await server.fails("hi", stream=stream)
        assert found == then
        assert message in error["message"]
    if status == 400:
        assert error["code"] == "context_length_exceeded"


async def test_a_failure_in_the_middle_of_a_stream_is_one_of_its_events(server: Serving):
    server.fake.calls(call("list_dir", path="."), text="Let me see.")
    server.fake.fail(500, "boom")
    streamed = await server.stream("go")
    assert streamed.text == "Let me see."
    assert "boom" in streamed.error["message"]
    assert not streamed.done


async def test_a_model_of_the_servers_list_answers_and_any_other_name_gets_the_usual_one(tmp_path: Path):
    async with serving(tmp_path, server_models=("other-*",), fallbacks=("spare",)) as server:
        for _ in range(2):
            server.fake.reply("hi")
        assert (await server.ask("hi", model="other-1"))["model"] == "other-1"
        assert (await server.ask("hi", model="gpt-4o"))["model"] == "scripted"
        assert [seen.model for seen in server.fake.requests] == ["other-1", "scripted"]
        status, listed = await server.get("/v1/models")
        assert [one["id"] for one in listed["data"]] == ["scripted", "spare", "everloop/agent", "everloop/chat"]
        assert (await server.get("/v1/models/spare"))[1]["id"] == "spare"
        status, body = await server.get("/v1/models/gpt-4o")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_the_health_endpoint_answers(server: Serving):
    assert await server.get("/healthz") == (200, {"status": "ok"})
    assert (await server.get("/readyz"))[0] == 200


async def test_a_call_that_needs_approval_is_denied_and_the_request_continues(tmp_path: Path):
    from everloop.config import Rule

    async with serving(tmp_path, policy=(Rule(do="ask", tool="write_file"),)) as server:
        server.fake.calls(call("write_file", path="x", content="y"))
        server.fake.reply("I may not.")
        assert text_of(await server.ask("write x")) == "I may not."
        assert not (server.owners.config.workspace / "x").exists()


async def test_a_custom_tool_and_a_dotted_one_are_handed_back_as_the_client_knows_them(server: Serving):
    tools = [{"type": "custom", "custom": {"name": "patch"}}, function("files.read")]
    made = (call("patch", "c1", input="*** Begin"), call("files_read", "c2"))
    server.fake.calls(*made)
    whole = (await server.ask("Go.", tools=tools))["choices"][0]["message"]["tool_calls"]
    assert whole[0] == {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert whole[1]["function"]["name"] == "files.read"
    server.fake.calls(*made)
    streamed = await server.stream("Go.", tools=tools)
    pieces = [
        piece
        for chunk in streamed.chunks
        for choice in chunk["choices"]
        for piece in choice["delta"].get("tool_calls", ())
    ]
    assert [piece.get("custom", {}).get("input") for piece in pieces[:2]] == ["", "*** Begin"]
    assert (pieces[0]["type"], pieces[2]["function"]["name"]) == ("custom", "files.read")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_parameters_without_effect_are_named_in_a_header(server: Serving, stream: bool):
    server.fake.reply("hi")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "top_k": 5, "min_p": 0.1}
    async with server.post(body) as response:
        assert response.status == 200
        assert response.headers["Warning"] == '299 everloop "no effect: top_k, min_p"'
    assert not {"top_k", "min_p"} & (server.fake.requests[-1].body or {}).keys()


@pytest.mark.parametrize("path", ["/v1/nothing", "/v2/chat/completions", "/chat/completions", "/api/pull"])
async def test_an_unknown_path_lists_the_supported_apis(server: Serving, path: str):
    async with server.http.post(server.url + path, json={}) as response:
        body, status = await response.text(), response.status
    assert status == 404
    assert all(name in body for name in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"))


async def test_many_concurrent_requests_do_not_see_each_other(tmp_path: Path):
    async with serving(tmp_path, model="tools-2x1-flist_dir-n3") as server:

        async def one(number: int) -> None:
            streamed = await server.stream(f"mark:m{number}")
            assert streamed.text.startswith(f"done:m{number} ")

        await asyncio.gather(*(one(number) for number in range(20)))


async def test_nothing_stays_in_the_outbox_for_a_client_that_disconnected(server: Serving):
    server.fake.calls(call("message", content="one moment"), call("spawn", "c2", task="look around"))
    server.fake.reply("I looked around.")  # the sub-agent, which is waited for
    server.fake.reply("All is well.")
    assert text_of(await server.ask("is all well?")) == "All is well."
    results = {message["tool_call_id"]: message["content"] for message in server.seen() if message["role"] == "tool"}
    assert '"status":"error"' in results["c1"]
    assert "I looked around." in results["c2"]
    assert await server.store.take_outgoing("somebody") == []


@pytest.mark.parametrize("kept", [True, False])
async def test_at_the_limit_of_rounds_a_client_is_promised_only_what_its_kind_of_request_has(
    tmp_path: Path, kept: bool
):
    from everloop.replay import replay

    async with serving(tmp_path, server_rounds=2) as server:
        for number in range(2):
            server.fake.calls(call("list_dir", f"c{number}", path="."))
        said = text_of(await server.ask("go", {"X-Session": "work"} if kept else {}))
        assert "after 2 rounds" in said
        assert ("say “go on”" in said, "not remembered" in said) == (kept, not kept)
        server.fake.reply("hello")
        await server.ask("go on", {"X-Session": "work"} if kept else {})
        assert ("list_dir" in str(server.seen())) == kept  # what was promised is true
        entries = await server.entries(None if kept else (await server.store.sessions("me"))[-1].key)
        turn = entries[: [isinstance(entry, TurnEnded) for entry in entries].index(True) + 1]
        assert (await replay(turn)).same
