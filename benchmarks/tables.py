"""The lines that benchmarks print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Row:
    """One line of the table of `make bench`."""

    what: str
    ours: str
    base: str
    figure: float
    bound: float
    unit: str = "×"

    @property
    def ok(self) -> bool:
        return self.figure <= self.bound


def say(what: str, *figures: str) -> None:
    print(f"| {' | '.join([what, *figures])} |", flush=True)


def head(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
