"""Fixtures of the commands' tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.model_servers import held as held
from tests.support.model_servers import server as server


@pytest.fixture
def home() -> Path:
    return Path(os.environ["EVERLOOP_HOME"])
