from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from tests.support.places import CERTIFICATES


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine trusts the tests' certificate authority."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / "ca.pem"))


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    """A task, a transport or an exception that is never retrieved fails the test."""
    before = asyncio.all_tasks()
    yield
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"still running: {left}"
    gc.collect()
