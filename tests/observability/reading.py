"""A strict parser of Prometheus's text format 0.0.4, which rejects anything a scraper might stumble over."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.+)\})? (\S+)")
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|Inf)|NaN")
HELP = re.compile(r"(?:[^\\\n]|\\[\\n])+")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    """A metric: its samples by name and labels."""

    kind: str
    help: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def read(text: str) -> dict[str, Family]:
    """Return all metrics by name; raise an AssertionError that names what violates the format."""
    assert text.endswith("\n"), "the last line has no line ending"
    families: dict[str, Family] = {}
    current, help, named = "", "", ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            named, _, help = line[7:].partition(" ")
            assert NAME.fullmatch(named), line
            assert HELP.fullmatch(help), line
            assert named not in families, f"{named} is declared twice"
        elif line.startswith("# TYPE "):
            current, kind = line[7:].split(" ")
            assert current == named, "TYPE does not follow its HELP"
            assert kind in ("counter", "gauge", "histogram"), line
            assert (kind == "counter") == current.endswith("_total"), line
            families[current] = Family(kind, help)
        else:
            assert not line.startswith("#"), f"a stray comment: {line}"
            _sample(line, current, families[current])
    for name, family in families.items():
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families


def _sample(line: str, current: str, family: Family) -> None:
    found = SAMPLE.fullmatch(line)
    assert found is not None, f"not a sample: {line}"
    name, inner, number = found.groups()
    assert name in [current + suffix for suffix in SUFFIXES.get(family.kind, ("",))], f"{name} under {current}"
    assert NUMBER.fullmatch(number), line
    labels, at = [], 0
    while inner and at < len(inner):
        label = LABEL.match(inner, at)
        assert label is not None, f"not labels: {inner}"
        labels.append((label[1], re.sub(r"\\(.)", lambda one: {"n": "\n"}.get(one[1], one[1]), label[2])))
        at = label.end()
        assert label[3] == "" or at < len(inner), f"a trailing comma: {inner}"
    assert len(dict(labels)) == len(labels), f"a duplicate label: {inner}"
    key = (name, frozenset(labels))
    assert key not in family.samples, f"a duplicate series: {line}"
    family.samples[key] = float(number)
    assert family.kind == "gauge" or (not math.isnan(float(number)) and float(number) >= 0), line


def _check_histogram(name: str, family: Family) -> None:
    buckets = [
        (float(dict(labels)["le"]), count) for (of, labels), count in family.samples.items() if of == f"{name}_bucket"
    ]
    assert buckets == sorted(buckets), f"buckets of {name} are not in order, or their counts shrink"
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert math.isinf(buckets[-1][0]), f"{name} has no +Inf"
    assert buckets[-1][1] == family.samples[f"{name}_count", frozenset()]
    assert (f"{name}_sum", frozenset()) in family.samples


def value(families: dict[str, Family], name: str, /, **labels: str) -> float:
    """Return one value, or 0 if the series does not exist yet."""
    family = families.get(name) or families[re.sub(r"_(?:bucket|sum|count)$", "", name)]
    return family.samples.get((name, frozenset(labels.items())), 0.0)
