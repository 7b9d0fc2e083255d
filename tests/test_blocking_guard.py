"""The guard around every test: Everloop's own code may not block the event loop, whatever else runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import blockbuster
import pytest

import everloop

from . import conftest

# A function of Everloop that blocks: the file name decides which code it belongs to.
_OURS: dict[str, Any] = {"os": os, "time": time}
_FILE = str(Path(everloop.__file__).parent / "engine.py")
exec(compile("def nap(): time.sleep(0)\ndef look(call): return call()", _FILE, "exec"), _OURS)


async def test_a_blocking_call_is_refused_and_remembered():
    with pytest.raises(blockbuster.blockbuster.BlockingError):
        _OURS["nap"]()
    blocked = conftest._guard().blocked
    assert blocked == ["time.sleep at engine.py:1"]
    blocked.clear()


async def test_what_a_test_calls_may_block_even_if_everloop_called_the_test():
    time.sleep(0)
    _OURS["look"](lambda: time.sleep(0))
    assert conftest._guard().blocked == []


def test_code_outside_a_loop_may_block():
    _OURS["nap"]()
    assert conftest._guard().blocked == []


@pytest.mark.may_block
async def test_a_test_that_says_so_may_block():
    _OURS["nap"]()
    assert conftest._guard().blocked == []
