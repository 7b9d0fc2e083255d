"""Fixtures: model servers on loopback. A test file imports those that it uses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from everloop.testing import FakeAnthropic, FakeOpenAI

from .held import HeldOpenAI


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAI]:
    """A server with OpenAI's API."""
    async with FakeOpenAI() as running:
        yield running


@pytest.fixture
async def anthropic() -> AsyncIterator[FakeAnthropic]:
    """A server with Anthropic's API."""
    async with FakeAnthropic() as running:
        yield running


@pytest.fixture
async def held() -> AsyncIterator[HeldOpenAI]:
    """A server with OpenAI's API that pauses in the middle of an answer."""
    async with HeldOpenAI() as running:
        yield running
