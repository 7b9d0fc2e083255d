"""Front matter: what is read, what is refused and where, and that the fast path agrees with YAML."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import date

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from everloop.context.frontmatter import MAX_LENGTH, FrontMatterError, read_front_matter, read_simple, read_yaml

from ..support.cases import each


@pytest.fixture(params=["C", "Python"])
def _both_readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every machine has the YAML reader written in C."""
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader")


def refused(text: str) -> FrontMatterError:
    with pytest.raises(FrontMatterError) as caught:
        read_front_matter(text)
    assert "\n" not in caught.value.message
    return caught.value


def test_keys_and_body_are_read_with_the_line_of_each_key():
    read = read_front_matter(
        "---\nname: notes\n\ndescription: Takes notes, well.\nalways: true\n---\n# Notes\n\nBody.\n"
    )
    assert read.values == {"name": "notes", "description": "Takes notes, well.", "always": True}
    assert read.body == "# Notes\n\nBody.\n"
    assert [read.line(key) for key in ("name", "description", "always", "missing")] == [2, 4, 5, 1]


@pytest.mark.usefixtures("_both_readers")
def test_nested_values_are_plain_data_with_the_lines_of_their_keys():
    text = (
        "---\ninputs:\n  type: object\n  properties: {topic: {type: string}}\nparts:\n  - a\n  - 2\n  - 1.5\n  - null\n"
        "day: 2024-02-30\nlong: >-\n  two\n  lines\n---\nBody"
    )
    read = read_front_matter(text)
    assert read.values == {
        "inputs": {"type": "object", "properties": {"topic": {"type": "string"}}},
        "parts": ["a", 2, 1.5, None],
        "day": "2024-02-30",
        "long": "two lines",
    }
    assert (read.line("inputs", "properties"), read.line("inputs", "properties", "topic", "x")) == (4, 4)
    assert (read.line("day"), read.line("long")) == (10, 11)


@pytest.mark.usefixtures("_both_readers")
def test_many_sibling_lists_and_some_nested_ones_are_accepted():
    beside, inside = ", ".join(["[a]"] * 100), "[" * 19 + "]" * 19
    read = read_front_matter(f"---\na: [{beside}]\nb: {inside}\n---\n")
    assert read.values["a"] == [["a"]] * 100


def test_a_byte_order_mark_and_windows_line_endings_are_accepted():
    text = "---\nname: a\nrequires:\n  bins: [git]\n---\nline one\nline two\n"
    plain = read_front_matter(text)
    assert read_front_matter("\ufeff" + text.replace("\n", "\r\n")) == plain
    assert read_front_matter(text.replace("\n", "\r")) == plain
    assert read_front_matter("---  \nname: a\n--- \t\nbody").body == "body"


def test_only_the_first_line_of_dashes_ends_it():
    assert read_front_matter("---\na: b\n---\none\n---\ntwo\n").body == "one\n---\ntwo\n"
    assert read_front_matter("---\n---").values == {}
    assert read_front_matter("---\n# nothing but this\n---\n").values == {}


@pytest.mark.usefixtures("_both_readers")
@each(
    ("text", "line", "word"),
    [
        ("name: a\n---\n", 1, "---"),
        ("", 1, "---"),
        ("\n---\nname: a\n---\n", 1, "---"),
        ("----\nname: a\n---\n", 1, "---"),
        ("---", 1, "ends"),
        ("---\nname: a\n", 1, "ends"),
        ("---\nname: a\n ---\nbody", 1, "ends"),
        ("---\nname: a\ndescription: use it: often\n---\n", 3, "quotes"),
        ("---\nname: a\nb: @b\n---\n", 3, "quotes"),
        ("---\nname: a\n\tb: c\n---\n", 3, "tab"),
        ("---\nname: a\n\nb: 'open\nc: d\n---\n", 4, "quoted"),
        ("---\na: é\nb: [é, é\nc: d\n---\n", 3, "sequence"),
        ("---\na: é\nb\nc: d\n---\n", 3, "':'"),
        ("---\na: é\na: b\n---\n", 3, '"a"'),
        ("---\na:\n  é: 1\n  c: 2\n  é: 3\n---\n", 5, '"é"'),
        ("---\na: b\nyes: c\n---\n", 3, "yes"),
        ("---\na: b\n1: c\n---\n", 3, "1"),
        ("---\na: b\n? [x]\n: c\n---\n", 3, "text"),
        ("---\na: b\n<<: {c: d}\n---\n", 3, "<<"),
        ("---\n- a\n---\n", 2, "key: value"),
        ("---\njust words\n---\n", 2, "key: value"),
        ("---\na: b\n...\nc: d\n---\n", 4, ""),
        ("---\na: b\n--- c\n---\n", 3, ""),
        ("---\na: é\n\nb: x\x07\n---\n", 4, "U+0007"),
        ("---\na: b\nc: \ud800\n---\n", 3, "U+D800"),
        ("---\na: 1\nb: 0x_\n---\n", 3, "0x_"),
        (f"---\na: 1\nb: {'9' * 5000}\n---\n", 3, "number"),
    ],
)
def test_errors_name_the_line(text, line, word):
    error = refused(text)
    assert error.line == line
    assert word in error.message


@pytest.mark.usefixtures("_both_readers")
@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1, 2]\nb: *x\n",
        "a: &x 1\n",
        "a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
        "a: !!python/object/apply:os.system [touch canary]\n",
        "a: !!python/name:os.system\n",
        "a: !mine x\n",
        "a: !!binary aGk=\n",
        "!!set {a, b}\n",
        "a: !!str 5\n",
        "a: " + "[" * 8000 + "\n",
        "a: " + "{a: " * 3000 + "\n",
        "".join(f"{' ' * depth}a:\n" for depth in range(100)),
        "- " * 5000 + "a\n",
    ],
)
def test_constructs_that_could_expand_nest_or_execute_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(f"---\nfirst: one\n{text}---\n").line >= 3
    assert refused(f"---\n{text}---\n").line >= 2
    assert not (tmp_path / "canary").exists()


def test_front_matter_has_a_size_limit_and_the_body_has_none():
    fits = "a: " + "x" * (MAX_LENGTH - 4) + "\n"
    assert len(read_front_matter(f"---\n{fits}---\n" + "y" * 100_000).body) == 100_000
    assert str(MAX_LENGTH) in refused(f"---\n{'# ' * 10}{fits}---\nbody").message
    assert refused("---\n" + "a: b\n" * 100_000).line == 1


# ---------------------------------------------------------------------------------------------- the fast path

VALUES = st.one_of(
    st.text(),
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Z"])),
    st.text("ab:# -'\"\\\t&*!|>%@`[]{},?=~0.\x85\xa0\u2028\ufeff", max_size=12).map("a".__add__),
    st.sampled_from(["true", "True", "FALSE", "yes", "NO", "on", "Off", "null", "Null", "~", "y", "N", "None", "nan"]),
    st.text(max_size=8).map("'{}'".format),
    st.text(max_size=8).map('"{}"'.format),
)
KEYS = st.one_of(
    st.sampled_from(["name", "yes", "On", "null", "y", "a-b", "a_1"]), st.from_regex(r"[A-Za-z][\w-]{0,5}")
)
PRINTABLE = st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.sampled_from(" :#'\"-")
WORDS = st.one_of(
    st.sampled_from(["git", "A_B", "yes", "a-", "_", "null", "3", ""]), st.text("ab-_: [],{}#", max_size=4)
)
PAIRS = st.builds("{}: [{}]".format, WORDS, st.lists(WORDS, max_size=3).map(", ".join))
LINES = st.one_of(
    st.builds("{}: {{{}}}".format, KEYS, st.lists(PAIRS, max_size=3).map(", ".join)),
    st.builds("{}: a{}".format, KEYS, st.text(PRINTABLE, max_size=20)),
    st.builds("{}: {quote}{}{quote}".format, KEYS, st.text(PRINTABLE, max_size=9), quote=st.sampled_from("'\"")),
    st.builds(
        "{}:{}{}{}".format, KEYS, st.sampled_from([" ", "  ", "", "\t"]), VALUES, st.sampled_from(["", " ", "\t"])
    ),
    st.text(max_size=10),
    st.sampled_from(["", " ", "# note", " more", "- a", "...", "--- b", "a: b", "%YAML 1.1"]),
)


@given(st.lists(LINES, max_size=5).map("\n".join))
@example("a: b #c")
@example("a: b# c: d")
@example("a: b:")
@example("a: b :c")
@example("a: 'it''s'")
@example("a: 'x' #c")
@example('a: ""')
@example("a: true \nb: True")
@example("a: b\na: c")
@example("a: {b: [c, d], e: [f]}")
@example("a: {b: [c], b: [d]}")
@example("a: {b: [no]}")
def test_whatever_the_fast_path_reads_yaml_reads_the_same(header):
    short = read_simple(header)
    if short is not None:
        assert yaml.load(header, Loader=yaml.SafeLoader) == (short[0] or None)
        assert read_yaml(header) == short


@given(st.lists(LINES, max_size=5).map("\n".join))
def test_the_yaml_reader_returns_plain_data_or_one_error(header):
    with contextlib.suppress(FrontMatterError):
        values, lines = read_yaml(header)
        assert set(values) == {path[0] for path in lines}
        assert not any(isinstance(value, date) for value in values.values())


def test_typical_front_matter_takes_the_fast_path_and_loads_no_yaml():
    simple = (
        '---\nname: git\ndescription: Work, e.g. http://x (é) – "so" it\'s.\n'
        "always: false\nversion: '1.0'\nrequires: {bins: [git]}\n---\n"
    )
    code = (
        "import sys; from everloop.context.frontmatter import read_front_matter as read;"
        f"read({simple!r}); print('yaml' in sys.modules);"
        "read('---\\nrequires:\\n  bins: [git]\\n---\\n'); print('yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr
