"""Instruction files: a command that replaces them exposes nothing, and a page plants nothing in them."""

from __future__ import annotations

import asyncio

import pytest

from everloop import AgentLoop, ContextBuilder, MessageBus
from everloop.config import Config
from everloop.testing import ScriptedProvider, call
from tests.support.commands import until

from .scene import canary, running, settings

# ------------------------------------------------------------------------------------------------ the prompt's files


@pytest.mark.parametrize("name", ["AGENTS.md", "memory/MEMORY.md", "memory"])
async def test_a_link_in_place_of_a_file_of_the_prompt_shows_nothing_from_outside(scene, name):
    (scene.outside / "MEMORY.md").write_text(scene.secret)
    target = scene.outside if name == "memory" else scene.outside / "secret.txt"
    made = await scene.run(call("exec", command=f"mkdir -p $(dirname {name}); ln -s {target} {name}; ls -l {name}"))
    assert str(target) in made.results[0]
    later = await scene.run(say="hello")
    assert scene.secret not in later.seen


async def test_the_runtimes_environment_is_not_read_into_the_prompt(scene, monkeypatch):
    (secret := scene.workspace / "AGENTS.md").symlink_to("/proc/self/environ")
    shown = (await scene.run(say="hello")).seen
    assert "PATH=" in secret.read_text()
    assert "PATH=" not in shown


async def test_the_runtimes_own_files_inside_the_workspace_are_not_read_into_the_prompt(scene):
    home = scene.workspace / ".everloop"
    home.mkdir()
    (home / "config.toml").write_text(key := canary("key"))
    made = await scene.run(call("exec", command="ln -s .everloop/config.toml SOUL.md"), config=Config(home=home))
    assert key not in made.seen
    assert (scene.workspace / "SOUL.md").read_text() == key
    assert key not in (await scene.run(say="hello", config=Config(home=home))).seen


@pytest.mark.parametrize("command", ["mkfifo AGENTS.md", "ln -s /dev/zero AGENTS.md", "truncate -s 3G AGENTS.md"])
async def test_an_endless_prompt_file_does_not_block(scene, command):
    await scene.run(call("exec", command=command))
    async with asyncio.timeout(30):
        assert (await scene.run(say="hello")).answer == "done"


async def test_a_link_between_files_of_the_workspace_still_steers(scene):
    (scene.workspace / "CLAUDE.md").write_text(rule := canary("rule"))
    (scene.workspace / "AGENTS.md").symlink_to("CLAUDE.md")
    assert rule in (await scene.run(say="hello")).seen


# ------------------------------------------------------------------------------------------------ planted instructions


@pytest.mark.parametrize(
    ("link", "path"),
    [("ln -s AGENTS.md notes.md", "notes.md"), ("mkdir skills; ln -s skills notes", "notes/x/SKILL.md")],
)
async def test_a_page_cannot_have_instructions_planted_through_a_link(scene, evil, address, link, path):
    (scene.workspace / "AGENTS.md").write_text("mine")
    await scene.run(
        call("exec", command=link),
        call("web_fetch", url=f"{address}/page"),
        call("write_file", path=path, content="evil"),
        call("edit_file", path=path, old_text="mine", new_text="evil"),
        say=f"{address}/page",
        config=settings(evil),
    )
    assert (scene.workspace / "AGENTS.md").read_text() == "mine"
    assert not list(scene.workspace.rglob("SKILL.md"))


async def test_a_page_plants_nothing_through_the_other_name_of_a_linked_workspace(scene, evil, address):
    real = scene.root / "real"
    scene.workspace.rename(real)
    scene.workspace.symlink_to(real)
    plant = call("write_file", path=str(real / "AGENTS.md"), content="evil")
    await scene.run(call("web_fetch", url=f"{address}/page"), plant, say=f"{address}/page", config=settings(evil))
    assert not (real / "AGENTS.md").exists()


async def test_a_page_plants_nothing_in_the_memory(scene, evil, address):
    plant = call("write_file", path="memory/MEMORY.md", content="evil")
    await scene.run(call("web_fetch", url=f"{address}/page"), plant, say=f"{address}/page", config=settings(evil))
    assert not list(scene.workspace.rglob("MEMORY.md"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "echo evil > AGENTS.md",
        "echo evil > x; ln -s x SOUL.md",
        "mkdir -p skills/a; echo evil > skills/a/SKILL.md",
        "rm TOOLS.md; echo evil > TOOLS.md",
        "echo evil > LINKED.md",
        "mkdir memory; echo evil > memory/MEMORY.md; exit 1",
    ],
)
async def test_a_page_plants_nothing_by_a_command_that_creates_the_file(scene, evil, address, command, background):
    (scene.workspace / "LINKED.md").write_text("mine")
    (scene.workspace / "TOOLS.md").symlink_to("LINKED.md")
    await scene.run(
        call("web_fetch", url=f"{address}/page"),
        call("exec", command=command, background=background),
        call("exec", command="sleep 0.3"),
        say=f"{address}/page",
        config=settings(evil),
    )
    assert not {"AGENTS.md", "SOUL.md", "skills", "memory"} & {path.name for path in scene.workspace.iterdir()}
    assert (scene.workspace / "LINKED.md").read_text() == "mine"
    assert "evil" not in await asyncio.to_thread(ContextBuilder(scene.workspace).build_system_prompt)


@pytest.mark.parametrize("late", [False, True])
async def test_a_page_plants_nothing_by_a_command_that_outlives_its_turn(scene, evil, address, late):
    """Its files would not be set aside before the next prompt is built."""
    wait = "while [ ! -e go ]; do sleep 0.02; done; " if late else ""
    plant = f"{wait}echo evil > AGENTS.md; touch done; sleep 60"
    model = ScriptedProvider(
        [
            call("web_fetch", url=f"{address}/page"),
            call("exec", command=plant, background=True, keep=True),
            "done",
            "done",
        ]
    )
    options = {"store": scene.root / "s.db", "config": settings(evil), "restrict_to_workspace": True}
    async with AgentLoop(MessageBus(), model, scene.workspace, **options) as agent:
        await agent.process_direct(f"{address}/page")
        (scene.workspace / "go").touch()
        if running(plant):
            await until((scene.workspace / "done").exists)
        assert not (scene.workspace / "AGENTS.md").exists()


async def test_a_page_plants_nothing_by_a_command_started_before_it_was_read(scene, evil, address):
    await scene.run(
        call("exec", command="bash", background=True),
        call("web_fetch", url=f"{address}/page"),
        call("process", action="write", id="p1", text="echo evil > AGENTS.md; echo made\n"),
        call("process", action="poll", id="p1", wait=20),
        say=f"{address}/page",
        config=settings(evil),
    )
    assert not (scene.workspace / "AGENTS.md").exists()
