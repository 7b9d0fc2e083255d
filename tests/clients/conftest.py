"""The server and the clients, which live as long as a worker's tests need them: some take seconds to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from .processes import CLIENTS, Client, Served, serving


@pytest.fixture(scope="session", params=CLIENTS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Each client in turn."""
    running = Client(request.param, tmp_path_factory.mktemp(request.param))
    yield running
    running.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    """The running server, without leftovers of earlier tests."""
    running.behind.requests.clear()
    running.behind.replies.clear()
    yield running
    assert not running.behind.replies, "the model behind was asked less often than the test says"
    assert running.behind.invalid == 0
