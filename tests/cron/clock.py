"""The clock of a test's job service."""

from __future__ import annotations

NOW = 1_800_000_000.0  # Friday, 2027-01-15 08:00 UTC


class Clock:
    """Shows the time that the test has set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now
