"""The text format: the strictest parser can read what is written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.observability.metrics import MAX_SERIES, Counter, Histogram, format_number

from .reading import read, value


def text(*metrics: Counter | Histogram) -> str:
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=20), st.text(min_size=1))
def test_any_label_and_any_help_text_round_trips(labels, help):
    counter = Counter("seen_total", f"What {help}", "one", "two")
    for one, two in labels:
        counter.add(one, two)
    seen = read(text(counter))
    for one, two in labels:
        assert value(seen, "seen_total", one=one, two=two) >= 1


def test_two_unencodable_labels_stay_distinct():
    counter = Counter("seen_total", "Seen.", "name")
    counter.add("\ud800")
    counter.add("\ud801")
    assert len(read(text(counter))["seen_total"].samples) == 2


def test_quotes_line_ends_and_backslashes_are_escaped_per_the_format():
    counter = Counter("seen_total", 'a "quote", a \\ and a\nline end', "name")
    counter.add('a "quote", a \\ and a\nline end', amount=2)
    assert text(counter).splitlines() == [
        '# HELP seen_total a "quote", a \\\\ and a\\nline end',
        "# TYPE seen_total counter",
        'seen_total{name="a \\"quote\\", a \\\\ and a\\nline end"} 2',
    ]


def test_a_counter_without_labels_exists_before_anything_happens():
    assert value(read(text(Counter("seen_total", "Seen."))), "seen_total") == 0
    assert text(Counter("seen_total", "Seen.")).splitlines()[-1] == "seen_total 0"


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_a_histogram_counts_each_value_in_every_bucket_that_holds_it(values):
    histogram = Histogram("took_seconds", "Took.", (0.5, 1, 10))
    for one in values:
        histogram.observe(one)
    seen = read(text(histogram))
    for bound in (0.5, 1, 10, math.inf):
        le = format_number(bound)
        assert value(seen, "took_seconds_bucket", le=le) == sum(one <= bound for one in values)
    assert value(seen, "took_seconds_sum") == pytest.approx(sum(values))
    assert value(seen, "took_seconds_count") == len(values)


def test_the_number_of_series_is_bounded_whatever_the_labels():
    counter = Counter("seen_total", "Seen.", "name")
    for n in range(MAX_SERIES * 3):
        counter.add(f"name{n}")
    counter.add("name0")
    seen = read(text(counter))
    assert len(seen["seen_total"].samples) == MAX_SERIES + 1
    assert value(seen, "seen_total", name="other") == MAX_SERIES * 2
    assert value(seen, "seen_total", name="name0") == 2


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (3.0, "3"), (0.25, "0.25"), (1e20, "1e+20"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)
def test_numbers_are_written_per_the_format(number, words):
    assert format_number(number) == words


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "a 1",
        "# HELP a x\n# TYPE a gauge\na 1",
        "# TYPE a gauge\na 1\n",
        "# HELP a x\n# TYPE a counter\na 1\n",
        '# HELP a x\n# TYPE a gauge\na{b="\\x"} 1\n',
        '# HELP a x\n# TYPE a gauge\na{b="c",} 1\n',
        "# HELP a x\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a x\n# TYPE a gauge\na one\n",
        "# HELP a x\n# TYPE a gauge\nb 1\n",
        '# HELP a x\n# TYPE a histogram\na_bucket{le="1"} 1\na_sum 1\na_count 1\n',
    ],
)
def test_the_parser_rejects_invalid_text(wrong):
    with pytest.raises((AssertionError, KeyError)):
        read(wrong)
