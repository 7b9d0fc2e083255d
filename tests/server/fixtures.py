"""Fixtures for tests with servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from everloop.testing.openai_server import FakeOpenAI


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    """A model behind OpenAI's API."""
    async with FakeOpenAI() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
