"""The format of chat completions, whole and streamed, and of the small bodies that the APIs share."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from everloop.log import Call
from everloop.server import openai_chat, responses
from everloop.server.errors import bad_gateway
from everloop.server.openai_chat import Chunks, completion
from everloop.server.openai_chat import choice as made_choice
from everloop.server.responses import usage_of

CALLS = (Call("c1", "look", {"path": "é\u2028"}), Call("c2", "list"))


def chunks(include_usage: bool = False) -> Chunks:
    return Chunks("chatcmpl-1", 7, "org/model", include_usage)


def events(data: bytes) -> list[Any]:
    """The data of a stream's events, read as the strictest of clients would."""
    assert data.endswith(b"\n\n")
    lines = data.decode().splitlines()  # also at letters that only some clients take for the end of a line
    assert all(line == "" or line.startswith(("data: ", ": ")) for line in lines)
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def delta(data: bytes) -> dict[str, Any]:
    (event,) = events(data)
    (choice,) = event["choices"]
    return choice["delta"]


def test_a_chunk_has_the_fields_that_every_client_reads_and_no_others():
    assert events(chunks().text("Hi")) == [
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 7,
            "model": "org/model",
            "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}],
        }
    ]


def test_the_pieces_of_an_answer_have_formats_that_all_clients_accept():
    made = chunks()
    assert delta(made.role()) == {"role": "assistant", "content": ""}
    assert delta(made.reasoning("hm")) == {"reasoning_content": "hm"}
    pieces = [event["choices"][0]["delta"]["tool_calls"] for event in events(made.calls(CALLS))]
    assert pieces == [
        [{"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"path":"é\u2028"}'}}],
        [{"index": 1, "id": "c2", "type": "function", "function": {"name": "list", "arguments": ""}}],
        [{"index": 1, "function": {"arguments": "{}"}}],
    ]
    (last,) = events(made.finish("tool_calls"))
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert made.calls([]) == b""
    assert made.done() == b"data: [DONE]\n\n"


def test_the_usage_is_a_separate_chunk_and_null_in_all_others_if_requested():
    asked, plain = chunks(include_usage=True), chunks()
    for made in (asked.role(), asked.text("x"), asked.reasoning("x"), asked.calls(CALLS), asked.finish("stop")):
        assert all(event["usage"] is None for event in events(made))
    for made in (plain.role(), plain.text("x"), plain.reasoning("x"), plain.calls(CALLS), plain.finish("stop")):
        assert all("usage" not in event for event in events(made))
    assert asked.include_usage
    assert not plain.include_usage
    (event,) = events(asked.usage({"prompt_tokens": 3, "completion_tokens": 4}))
    assert event["choices"] == []
    assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


@example("a\ud800", True)
@given(st.text(st.characters(exclude_categories=())), st.booleans())
def test_any_text_arrives_in_one_event(text, include_usage):
    made = chunks(include_usage)
    expected = text.encode("utf-8", "replace").decode()
    assert delta(made.text(text)) == {"content": expected}
    assert delta(made.reasoning(text)) == {"reasoning_content": expected}
    assert "".join(events(made.comment(text))) == ""
    assert made.comment(text).startswith(b": ")
    odd = Call(text, text, {text: text})
    for event in events(made.calls([odd])):
        assert len(event["choices"]) == 1
    assert json.loads(completion(text, 1, text, [made_choice(content=text, calls=[odd], reasoning=text)]))["choices"]
    assert events(made.error(bad_gateway(text)))
    assert delta(Chunks(text, 1, text).text("x")) == {"content": "x"}


def strict(body: type, data: Any) -> None:
    """The body has no field that its type does not know."""
    known: Any = msgspec.convert(data, body)
    assert msgspec.to_builtins(known) == data


def test_every_event_has_the_documents_types():
    for made in (chunks(), chunks(include_usage=True)):
        said = made.role() + made.text("x") + made.reasoning("y") + made.calls(CALLS) + made.finish("length")
        for event in events(said + made.usage({"prompt_tokens": 1, "cached_tokens": 1, "reasoning_tokens": 2})):
            strict(openai_chat.Chunk, event)
    (error,) = events(chunks().error(bad_gateway("the model is away")))
    assert error["error"]["message"] == "the model is away"
    strict(responses.Error, error)


def test_a_whole_answer_is_an_openai_completion():
    data = completion("chatcmpl-1", 7, "m", [made_choice(content="Hi")], {"prompt_tokens": 1, "completion_tokens": 2})
    assert json.loads(data) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    strict(openai_chat.Completion, json.loads(data))


def test_a_whole_answer_may_contain_calls_and_thoughts():
    called = made_choice(content=None, finish_reason="tool_calls", calls=CALLS, reasoning="hm")
    answer = json.loads(completion("a", 7, "m", [called]))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "hm"
    made = [(call["id"], call["type"], call["function"]["name"]) for call in choice["message"]["tool_calls"]]
    assert made == [("c1", "function", "look"), ("c2", "function", "list")]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"path": "é\u2028"}
    assert "usage" not in answer
    strict(openai_chat.Completion, answer)


def test_the_details_of_the_usage_are_nested_if_known():
    usage = usage_of({"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 12, "cached_tokens": 4, "odd": 1})
    assert msgspec.to_builtins(usage) == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    details = msgspec.to_builtins(usage_of({"reasoning_tokens": 3}))["completion_tokens_details"]
    assert details == {"reasoning_tokens": 3}


def test_models_and_health_are_answered_as_by_openai():
    assert json.loads(responses.model("org/model")) == {
        "id": "org/model", "object": "model", "created": 0, "owned_by": "everloop",
    }  # fmt: skip
    listed = json.loads(responses.models(["a", "org/b"]))
    assert listed["object"] == "list"
    assert [(model["id"], model["created"]) for model in listed["data"]] == [("a", 0), ("org/b", 0)]
    assert json.loads(responses.health()) == {"status": "ok"}


def test_a_chunk_costs_next_to_nothing():
    made, count = chunks(include_usage=True), 20_000
    best = 1.0
    for _ in range(5):
        started = time.process_time()
        for _ in range(count):
            made.text("a word ")
        best = min(best, (time.process_time() - started) / count)
    assert best < 5e-6  # 0.5 µs on an idle machine
