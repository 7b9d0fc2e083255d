"""Several answers to one request, and the log probabilities of an answer's tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from everloop.testing.openai_server import Reply

from ..support.held import HeldOpenAI
from .fixtures import shared_server
from .serving import Streamed, call, function, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = shared_server
CHAT = "everloop/chat"
TOKENS: list[dict[str, Any]] = [
    {
        "token": token,
        "logprob": -0.25,
        "bytes": list(token.encode()),
        "top_logprobs": [
            {"token": token, "logprob": -0.25, "bytes": None},
            {"token": "x", "logprob": -2.5, "bytes": None},
        ],
    }
    for token in ("Water", " it\u2028")
]
TEXT = "Water it\u2028"


async def test_a_model_answers_several_times(server):
    for number in range(3):
        server.fake.reply(f"Answer {number}.")
    body = await server.ask("What needs doing?", n=3, model=CHAT)
    assert sorted(choice["message"]["content"] for choice in body["choices"]) == ["Answer 0.", "Answer 1.", "Answer 2."]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len(server.fake.requests) == 3
    assert body["usage"]["completion_tokens"] == 6


async def test_several_answers_may_call_the_clients_tools(server):
    for city in ("Oslo", "Oslo"):
        server.fake.calls(call("forecast", city=city))
    body = await server.ask("Rain?", n=2, tools=[function("forecast")])
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "tool_calls"]


@pytest.mark.parametrize(
    ("fields", "headers"),
    [({}, {}), ({"stream": True}, {}), ({"model": CHAT}, {"X-Session": "one"})],
    ids=["agent", "streamed agent", "session"],
)
async def test_a_request_that_would_act_or_be_kept_several_times_is_refused(server, fields, headers):
    status, error = await server.fails("Go.", headers, n=2, **fields)
    assert (status, error["param"]) == (400, "n")
    assert server.fake.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_one_answer_that_fails_fails_the_request(server, stream):
    server.fake.fail(400)
    server.fake.fail(400)
    status, _ = await server.fails("Go.", n=2, model=CHAT, stream=stream)
    assert status == 400


def choices_in(answer: Any) -> list[dict[str, Any]]:
    return [choice for chunk in answer.chunks for choice in chunk["choices"]]


async def test_several_answers_are_streamed_concurrently(tmp_path):
    async with asyncio.timeout(60), HeldOpenAI() as model, serving(tmp_path, base_url=model.base_url) as server:
        model.hold(Reply("First answer."), after_chunks=1)
        model.reply("Second answer, which ends first.")
        answer = Streamed()
        said = [{"role": "user", "content": "What needs doing?"}]
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        async with server.post({"messages": said, "n": 2, "model": CHAT, **options}) as response:
            async for line in response.content:
                answer.take(line.decode().removesuffix("\n"))
                if "First" in answer.text and any(one["finish_reason"] for one in choices_in(answer)):
                    model.go.set()
    found = choices_in(answer)
    texts = ["".join(one["delta"].get("content") or "" for one in found if one["index"] == at) for at in (0, 1)]
    assert sorted(texts) == ["First answer.", "Second answer, which ends first."]
    for at in (0, 1):
        own = [one for one in found if one["index"] == at]
        assert own[0]["delta"]["role"] == "assistant"
        assert [one["finish_reason"] for one in own][-1] == "stop"
    assert len({chunk["id"] for chunk in answer.chunks}) == 1
    assert answer.chunks[-1]["choices"] == []
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 7
    assert answer.done


async def test_streamed_answers_have_their_own_calls_and_probabilities(server):
    for city in ("Oslo", "Rome"):
        server.fake.calls(call("forecast", city=city))
    found = choices_in(await server.stream("Rain?", n=2, tools=[function("forecast")]))
    arguments = [
        "".join(
            part["function"]["arguments"]
            for one in found
            if one["index"] == at
            for part in one["delta"].get("tool_calls", ())
        )
        for at in (0, 1)
    ]
    assert sorted(json.loads(one)["city"] for one in arguments) == ["Oslo", "Rome"]
    assert [one["finish_reason"] for one in found if one["finish_reason"]] == ["tool_calls", "tool_calls"]
    server.fake.replies += [streamed(), streamed()]
    found = choices_in(await server.stream("What needs doing?", n=2, model=CHAT, logprobs=True))
    assert sorted(one["index"] for one in found if "logprobs" in one) == [0, 1]


async def test_a_client_that_disconnects_stops_all_streamed_answers(server):
    for _ in range(2):
        server.fake.hang(100, 1, "Never said to its end.")
    body = {"messages": [{"role": "user", "content": "Go."}], "n": 2, "stream": True, "model": CHAT}
    async with asyncio.timeout(30):
        async with server.post(body) as response:
            begun = 0
            while begun < 2:  # a turn that has not asked the model yet would never ask it
                begun += b"Never" in await response.content.readline()
        while not all(one.gone for one in server.fake.requests):
            await asyncio.sleep(0.01)
    assert len(server.fake.requests) == 2


async def test_an_interrupted_answer_ends_the_stream_with_its_error(server):
    server.fake.reply("Half an", cut_after=1)
    server.fake.reply("Half an", cut_after=1)
    answer = await server.stream("Go.", n=2, model=CHAT)
    assert answer.error["message"]
    assert not answer.done


def whole() -> Reply:
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "logprobs": {"content": TOKENS}, "finish_reason": "stop"}
    return Reply(body={"choices": [choice], "usage": {}})


def streamed(bad: Any = None) -> Reply:
    lines = [
        {"choices": [{"index": 0, "delta": {"content": token["token"]}, "logprobs": bad or {"content": [token]}}]}
        for token in TOKENS
    ]
    events = [*map(json.dumps, [*lines, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]), "[DONE]"]
    return Reply(raw=b"".join(b"data: %b\n\n" % event.encode() for event in events))


async def test_log_probabilities_reach_the_client(server):
    server.fake.replies.append(whole())
    body = await server.ask("What needs doing?", logprobs=True, top_logprobs=2)
    assert body["choices"][0]["logprobs"] == {"content": TOKENS, "refusal": None}
    sent = server.fake.requests[-1].body
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 2)


async def test_log_probabilities_of_a_stream_follow_it(server):
    server.fake.replies.append(streamed())
    answer = await server.stream("What needs doing?", logprobs=True, top_logprobs=2)
    assert answer.text == TEXT
    (found,) = [choice["logprobs"] for chunk in answer.chunks for choice in chunk["choices"] if "logprobs" in choice]
    assert found["content"] == TOKENS


@pytest.mark.parametrize("bad", [{"content": [{"token": 5}]}, {"content": "x"}, "x", [1]])
async def test_log_probabilities_in_another_format_are_left_out(server, bad):
    server.fake.replies.append(streamed(bad))
    answer = await server.stream("What needs doing?", logprobs=True)
    assert answer.text == TEXT
    assert not any("logprobs" in choice for chunk in answer.chunks for choice in chunk["choices"])


async def test_a_model_that_was_not_asked_for_them_sends_none(server):
    server.fake.reply("Hi.")
    body = await server.ask("Hello.", logprobs=False, top_logprobs=0)
    assert body["choices"][0]["logprobs"] is None
