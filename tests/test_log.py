"""The log: what is written is what is read, and the entries add up to a conversation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.log import (
    MANY,
    Call,
    CallEnded,
    CallsBegun,
    Cleared,
    Entry,
    ModelAnswered,
    Noted,
    Request,
    Transcript,
    TurnEnded,
    UserSaid,
    decode_entry,
    encode_entry,
    entry_bytes,
    error_content,
    error_in,
    exit_status,
    extend_conversation,
    messages_of,
    open_turn,
    split_exit_status,
)
from everloop.messages import Conversation
from everloop.testing import check_conversation

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(texts, values, max_size=3)
calls = st.builds(Call, texts, texts, objects, st.none() | texts)
entries = st.one_of(
    st.builds(UserSaid, texts | st.lists(objects, max_size=2), texts),
    st.builds(
        ModelAnswered, st.none() | texts, st.lists(calls, max_size=3).map(tuple), st.none() | texts, texts,
        st.dictionaries(texts, st.integers(0, 2**53), max_size=2), texts,
    ),
    st.builds(CallsBegun, st.lists(texts, max_size=3).map(tuple)),
    st.builds(CallEnded, texts, texts, texts, st.sampled_from(["ok", "error", "denied"]), st.just(0.5)),
    st.builds(TurnEnded, st.sampled_from(["answer", "cancelled", "error"]), texts),
    st.builds(Noted, objects),
    st.just(Cleared()),
)  # fmt: skip


@given(entries)
def test_an_entry_is_read_as_it_was_written(entry):
    assert decode_entry(encode_entry(entry)) == entry


def test_an_entry_names_its_kind_and_omits_empty_fields():
    assert encode_entry(UserSaid("hi")) == '{"type":"user","content":"hi"}'
    assert encode_entry(TurnEnded("answer")) == '{"type":"end","reason":"answer"}'


@pytest.mark.parametrize("count", [1, MANY, MANY + 1])
def test_a_long_history_of_a_client_is_encoded_in_pieces_with_the_same_bytes(count):
    before = tuple({"role": "user", "content": f'Grüße {n} "漢字"\n'} for n in range(count))
    entry = UserSaid("hi", request=Request(before, "system", model="m"))
    data = entry_bytes(entry)
    assert data == msgspec.json.encode(entry)
    assert decode_entry(data) == entry


@pytest.mark.parametrize("data", ["", "{}", '{"type":"nothing"}', '{"type":"user","content":7}', "[1]"])
def test_an_invalid_entry_is_refused(data):
    with pytest.raises(msgspec.MsgspecError):
        decode_entry(data)


HI, BYE = UserSaid("hi"), TurnEnded("answer", "yes")
A, B = Call("a", "look"), Call("b", "send", {"to": "x"})
ROUND: list[Entry] = [ModelAnswered("I look", (A, B)), CallEnded("b", "send", "sent"), CallEnded("a", "look", "seen")]


def test_the_open_turn_is_everything_after_the_last_end():
    assert open_turn([]) == []
    assert open_turn([HI, BYE]) == []
    assert open_turn([HI, BYE, HI, *ROUND]) == [HI, *ROUND]
    assert open_turn([HI, BYE, Cleared()]) == []
    assert open_turn([Noted({"role": "user", "content": ""}), HI]) == [HI]


def test_results_come_in_the_order_of_the_calls_once_all_are_there():
    transcript = Transcript()
    assert [message["role"] for message in transcript.add(ROUND[0])] == ["assistant"]
    assert transcript.add(CallsBegun(("a",))) == []
    assert transcript.add(ROUND[1]) == []
    assert [message["content"] for message in transcript.add(ROUND[2])] == ["seen", "sent"]


@pytest.mark.parametrize(
    ("log", "roles"),
    [
        ([HI, ModelAnswered("yes"), BYE], "user assistant"),
        ([HI, *ROUND, ModelAnswered("yes"), BYE], "user assistant tool tool assistant"),
        ([HI, *ROUND, TurnEnded("max_rounds", "notice")], "user assistant tool tool assistant"),
        ([HI, TurnEnded("error", "Sorry")], "user assistant"),
        ([HI, ModelAnswered(None), ModelAnswered(" "), TurnEnded("empty", "nothing")], "user assistant"),
        ([HI, ModelAnswered("part", finish_reason="cancelled"), TurnEnded("cancelled", "x")], "user assistant"),
        ([HI, ModelAnswered("yes"), UserSaid("more"), ModelAnswered("also"), BYE], "user assistant user assistant"),
        ([HI, BYE, UserSaid("second"), BYE], "user assistant user assistant"),
        ([Noted({"role": "user", "content": "x"}), Noted({"role": "assistant", "content": "y"})], "user assistant"),
    ],
)
def test_a_log_adds_up_to_a_conversation_that_models_accept(log, roles):
    messages = list(messages_of(log))
    assert " ".join(message["role"] for message in messages) == roles
    assert check_conversation(messages) == []


def test_a_jobs_note_is_shown_to_the_model_but_is_not_a_message_of_a_person():
    conversation, said = Conversation([]), UserSaid("water", "cron", "noon", job="j1", note="the job “x.example”")
    extend_conversation(conversation, Transcript(), said)
    assert conversation == [{"role": "user", "content": "water\n\n[the job “x.example”]\n\n[It is now noon.]"}]
    assert conversation.own_words == {0: "water"}


def test_an_error_message_is_read_back_and_nothing_else_counts_as_one():
    written = error_content('no file "a"\n\ud800', "look again")
    assert error_in(written) == 'no file "a"\n?'
    assert written == '{"status":"error","message":"no file \\"a\\"\\n?","advice":"look again"}'
    for content in (
        "",
        "not found",
        '{"status":"error"}',
        '{"status":"error","message":',
        '{"status":"ok","message":"x"}',
    ):
        assert error_in(content) is None, content


def test_the_exit_status_of_a_command_is_read_back():
    for code in (1, 3, 137, 255):
        assert split_exit_status(f"out\n[{exit_status(code)}]\n[a note]") == ("out", code)
    assert exit_status(137) == "exit status 137, SIGKILL"
    assert split_exit_status("out\n[a note]") == ("out\n[a note]", None)
