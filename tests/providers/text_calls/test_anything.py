"""Any output of a model: never an error or a loop, the same however it is split, in time linear in the text."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.providers.text_calls import Reader, read
from everloop.providers.text_calls.dialects import OPENINGS

from .tools import TOOLS, fed, plain

CALL = '{"name": "read_file", "arguments": {"path": "a"}}'
WORDS = [
    *OPENINGS, CALL, CALL[:-1], CALL[:20], CALL[20:], "[" + CALL + "]", '[read_file(path="a")]', "read_file(",
    "read_file", "</tool_call>", "</function>", "</invoke>", "</tools>", "<tools>", "<function=read_file>",
    "<parameter=path>", "x", "</parameter>", '<invoke name="read_file">', '<parameter name="path">',
    "<arg_key>path</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "<｜tool▁sep｜>", "function",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "<|tool_calls_section_end|>", "functions.read_file:0", "call:read_file{", "<escape>", "path:", "}",
    "<end_function_call>", "<|channel|>", "<|start|>", "assistant", "<|message|>", "<|call|>", "<|end|>",
    "commentary to=functions.read_file ", "analysis", "final", "```json\n", "```tool_code\n", "```python\n",
    "```", "```\n", "\n", "\n\n", " ", "  ", "\t", "prose", ". You could",
    "Let me look. ", "I will call ", "This is how it goes.", "I report later.", "for example", "{", "}", "[", "]",
    '"', "'", "\\", ",", ";", ":", "<think>", "</think>", "\n</think>\n", "[THINK]", "[/THINK]", "<", ">", "|",
    "`", "é", "😀", "\ud800", "\x00", "</s>", "print(", "null", "true", "NaN", "1e999", '{"name": "exec"',
    '"arguments": ', "{}", '{"tool_calls": [', "\r\n", "\u2028", "functools[", "Action: read_file", "Action Input: ",
    "\nObservation:", ">>>", "<|content|>", "<tool_sep>", "]<]minimax[>[", "<path>", "</path>", "</invoke>", "<|sep|>",
    '<|open|>call tool="read_file" index="1"', '<|open|>argument key="path" type="string"', "<|close|>argument",
    "<|close|>call", "<|close|>tools", "<atem:", "to=user", "to=self", "<answer>", "</answer>", "<|message_sep|>",
    '<param name="path">', "</param>", "<![CDATA[", "]]>", "<|eom|>", "<|close|>think<|sep|>", "◁/think▷",
]  # fmt: skip
BEHIND_MARKS = (
    "", "call:", "call: x", "read_file", "{", "[", "<function=", '<invoke name="read_file">', "<arg_key>", "```json",
    "<tool_call>", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "]<]minimax[>[</x>", "<|plugin|>", "print(",
    '<|open|>call tool="read_file"<|sep|>', "read_file\nAction Input:", "[ARGS]",
)  # fmt: skip
texts = st.one_of(st.lists(st.sampled_from(WORDS), max_size=24).map("".join), st.text(max_size=60))


@settings(max_examples=400)
@given(texts, st.data())
def test_any_text_reads_the_same_however_it_is_split(text, data):
    whole, said, thought = fed([text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    for parts in (pieces, list(text)):
        again, said_again, thought_again = fed(parts)
        assert plain(again) == plain(whole)
        assert (said_again, thought_again) == (said, thought)


@settings(max_examples=400)
@given(texts)
def test_any_text_is_either_shown_or_read(text):
    reading, said, _ = fed([text])
    for call in reading.calls:
        json.dumps(call.arguments, allow_nan=False)
        assert call.name
    marked = any(one in text.lower() for one in ("<|", "think", "answer>", "response>"))
    if not reading.calls and not reading.reasoning and not marked:
        assert reading.content == said == text


@settings(max_examples=200)
@given(texts)
def test_without_tools_no_text_is_a_call(text):
    assert read(text, None).calls == []
    assert read(text, []).calls == []


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "type", "function", "parameters", "arguments", "tool", "x"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_definition_of_a_tool_and_any_value_are_handled(value):
    for tools in ([value], [{"function": value}], [{"function": {"name": "read_file", "parameters": value}}]):
        read(CALL, tools)
    text = json.dumps(value)
    read(text, TOOLS)
    read(f"<tool_call>{text}</tool_call>", TOOLS)


# ---------------------------------------------------------------------------------------------- hostile texts

UNITS = {
    "opening tags": "<tool_call>",
    "tags with an object": "<tool_call>{",
    "calls without arguments": '<tool_call>{"name": "exec"}</tool_call>',
    "broken calls": '<tool_call>{"name": "exec", "arguments": {"command": </tool_call>\n',
    "brackets": "[",
    "braces": "{",
    "brackets on lines": "[\n",
    "beginnings of calls": '{"name": "exec",\n',
    "objects in objects": '{"function": {"arguments": ',
    "lists in arguments": '[{"name": "exec", "arguments": [',
    "unclosed strings": '{"name": "exec", "arguments": {"command": "',
    "quotes": '{"name": "exec\'"',
    "backticks": "`",
    "fences": "```json\n",
    "fences with a beginning": '```json\n{"name": "exec",\n',
    "calls followed by words": f"{CALL}\nword\n",
    "fenced calls followed by words": f"word\n```json\n{CALL}\n```\n",
    "calls": f"{CALL}\n",
    "thoughts": "<think>",
    "thoughts that end": "\n</think>\n",
    "keys and values": "<tool_call>exec<arg_key>command</arg_key><arg_value>",
    "parameters": "<function=exec><parameter=command>",
    "parameters that end": "<function=exec><parameter=command>x</parameter>",
    "channels": "<|channel|>",
    "messages": "<|channel|>commentary to=functions.exec<|message|>{",
    "analyses": "<|channel|>analysis<|message|>",
    "sections": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>exec<｜tool▁sep｜>{",
    "escapes": "<start_function_call>call:exec{command:<escape>",
    "python": "[exec(command=",
    "spaces": " ",
    "indented braces": "\n" + " " * 70 + "{",
    "minus signs": "<|python_tag|>exec(-",
    "backslashes": '{"name": "exec", "arguments": {"command": "\\',
    "half a surrogate": "\ud800<",
    "invokes": '<invoke name="exec">',
    "mistral": "[TOOL_CALLS]exec[ARGS]{",
    "announced beginnings": 'I look. {"name": "exec", ',
    "announced fences": "let me look: ```json",
    "announced fences far apart": f"let me look {'on ' * 30}now: ```json ",
}


@pytest.mark.parametrize("name", UNITS)
def test_a_megabyte_is_read_in_bounded_time(name):
    text = UNITS[name] * (1_000_000 // len(UNITS[name]))
    started = time.process_time()
    reading = read(text, TOOLS)
    assert time.process_time() - started < 5
    assert len(reading.calls) <= 512


@pytest.mark.parametrize("name", UNITS)
def test_one_character_at_a_time_takes_linear_time(name):
    text = UNITS[name] * (20_000 // len(UNITS[name]))
    started = time.process_time()
    reader = Reader(TOOLS)
    for character in text:
        reader.feed(character)
    assert plain(reader.finish()) == plain(read(text, TOOLS))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("size", "mended"), [(3000, True), (5000, False)])
def test_only_short_texts_are_repaired_by_the_slow_parser(size, mended):
    text = f'<tool_call>{{name: exec, "arguments": {{"command": "{"x" * size}"}}}}</tool_call>'
    assert [call.error is None for call in read(text, TOOLS).calls] == [mended]


def test_at_most_a_few_calls_of_an_answer_are_repaired_by_the_slow_parser():
    text = f'<tool_call>{{name: exec, "arguments": {{"command": "{"x" * 3000}"}}}}</tool_call>\n' * 8
    assert [call.error is None for call in read(text, TOOLS).calls] == [True] * 5 + [False] * 3


def test_a_random_mixture_in_random_pieces_is_read_like_the_whole():
    dice = random.Random(7)
    for _ in range(60):
        text = "".join(dice.choices(WORDS, k=80))
        pieces, at = [], 0
        while at < len(text):
            size = dice.randrange(1, 30)
            pieces.append(text[at : at + size])
            at += size
        assert plain(fed(pieces)[0]) == plain(fed([text])[0])


def test_whatever_follows_a_mark_is_read_without_an_error():
    for opening in OPENINGS:
        for inside in BEHIND_MARKS:
            text = f"{opening}{inside}"
            assert plain(read(text, TOOLS)) == plain(fed(list(text))[0]), text
