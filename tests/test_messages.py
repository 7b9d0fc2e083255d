"""The wire format, and the list that knows its own JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.messages import Conversation, assistant_message, tool_message, user_message
from everloop.text import clean

CALL = assistant_message(None, [("a", "look", {"path": "é"})])


def test_the_format_is_openais():
    assert user_message("hi") == {"role": "user", "content": "hi"}
    assert assistant_message("yes") == {"role": "assistant", "content": "yes"}
    assert tool_message("a", "look", "out") == {"role": "tool", "tool_call_id": "a", "name": "look", "content": "out"}
    (call,) = CALL["tool_calls"]
    assert CALL["content"] is None
    assert (call["id"], call["type"], call["function"]["name"]) == ("a", "function", "look")
    assert json.loads(call["function"]["arguments"]) == {"path": "é"}


@given(st.text())
def test_clean_text_can_always_be_written(text):
    clean(text).encode()
    if all(not 0xD800 <= ord(letter) < 0xE000 for letter in text):
        assert clean(text) == text


def test_a_lone_surrogate_is_replaced():
    assert clean("a\ud800b") == "a?b"


messages = st.one_of(
    st.builds(user_message, st.text(st.characters(codec="utf-8"), max_size=50)),
    st.builds(lambda text: tool_message("a", "t", text), st.text(st.characters(codec="utf-8"), max_size=2000)),
    st.just(CALL),
)


@given(st.lists(st.lists(messages, max_size=4), max_size=10))
def test_the_json_is_that_of_the_list_however_it_grew(parts):
    conversation = Conversation()
    for part in parts:
        conversation.extend(part)
        before = conversation.json()
        assert json.loads(before) == list(conversation)
        assert conversation.json() == before


def test_the_json_of_a_longer_conversation_begins_with_that_of_the_shorter():
    conversation = Conversation([user_message("hi")])
    before = conversation.json()
    conversation.append(user_message("more"))
    assert conversation.json().startswith(before[:-1])


def test_a_message_that_cannot_be_encoded_leaves_the_json_unchanged():
    conversation = Conversation([user_message("a")])
    conversation.json()
    conversation.extend([user_message("b"), user_message("\ud800")])
    for _ in range(3):
        with pytest.raises(UnicodeEncodeError):
            conversation.json()
    conversation.pop()
    conversation.append(user_message("c"))
    assert [message["content"] for message in json.loads(conversation.json())] == ["a", "b", "c"]


def test_messages_can_be_removed_at_the_end():
    conversation = Conversation([user_message("a"), user_message("b")])
    conversation.json()
    conversation.pop()
    assert json.loads(conversation.json()) == [user_message("a")]


def test_a_conversation_knows_the_ids_of_its_calls():
    conversation = Conversation([user_message("hi"), CALL])
    conversation.append(assistant_message(None, [("b", "t", {}), ("c", "t", {})]))
    assert conversation.call_ids == {"a", "b", "c"}


@pytest.mark.parametrize("encoded", [True, False])
def test_the_size_of_a_conversation_grows_even_if_its_json_is_never_requested(encoded):
    picture = [{"type": "image_url", "image_url": {"url": "data:" + "x" * 50_000}}]
    conversation = Conversation(
        [user_message("y" * 100_000), user_message(picture), assistant_message(None, [("a", "t", {"z": "z" * 30_000})])]
    )
    if encoded:
        conversation.json()
    assert 180_000 < conversation.size < 600_000


def test_a_conversation_has_at_least_the_characters_of_its_texts_and_pictures():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    content: list[dict[str, Any]] = [{"type": "text", "text": "see" * 100}, picture]
    assert 5322 <= Conversation([user_message(content)]).characters < 7000
    assert Conversation([user_message("x" * 1000)]).characters >= 1000
