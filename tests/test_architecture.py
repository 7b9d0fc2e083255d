"""The shape of the code: rooms import only from rooms above them, and constructors get what an object needs."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import everloop
from everloop import AgentDefinition, AgentExecutor, AgentLoop, Config, MessageBus
from everloop.cli.common import make_agent
from everloop.runtime.agent import agent_of
from everloop.runtime.owners import Owners
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider

SOURCE = Path(everloop.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "architecture.md"
MODULES = {path.relative_to(SOURCE).with_suffix("").as_posix(): path for path in SOURCE.rglob("*.py")}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(module)))


# ---------------------------------------------------------------------------------------------- rooms


def read_rooms() -> dict[str, int]:
    """Return the modules and packages in the table of rooms, each with its row: rows further up come first."""
    table = PAGE.read_text().split("| module |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in table]
    return {name.rstrip("/"): number for number, names in enumerate(rows) for name in names}


ROOMS = read_rooms()


def row_of(module: str) -> int | None:
    """Return the row that names the module, or the nearest package around it; None for a module in no room."""
    parts = module.removesuffix("/__init__").split("/")
    return next((ROOMS[name] for end in range(len(parts), 0, -1) if (name := "/".join(parts[:end])) in ROOMS), None)


def imports(module: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports when it is loaded or runs, also inside functions."""
    hidden = {
        node
        for block in tree_of(module).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in nodes_of(module):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (
                "/".join(alias.name.split(".")[1:]) for alias in node.names if alias.name.startswith("everloop.")
            )
        elif isinstance(node, ast.ImportFrom):
            named = node.module.split(".") if node.module else []
            if not node.level and named[0] != "everloop":
                continue
            base = module.split("/")[: -node.level] + named if node.level else named[1:]
            for alias in node.names:
                whole = "/".join([*base, alias.name])
                yield whole if whole in MODULES else "/".join(base)


def test_a_room_imports_only_from_itself_and_rooms_above_it():
    wrong = [
        f"{module} -> {target}"
        for module in MODULES
        if (own := row_of(module)) is not None
        for target in imports(module)
        if (other := row_of(target)) is not None and other > own
    ]
    assert sorted(set(wrong)) == []


def test_every_module_is_in_a_room():
    outside = ("__init__", "__main__", "testing/")  # the package itself, and helpers for users' tests
    assert sorted(name for name in MODULES if row_of(name) is None and not name.startswith(outside)) == []


# ---------------------------------------------------------------------------------------------- objects


def found(kind: type[ast.AST], *folders: str) -> Iterator[tuple[str, ast.AST]]:
    for module in MODULES:
        if module.startswith(folders):
            for node in nodes_of(module):
                if isinstance(node, kind):
                    yield f"{module}:{getattr(node, 'lineno', 0)}", node


@functools.cache
def callables(module: str) -> set[str]:
    """Return the names of a module's functions and methods, but not of its properties."""
    return {
        node.name
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(one) for one in node.decorator_list)
    }


METHODS_OF_ASYNCIO = {"cancel", "set", "clear", "set_result", "set_exception", "put_nowait"}


def test_no_callback_is_assigned_to_another_object():
    """An object gets what it calls in its constructor, or by a method that says so."""
    wrong = []
    for place, node in found(ast.Assign, ""):
        assert isinstance(node, ast.Assign)
        names = callables(place.split(":")[0]) | METHODS_OF_ASYNCIO
        value = node.value
        name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
        for target in node.targets:
            if not isinstance(target, ast.Attribute) or ast.unparse(target.value) in ("self", "cls"):
                continue
            is_none = isinstance(value, ast.Constant) and value.value is None
            if isinstance(value, ast.Lambda) or name in names or (target.attr.startswith("on_") and not is_none):
                wrong.append(f"{place.split(':')[0]} {ast.unparse(node)}")
    assert wrong == []


def test_no_attribute_waits_for_a_callback():
    """No public attribute is None until a callback is assigned to it."""
    wrong = []
    for place, node in found(ast.AnnAssign, ""):
        assert isinstance(node, ast.AnnAssign)
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        if (
            re.match(r"self\.[a-z]", ast.unparse(node.target))
            and "Callable" in ast.unparse(node.annotation)
            and is_none
        ):
            wrong.append(f"{place.split(':')[0]} {ast.unparse(node.target)}")
    assert wrong == []


def test_no_object_is_made_with_a_lambda_over_a_later_object():
    """Neither in a constructor nor anywhere else; a function that only looks up `self` later hides what is needed."""
    wrong = []
    for place, node in found(ast.FunctionDef, ""):
        assert isinstance(node, ast.FunctionDef)
        if node.name == "__init__":
            lambdas = [one for one in ast.walk(node) if isinstance(one, ast.Lambda)]
            wrong += [place for one in lambdas if re.search(r"\bself\._?\w+\.", ast.unparse(one))]
    for place, node in found(ast.Call, ""):
        assert isinstance(node, ast.Call)
        if re.search(r"(^|\.)_?[A-Z]\w*$", ast.unparse(node.func)):  # a class
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            lambdas = [one for one in given if isinstance(one, ast.Lambda) and not one.args.args]
            wrong += [place for one in lambdas if re.search(r"\bself\b", ast.unparse(one))]
    assert wrong == []


def test_no_code_checks_the_kind_of_store():
    wrong = []
    for place, node in found(ast.Call, ""):
        assert isinstance(node, ast.Call)
        names = ("str | Path | DSN", "Path", "DSN", "str")  # a store's name, not a store
        is_asked = ast.unparse(node.func) == "isinstance" and re.search(r"\bstore$", ast.unparse(node.args[0]))
        if is_asked and ast.unparse(node.args[1]) not in names:
            wrong.append(f"{place} {ast.unparse(node)}")
    assert wrong == []


def test_no_mode_is_decided_by_whether_a_field_is_set():
    """An agent that runs alone and one that shares its process are types, not a field that may be None."""
    names = r"(house|process|owners)"
    wrong = []
    for place, node in found(ast.Compare, "runtime/"):
        assert isinstance(node, ast.Compare)
        if re.fullmatch(rf"(self\.)?_?{names} is (not )?None", ast.unparse(node)):
            wrong.append(f"{place} {ast.unparse(node)}")
    assert wrong == []


def test_only_owners_subscribe_agents_to_other_workers():
    """There is one way to live in a process; a bus that sends for channels has a subscription of its own."""
    places = {
        place.split(":")[0] for place, node in found(ast.Attribute, "runtime/") if getattr(node, "attr", "") == "peer"
    }
    assert places == {"runtime/owners", "runtime/durable_bus"}


def test_only_one_place_checks_the_kind_of_bus():
    asked = []
    for place, node in found(ast.Call, ""):
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked += [place.split(":")[0]] if ast.unparse(node.args[1]) == "DurableBus" else []
    assert asked == ["runtime/outbox"]


async def test_every_agent_is_created_by_its_owners_object(tmp_path):
    config = Config(home=tmp_path / "home", workspace=tmp_path, base_url="http://127.0.0.1:9/v1", model="scripted")
    provider = ScriptedProvider([])
    executor = await AgentExecutor.create(AgentDefinition("counter", "Counts.", "You count."), provider, tmp_path)
    shared = Owners(config, SQLiteStore(tmp_path / "store.db"), provider, agent_of)
    agents = [
        AgentLoop(MessageBus(), provider, tmp_path),
        AgentLoop.from_config(config=config),
        make_agent(config),
        executor._make_loop(),
        await shared.agent("me"),
        await shared.agent("ada"),
    ]
    for agent in agents:
        assert type(agent._owners) is Owners
        assert await agent._owners.agent(agent.owner or "me") is agent
    assert [agent._owners is shared for agent in agents] == [False] * 4 + [True] * 2
    for agent in agents[:-1]:
        await agent.close()
