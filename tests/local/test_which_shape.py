"""Which requests to a small local model are put into another shape, and which are the model's own matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider
from everloop.providers.local.small import SmallShaping

from ..commands import everloop

ASKED = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is the weather in Rome?"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


class Written(Engine):
    """An engine without a model: it writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__(Settings(Path("none.gguf")))
        self.requests: list[dict[str, Any]] = []

    async def complete(self, request: dict[str, Any], on_delta: Any = None, *, session: str = "") -> dict[str, Any]:
        self.requests.append(request)
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("tools", "options", "shaped"),
    [
        ([tool("list_dir"), tool("read_file")], {}, True),
        (None, {}, True),
        ([tool("get_weather")], {}, False),  # a client's own: there are no examples of it
        ([tool("list_dir")], {"tool_choice": "required"}, False),
        ([tool("list_dir")], {"tool_choice": "none"}, True),
        ([tool("list_dir")], {"response_format": {"type": "json_object"}}, False),
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


async def test_weights_that_are_named_and_not_there_are_one_line(tmp_path: Path):
    done = await everloop("run", "hello", EVERLOOP_MODEL="", EVERLOOP_WEIGHTS=str(tmp_path / "no.gguf"))
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert "EVERLOOP_WEIGHTS" in done.err
