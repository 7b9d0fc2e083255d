"""The registry: definitions for the model, and calls that never crash."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everloop.log import Call
from everloop.tools.base import Tool, ToolError, tool
from everloop.tools.context import CallContext, current, current_call
from everloop.tools.registry import ToolRegistry, ToolResult


class Upper(Tool):
    name = "upper"
    description = "Makes text upper case."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text"],
    }

    async def execute(self, text: str, times: int = 1) -> str:
        return text.upper() * times


class Described(Tool):
    """A tool that computes its description."""

    @property
    def name(self) -> str:
        return "described"

    @property
    def description(self) -> str:
        return "By properties."

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def execute(self, **kwargs: Any) -> str:
        return json.dumps(kwargs)


@tool(replay="safe")
async def whoami() -> str:
    """Tell the session of the call."""
    await asyncio.sleep(0)
    return current_call().session


@tool(parallel=False)
async def alone() -> str:
    """Run alone."""
    return "done"


@tool(timeout=0.05)
async def slow() -> str:
    """Take too long."""
    await asyncio.sleep(30)
    return "never"


@tool
async def broken(kind: str) -> str:
    """Fail in many ways."""
    if kind == "tool":
        raise ToolError("The moon is not full: wait.")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "timeout":
        raise TimeoutError("the far end")
    if kind == "cancel":
        raise asyncio.CancelledError
    if kind == "unshowable":
        raise Unshowable
    raise ValueError("bad \ud800 " + "x" * 10_000)


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def context(session: str = "cli:direct") -> CallContext:
    return CallContext("me", session, "t1", "c1", "cli", "direct", Path(), False, "key", lambda text: None)


async def run(registry: ToolRegistry, name: str, error: str | None = None, **arguments: Any) -> ToolResult:
    return await registry.run(Call("c1", name, arguments, error), context())


def failure(result: ToolResult) -> str:
    assert result.status == "error"
    body = json.loads(result.content)
    assert body["status"] == "error"
    assert "other arguments or in another way" in body["advice"]
    assert "Traceback" not in body["message"]
    return body["message"]


# --- the list of tools ---------------------------------------------------------------------------------------------


def test_definitions_have_the_shape_of_model_apis_in_registration_order():
    registry = ToolRegistry([Upper(), Described()])
    assert registry.get_definitions() == [
        {
            "type": "function",
            "function": {"name": "upper", "description": Upper.description, "parameters": Upper.parameters},
        },
        {
            "type": "function",
            "function": {
                "name": "described",
                "description": "By properties.",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            },
        },
    ]
    assert registry.names == ["upper", "described"]


def test_definitions_are_the_same_object_until_something_changes():
    registry = ToolRegistry([Upper()])
    first = registry.get_definitions()
    registry.unregister("nothing")
    assert registry.get_definitions() is first
    registry.register(whoami)
    second = registry.get_definitions()
    assert second is not first
    registry.unregister("whoami")
    assert len(registry.get_definitions()) == 1
    assert len(second) == 2, "a returned list changed"


async def test_registering_a_taken_name_replaces_the_tool_in_place():
    registry = ToolRegistry([Upper(), whoami])

    @tool(name="upper")
    async def other(text: str) -> str:
        """Other."""
        return "other"

    registry.register(other)
    assert registry.names == ["upper", "whoami"]
    assert registry.get("upper") is other
    assert await registry.execute("upper", {"text": "a"}) == "other"


def test_tools_can_be_looked_up_by_name():
    registry = ToolRegistry([whoami])
    assert registry.get("whoami") is whoami
    assert registry.has("whoami")
    assert "whoami" in registry
    assert list(registry) == [whoami]
    registry.unregister("whoami")
    assert registry.get("whoami") is None
    assert not registry.has("whoami")
    assert len(registry) == 0


def test_a_tool_without_parameters_still_has_an_object_schema():
    class Bare(Tool):
        name = "bare"
        description = "Nothing."
        parameters: dict[str, Any] = {}  # noqa: RUF012

    function = ToolRegistry([Bare()]).get_definitions()[0]["function"]
    assert function["parameters"] == {"type": "object", "properties": {}}


def test_an_object_that_is_not_a_tool_is_refused_with_advice():
    registry = ToolRegistry()
    with pytest.raises(TypeError, match=r"make one, Upper\(\)"):
        registry.register(Upper)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="put @tool on it"):
        registry.register(context)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subclass"):
        registry.register("upper")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["", "has space", "x" * 65, "ümlaut", "line\n", None, 5])
def test_a_name_that_model_apis_refuse_is_refused(bad):
    class Named(Upper):
        name = bad

    with pytest.raises(ValueError, match="name must be"):
        ToolRegistry([Named()])


def test_invalid_parameters_and_timeouts_are_refused():
    class Listed(Upper):
        parameters = {"type": "array"}  # noqa: RUF012

    class Hasty(Upper):
        timeout = 0

    with pytest.raises(ValueError, match="upper: parameters must be"):
        ToolRegistry([Listed()])
    with pytest.raises(ValueError, match="upper: timeout must be"):
        ToolRegistry([Hasty()])


# --- running -------------------------------------------------------------------------------------------------------


async def test_arguments_are_repaired_before_the_tool_sees_them():
    result = await run(ToolRegistry([Upper()]), "upper", text="ab", times="2")
    assert result == ToolResult("ABAB", "ok")


async def test_invalid_arguments_are_explained_and_the_tool_does_not_run():
    message = failure(await run(ToolRegistry([Upper()]), "upper", txt="ab", times="many"))
    assert 'unknown argument "txt" (did you mean "text"?)' in message
    assert "times: must be an integer" in message
    assert "text: is required" in message


async def test_a_tool_with_keyword_arguments_accepts_additional_ones():
    result = await run(ToolRegistry([Described()]), "described", a="1", b=2)
    assert json.loads(result.content) == {"a": 1, "b": 2}


async def test_an_unknown_tool_is_named_with_the_closest_ones():
    registry = ToolRegistry([Upper(), whoami])
    assert failure(await run(registry, "uper")) == 'The tool "uper" does not exist; did you mean upper?'
    assert "there are: upper, whoami." in failure(await run(registry, "zzz"))
    assert "none" in failure(await run(ToolRegistry(), "zzz"))
    assert 'The tool \\"None\\" does not exist' in await registry.execute(None)  # type: ignore[arg-type]


async def test_unreadable_arguments_are_reported_and_the_tool_does_not_run():
    assert "cut off at 12" in failure(await run(ToolRegistry([Upper()]), "upper", error="cut off at 12", text="a"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("tool", "The moon is not full: wait."),
        ("exit", "broken failed: SystemExit: 3"),
        ("timeout", "broken failed: TimeoutError: the far end"),
        ("cancel", "broken was cancelled from within."),
        ("unshowable", "broken failed: Unshowable"),
    ],
)
async def test_every_failure_becomes_an_error_result(kind, said):
    assert failure(await run(ToolRegistry([broken]), "broken", kind=kind)) == said


async def test_a_long_or_unprintable_error_is_shortened_and_cleaned():
    message = failure(await run(ToolRegistry([broken]), "broken", kind="other"))
    assert message.startswith("broken failed: ValueError: bad ? xxx")
    assert len(message) <= 4000
    assert "characters left out" in message


async def test_a_tool_that_takes_too_long_times_out():
    began = time.monotonic()
    assert "timed out after 0.05 seconds" in failure(await run(ToolRegistry([slow]), "slow"))
    assert time.monotonic() - began < 20


async def test_the_registrys_timeout_applies_to_tools_without_one():
    release = threading.Event()

    @tool
    def hang() -> str:
        """Hang."""
        release.wait(30)
        return "late"

    @tool(timeout=float("inf"))
    async def patient() -> str:
        """Wait a little."""
        await asyncio.sleep(0.1)
        return "there"

    registry = ToolRegistry([hang, patient], timeout=0.05)
    assert "timed out after 0.05 seconds" in failure(await run(registry, "hang"))
    release.set()
    assert (await run(registry, "patient")).content == "there"


async def test_a_cancelled_turn_cancels_the_tool_and_is_not_turned_into_a_result():
    begun, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            stopped.set()
        return ""

    task = asyncio.create_task(run(ToolRegistry([wait]), "wait"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()


async def test_a_tool_that_is_not_async_does_not_block_the_loop():
    class Plain(Tool):
        name = "plain"
        description = "Plain."

        def execute(self) -> str:  # type: ignore[override]
            return threading.current_thread().name

    result = await run(ToolRegistry([Plain()]), "plain")
    assert result.status == "ok"
    assert result.content != threading.current_thread().name


@dataclass
class Answer:
    value: int


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("text", "text"),
        ("", ""),
        (None, "(no output)"),
        ({"a": [1, "é"]}, '{"a":[1,"é"]}'),
        ([1, 2], "[1,2]"),
        (5, "5"),
        (True, "true"),
        (b"raw", "raw"),
        (Answer(1), '{"value":1}'),
        ("\ud800", "?"),
        ({1: object}, str({1: object})),
    ],
)
async def test_every_result_becomes_text(given, text):
    @tool
    async def give() -> Any:
        """Give."""
        return given

    assert await run(ToolRegistry([give]), "give") == ToolResult(text, "ok")


@pytest.mark.parametrize(("length", "limit"), [(101, 100), (1_000_000, 1000), (1000, 10)])
async def test_a_long_result_is_shortened_in_the_middle_with_a_note(length, limit):
    @tool
    async def much() -> str:
        """Give much."""
        return "a" * (length // 2) + "z" * (length - length // 2)

    content = (await run(ToolRegistry([much], result_limit=limit), "much")).content
    assert "characters left out" in content
    kept = content.count("a" * 5) and content.count("z" * 5)
    assert len(content) <= max(limit, 60)
    if limit >= 100:
        assert kept
        missing = int(content.split("[… ")[1].split(" of ")[0])
        shown = content.split("\n")
        assert missing + len(shown[0]) + len(shown[2]) == length


async def test_each_call_sees_its_own_origin_even_in_parallel():
    registry = ToolRegistry([whoami])
    calls = [registry.run(Call("c", "whoami"), context(f"chat:{index}")) for index in range(20)]
    results = await asyncio.gather(*calls)
    assert [result.content for result in results] == [f"chat:{index}" for index in range(20)]
    result = await registry.run(Call("c", "whoami"), context("chat:here"))
    assert result.content == "chat:here"
    assert current.get(None) is None


async def test_arguments_that_are_not_an_object_are_reported():
    assert "must be an object, not list" in await ToolRegistry([Upper()]).execute("upper", [1])  # type: ignore[arg-type]


async def test_execute_returns_text_even_outside_a_turn():
    registry = ToolRegistry([Upper(), whoami, alone])
    assert await registry.execute("upper", {"text": "a"}) == "A"
    assert await registry.execute("upper", '{"text": "b"}') == "B"  # type: ignore[arg-type]
    assert await registry.execute("alone") == "done"
    assert await registry.execute("alone", None) == "done"
    assert await registry.execute("whoami", {}) == "cli:direct"
    assert json.loads(await registry.execute("nope", {}))["status"] == "error"
    assert json.loads(await registry.execute("upper", [1]))["status"] == "error"  # type: ignore[arg-type]


async def test_a_tool_that_runs_another_tool_passes_its_origin_on():
    registry = ToolRegistry([whoami])

    @tool
    async def ask() -> str:
        """Ask another tool."""
        return await registry.execute("whoami", {})

    registry.register(ask)
    result = await registry.run(Call("c", "ask"), context("chat:7"))
    assert result.content == "chat:7"


async def test_an_argument_may_have_any_name():
    registry = ToolRegistry([Described()])
    odd = {"call": 1, "kwargs": 2, "name": 3, "with space": 4}
    assert json.loads(await registry.execute("described", odd)) == odd
    assert "TypeError" in failure(await registry.run(Call("c", "described", {"self": 1}), context()))


# --- what may run when ---------------------------------------------------------------------------------------------


def calls(*names: str) -> list[Call]:
    return [Call(f"c{index}", name) for index, name in enumerate(names)]


@pytest.mark.parametrize(
    ("pending", "count"),
    [
        ((), 0),
        (("whoami",), 1),
        (("whoami", "upper", "unknown"), 3),
        (("whoami", "upper", "alone", "whoami"), 2),
        (("alone", "whoami"), 1),
        (("alone", "alone"), 1),
    ],
)
def test_parallel_calls_start_together_and_others_one_by_one(pending, count):
    registry = ToolRegistry([Upper(), whoami, alone])
    assert registry.batch(calls(*pending)) == calls(*pending)[:count]


def test_only_tools_declared_replay_safe_may_be_run_again():
    registry = ToolRegistry([Upper(), whoami])
    assert registry.replay_safe("whoami")
    assert not registry.replay_safe("upper")
    assert registry.replay_safe("unknown")


def test_adding_and_removing_tools_updates_whether_any_description_is_foreign():
    ours, theirs = tool(_plain), tool(_foreign)
    theirs.described_outside = True
    tools = ToolRegistry([ours])
    found = [tools.described_outside]
    tools.register(theirs)
    found.append(tools.described_outside)
    tools.unregister(theirs.name)
    found.append(tools.described_outside)
    assert found == [False, True, False]


async def _plain() -> str:
    """Do nothing."""
    return ""


async def _foreign() -> str:
    """Do nothing."""
    return ""
