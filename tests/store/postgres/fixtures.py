"""Fixtures for tests with PostgreSQL: `from tests.store.postgres.fixtures import *` where they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .server import Server, shared_server


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The PostgreSQL server of this test run, however many processes it has."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "postgres"
    with shared_server(folder) as server:
        yield server


@pytest.fixture
def database(postgres: Server) -> Iterator[str]:
    """The address of a fresh database with our tables."""
    with postgres.database() as dsn:
        yield dsn
