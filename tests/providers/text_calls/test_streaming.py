"""Text is held back only while it may still become a call."""

from __future__ import annotations

import re

import pytest

from everloop.providers.text_calls import Reader, TextPart

from .tools import TOOLS, fed

PLAIN = """
# How to water beans

1. Take a can [of a liter](https://x.example/can) and **fill** it.
2. If `liters < 1`, fill it again; <b>never</b> more than two.

```python
beans = [{"name": "exec", "arguments": {"command": "ls"}}]
if x < 3: print("<tool_call>")
```

| bean | liters |
|------|--------|
| {a}  | [1, 2] |

```json
{"beans": [1, 2, 3], "name": "read_file"}
```

{"liters": {"a": 1}}
[1, 2, 3]
```sh
ls -l
```
That is all. Look at [TOOL] and <tool> and <|x|>.
"""


def tokens(text: str) -> list[str]:
    return re.findall(r"\s?\w+|\s|[^\w\s]", text)


def test_a_plain_answer_is_shown_as_it_arrives():
    reader = Reader(TOOLS)
    came = shown = 0
    late = []
    for token in tokens(PLAIN):
        came += len(token)
        shown += sum(len(piece.text) for piece in reader.feed(token))
        late.append(came - shown)
    assert max(late) <= 20  # the beginning of a tag, or a fence with the first key of its contents
    assert sum(late) / len(late) < 2
    assert fed(tokens(PLAIN))[1] == PLAIN


@pytest.mark.parametrize(
    ("held", "then"),
    [
        ('{"', 'beans": '),
        ('{"name": "', 'Ada", '),
        ("[", "1"),
        ('```json\n{"na', 'tion": '),
        ("```json\n", "x"),
        ('<tool_call>', "s and "),
        ("<tool_", "x"),
        ("<|", "x"),
        ("``", "x"),
        ('[read_file', "]("),
        ("[", "note](x)"),
        ("```tool_code\n", "for x"),
    ],
)  # fmt: skip
def test_held_text_is_shown_as_soon_as_it_cannot_be_a_call(held, then):
    reader = Reader(TOOLS)
    assert reader.feed("word\n") == [TextPart("word\n")]
    assert reader.feed(held) == []
    assert "".join(piece.text for piece in reader.feed(then)) == held + then


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "exec", "arguments": {"command": "ls"}}',
        '```json\n{"name": "exec", "arguments": {"command": "ls"}}\n```',
        '<tool_call>{"name": "exec", "arguments": {"command": "ls"}}</tool_call>',
        '[TOOL_CALLS]exec[ARGS]{"command": "ls"}',
        "[exec(command='ls')]",
    ],
)
def test_the_text_before_a_call_is_shown_at_once_and_nothing_of_the_call_ever(call):
    reader = Reader(TOOLS)
    assert "".join(piece.text for piece in reader.feed("I look.\n")) == "I look.\n"
    for character in call:
        assert reader.feed(character) == []
    reading = reader.finish()
    assert (reading.content, reading.pieces, len(reading.calls)) == ("I look.", [], 1)


def test_a_fenced_example_is_shown_as_soon_as_the_next_line_shows_it_is_no_call():
    text = 'The folder.\n```json\n{"name": "exec", "arguments": {"command": "ls"}}\n```\n'
    reader = Reader(TOOLS)
    shown = "".join(piece.text for piece in reader.feed(text))
    assert shown == "The folder.\n"
    shown += "".join(piece.text for piece in reader.feed("This is how"))
    shown += "".join(piece.text for piece in reader.feed(" it goes.\n"))
    assert shown == text + "This is how it goes.\n"


def test_no_more_than_512_calls_are_read():
    call = '<tool_call>{"name": "exec", "arguments": {"command": "ls"}}</tool_call>\n'
    assert len(fed([call * 600])[0].calls) == 512
    assert len(fed(['{"name": "exec", "arguments": {"command": "ls"}}\n' * 600])[0].calls) == 512
    listed = ",".join(['{"name": "exec", "arguments": {"command": "ls"}}'] * 600)
    assert len(fed([f"<tool_call>[{listed}]</tool_call>"])[0].calls) == 512
