"""Which requests to a small local model are reshaped, and which go to the model unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everloop.messages import assistant_message, tool_message
from everloop.providers.base import Delta, LLMResponse
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider
from everloop.providers.local.small.shaping import SmallShaping
from tests.support.commands import everloop

ASKED = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is the weather in Rome today?"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


class Written(Engine):
    """An engine without a model: it records its requests."""

    def __init__(self, text: str = "fine") -> None:
        super().__init__(Settings(Path("none.gguf")))
        self.text = text
        self.requests: list[dict[str, Any]] = []

    async def complete(self, request: dict[str, Any], on_delta: Any = None, *, session: str = "") -> dict[str, Any]:
        self.requests.append(request)
        if on_delta is not None:
            on_delta({"content": self.text})
        message = {"role": "assistant", "content": self.text}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def test_only_a_small_model_has_a_prompt_of_its_own() -> None:
    assert 0 < LocalProvider(Written(), SmallShaping()).own_prompt < 3_000
    assert LocalProvider(Written()).own_prompt == 0


@pytest.mark.parametrize(
    ("tools", "options", "shaped"),
    [
        ([tool("list_dir"), tool("read_file")], {}, True),
        (None, {}, True),
        ([tool("get_weather")], {}, True),  # a client's own, without examples
        ([tool("list_dir")], {"tool_choice": "required"}, False),
        ([tool("list_dir")], {"tool_choice": "none"}, True),
        ([tool("get_weather")], {"tool_choice": "required"}, False),
        ([tool("list_dir")], {"response_format": {"type": "text"}}, True),
    ],
)
async def test_everything_except_a_required_call_is_shaped(tools: Any, options: dict[str, Any], shaped: bool):
    engine = Written()
    provider = LocalProvider(engine, SmallShaping(), model="m")
    assert (await provider.chat(ASKED, tools, options=options)).content
    (sent,) = engine.requests
    assert ("grammar" in sent) == shaped
    if not shaped:
        assert sent.get("tools") == tools
        assert all(sent[name] == value for name, value in options.items())


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


async def test_an_answer_in_the_callers_form_has_the_short_prompt_and_only_that_form():
    engine = Written()
    provider = LocalProvider(engine, SmallShaping(), model="m")
    known = [tool("list_dir"), tool("read_file")]
    long = [{"role": "system", "content": "You help.\n\n---\n\n## Skills\n\n" + "canary-53 " * 5_000}, ASKED[1]]
    answer = await provider.chat(long, known, options={"response_format": FORM})
    sent = engine.requests[-1]
    assert sent["response_format"] == FORM
    assert "grammar" not in sent
    assert "tools" not in sent
    assert "canary-53" not in str(sent["messages"])
    assert (answer.content, answer.tool_calls) == ("fine", [])


async def test_calls_with_their_own_form_may_precede_an_answer_in_the_callers_form():
    engine = Written('{"tool": "read_file", "path": "notes.txt"}')
    provider = LocalProvider(engine, SmallShaping(), model="m")
    asked = [{"role": "user", "content": "What does the note about the garden say?"}]
    answer = await provider.chat(asked, [tool("list_dir"), tool("read_file")], options={"response_format": FORM})
    (sent,) = engine.requests
    assert "grammar" in sent
    assert "response_format" not in sent
    assert [call.name for call in answer.tool_calls] == ["read_file"]


async def test_a_json_answer_is_not_a_call_and_is_streamed():
    engine = Written('{"tool": "exec", "command": "rm canary"}')
    provider = LocalProvider(engine, SmallShaping(), model="m")
    pieces = [piece async for piece in provider.stream(ASKED, None, options={"response_format": FORM})]
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == [engine.text]
    last = pieces[-1]
    assert isinstance(last, LLMResponse)
    assert (last.content, last.tool_calls) == (engine.text, [])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_a_clients_own_tools_are_in_the_short_prompt_and_their_calls_are_read():
    engine = Written('{"tool": "get_weather", "city": "Rome"}')
    provider = LocalProvider(engine, SmallShaping(), model="m")
    answer = await provider.chat(ASKED, [WEATHER])
    (sent,) = engine.requests
    assert "tools" not in sent
    assert "get_weather" in sent["grammar"]
    assert "Tell the weather of a city." in sent["messages"][0]["content"]
    assert "read_file" not in str(sent["messages"]), "examples of our tools would be taken for offers"
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("get_weather", {"city": "Rome"})]


async def test_with_a_clients_own_tools_a_formatted_answer_comes_after_the_calls():
    engine = Written('{"tool": "get_weather", "city": "Rome"}')
    provider = LocalProvider(engine, SmallShaping(), model="m")
    called = await provider.chat(ASKED, [WEATHER], options={"response_format": FORM})
    assert [call.name for call in called.tool_calls] == ["get_weather"]
    engine.text = "It rains."
    pieces = [piece async for piece in provider.stream(ASKED, [WEATHER], options={"response_format": FORM})]
    _, free, formed = engine.requests
    assert "grammar" in free
    assert "response_format" not in free
    assert formed["response_format"] == FORM
    assert "grammar" not in formed
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == ["It rains."], "the first try is not shown"


async def test_configured_weights_that_are_missing_are_a_one_line_error(tmp_path: Path):
    done = await everloop("run", "hello", EVERLOOP_MODEL="", EVERLOOP_WEIGHTS=str(tmp_path / "no.gguf"))
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert "EVERLOOP_WEIGHTS" in done.err


async def test_an_answer_that_is_certain_is_streamed_without_asking_the_model():
    engine = Written()
    provider = LocalProvider(engine, SmallShaping(), model="m")
    listed = [
        {"role": "user", "content": "which files are here?"},
        assistant_message(None, [("c1", "list_dir", {"path": "."})]),
        tool_message("c1", "list_dir", "nets/\npike.md  1 kB"),
    ]
    pieces = [piece async for piece in provider.stream([ASKED[0], *listed], [tool("list_dir")])]
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == ["nets/, pike.md"]
    assert isinstance(pieces[-1], LLMResponse)
    assert pieces[-1].content == "nets/, pike.md"
    assert engine.requests == []
