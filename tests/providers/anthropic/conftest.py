from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from everloop.providers.anthropic import AnthropicProvider
from everloop.testing import FakeAnthropic

from .streams import SECRET


@pytest.fixture
async def server() -> AsyncIterator[FakeAnthropic]:
    async with FakeAnthropic() as server:
        yield server


@pytest.fixture
async def provider(server: FakeAnthropic) -> AsyncIterator[AnthropicProvider]:
    provider = AnthropicProvider(SECRET, "some-model", base_url=server.base_url)
    yield provider
    await provider.close()
