"""Prometheus's text format, version 0.0.4: counters and histograms."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 500  # per metric: bounds memory and scrapes, whatever becomes a label
OTHER = "other"


class Counter:
    """A monotonic counter per combination of labels."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, *values: str, amount: float = 1) -> None:
        if values not in self._values and len(self._values) >= MAX_SERIES:
            values = (OTHER,) * len(values)
        self._values[values] = self._values.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        yield from heading(self.name, self.help, self.kind)
        for values, number in sorted(self._values.items()):
            yield sample(self.name, number, dict(zip(self.labels, values, strict=True)))


class Histogram:
    """Counts observations in buckets with an upper bound."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield from heading(self.name, self.help, self.kind)
        so_far = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            so_far += count
            yield sample(f"{self.name}_bucket", so_far, {"le": format_number(bound)})
        yield sample(f"{self.name}_sum", self._sum)
        yield sample(f"{self.name}_count", so_far)


def heading(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {_escaped(help)}"
    yield f"# TYPE {name} {kind}"


def sample(name: str, value: float, labels: dict[str, str] | None = None) -> str:
    pairs = ",".join(f'{label}="{_escaped(text, quote=True)}"' for label, text in (labels or {}).items())
    return f"{name}{{{pairs}}} {format_number(value)}" if pairs else f"{name} {format_number(value)}"


def format_number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(text: str, *, quote: bool = False) -> str:
    """Escape text to a single line. Lone surrogates, which cannot be encoded, are written as escapes."""
    text = text.encode(errors="backslashreplace").decode().replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
