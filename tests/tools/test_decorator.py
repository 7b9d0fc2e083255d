"""The `tool` decorator: how a function becomes a tool, and how it is run."""

from __future__ import annotations

import asyncio
import enum
import inspect
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

import msgspec
import pytest

from everloop.tools.base import Tool, ToolError, tool
from everloop.tools.schema import compile_schema


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


async def test_a_decorated_function_can_still_be_called_directly():
    assert await search("cats", count=2) == "cats:2"
    assert inspect.signature(search).parameters["query"].annotation == "str"

    @tool
    def double(number: int) -> int:
        """Double it."""
        return number * 2

    assert double(4) == 8
    assert await double.execute(number=4) == 8


def test_the_flags_have_safe_defaults_and_can_be_set():
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


async def test_a_plain_function_runs_in_a_thread_with_the_callers_context():
    seen: ContextVar[str] = ContextVar("seen")
    seen.set("mine")

    @tool
    def where() -> tuple[str, str]:
        """Tell."""
        return threading.current_thread().name, seen.get()

    thread, value = await where.execute()
    assert thread != threading.current_thread().name
    assert value == "mine"


async def test_plain_functions_run_in_parallel_and_their_errors_propagate():
    barrier = threading.Barrier(8, timeout=30)

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
        release.wait(30)
        return "late"

    task = asyncio.create_task(hang.execute())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await hang.execute() == "late"


async def test_arguments_arrive_with_the_hinted_types():
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


def test_a_function_with_keyword_arguments_accepts_any_argument():
    @tool
    async def anything(first: str, **rest: Any) -> str:
        """Anything."""
        return first

    assert compile_schema(anything.parameters)({"first": "a", "more": 1}) == {"first": "a", "more": 1}


def test_a_local_class_is_resolved_although_hints_are_strings():
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
def test_an_unusable_hint_is_refused_when_decorating(function):
    with pytest.raises(TypeError, match=rf"@tool {function.__name__}\(\): parameter 'a' "):
        tool(function)


def test_an_object_that_cannot_be_a_tool_is_refused_with_advice():
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


def test_an_error_of_a_tool_is_an_ordinary_exception():
    assert issubclass(ToolError, Exception)
