"""Fixtures of the commands' tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.testing.openai_server import FakeOpenAI
from tests.support.held import HeldOpenAI


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


@pytest.fixture
async def held() -> AsyncIterator[HeldOpenAI]:
    async with HeldOpenAI() as running:
        yield running


@pytest.fixture
def home() -> Path:
    return Path(os.environ["EVERLOOP_HOME"])
