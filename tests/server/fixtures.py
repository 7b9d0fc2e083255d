"""Fixtures for tests with servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from everloop.testing.openai_server import FakeOpenAI

from .serving import Serving, serving


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    """A model behind OpenAI's API."""
    async with FakeOpenAI() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server in this process, with a fake model behind it."""
    async with serving(tmp_path) as running:
        yield running
