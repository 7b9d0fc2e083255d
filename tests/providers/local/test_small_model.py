"""Shaping with a real model: even the smallest one can only write what the grammar allows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everloop.messages import assistant_message, tool_message, user_message
from everloop.providers.base import Delta, LLMResponse
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider
from everloop.providers.local.small.shaping import SmallShaping

from .real import TINY, weights
from .real import found_tiny as found_tiny
from .test_small import TOOLS, with_system

pytestmark = pytest.mark.timeout(300)  # in CI the weights may have to be pulled first


@contextlib.asynccontextmanager
async def model() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(Engine(Settings(weights(TINY), window=4096, slots=1, threads=1)), SmallShaping())
    try:
        yield provider
    finally:
        await provider.close()


async def test_a_tiny_model_makes_a_valid_call_and_answers_from_its_result():
    async with model() as provider:
        conversation: list[dict[str, Any]] = with_system(user_message('show me "odd" notes/pike.md'))
        pieces = [piece async for piece in provider.stream(conversation, TOOLS)]
        first = pieces[-1]
        assert isinstance(first, LLMResponse)
        assert [
            piece for piece in pieces if isinstance(piece, Delta) and piece.text
        ] == []  # subscribers do not see calls
        (call,) = first.tool_calls
        function = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == call.name)
        assert call.error is None
        assert call.arguments.keys() <= function["parameters"]["properties"].keys()
        read = [("c1", "read_file", {"path": "notes/pike.md"})]
        conversation.append(assistant_message(None, read))
        conversation.append(tool_message("c1", "read_file", '     1\ta "pike"\\\n     2\tist größer 大'))
        pieces = [piece async for piece in provider.stream(conversation, TOOLS)]
        answer = pieces[-1]
        assert isinstance(answer, LLMResponse)
        assert answer.content is not None
        assert answer.content.startswith('notes/pike.md:\na "pike"\\\nist größer 大')
        assert "".join(piece.text for piece in pieces if isinstance(piece, Delta)).strip() == answer.content
        # The prompt was read in the first round; the second reads the call and its result.
        assert answer.usage["prompt_tokens"] - answer.usage["cached_tokens"] < 120
        assert answer.usage["cached_tokens"] > 500
