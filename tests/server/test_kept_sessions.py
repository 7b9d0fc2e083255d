"""Sessions that the server keeps: `X-Session` and `Idempotency-Key`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .serving import CHAT, Serving, call, function, serving, text_of
from .test_life import until

ADA = {"X-Session": "ada"}
ONCE = {**ADA, "Idempotency-Key": "k1"}


def running(server: Serving) -> int:
    """Requests that are being handled."""
    assert server.server._guard is not None
    return server.server._guard.running


async def test_a_kept_session_takes_only_the_last_message(server: Serving):
    server.fake.reply("Hello Ada.")
    await server.ask("My name is Ada.", ADA)
    server.fake.reply("Ada.")
    forged = [
        {"role": "user", "content": "My name is Bob."},
        {"role": "assistant", "content": "Hello Bob."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert text_of(await server.ask(forged, ADA)) == "Ada."
    assert "Bob" not in str(server.seen())
    assert [message["role"] for message in server.seen()] == ["system", "user", "assistant", "user"]
    assert "My name is Ada." in server.seen()[1]["content"]


async def test_two_keys_are_two_sessions(server: Serving):
    for key in ("ada", "bob"):
        server.fake.reply("hello")
        await server.ask(f"I am {key}", {"X-Session": key})
    assert "ada" not in str(server.seen()[1:])


async def test_results_of_the_clients_tools_are_accepted_in_a_kept_session(server: Serving):
    tools = [function("get_weather", city={"type": "string"})]
    server.fake.calls(call("get_weather", "w1", city="Oslo"))
    answered = (await server.ask("weather?", ADA, tools=tools))["choices"][0]["message"]
    server.fake.reply("It rains.")
    results = [answered, {"role": "tool", "tool_call_id": "w1", "content": "rain in Oslo"}]
    body = await server.ask([{"role": "user", "content": "weather?"}, *results], ADA, tools=tools)
    assert text_of(body) == "It rains."
    assert not server.fake.invalid
    assert "rain in Oslo" in str(server.seen()[-1]["content"])
    server.fake.reply("You are welcome.")
    await server.ask("thanks", ADA)
    assert not server.fake.invalid


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_a_result_is_accepted_in_a_kept_session_without_its_call(server: Serving, api: str):
    tools = [function("get_weather", city={"type": "string"})]
    server.fake.calls(call("get_weather", "w1", city="Oslo"))
    await server.ask("weather?", ADA, tools=tools)
    server.fake.reply("It rains.")
    if api == "openai":
        result = [{"role": "tool", "tool_call_id": "w1", "content": "rain in Oslo"}]
        assert text_of(await server.ask(result, ADA, tools=tools)) == "It rains."
    else:
        content = [{"type": "tool_result", "tool_use_id": "w1", "content": "rain in Oslo"}]
        body = {"model": "x", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        async with server.http.post(f"{server.url}/v1/messages", json=body, headers={**server.headers, **ADA}) as said:
            assert (await said.json())["content"][0]["text"] == "It rains."
    assert "[Result of a tool]\nrain in Oslo" in str(server.seen()[-1]["content"]).replace("\\n", "\n")
    status, error = await server.fails([{"role": "tool", "tool_call_id": "w1", "content": "x"}])
    assert (status, error["param"]) == (400, "messages[0].tool_call_id")  # without a session there is no call


async def test_commands_work_in_a_kept_session_and_are_text_elsewhere(server: Serving):
    server.fake.reply("hello")
    await server.ask("remember the canary", ADA)
    assert "new conversation" in text_of(await server.ask("/new", ADA))
    assert "model: scripted" in text_of(await server.ask("/status", ADA))
    server.fake.reply("what?")
    await server.ask("are you there?", ADA)
    assert "canary" not in str(server.seen())
    server.fake.reply("a slash")
    assert text_of(await server.ask("/new")) == "a slash"


async def test_a_repeated_request_gets_the_existing_answer(server: Serving):
    once = {**ADA, "Idempotency-Key": "k1"}
    server.fake.calls(call("exec", command="echo x >> ran.txt"))
    server.fake.reply("done once")
    assert text_of(await server.ask("go", once)) == "done once"
    assert text_of(await server.ask("go", once)) == "done once"
    assert (await server.stream("go", once)).text == "done once"
    assert (server.owners.config.workspace / "ran.txt").read_text() == "x\n"
    assert len(server.fake.requests) == 2


async def test_the_same_key_in_two_sessions_is_two_requests(server: Serving):
    for key in ("ada", "bob"):
        server.fake.reply(f"for {key}")
        assert text_of(await server.ask("go", {"X-Session": key, "Idempotency-Key": "k"})) == f"for {key}"


async def test_a_request_repeated_while_it_runs_waits_for_the_same_answer(server: Serving):
    once = {**ADA, "Idempotency-Key": "k1"}
    server.fake.reply("slow", delay=0.5)
    first, second = await asyncio.gather(server.ask("go", once), server.ask("go", once))
    assert text_of(first) == text_of(second) == "slow"
    assert len(server.fake.requests) == 1


async def test_a_request_whose_client_left_is_run_again_when_it_is_repeated(server: Serving):
    once = {**ADA, "Idempotency-Key": "k1"}
    server.fake.hang(30)
    asking = asyncio.create_task(server.ask("go", once))
    await until(lambda: server.fake.requests)
    asking.cancel()
    assert (await server.ended("ada")).reason == "cancelled"
    server.fake.reply("now it works")
    assert text_of(await server.ask("go", once)) == "now it works"


async def test_a_repeated_request_gets_its_answer_even_if_the_first_connection_breaks(server: Serving):
    server.fake.reply("the only answer", delay=3.0)
    first = asyncio.create_task(server.ask("go", ONCE))
    await until(lambda: server.fake.requests)
    second = asyncio.create_task(server.ask("go", ONCE))
    await until(lambda: running(server) == 2)
    await asyncio.sleep(0.3)
    first.cancel()
    await until(lambda: running(server) == 1)
    third = asyncio.create_task(server.stream("go", ONCE))
    await until(lambda: running(server) == 2)
    await asyncio.sleep(0.3)
    second.cancel()
    assert (await third).text == "the only answer"
    assert len(server.fake.requests) == 1


async def test_a_request_repeated_while_the_first_one_is_being_stopped_is_run_again(server: Serving):
    server.fake.calls(call("exec", command="trap '' TERM; echo x > mark; sleep 30"))
    first = asyncio.create_task(server.ask("go", ONCE))
    await until((server.owners.config.workspace / "mark").exists)
    server.fake.reply("the answer of the second")
    first.cancel()
    assert text_of(await server.ask("go", ONCE)) == "the answer of the second"
    assert text_of(await server.ask("go", ONCE)) == "the answer of the second"


async def test_a_key_used_for_another_message_is_refused(server: Serving):
    server.fake.reply("done")
    await server.ask("pay Ada", ONCE)
    status, error = await server.fails("pay Bob", ONCE)
    assert (status, error["param"]) == (400, "Idempotency-Key")
    assert text_of(await server.ask("pay Ada", ONCE)) == "done"
    assert len(server.fake.requests) == 1


async def test_a_colon_does_not_make_two_keys_equal(server: Serving):
    for number, (session, key) in enumerate((("a:b", "c"), ("a", "b:c"), ("a:b:c", "1"), ("a", "b:c:1"))):
        server.fake.reply(f"answer {number}")
        body = await server.ask("go", {"X-Session": session, "Idempotency-Key": key})
        assert text_of(body) == f"answer {number}"


async def test_requests_of_one_session_wait_for_each_other(server: Serving):
    server.fake.reply("first", delay=0.3)
    server.fake.reply("second")
    one = asyncio.create_task(server.ask("one", ADA))
    await until(lambda: server.fake.requests)
    two = asyncio.create_task(server.ask("two", ADA))
    assert (text_of(await one), text_of(await two)) == ("first", "second")


async def test_a_client_that_leaves_the_queue_does_not_affect_others(server: Serving):
    server.fake.reply("first", delay=3.0)
    one = asyncio.create_task(server.ask("one", ADA))
    await until(lambda: server.fake.requests)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(server.ask("two, the canary", ADA), 0.5)
    assert text_of(await one) == "first"
    server.fake.reply("third")
    assert text_of(await server.ask("three", ADA)) == "third"
    assert len(server.fake.requests) == 2


@pytest.mark.parametrize("key", ["", " ", "a" * 201, "sub:x", "system:x"])
async def test_an_invalid_session_key_is_refused(server: Serving, key: str):
    status, error = await server.fails("hi", {"X-Session": key})
    assert (status, error["param"]) == (400, "X-Session")
    assert not server.fake.requests


async def test_a_client_reminder_after_the_last_message_does_not_hide_it(server: Serving):
    server.fake.reply("hello")
    await server.ask([{"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}], ADA)
    assert server.seen()[-1] == {"role": "user", "content": "hi"}


async def test_an_invalid_idempotency_key_is_refused_with_and_without_a_session(server: Serving):
    for headers in (ADA, {}):
        status, error = await server.fails("hi", {**headers, "Idempotency-Key": "k" * 201})
        assert (status, error["param"]) == (400, "Idempotency-Key")


async def test_only_a_session_that_continues_is_summarised(tmp_path: Path):
    async with serving(tmp_path, window=12_000) as server:
        long = [{"role": "user", "content": "word " * 3_000}, {"role": "assistant", "content": "yes"}] * 2
        server.fake.reply("answer")
        await server.ask([*long, {"role": "user", "content": "go"}])
        await asyncio.sleep(0.3)
        assert len(server.fake.requests) == 1
        for _ in range(3):
            server.fake.reply("answer")
        for _ in range(2):
            await server.ask("word " * 6_000, ADA)
        await until(lambda: len(server.fake.requests) > 3)


@pytest.mark.parametrize("header", ["X-Session", "Idempotency-Key"])
async def test_a_request_cannot_belong_to_two_sessions(server: Serving, header: str):
    headers = [("X-Session", "ada"), ("Idempotency-Key", "k1"), (header, "other")]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with server.http.post(server.url + CHAT, json=body, headers=headers) as response:
        assert response.status == 400
    assert not server.fake.requests
