"""Access outside the workspace needs approval, and an approval covers exactly what the user saw."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus
from everloop.config import Config, Rule
from everloop.testing import ScriptedProvider, call

from .scene import Scene


def agent_of(scene: Scene, *steps: Any, **options: Any) -> tuple[AgentLoop, ScriptedProvider]:
    model = ScriptedProvider([*steps, "done"])
    options = {"restrict_to_workspace": True, "store": scene.root / "store.db", **options}
    return AgentLoop(MessageBus(), model, scene.workspace, **options), model


async def test_a_file_outside_is_read_only_after_approval(scene):
    path = str(scene.outside / "secret.txt")
    agent, model = agent_of(scene, call("read_file", path=path))
    async with agent:
        question = await agent.process_direct("read it", attended=True)
        assert path in question
        assert scene.secret not in question
        await agent.process_direct("/approve", attended=True)
    assert scene.secret in str(model.requests[-1].messages)


async def test_an_approval_for_one_file_does_not_cover_another(scene):
    (scene.outside / "other.txt").write_text("other")
    agent, model = agent_of(
        scene, call("read_file", path="../outside/other.txt"), call("read_file", path="../outside/secret.txt")
    )
    async with agent:
        await agent.process_direct("read it", attended=True)
        question = await agent.process_direct("/approve", attended=True)
        assert "secret.txt" in question
        await agent.process_direct("/deny", attended=True)
    assert scene.secret not in str(model.requests[-1].messages)


async def test_a_link_inserted_into_the_approved_path_leads_nowhere(scene):
    there = scene.outside / "there"
    there.mkdir()
    (there / "harmless.txt").write_text("harmless")
    agent, model = agent_of(scene, call("read_file", path=str(there / "harmless.txt")))
    async with agent:
        await agent.process_direct("read it", attended=True)
        (there / "harmless.txt").unlink()
        (there / "harmless.txt").symlink_to(scene.outside / "secret.txt")
        await agent.process_direct("/approve", attended=True)
    assert scene.secret not in str(model.requests[-1].messages)


async def test_a_link_inside_the_workspace_is_refused_and_not_asked_for(scene):
    (scene.workspace / "link").symlink_to(scene.outside)
    agent, model = agent_of(scene, call("read_file", path="link/secret.txt"))
    async with agent:
        assert await agent.process_direct("read it", attended=True) == "done"
    assert scene.secret not in str(model.requests[-1].messages)


async def test_without_a_user_it_is_refused(scene):
    attack = await scene.run(call("read_file", path=str(scene.outside / "secret.txt")))
    assert attack.answer == "done"
    assert scene.secret not in attack.seen


async def test_writing_outside_happens_only_after_approval(scene):
    agent, _ = agent_of(scene, call("write_file", path="../outside/new.txt", content="hello"))
    async with agent:
        question = await agent.process_direct("write it", attended=True)
        assert "hello" in question
        assert not (scene.outside / "new.txt").exists()
        await agent.process_direct("/approve", attended=True)
    assert (scene.outside / "new.txt").read_text() == "hello"


async def test_the_runtimes_own_files_stay_out_of_reach_even_if_approved(scene):
    home = scene.root / "home"
    home.mkdir()
    (home / "config.toml").write_text(scene.secret)
    config = Config(home=home)
    agent, model = agent_of(scene, call("read_file", path=str(home / "config.toml")), config=config)
    async with agent:
        await agent.process_direct("read it", attended=True)
        await agent.process_direct("/approve", attended=True)
    assert scene.secret not in str(model.requests[-1].messages)


async def test_a_path_rule_applies_to_files_and_links_to_them(scene):
    private = scene.workspace / "private"
    private.mkdir()
    (private / "key.txt").write_text(scene.secret)
    (scene.workspace / "innocent").symlink_to("private")
    (scene.workspace / "innocent.txt").symlink_to("private/key.txt")
    config = Config(policy=(Rule(do="deny", path="private/**"),))
    attack = await scene.run(
        call("read_file", path="private/key.txt"),
        call("read_file", path="innocent/key.txt"),
        call("read_file", path="innocent.txt"),
        call("grep", pattern="secret-"),
        call("grep", pattern="secret-", path="innocent"),
        call("edit_file", path="innocent.txt", old_text="secret", new_text="x"),
        config=config,
    )
    assert scene.secret not in attack.seen
    assert (private / "key.txt").read_text() == scene.secret


async def test_a_long_result_is_saved_for_its_own_session_only(scene):
    (scene.workspace / "long.txt").write_text("".join(f"{scene.secret} {n}\n" for n in range(5_000)))
    config = Config(home=scene.root / "home", result_limit=2_000)
    await scene.run(call("read_file", path="long.txt"), config=config)
    (saved,) = (scene.root / "home" / "outputs").rglob("*.txt")
    again = await scene.run(call("read_file", path=str(saved), limit=3), config=config, say="more")
    assert again.results[-1].count(scene.secret) == 3
    assert "untrusted data" in again.results[-1]  # its origin is unknown
    agent, model = agent_of(scene, call("read_file", path=str(saved), limit=3), config=config)
    async with agent:
        await agent.process_direct("read it", session_key="cli:other")
    assert scene.secret not in str(model.requests[-1].messages)


@pytest.mark.parametrize("mode", ["bubblewrap", "landlock"])
async def test_the_program_that_runs_the_agent_cannot_be_changed_from_a_workspace_around_it(scene, monkeypatch, mode):
    prefix = scene.workspace / ".venv"
    (prefix / "lib").mkdir(parents=True)
    (prefix / "lib" / "module.py").write_text("good")
    monkeypatch.setattr("sys.prefix", str(prefix))
    write = "echo evil > .venv/lib/module.py"
    await scene.run(
        call("write_file", path=".venv/lib/module.py", content="evil"),
        call("edit_file", path=".venv/lib/module.py", old_text="good", new_text="evil"),
        call("exec", command=f"{write}; touch .venv/lib/new.py; mv .venv other; mkdir -p .venv/lib; {write}"),
        exec_config={"mode": mode},
    )
    assert (prefix / "lib" / "module.py").read_text() == "good"
    assert [path.name for path in (prefix / "lib").iterdir()] == ["module.py"]


async def test_a_module_in_the_current_folder_is_not_loaded_in_place_of_a_real_one(tmp_path):
    for name in ("argparse", "asyncio", "tomllib", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    done = await asyncio.create_subprocess_exec(sys.executable, "-m", "everloop", "sessions", cwd=tmp_path,
                                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    await done.wait()
    assert not (tmp_path / "canary").exists()


async def test_a_command_without_a_sandbox_needs_approval_in_a_restricted_workspace(scene):
    read = call("exec", command=f"cat {scene.outside}/secret.txt")
    attack = await scene.run(read, exec_config={"mode": "off"})
    assert scene.secret not in attack.seen
    allowed = Config(policy=(Rule(do="allow", tool="exec"),))
    assert scene.secret in (await scene.run(read, exec_config={"mode": "off"}, config=allowed)).seen
