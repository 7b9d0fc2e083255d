"""One model call of a turn: what several turns of a process do at once."""

from __future__ import annotations

import asyncio
import sys

import pytest

import everloop.providers
from everloop import LLMResponse
from everloop.messages import Conversation
from everloop.runtime import model_call

PARSER = "everloop.providers.text_calls"


async def test_turns_that_need_the_parser_at_once_wait_for_its_import_without_blocking_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_call, "_is_loaded", False, raising=False)
    for name in [one for one in sys.modules if one.startswith(PARSER)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(everloop.providers, "text_calls", None, raising=False)  # what the import sets is undone

    async def read(after: int) -> str | None:
        for _ in range(after):
            await asyncio.sleep(0.001)
        return (await model_call.read_text_calls(LLMResponse("[1, 2]"), Conversation([]), None)).content

    assert await asyncio.gather(*(read(after) for after in range(40))) == 40 * ["[1, 2]"]
