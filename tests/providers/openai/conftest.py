from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from everloop.providers.openai import OpenAIProvider
from everloop.testing import FakeOpenAI
from tests.support.model_servers import server as server


@pytest.fixture
async def provider(server: FakeOpenAI) -> AsyncIterator[OpenAIProvider]:
    provider = OpenAIProvider(server.base_url, "secret-key", "some-model")
    yield provider
    await provider.close()
