"""Variants of OpenAI's deltas that servers send, each over real HTTP, split into small pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .streams import ASK, END, piece, sse, watch

SIZES = [1, 2, 3, 5, 8, 13, 0]  # bytes that arrive at once; 0 is all

CALL_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "name repeated in every piece": [
        piece(0, "a", "echo", ""),
        piece(0, "a", "echo", '{"n"'),
        piece(0, "a", "echo", ":1}"),
        piece(1, "b", "echo", '{"n":2}'),
    ],
    "name and id null after the first piece": [
        piece(0, "a", "echo", None),
        piece(0, None, None, '{"n":1}'),
        piece(1, "b", "echo", None),
        piece(1, None, None, '{"n":2}'),
    ],
    "no index at all": [
        piece(None, "a", "echo", '{"n"'),
        piece(None, None, None, ":1}"),
        piece(None, "b", "echo", '{"n":2}'),
    ],
    "every index 0": [
        piece(0, "a", "echo", '{"n":1}'),
        piece(0, "b", "echo", '{"n"'),
        piece(0, "b", None, ":2}"),
    ],
    "empty ids and every index 0": [piece(0, "", "echo", '{"n":1}'), piece(0, "", "echo", '{"n":2}')],
    "neither id nor index": [piece(None, None, "echo", '{"n":1}'), piece(None, None, "echo", '{"n":2}')],
    "an id that comes late": [
        piece(0, None, "echo", ""),
        piece(0, "a", None, '{"n":1}'),
        piece(1, None, "echo", '{"n":2}'),
        piece(1, "b", None, ""),
    ],
    "arguments as an object": [piece(0, "a", "echo", {"n": 1}), piece(1, "b", "echo", {"n": 2})],
    "both in one delta": [
        {
            "tool_calls": [
                piece(0, "a", "echo", '{"n":1}')["tool_calls"][0],
                piece(1, "b", "echo", '{"n":2}')["tool_calls"][0],
            ]
        },
    ],
    "one id for both": [piece(0, "a", "echo", '{"n":1}'), piece(1, "a", "echo", '{"n":2}')],
    "pieces that take turns": [
        piece(0, "a", "echo", ""),
        piece(1, "b", "echo", ""),
        piece(0, None, None, '{"n":'),
        piece(1, None, None, '{"n":'),
        piece(0, None, None, "1}"),
        piece(1, None, None, "2}"),
    ],
    "name null and arguments null where the id comes": [
        piece(0, "a", None, None),
        piece(0, None, "echo", '{"n":1}'),
        piece(1, "b", None, None),
        piece(1, None, "echo", '{"n":2}'),
    ],
    "the id repeated on every piece without an index": [
        piece(None, "a", "echo", ""),
        piece(None, "a", None, '{"n"'),
        piece(None, "a", None, ":1}"),
        piece(None, "b", "echo", ""),
        piece(None, "b", None, '{"n":2}'),
    ],
    "every index 0, name and id repeated": [
        piece(0, "a", "echo", '{"n"'),
        piece(0, "a", "echo", ":1}"),
        piece(0, "b", "echo", '{"n"'),
        piece(0, "b", "echo", ":2}"),
    ],
    "arguments as an object and every index 0": [piece(0, "a", "echo", {"n": 1}), piece(0, "b", "echo", {"n": 2})],
    "arguments as an object, without index or id": [
        piece(None, None, "echo", {"n": 1}),
        piece(None, None, "echo", {"n": 2}),
    ],
    "indexes that begin at 1": [piece(1, "a", "echo", '{"n":1}'), piece(2, "b", "echo", '{"n":2}')],
    "empty names and ids in later pieces": [
        piece(0, "a", "echo", ""),
        piece(0, "", "", '{"n":1}'),
        piece(1, "b", "echo", ""),
        piece(1, "", "", '{"n":2}'),
    ],
    "null pieces and a null function among them": [
        {"tool_calls": None},
        {"tool_calls": [None]},
        piece(0, "a", "echo", '{"n":1}'),
        {"tool_calls": [{"index": 0, "function": None}]},
        piece(1, "b", "echo", '{"n":2}'),
        {"tool_calls": []},
    ],
    "the role on every piece": [
        {"role": "assistant", "content": None, **piece(0, "a", "echo", '{"n":1}')},
        {"role": "assistant", "content": "", **piece(1, "b", "echo", '{"n":2}')},
    ],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", CALL_VARIANTS)
async def test_calls_are_read_however_a_server_splits_them(server, provider, variant, size):
    server.raw(sse(*CALL_VARIANTS[variant], END), piece=size)
    _, answer = await watch(provider)
    assert [(c.name, c.arguments, c.error) for c in answer.tool_calls] == [
        ("echo", {"n": 1}, None),
        ("echo", {"n": 2}, None),
    ]
    ids = [c.id for c in answer.tool_calls if c.id]
    assert len(ids) == len(set(ids))
    assert answer.finish_reason == "tool_calls"  # although the server says "stop"


def chunk(delta: Any, finish: Any = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


HELLO = [{"content": "hel"}, {"content": "lo"}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
STREAMS: dict[str, bytes] = {
    "as it should be": sse({"role": "assistant", "content": ""}, *HELLO, END),
    "no [DONE]": sse(*HELLO, END, done=False),
    "no [DONE] and no last line end": sse(*HELLO, END, done=False).rstrip(),
    "no finish reason": sse(*HELLO),
    "CRLF": sse(*HELLO, END, end="\r\n\r\n"),
    "one line end between events": sse(*HELLO, END, end="\n"),
    "no space after the colon": sse(*HELLO, END).replace(b"data: ", b"data:"),
    "a byte order mark": b"\xef\xbb\xbf" + sse(*HELLO, END),
    "a byte order mark and CRLF": b"\xef\xbb\xbf" + sse(*HELLO, END, end="\r\n\r\n"),
    "comments, ids and events": b": hi\n\nid: 1\nevent: message\nretry: 5\n" + sse(*HELLO, END) + b": bye\n\n",
    "empty data lines": b"data:\n\ndata: \n\n" + sse(*HELLO, END),
    "an unasked usage chunk": sse(*HELLO, END, {"choices": [], "usage": USAGE}),
    "usage on every chunk": sse(*(chunk(delta, usage=USAGE) for delta in HELLO), END),
    "usage with null choices": sse(*HELLO, END, {"choices": None, "usage": USAGE}),
    "empty choices first": sse({"choices": [], "prompt_filter_results": []}, *HELLO, END),
    "a null choice": sse({"choices": [None]}, *HELLO, END),
    "a null delta": sse(chunk(None), *HELLO, chunk(None, "stop")),
    "no delta": sse({"choices": [{"index": 0}]}, *HELLO, {"choices": [{"finish_reason": "stop"}]}),
    "no index of the choice": sse(*({"choices": [{"delta": delta}]} for delta in HELLO), END),
    "role-only chunks all along": sse({"role": "assistant"}, HELLO[0], {"role": "assistant"}, HELLO[1], END),
    "null everywhere": sse(
        *(chunk({**delta, "role": None, "tool_calls": None, "refusal": None}, usage=None) for delta in HELLO), END,
    ),
    "content as parts": sse({"content": [{"type": "text", "text": "hel"}]}, {"content": [{"text": "lo"}, None]}, END),
    "a message where a delta should be": sse({"choices": [{"message": {"content": "hello"}}]}, END),
    "another choice in between": sse(
        HELLO[0], {"choices": [{"index": 1, "delta": {"content": "no"}}]}, HELLO[1], END
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", STREAMS)
async def test_a_text_is_read_however_a_server_sends_it(server, provider, variant, size):
    server.raw(STREAMS[variant], piece=size)
    shown, answer = await watch(provider)
    assert "".join(delta.text for delta in shown) == answer.content == "hello"
    assert (answer.finish_reason, answer.tool_calls, answer.reasoning) == ("stop", [], None)
    assert answer.usage == (USAGE if "usage" in variant else {})


REASONING: dict[str, list[dict[str, Any]]] = {
    "reasoning_content": [{"reasoning_content": "hm "}, {"reasoning_content": "so"}],
    "reasoning": [{"reasoning": "hm "}, {"reasoning": "so"}],
    "thinking": [{"thinking": "hm "}, {"thinking": "so"}],
    "the same in two fields": [{"reasoning": "hm ", "reasoning_content": "hm "}, {"reasoning": "so", "thinking": "so"}],
    "beside empty content": [{"reasoning": "hm ", "content": ""}, {"reasoning": "so", "content": None}],
    "parts of the reasoning": [{"reasoning": [{"type": "text", "text": "hm "}]}, {"reasoning": [{"text": "so"}]}],
    "parts of the content": [
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm "}]}]},
        {"content": [{"type": "thinking", "thinking": "so"}]},
    ],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", REASONING)
async def test_reasoning_is_read_from_every_field_that_servers_use(server, provider, variant, size):
    server.raw(sse(*REASONING[variant], *HELLO, END), piece=size)
    shown, answer = await watch(provider)
    assert "".join(delta.reasoning for delta in shown) == answer.reasoning == "hm so"
    assert answer.content == "hello"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_a_whole_answer_with_a_byte_order_mark_is_read_too(server, provider, mark):
    body = {"choices": [{"message": {"content": "hello", "thinking": "hm"}}]}
    server.raw(mark + json.dumps(body).encode(), content_type="application/json")
    answer = await provider.chat(ASK)
    assert (answer.content, answer.reasoning) == ("hello", "hm")
