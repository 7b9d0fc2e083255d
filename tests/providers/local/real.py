"""Real weights for tests: from a configured path, from where a person's own pulls go, or (in CI) pulled now."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

from everloop.providers.local.weights import Sources, Weights

# Read when the tests are collected: each test has its own environment.
_TOLD = os.environ.get("EVERLOOP_TEST_WEIGHTS", "")
_HOME = Path(os.environ.get("EVERLOOP_HOME", "") or Path.home() / ".everloop")
_FOLDER = Path(os.environ.get("EVERLOOP_MODELS", "") or _HOME / "models")
_IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

TINY = "smollm2-135m"
SMALL = "qwen2.5-coder-0.5b"


@cache
def weights(name: str) -> Path:
    """Return a model's file. In CI a missing one is pulled, or the test fails; elsewhere the test is skipped with a
    reason.
    """
    if importlib.util.find_spec("xllamacpp") is None and not _IN_CI:
        pytest.skip('llama.cpp is not installed: `pip install "everloop[local]"` gets it')
    models = Weights(_FOLDER, Sources(Path(_TOLD) if _TOLD else None))
    if _IN_CI:
        return models.pull(name)
    if (found := models.find(name)) is None:
        pytest.skip(f"the weights of {name} are not here: `everloop model pull {name}` gets them")
    return found


@pytest.fixture(scope="module", autouse=True)
def found_tiny() -> None:
    """Find the tiny model before there is an event loop to be blocked. Active in each module that imports it."""
    weights(TINY)
