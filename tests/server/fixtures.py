"""Fixtures for tests with servers. A module with `server = shared_server` runs its tests in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from everloop.testing.openai_server import FakeOpenAI

from .feeds import PageClient, page_client
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


@pytest.fixture
async def ada(server: Serving) -> PageClient:
    """A client of the page's API with a token of its own."""
    return await page_client(server, "ada")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """A server that lives as long as the module's tests, which run in one event loop."""
    async with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def shared_server(running: Serving) -> Serving:
    """The module's server, cleared of earlier tests."""
    running.fake.requests.clear()
    running.fake.replies.clear()
    return running
