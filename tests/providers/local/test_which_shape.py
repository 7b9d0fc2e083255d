"""Which requests to a small local model are put into another shape, and which are the model's own matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everloop.providers.base import Delta, LLMResponse
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider
from everloop.providers.local.small.shaping import SmallShaping
from tests.support.commands import everloop

ASKED = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is the weather in Rome today?"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


class Written(Engine):
    """An engine without a model: it writes down what it is asked."""

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
        ([tool("get_weather")], {}, False),  # a client's own: there are no examples of it
        ([tool("list_dir")], {"tool_choice": "required"}, False),
        ([tool("list_dir")], {"tool_choice": "none"}, True),
        ([tool("get_weather")], {"response_format": {"type": "json_object"}}, False),
        ([tool("list_dir")], {"response_format": {"type": "text"}}, True),
    ],
)
async def test_only_what_the_shaping_knows_is_shaped(tools: Any, options: dict[str, Any], shaped: bool):
    engine = Written()
    provider = LocalProvider(engine, SmallShaping(), model="m")
    assert (await provider.chat(ASKED, tools, options=options)).content
    (sent,) = engine.requests
    assert ("grammar" in sent) == shaped
    if not shaped:
        assert sent.get("tools") == tools
        assert all(sent[name] == value for name, value in options.items())


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


async def test_an_answer_in_a_form_of_the_callers_own_has_the_short_prompt_and_that_form_alone():
    engine = Written()
    provider = LocalProvider(engine, SmallShaping(), model="m")
    known = [tool("list_dir"), tool("read_file")]
    long = [{"role": "system", "content": "You help.\n\n---\n\n## Skills\n\n" + "canary-53 " * 5_000}, ASKED[1]]
    answer = await provider.chat(long, known, options={"response_format": FORM})
    (sent,) = engine.requests
    assert sent["response_format"] == FORM
    assert "grammar" not in sent
    assert "tools" not in sent
    assert "canary-53" not in str(sent["messages"])
    assert (answer.content, answer.tool_calls) == ("fine", [])


async def test_before_an_answer_in_such_a_form_there_may_be_calls_which_have_their_own():
    engine = Written('{"tool": "read_file", "path": "notes.txt"}')
    provider = LocalProvider(engine, SmallShaping(), model="m")
    asked = [{"role": "user", "content": "What does the note about the garden say?"}]
    answer = await provider.chat(asked, [tool("list_dir"), tool("read_file")], options={"response_format": FORM})
    (sent,) = engine.requests
    assert "grammar" in sent
    assert "response_format" not in sent
    assert [call.name for call in answer.tool_calls] == ["read_file"]


async def test_an_answer_that_is_json_is_no_call_and_is_seen_as_it_comes():
    engine = Written('{"tool": "exec", "command": "rm canary"}')
    provider = LocalProvider(engine, SmallShaping(), model="m")
    pieces = [piece async for piece in provider.stream(ASKED, None, options={"response_format": FORM})]
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == [engine.text]
    last = pieces[-1]
    assert isinstance(last, LLMResponse)
    assert (last.content, last.tool_calls) == (engine.text, [])


async def test_weights_that_are_named_and_not_there_are_one_line(tmp_path: Path):
    done = await everloop("run", "hello", EVERLOOP_MODEL="", EVERLOOP_WEIGHTS=str(tmp_path / "no.gguf"))
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert "EVERLOOP_WEIGHTS" in done.err


async def test_what_is_certain_is_streamed_and_the_model_is_not_asked():
    engine = Written()
    provider = LocalProvider(engine, SmallShaping(), model="m")
    sum_ = [ASKED[0], {"role": "user", "content": "what is 17 * 23?"}]
    pieces = [piece async for piece in provider.stream(sum_, [tool("list_dir")])]
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == ["17 * 23 = 391"]
    assert isinstance(pieces[-1], LLMResponse)
    assert pieces[-1].content == "17 * 23 = 391"
    assert engine.requests == []
