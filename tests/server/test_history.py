"""The messages of a request: those that a model takes, and the place of what is wrong with others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from everloop.server.requests import read_chat
from everloop.testing.conversation import check_conversation

from .chats import ALL, HELLO, LIMIT, PIXEL, calls, parts, read, refused, result


def test_the_leading_system_messages_are_the_system_prompt():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": parts("Be", "kind.")},
        {"role": "system", "content": " "},
        HELLO,
        {"role": "developer", "content": "Now in French."},
        {"role": "user", "content": "again"},
    ]
    request = read(messages=messages)
    assert request.system == "Be brief.\n\nBe\nkind."
    assert [(message["role"], message["content"]) for message in request.messages] == [
        ("user", "hello"), ("system", "Now in French."), ("user", "again"),
    ]  # fmt: skip


def test_text_parts_become_one_text_and_pictures_stay():
    said = [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}, *parts("what is it?")]
    far = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    request = read(
        messages=[{"role": "user", "content": content, "name": "ada"} for content in (parts("a", "b"), said, far)]
    )
    assert [message["content"] for message in request.messages] == ["a\nb", said, far]
    assert {message["name"] for message in request.messages} == {"ada"}


def picture(url: Any, **fields: Any) -> list[dict[str, Any]]:
    return [
        HELLO,
        {"role": "user", "content": [*parts("x"), {"type": "image_url", "image_url": {"url": url, **fields}}]},
    ]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "/etc/passwd", "ftp://example.com/a.png", "data:text/html;base64,AAAA",
        "data:image/png,AAAA", "data:image/svg+xml;base64,AAAA", "data:image/png;base64,A",
        "data:image/png;base64,AA!A", "data:image/png;base64,AAAA!", "data:image/png;base64,AAAA\n",
        "data:image/png;base64,",
        "data:image/png;base64,é", "https://", "https://example.com/" + "a" * 9000, "", None, 5,
        "data:image/png;base64," + "A" * 14_000_000,
    ],
    ids=lambda url: str(url)[:30],
)  # fmt: skip
def test_an_invalid_picture_is_refused_by_its_place(url):
    assert refused(messages=picture(url)).param == "messages[1].content[1].image_url.url"


def test_the_number_of_pictures_and_their_detail_are_checked():
    many = [{"type": "image_url", "image_url": {"url": PIXEL}}] * 21
    assert refused(messages=[{"role": "user", "content": many}]).param == "messages[0].content[20]"
    assert refused(messages=picture(PIXEL, detail="x")).param == "messages[1].content[1].image_url.detail"


@pytest.mark.parametrize("kind", ["input_audio", "file", "refusal", "video_url", ""])
def test_a_part_that_no_model_accepts_is_refused_by_its_place(kind):
    messages = [HELLO, {"role": "user", "content": [*parts("x"), {"type": kind, kind: {}}]}]
    assert refused(messages=messages).param == "messages[1].content[1]"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_pictures_occur_only_in_user_messages_and_results(role):
    message = {"role": role, "tool_call_id": "a", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
    assert (refused(messages=[HELLO, message, HELLO]).param or "").startswith("messages[1].content[0]")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "name": "x", "content": "y"}, "messages[1].role"),
        ({"role": "robot", "content": "y"}, "messages[1].role"),
        ({"content": "y"}, "messages[1].role"),
        ({"role": None, "content": "y"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": "x", "name": ""}, "messages[1].name"),
        ({"role": "system", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "x"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ("hello", "messages[1]"),
        (None, "messages[1]"),
    ],
)
def test_an_unreadable_message_is_refused_by_its_place(message, param):
    assert refused(messages=[HELLO, message, HELLO]).param == param


def test_an_assistants_message_comes_back_in_our_providers_format():
    messages = [
        HELLO,
        {
            "role": "assistant",
            "content": None,
            "refusal": "no",
            "audio": None,
            "function_call": None,
            "annotations": [],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}, *parts("sorry")], "tool_calls": []},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        calls("a", "b", content="let me see"),
        result("b", parts("two")),
        {**result("a"), "name": "peek"},
    ]
    request = read(messages=messages)
    assert [message["content"] for message in request.messages] == [
        "hello", "no", "never\nsorry", "", "let me see", "two", "seen",
    ]  # fmt: skip
    assert [message.get("name") for message in request.messages[-2:]] == ["look", "peek"]
    assert request.messages[4] == messages[4]
    assert check_conversation(request.messages) == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([HELLO, result("a")], "messages[1].tool_call_id"),
        ([HELLO, calls("a")], "messages[1].tool_calls"),
        ([HELLO, calls("a"), HELLO], "messages[1].tool_calls"),
        ([HELLO, calls("a", "b"), result("a")], "messages[1].tool_calls"),
        ([HELLO, calls("a", "b"), result("a"), HELLO, result("b")], "messages[1].tool_calls"),
        ([HELLO, calls("a"), {"role": "system", "content": "x"}, result("a")], "messages[1].tool_calls"),
        ([HELLO, calls("a"), result("a"), result("a")], "messages[3].tool_call_id"),
        ([HELLO, calls("a"), result("b")], "messages[2].tool_call_id"),
        ([HELLO, calls("a", "a"), result("a")], "messages[1].tool_calls[1].id"),
        ([{"role": "system", "content": "x"}, HELLO, calls("a"), HELLO], "messages[2].tool_calls"),
        ([HELLO, calls("")], "messages[1].tool_calls[0].id"),
        ([], "messages"),
        ([{"role": "system", "content": "x"}], "messages"),
        ([HELLO, {"role": "assistant", "content": "Once upon"}], "messages[1]"),
        ([HELLO, {"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}], "messages[1]"),
    ],
)
def test_a_conversation_that_no_model_accepts_is_refused_by_the_place_of_its_error(messages, param):
    assert refused(messages=messages).param == param


def test_a_reminder_may_come_last():
    request = read(messages=[HELLO, {"role": "system", "content": "Answer in French."}])
    assert request.messages[0] == HELLO
    assert request.messages[-1]["role"] == "system"


def test_calls_with_the_same_id_in_two_answers_are_distinguished():
    messages = [HELLO, calls("0", "0_2"), result("0_2"), result("0"), calls("0"), result("0"), calls("0"), result("0")]
    made = read(messages=messages).messages
    ids = [call["id"] for message in made for call in message.get("tool_calls", ())]
    assert ids == ["0", "0_2", "0_3", "0_4"]
    assert check_conversation(made) == []
    long = "x" * 256
    made = read(messages=[HELLO, calls(long), result(long), calls(long), result(long)]).messages
    assert {len(message["tool_calls"][0]["id"]) for message in made if "tool_calls" in message} == {256, 242}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("", "{}"), (" ", "{}"), ('{"a":1}', '{"a":1}'), ("[1]", '{"text":"[1]"}'), ("{a", '{"text":"{a"}')],
)
def test_arguments_that_are_not_an_object_are_wrapped_for_servers_that_refuse_them(sent, kept):
    call = calls("a")
    call["tool_calls"][0]["function"]["arguments"] = sent
    made = read(messages=[HELLO, call, result("a")]).messages
    assert made[1]["tool_calls"][0]["function"]["arguments"] == kept


def test_the_number_of_messages_is_limited():
    assert len(read(messages=[HELLO] * LIMIT).messages) == LIMIT
    assert refused(messages=[HELLO] * (LIMIT + 1)).param == "messages"


def test_thousands_of_calls_with_the_same_id_take_no_longer_than_others():
    def seconds(messages: list[dict[str, Any]]) -> float:
        body = json.dumps({"messages": messages}).encode()
        began = time.process_time()
        read_chat(body, honours=ALL, messages_limit=20_000)
        return time.process_time() - began

    same = [message for _ in range(8_000) for message in (calls("x"), result("x"))]
    others = [message for n in range(8_000) for message in (calls(f"x{n}"), result(f"x{n}"))]
    assert seconds(same) < 5 * seconds(others) + 0.5
