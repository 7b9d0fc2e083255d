"""Fixtures of the PostgreSQL store's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everloop.store.peers import new_worker, retire
from tests.server.fixtures import fake as fake
from tests.server.fixtures import http as http

from .fixtures import database as database
from .fixtures import postgres as postgres


@pytest.fixture
def worker() -> Iterator[str]:
    name = new_worker()
    yield name
    retire(name)
