"""What a tool is, and what happens to arguments before it runs."""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.tools.base import Tool, ToolError, tool
from everloop.tools.coerce import same
from everloop.tools.schema import InvalidArguments, compile_schema, validate


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list)


class Options(TypedDict):
    deep: bool
    limit: NotRequired[int]


class Item(msgspec.Struct, rename="camel"):
    item_name: str
    colour: Colour = Colour.RED


@tool
async def search(
    query: str,
    count: int = 5,
    ratio: float = 0.5,
    exact: bool = False,
    kinds: list[str] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    labels: dict[str, int] | None = None,
    site: Annotated[str, "Only this site."] = "",
) -> str:
    """Search the web.

    More about it.

    Args:
        query: What to look for,
            in plain words.
        count (int): How many.

    Returns:
        The results.
    """
    return f"{query}:{count}"


def schema_of(function: Any) -> dict[str, Any]:
    return tool(function).parameters["properties"]


# --- @tool ---------------------------------------------------------------------------------------------------------


def test_a_function_becomes_a_tool_with_name_description_and_schema():
    assert isinstance(search, Tool)
    assert search.name == "search"
    assert search.description == "Search the web.\n\nMore about it."
    assert search.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in plain words."},
            "count": {"type": "integer", "default": 5, "description": "How many."},
            "ratio": {"type": "number", "default": 0.5},
            "exact": {"type": "boolean", "default": False},
            "kinds": {"type": "array", "items": {"type": "string"}},
            "mode": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
            "labels": {"type": "object", "additionalProperties": {"type": "integer"}},
            "site": {"type": "string", "default": "", "description": "Only this site."},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


async def test_a_decorated_function_can_still_be_called_as_it_was_written():
    assert await search("cats", count=2) == "cats:2"
    assert inspect.signature(search).parameters["query"].annotation == "str"

    @tool
    def double(number: int) -> int:
        """Double it."""
        return number * 2

    assert double(4) == 8
    assert await double.execute(number=4) == 8


def test_the_flags_have_careful_defaults_and_can_be_set():
    assert (search.replay, search.parallel, search.timeout) == ("never", True, None)

    @tool(name="send-it", description="Sends.", replay="safe", parallel=False, timeout=3.5)
    async def send(text: str) -> None: ...

    assert (send.name, send.description) == ("send-it", "Sends.")
    assert (send.replay, send.parallel, send.timeout) == ("safe", False, 3.5)


def test_an_undocumented_function_is_described_by_its_name():
    @tool
    async def add_numbers(a: int, b: int) -> int:
        return a + b

    assert add_numbers.description == "add numbers"


async def test_a_plain_function_runs_in_a_thread_with_the_context_of_the_caller():
    seen: ContextVar[str] = ContextVar("seen")
    seen.set("mine")

    @tool
    def where() -> tuple[str, str]:
        """Tell."""
        return threading.current_thread().name, seen.get()

    thread, value = await where.execute()
    assert thread != threading.current_thread().name
    assert value == "mine"


async def test_plain_functions_run_side_by_side_and_their_errors_come_back():
    barrier = threading.Barrier(8, timeout=10)

    @tool
    def meet(fail: bool) -> str:
        """Wait for the others."""
        barrier.wait()
        if fail:
            raise StopIteration("stopped")
        return "met"

    results = await asyncio.gather(*(meet.execute(fail=index == 0) for index in range(8)), return_exceptions=True)
    assert results[1:] == ["met"] * 7
    assert isinstance(results[0], RuntimeError)


async def test_a_cancelled_plain_function_leaves_the_pool_usable():
    release = threading.Event()

    @tool
    def hang() -> str:
        """Hang."""
        release.wait(10)
        return "late"

    task = asyncio.create_task(hang.execute())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await hang.execute() == "late"


async def test_arguments_arrive_as_the_hints_say():
    got: dict[str, Any] = {}

    @tool
    async def draw(
        colour: Colour,
        point: Point,
        options: Options,
        items: list[Item],
        path: Path,
        unique: set[int],
        by_name: dict[str, Colour],
        either: Union[int, Point],  # noqa: UP007
        fallback: Optional[Colour] = None,  # noqa: UP045
    ) -> None:
        """Draw."""
        got.update(locals())

    sent = {
        "colour": "RED",
        "point": {"x": "1"},
        "options": {"deep": "true"},
        "items": [{"itemName": "a", "colour": "blue"}],
        "path": "a/b",
        "unique": [1, 1, 2],
        "by_name": {"k": "blue"},
        "either": {"x": 3},
        "fallback": None,
    }
    await draw.execute(**compile_schema(draw.parameters)(sent))
    assert got["colour"] is Colour.RED
    assert got["point"] == Point(1)
    assert got["options"] == {"deep": True}
    assert got["items"] == [Item("a", Colour.BLUE)]
    assert got["path"] == Path("a/b")
    assert got["unique"] == {1, 2}
    assert got["by_name"] == {"k": Colour.BLUE}
    assert got["either"] == Point(3)
    assert got["fallback"] is None
    assert draw.parameters["properties"]["options"]["required"] == ["deep"]


def test_unions_keep_null_only_where_it_means_something():
    def function(a: int | None, b: int | None = None, c: str | int = "x", d: int | None = 3) -> None: ...

    properties = schema_of(function)
    assert properties["a"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert properties["b"] == {"type": "integer"}
    assert properties["c"]["anyOf"] == [{"type": "string"}, {"type": "integer"}]
    assert properties["d"]["anyOf"][1] == {"type": "null"}


def test_a_function_with_keywords_takes_any_argument():
    @tool
    async def anything(first: str, **rest: Any) -> str:
        """Anything."""
        return first

    assert compile_schema(anything.parameters)({"first": "a", "more": 1}) == {"first": "a", "more": 1}


def test_a_local_class_is_found_although_hints_are_texts():
    class Local(enum.Enum):
        A = 1

    @tool
    async def use(it: Local) -> None: ...

    assert use.parameters["properties"]["it"] == {"type": "integer", "enum": [1]}


def _no_hint(a): ...
def _bytes(a: bytes) -> None: ...
def _unknown_name(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def _int_keys(a: dict[int, str]) -> None: ...
def _positional(a: int, /) -> None: ...
def _many(*a: int) -> None: ...
def _pair(a: tuple[int, str]) -> None: ...
def _custom(a: threading.Thread) -> None: ...


@dataclass
class Tree:
    children: list[Tree]


def _recursive(a: Tree) -> None: ...


@pytest.mark.parametrize(
    "function", [_no_hint, _bytes, _unknown_name, _int_keys, _positional, _many, _pair, _custom, _recursive]
)
def test_a_hint_that_cannot_be_used_is_refused_when_decorating(function):
    with pytest.raises(TypeError, match=rf"@tool {function.__name__}\(\): parameter 'a' "):
        tool(function)


def test_what_cannot_be_a_tool_is_refused_with_advice():
    with pytest.raises(TypeError, match="subclass of Tool"):

        class Thing:
            @tool
            def method(self, a: int) -> None: ...

    with pytest.raises(TypeError, match="generator"):

        @tool
        async def stream(a: int):
            yield a

    with pytest.raises(ValueError, match="name must be"):

        @tool(name="has space")
        def spaced() -> None: ...


def test_decorating_needs_no_third_party_module():
    import subprocess
    import sys

    code = (
        "import sys; from everloop.tools.base import tool, Tool\n"
        "@tool\nasync def f(a: int) -> str:\n  'Doc.'\n  return 'x'\n"
        "print([m for m in ('msgspec', 'aiohttp', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- schemas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "sent", "taken"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, 5.0, 5),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": "number"}, "1e3", 1000),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, 1, True),
        ({"type": "string"}, 5, "5"),
        ({"type": "string"}, True, "true"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, (1, 2), [1, 2]),
        ({"type": "array", "items": {"type": "string"}}, "one", ["one"]),
        ({"type": "array", "items": {"type": "integer"}}, "7", [7]),
        ({"type": "array", "items": {"type": "object"}}, {"a": 1}, [{"a": 1}]),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]}, "5", 5),
        ({"oneOf": [{"type": "object"}, {"type": "array"}]}, "[]", []),
        ({"enum": ["add", "remove"]}, "Add ", "add"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "x"}, "X", "x"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "5", 5),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "5", 5),
        ({"properties": {"a": {"type": "string"}}}, {"a": None}, {}),
        ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": None}, {"a": None}),
        ({"properties": {"a": {"type": "string", "default": "x"}}}, {}, {}),
        ({"additionalProperties": {"type": "integer"}}, {"a": "1"}, {"a": 1}),
    ],
)
def test_what_models_get_slightly_wrong_is_repaired(schema, sent, taken):
    before = repr(sent)
    result = validate(schema, sent)
    assert same(result, taken)
    assert type(result) is type(taken)
    assert repr(sent) == before


@pytest.mark.parametrize(
    ("schema", "sent", "problem"),
    [
        ({"type": "integer"}, "five", 'must be an integer, got "five"'),
        ({"type": "integer"}, 5.5, "must be an integer, got 5.5"),
        ({"type": "integer"}, True, "must be an integer, got true"),
        ({"type": "integer"}, "1_000", "must be an integer"),
        ({"type": "number"}, float("nan"), "must be a number"),
        ({"type": "number"}, "1e999", "must be a number"),
        ({"type": "boolean"}, "maybe", "must be true or false"),
        ({"type": "string"}, None, "must be a string, got null"),
        ({"type": "string"}, {"a": 1}, "must be a string, got an object"),
        ({"type": "object"}, '{"a": ', "not valid JSON"),
        ({"type": "array"}, "[1,", "not valid JSON"),
        ({"enum": ["a", "A"]}, " a", 'must be one of "a", "A"'),
        ({"minimum": 3}, 2, "must be at least 3, got 2"),
        ({"exclusiveMaximum": 3}, 3, "must be less than 3"),
        ({"minLength": 2}, "a", "length of at least 2"),
        ({"maxItems": 1}, [1, 2], "items of at most 1"),
        ({"pattern": "^[a-z]+$"}, "A1", r"must match ^[a-z]+$"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", 'must be an integer, got "x"'),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "x", "fits none of the allowed forms"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "5", "must be an integer"),
        (False, 1, "is not allowed"),
        (
            {"properties": {"path": {}}, "additionalProperties": False},
            {"pth": 1},
            'unknown argument "pth" (did you mean "path"?)',
        ),
        ({"additionalProperties": False}, {"a": 1}, 'unknown argument "a" (there are none)'),
        ({"required": ["path"]}, {}, "path: is required, but missing"),
    ],
)
def test_what_cannot_be_repaired_is_explained(schema, sent, problem):
    with pytest.raises(InvalidArguments) as caught:
        validate(schema, sent)
    assert problem in str(caught.value)


def test_all_problems_come_at_once_each_with_its_path():
    schema = {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"properties": {"count": {"type": "integer"}}, "required": ["count"]}},
            "name": {"type": "string"},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    sent = {"items": [{"count": 1}, {}, {"count": "many"}], "nmae": "x"}
    with pytest.raises(InvalidArguments) as caught:
        validate(schema, sent)
    assert caught.value.problems == [
        "items[1].count: is required, but missing",
        'items[2].count: must be an integer, got "many"',
        'unknown argument "nmae" (did you mean "name"?)',
        "name: is required, but missing",
    ]


def test_a_message_stays_short_however_much_is_wrong():
    with pytest.raises(InvalidArguments) as caught:
        validate({"items": {"type": "integer"}}, ["x" * 1000] * 1000)
    assert len(caught.value.problems) == 1000
    assert len(str(caught.value)) < 5000


def test_a_schema_that_refers_to_itself_is_followed_as_deep_as_the_value_goes():
    schema: dict[str, Any] = {
        "$defs": {"node": {"properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    }
    assert validate(schema, {"n": "1", "next": {"n": "2"}}) == {"n": 1, "next": {"n": 2}}
    with pytest.raises(InvalidArguments, match=r"next\.next\.n: must be an integer"):
        validate(schema, {"next": {"next": {"n": "x"}}})


def test_depth_and_work_are_bounded():
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    endless: dict[str, Any] = {"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}]}}}
    endless["$ref"] = "#/$defs/t"
    tree: dict[str, Any] = {"items": {"$ref": "#"}}
    twins = {"$defs": {"t": {"anyOf": [{"items": {"$ref": "#/$defs/t"}, "type": "array"}] * 4}}, "$ref": "#/$defs/t"}
    thirty: Any = "x"
    for _ in range(30):
        thirty = [thirty]
    for schema, value in ((tree, deep), (endless, 1), (twins, thirty)):
        with pytest.raises(InvalidArguments, match="too deeply"):
            validate(schema, value)
    knot: dict[str, Any] = {"type": "object"}
    knot["properties"] = {"a": knot, "b": knot}
    assert validate(knot, {"a": {"b": {}}}) == {"a": {"b": {}}}
    nest: dict[str, Any] = {}
    for _ in range(5000):
        nest = {"items": nest}
    assert validate(nest, [[1]]) == [[1]]


def test_an_ambiguous_value_is_asked_back():
    with pytest.raises(InvalidArguments, match='is ambiguous, could be "1" or true'):
        validate({"anyOf": [{"type": "string", "enum": ["1"]}, {"type": "boolean"}]}, 1)
    assert validate({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "5") == 5


def test_a_closed_schema_takes_only_what_it_names():
    open_schema: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    assert compile_schema(open_schema)({"b": 1}) == {"b": 1}
    with pytest.raises(InvalidArguments):
        compile_schema(open_schema, closed=True)({"b": 1})
    assert compile_schema({**open_schema, "additionalProperties": True}, closed=True)({"b": 1}) == {"b": 1}


def test_huge_numbers_break_nothing():
    with pytest.raises(InvalidArguments):
        validate({"type": "string"}, 10**5000)
    with pytest.raises(InvalidArguments):
        validate({"type": "integer"}, "9" * 5000)
    with pytest.raises(InvalidArguments):
        validate({"enum": [1]}, 10**5000)
    assert validate({"type": "integer"}, 10**5000) == 10**5000


# --- for all schemas and values ------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars | st.sampled_from(["5", "true", "null", "[1]", '{"a": 1}', "{", "1e5", " 7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc") | st.text(max_size=3), inner),
    max_leaves=8,
)
types = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", "nonsense"])


def schemas_over(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": types | st.lists(types, max_size=3),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abc"), max_size=2),
            "additionalProperties": st.booleans() | inner,
            "items": inner,
            "enum": st.lists(values, max_size=3),
            "const": values,
            "anyOf": st.lists(inner, max_size=3),
            "oneOf": st.lists(inner, max_size=3),
            "allOf": st.lists(inner, max_size=2),
            "minimum": st.integers(-5, 5) | values,
            "maximum": st.integers(-5, 5) | values,
            "minLength": st.integers(0, 3) | values,
            "pattern": st.sampled_from(["^a", "[", "\\p{L}", "."]) | values,
            "$ref": st.sampled_from(
                ["#", "#/properties/a", "#/items", "#/nowhere", "https://example.com", "#/anyOf/0"]
            ),
        },
    )


schemas = st.recursive(st.booleans() | values | schemas_over(st.booleans()), schemas_over, max_leaves=5)


@settings(max_examples=300, deadline=None)
@given(schemas, values)
def test_whatever_the_schema_and_the_value_only_our_own_error_is_raised(schema, value):
    try:
        check = compile_schema(schema)
        first = check(value)
    except InvalidArguments:
        return
    assert same_or_nan(check(first), first), "what was repaired once needs no second repair"


def same_or_nan(left: Any, right: Any) -> bool:
    return json.dumps(left) == json.dumps(right) or same(left, right)


def fitting(depth: int = 2) -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
    """Schemas, each with a value that fits it as it is."""
    leaves = [
        st.tuples(st.just({"type": "string"}), st.text() | st.sampled_from(["5", "true", "null", "[1]", "{}"])),
        st.tuples(st.just({"type": "integer"}), st.integers()),
        st.tuples(st.just({"type": "number"}), st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
        st.tuples(st.just({"type": "boolean"}), st.booleans()),
        st.tuples(st.just({"type": "null"}), st.none()),
        st.tuples(st.just({"type": ["string", "integer"]}), st.text() | st.integers()),
        values.map(lambda value: ({"const": value}, value)),
        st.tuples(st.just({}), values),
    ]
    if not depth:
        return st.one_of(leaves)
    inner = fitting(depth - 1)
    return st.one_of(
        *leaves,
        inner.map(lambda pair: ({"type": "array", "items": pair[0]}, [pair[1], pair[1]])),
        inner.map(lambda pair: ({"type": "array"}, [pair[1]])),
        st.tuples(schemas, inner).map(lambda both: ({"anyOf": [both[1][0], both[0]]}, both[1][1])),
        st.tuples(inner, inner).map(
            lambda pairs: (
                {
                    "type": "object",
                    "properties": {"a": pairs[0][0], "b": pairs[1][0]},
                    "required": ["a"],
                    "additionalProperties": False,
                },
                {"a": pairs[0][1], "b": pairs[1][1]},
            )
        ),
    )


@settings(max_examples=300, deadline=None)
@given(fitting())
def test_a_value_that_fits_comes_back_unchanged(pair):
    schema, value = pair
    assert validate(schema, value) is value or same_or_nan(validate(schema, value), value)


def test_an_error_of_a_tool_is_an_ordinary_exception():
    assert issubclass(ToolError, Exception)
