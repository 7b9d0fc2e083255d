"""Takes the waits for the disk out of the tests: in them processes are killed, and the machine never loses its power.

What a process has written stays when it is killed, whether or not the disk has it yet. That the product does flush is
tested apart, with `flushed`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from everloop.store.sqlite.writer import SYNCHRONOUS

if TYPE_CHECKING:
    import pytest

_PRODUCT = dict(SYNCHRONOUS)


def leave_out_flushes() -> None:
    """For this process and those that are forked from it."""
    SYNCHRONOUS.update(dict.fromkeys(_PRODUCT, "OFF"))
    os.fsync = lambda fd: None


def flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test, flush as the product does."""
    for flush, value in _PRODUCT.items():
        monkeypatch.setitem(SYNCHRONOUS, flush, value)
