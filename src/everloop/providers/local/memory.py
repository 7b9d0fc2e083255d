"""Check whether a model fits into memory before it is loaded: otherwise the kernel would kill a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import ProviderError
from .gguf import read_head
from .machine import available_memory

STATE_BYTES = 2  # per number in a conversation's state (16 bits)
RESERVE = 200 << 20  # for the compute buffers and the process itself
MIN_WINDOW = 1_024


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that a model needs, in bytes: its file, the state of one token, and the number of tokens."""

    file: int
    token: int
    tokens: int

    @property
    def total(self) -> int:
        return self.file + self.token * self.tokens + RESERVE


def needs(weights: Path, window: int, slots: int) -> Needs:
    """Return the memory that a model needs for this many concurrent conversations of this length."""
    return Needs(weights.stat().st_size, _token_bytes(read_head(weights)), window * slots)


def check_memory(weights: Path, window: int, slots: int, available: int | None = None) -> None:
    """Raise an error if the model does not fit; it says how much memory is missing and what to do."""
    needed = needs(weights, window, slots)
    free = available_memory() if available is None else available
    if free is None or needed.total <= free:
        return
    shorter = _window_that_fits(needed, free, slots)
    advice = f"set EVERLOOP_WINDOW={shorter}, or take a smaller model" if shorter else "take a smaller model"
    raise ProviderError(
        f"too little memory for {weights.name}: it needs {_shown(needed.total)} and {_shown(free)} are free; "
        f"{advice} (`everloop model list`), or free some memory"
    )


def _window_that_fits(needed: Needs, free: int, slots: int) -> int:
    """Return the longest conversation that fits, in whole thousands of tokens; 0 if not even a short one fits."""
    room = (free - needed.file - RESERVE) // max(1, needed.token * slots)
    return room // 1_024 * 1_024 if room >= MIN_WINDOW else 0


def _token_bytes(head: dict[str, Any]) -> int:
    """Return the bytes of state per token of a conversation: the keys and values of every layer."""
    kind = head.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        value = head.get(f"{kind}.{name}", default)
        return value if type(value) is int and value >= 0 else default

    layers, heads, width = number("block_count"), number("attention.head_count", 1), number("embedding_length")
    each = width // max(1, heads)
    numbers = number("attention.key_length", each) + number("attention.value_length", each)
    pairs = head.get(f"{kind}.attention.head_count_kv")
    if isinstance(pairs, list):
        total = sum(count for count in pairs if type(count) is int)
    else:
        total = layers * number("attention.head_count_kv", heads)
    return total * numbers * STATE_BYTES


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
