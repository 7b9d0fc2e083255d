"""Requests: a conversation in OpenAI's format becomes one that the API accepts."""

from __future__ import annotations

import base64
import gc
import json
from typing import Any

import pytest

from everloop.errors import ConfigError
from everloop.messages import Conversation, assistant_message, tool_message, user_message
from everloop.providers.anthropic import AnthropicProvider
from everloop.testing import FakeAnthropic
from tests.support.commands import until

from .streams import ASK, ECHO, sse, text, unmarked, watch

DOT = base64.b64encode(b"\x89PNG pixels").decode()


async def sent(server: FakeAnthropic, provider: AnthropicProvider, messages: Any, tools: Any = None) -> dict[str, Any]:
    """Return the request body for these messages, without markers; the server finds nothing wrong with it."""
    server.reply("ok")
    await provider.chat(messages, tools)
    assert server.requests[-1].problems == []
    body: dict[str, Any] = unmarked(server.requests[-1].body)
    return body


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_a_question_becomes_a_request(server, provider):
    body = await sent(server, provider, [{"role": "system", "content": "Be kind."}, *ASK])
    assert body == {
        "model": "some-model", "max_tokens": 32_000, "system": [said("Be kind.")],
        "messages": [{"role": "user", "content": [said("hello")]}],
    }  # fmt: skip


async def test_a_round_of_calls_and_the_users_next_message_keep_the_roles_alternating(server, provider):
    conversation = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        user_message("do"),
        user_message("it"),
        assistant_message("sure \n", [("a", "echo", {"n": 1}), ("b", "echo", {})]),
        tool_message("a", "echo", "first"),
        tool_message("b", "echo", ""),
        user_message("and hurry"),
        assistant_message("done"),
        assistant_message("really"),
        user_message("thanks"),
    ]
    body = await sent(server, provider, conversation, ECHO)
    assert body["system"] == [said("one"), said("two")]
    assert body["messages"] == [
        {"role": "user", "content": [said("do"), said("it")]},
        {
            "role": "assistant",
            "content": [
                said("sure"),
                {"type": "tool_use", "id": "a", "name": "echo", "input": {"n": 1}},
                {"type": "tool_use", "id": "b", "name": "echo", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "first"},
                {"type": "tool_result", "tool_use_id": "b", "content": "(no output)"},
                said("and hurry"),
            ],
        },
        {"role": "assistant", "content": [said("done"), said("really")]},
        {"role": "user", "content": [said("thanks")]},
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "only this"}],
        [],
        [user_message("")],
        [user_message(" \n"), assistant_message(None), user_message([])],
        [user_message([{"type": "text", "text": ""}, {"type": "text", "text": "x"}])],
        [assistant_message("I begin"), user_message("yes")],
        [user_message("a"), assistant_message(" \n "), user_message("b")],
        [user_message("a"), assistant_message("to be continued \n")],
        [{"role": "user"}, {"role": "user", "content": 5}, {"role": "system", "content": " "}],
        [user_message("a"), {"role": "system", "content": "later"}, assistant_message("b"), user_message("c")],
        [user_message("a"), assistant_message("", [("c", "echo", {})]), {"role": "tool", "tool_call_id": "c"}],
        [user_message("a\ud800b")],
        [{"role": "tool_output", "content": "what"}],
    ],
)
async def test_whatever_is_missing_or_empty_the_api_accepts_the_request(server, provider, messages):
    await sent(server, provider, messages)
    await sent(server, provider, Conversation(messages))
    assert server.requests[0].body == server.requests[1].body


@pytest.mark.parametrize("content", ["", [], None, [{"type": "text", "text": ""}]])
async def test_an_empty_message_of_the_user_is_still_the_users_turn(server, provider, content):
    body = await sent(server, provider, [*ASK, assistant_message("yes?"), {"role": "user", "content": content}])
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]


async def test_a_system_message_in_the_middle_stays_in_the_middle(server, provider):
    body = await sent(server, provider, [user_message("a"), {"role": "system", "content": "now"}])
    assert "system" not in body
    assert "now" in body["messages"][0]["content"][1]["text"]


async def test_pictures_are_sent_by_value_or_by_address(server, provider):
    def picture(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    parts = [picture(f"data:image/png;base64,{DOT}"), picture(f"data:image/JPG;x=y;base64,{DOT[:4]}\n{DOT[4:]}")]
    parts += [picture("https://example.com/a.png"), {"type": "text", "text": "what is it?"}]
    body = await sent(server, provider, [user_message(parts)])
    assert body["messages"][0]["content"] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DOT}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": DOT}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        said("what is it?"),
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/tiff;base64,{DOT}"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,abc"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,ab==abcd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,plain"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url"},
        {"type": "input_audio", "input_audio": {"data": "x"}},
        {"odd": 1},
    ],
)
async def test_content_that_cannot_be_sent_is_named_in_its_place(server, provider, part):
    body = await sent(server, provider, [user_message([part, {"type": "text", "text": "see"}])])
    left_out, text = body["messages"][0]["content"]
    assert left_out["type"] == "text"
    assert left_out["text"].startswith("[left out: ")
    assert text == said("see")


async def test_a_result_may_have_parts(server, provider):
    parts = [
        {"type": "text", "text": "seen"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DOT}"}},
    ]
    calls = assistant_message(None, [("a", "look", {}), ("b", "look", {})])
    results = [
        {"role": "tool", "tool_call_id": "a", "content": parts},
        {"role": "tool", "tool_call_id": "b", "content": []},
    ]
    body = await sent(server, provider, [*ASK, calls, *results])
    first, second = body["messages"][2]["content"]
    assert [block["type"] for block in first["content"]] == ["text", "image"]
    assert second["content"] == "(no output)"


@pytest.mark.parametrize(
    "arguments", ["", "{", "[1]", "null", None, '{"a": 1, "a": 2}', '{"n": 123456789012345678901234}']
)
async def test_unreadable_arguments_are_an_empty_object(server, provider, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "echo", "arguments": arguments}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, tool_message("c", "echo", "x")]
    body = await sent(server, provider, messages, ECHO)
    expected = {'{"a": 1, "a": 2}': {"a": 2}, '{"n": 123456789012345678901234}': {"n": 123456789012345678901234}}
    assert body["messages"][1]["content"][0]["input"] == expected.get(arguments, {})


async def test_names_and_ids_that_the_api_refuses_are_changed_the_same_way_every_time_and_back(server, provider):
    odd = ["files.read", "files:read", "filés/read", "x" * 80, ""]
    tools = [{"type": "function", "function": {"name": name}} for name in odd]
    calls = assistant_message(None, [(f"id.{name}", name, {}) for name in odd])
    results = [tool_message(f"id.{name}", name, "ok") for name in odd]
    bodies = [await sent(server, provider, [*ASK, calls, *results], list(tools)) for _ in range(2)]
    assert bodies[0] == bodies[1]
    names = [tool["name"] for tool in bodies[0]["tools"]]
    assert len(set(names)) == len(odd)
    blocks = bodies[0]["messages"][1]["content"]
    assert [block["name"] for block in blocks] == names
    assert [block["id"] for block in blocks] == [block["tool_use_id"] for block in bodies[0]["messages"][2]["content"]]
    other = AnthropicProvider("k", f"tools-1x1-f{names[0]}", base_url=server.base_url)
    answer = await other.chat(ASK, tools)
    assert answer.tool_calls[0].name == "files.read"
    assert (await watch(other, tools=tools))[1].tool_calls[0].name == "files.read"
    await other.close()


async def test_tools_are_described_in_the_apis_format(server, provider):
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}}, "required": ["a"]}
    tools = [
        {
            "type": "function",
            "function": {"name": "full", "description": "Does it.", "parameters": schema, "strict": True},
        },
        {"type": "function", "function": {"name": "union", "parameters": {**schema, "anyOf": [{"required": ["a"]}]}}},
        {"type": "function", "function": {"name": "bare", "description": ""}},
    ]
    body = await sent(server, provider, ASK, tools)
    assert body["tools"] == [
        {"name": "full", "description": "Does it.", "input_schema": schema},
        {"name": "union", "input_schema": schema},
        {"name": "bare", "input_schema": {"type": "object", "properties": {}}},
    ]


async def test_tools_are_encoded_once_while_the_list_stays_the_same(server, provider):
    tools = list(ECHO)
    await sent(server, provider, ASK, tools)
    tools.append({"type": "function", "function": {"name": "later"}})
    await sent(server, provider, ASK, tools)
    assert [len(request.body["tools"]) for request in server.requests] == [1, 2]


async def test_a_history_with_calls_is_accepted_though_no_tools_are_offered_now(server, provider):
    calls = [assistant_message(None, [("a", "echo", {})]), tool_message("a", "echo", "x")]
    body = await sent(server, provider, [*ASK, *calls, user_message("sum up")])
    assert body["tool_choice"] == {"type": "none"}
    assert "tools" not in await sent(server, provider, ASK)


async def test_the_length_of_an_answer_follows_the_model_unless_it_is_given(server):
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("claude-3-haiku-20240307", {}, 4096),
        ("claude-3-5-sonnet-latest", {}, 8192),
        ("anthropic/claude-3.5-haiku", {}, 8192),
        ("claude-3-7-sonnet-latest", {}, 32_000),
        ("claude-sonnet-4-5", {}, 32_000),
        ("claude-sonnet-4-5", {"thinking": 40_000}, 72_000),
        ("claude-sonnet-4-5", {"max_tokens": 100}, 100),
        ("claude-sonnet-4-5", {"extra": {"max_tokens": 7}}, 7),
    ]
    for model, options, tokens in cases:
        provider = AnthropicProvider("k", model, base_url=server.base_url, **options)
        assert (await sent(server, provider, ASK))["max_tokens"] == tokens
        await provider.close()


async def test_extra_fields_and_headers_go_into_every_request(server):
    provider = AnthropicProvider(
        None, "m", base_url=server.base_url, extra={"temperature": 0, "thinking": {"type": "adaptive"}},
        headers={"Authorization": "Bearer t", "anthropic-beta": "x"},
    )  # fmt: skip
    for _ in range(2):
        server.reply("ok")
    await provider.chat(ASK)
    await watch(provider)
    assert [request.body["temperature"] for request in server.requests] == [0, 0]
    assert server.requests[0].body["thinking"] == {"type": "adaptive"}
    assert server.requests[0].headers["anthropic-beta"] == "x"
    assert "x-api-key" not in server.requests[0].headers
    await provider.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extra": {"messages": [], "stream": True}}, "messages, stream"),
        ({"thinking": 1000}, "1024"),
        ({"thinking": 2000, "max_tokens": 2000}, "less than max_tokens"),
        ({"thinking": 2000, "extra": {"thinking": {"type": "adaptive"}}}, "extra"),
        ({"max_tokens": 0}, "at least 1"),
        ({"api_key": "two words"}, "EVERLOOP_API_KEY"),
        ({"base_url": "api.anthropic.com"}, "EVERLOOP_BASE_URL"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(options, says):
    with pytest.raises(ConfigError, match=says):
        AnthropicProvider(**{"api_key": "k", "model": "m"} | options)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/messages"])
async def test_a_base_url_may_end_as_people_write_it(server, suffix):
    provider = AnthropicProvider("k", "tools-0x0", base_url=server.base_url + suffix)
    assert (await provider.chat(ASK)).content == "done:?"
    await provider.close()


# ---------------------------------------------------------------------------------------------- thinking


async def test_the_model_thinks_only_where_the_api_does_not_require_earlier_thoughts(server):
    provider = AnthropicProvider("k", "m", base_url=server.base_url, thinking=2048)
    conversation = Conversation(ASK)
    thought = []
    for steps in (
        [],
        [assistant_message("hm", [("a", "echo", {})]), tool_message("a", "echo", "x")],
        [user_message("and hurry")],
        [assistant_message(None, [("b", "echo", {})]), tool_message("b", "echo", "x")],
        [assistant_message("done"), user_message("next")],
    ):
        conversation.extend(steps)
        thought.append("thinking" in await sent(server, provider, conversation, ECHO))
    assert thought == [True, False, False, False, True]
    assert server.requests[0].body["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    await provider.close()


# ---------------------------------------------------------------------------------------------- what is kept


async def test_a_message_is_encoded_only_once(server, provider):
    conversation = Conversation([user_message("a"), assistant_message("b"), user_message("c")])
    await sent(server, provider, conversation)
    conversation[0]["content"] = "changed behind its back"
    conversation.append(assistant_message("d"))
    conversation.append(user_message("e"))
    body = await sent(server, provider, conversation)
    assert [message["content"][0]["text"] for message in body["messages"]] == list("abcde")


@pytest.mark.parametrize("place", [0, 2])
async def test_a_conversation_with_replaced_or_removed_messages_is_encoded_anew(server, provider, place):
    conversation = Conversation([user_message("a"), assistant_message("b"), user_message("c")])
    await sent(server, provider, conversation)
    conversation[place] = user_message("other")
    assert (await sent(server, provider, conversation))["messages"][place]["content"] == [said("other")]
    del conversation[1:]
    assert len((await sent(server, provider, conversation))["messages"]) == 1


async def test_cached_encodings_of_a_conversation_end_with_it(server, provider):
    for n in range(3):
        conversation = Conversation([user_message(f"number {n}")])
        await sent(server, provider, conversation)
    del conversation
    gc.collect()
    assert provider._histories._kept == {}


async def test_connections_are_reused(server, provider):
    for _ in range(3):
        server.reply("ok")
        server.reply("ok")
        await provider.chat(ASK)
        await watch(provider)
        await until(lambda: provider._endpoint._pool._idle)  # its last bytes are read after the answer
    assert server.connections == 1


async def test_a_connection_is_reused_even_if_the_stream_ends_a_moment_after_its_last_event(server, provider):
    for _ in range(3):
        server.raw(sse(text("ok")), hang_after=1, hang=0.05)
        assert (await watch(provider))[1].content == "ok"
        await until(lambda: provider._endpoint._pool._idle)
    assert server.connections == 1


async def test_a_long_conversation_is_sent_whole_and_grows_at_its_end(server, provider):
    conversation = Conversation()
    for n in range(300):
        conversation.append(user_message(f"{n}: " + "long " * 100))
        conversation.append(assistant_message(f"answer {n}"))
    for n in range(40):
        conversation.append(user_message(f"question {n}"))
        body = await sent(server, provider, conversation, ECHO)
        texts = [message["content"][0]["text"] for message in body["messages"]]
        assert texts == [message["content"] for message in conversation]
        conversation.append(assistant_message(f"answer {n}"))
    assert json.dumps(server.requests[-1].body).count("cache_control") == 3
