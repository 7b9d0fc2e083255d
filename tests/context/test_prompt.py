"""The contents of a running agent's prompt: skills that are mentioned or read, the time, pictures."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, Config, MessageBus
from everloop.config import Rule
from everloop.context.skills import SHIPPED
from everloop.testing import ScriptedProvider, call

from ..runtime.chat import Gate
from ..support.drawing import PIXEL

UNSEEN = "a picture is here that this model cannot see"
TEA = "---\nname: tea\ndescription: How to make tea.\n---\nBoil water first."


def agent(tmp_path: Path, model: Any, restricted: bool = True, **settings: Any) -> AgentLoop:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    config = Config(home=tmp_path / "home", **settings)
    return AgentLoop(
        MessageBus(), model, work, config=config, store=tmp_path / "store.db", restrict_to_workspace=restricted
    )


def plant(tmp_path: Path, text: str = TEA, name: str = "tea") -> None:
    folder = tmp_path / "work" / "skills" / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(text)


async def test_a_skill_mentioned_in_a_message_is_loaded_with_it_and_does_not_change(tmp_path):
    plant(tmp_path)
    model = ScriptedProvider(["made", "again"])
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("make some $tea please, for $5")
        (tmp_path / "work/skills/tea/SKILL.md").write_text(TEA.replace("Boil water", "Buy leaves"))
        await loop.process_direct("and once more")
    first, second = (request.messages[1]["content"] for request in model.requests)
    assert first.startswith("make some $tea please, for $5\n\n")
    assert "Boil water first." in first
    assert second == first


async def test_a_dollar_sign_without_a_skill_name_changes_nothing(tmp_path):
    model = ScriptedProvider(["ok"] * 3)
    texts = ["echo $path and $5", "cost: $nothing", "look at `$tea`"]
    plant(tmp_path)
    async with agent(tmp_path, model) as loop:
        for text in texts:
            await loop.process_direct(text)
    assert [message["content"] for message in model.requests[-1].messages if message["role"] == "user"] == texts


async def test_internal_messages_load_no_skill(tmp_path):
    plant(tmp_path)
    model = ScriptedProvider(["ok"])
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("use $tea", "cli:direct", "system", "cli:direct")
    assert model.requests[0].messages[1]["content"] == "use $tea"


async def test_a_restricted_agent_reads_a_shipped_skill_and_cannot_change_it(tmp_path):
    path = str(SHIPPED / "git" / "SKILL.md")
    before = Path(path).read_text()
    steps: list[Any] = [call("read_file", path=path), call("write_file", path=path, content="evil"), "done"]
    model = ScriptedProvider(steps)
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("what does it say?")
        outside = call("read_file", path=str(SHIPPED.parent / "engine.py"))
        model.steps += [outside, "no"]
        await loop.process_direct("and this?")
    results = [message["content"] for message in model.requests[-1].messages if message["role"] == "tool"]
    assert "name: git" in results[0]
    assert "evil" not in results[0]
    assert Path(path).read_text() == before
    assert "class Turn" not in results[2]


async def test_the_paths_in_the_list_of_skills_can_be_read(tmp_path):
    model = ScriptedProvider(["ok"])
    plant(tmp_path)
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("hi")
    system = model.requests[0].messages[0]["content"]
    assert f"({SHIPPED}/git/SKILL.md)" in system
    assert "(skills/tea/SKILL.md)" in system


async def test_a_broken_skill_is_logged_once(tmp_path, caplog):
    plant(tmp_path, "---\nname: coffee\ndescription: x\n---\ntext")
    model = ScriptedProvider(["ok"] * 2)
    with caplog.at_level(logging.WARNING):
        async with agent(tmp_path, model) as loop:
            await loop.process_direct("hi")
            await loop.process_direct("again")
    told = [record.getMessage() for record in caplog.records if "skills/tea/SKILL.md:2" in record.getMessage()]
    assert len(told) == 1
    assert "skills/tea/SKILL.md:2" in model.requests[0].messages[0]["content"]


@pytest.mark.parametrize(("vision", "seen"), [("auto", True), ("yes", True), ("no", False)])
async def test_a_model_without_vision_gets_notes_and_one_with_vision_gets_pictures(tmp_path, vision, seen):
    picture = tmp_path / "dot.png"
    picture.write_bytes(PIXEL)
    model = ScriptedProvider(["ok", "ok"])
    async with agent(tmp_path, model, vision=vision) as loop:
        await loop.process_direct("look", media=[str(picture)])
        await loop.process_direct("and?")
    for request in model.requests:
        content = request.messages[1]["content"]
        if seen:
            assert [part["type"] for part in content] == ["image_url", "text"]
        else:
            assert UNSEEN in content
            assert content.endswith("look")


async def test_a_model_known_to_lack_vision_gets_no_pictures(tmp_path):
    picture = tmp_path / "dot.png"
    picture.write_bytes(PIXEL)
    model = ScriptedProvider(["ok"], model="qwen3-coder:30b")
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("look", media=[str(picture)])
    assert UNSEEN in str(model.requests[0].messages)


async def test_the_model_gets_the_time_at_the_beginning_and_after_a_pause(tmp_path):
    model = ScriptedProvider(["ok"] * 3)
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("one")
        await loop.process_direct("two")
    with sqlite3.connect(tmp_path / "store.db") as store:
        store.execute("UPDATE session SET updated_at = updated_at - 3600")
    store.close()
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("three")
    system, *rest = model.requests[-1].messages
    assert "This conversation began on " in system["content"].rsplit("---", 1)[1]
    said = [message["content"] for message in rest if message["role"] == "user"]
    assert said[:2] == ["one", "two"]
    assert said[2].startswith("three\n\n[It is now ")


async def test_a_compacted_and_interrupted_turn_resumes_with_the_same_bytes(tmp_path):
    gate = Gate("never")
    long = "line of a long report\n" * 600
    script: list[Any] = [call("read_file", path="long.txt"), call("read_file", path="long.txt"), gate]
    model = ScriptedProvider(script)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "long.txt").write_text(long)
    loop = agent(tmp_path, model, window=13_000)
    turn = asyncio.create_task(loop.process_direct("read it twice"))
    await gate.reached.wait()
    await loop.close()
    with pytest.raises(Exception, match="stopped"):
        await turn
    again = ScriptedProvider(["done"])
    async with agent(tmp_path, again, window=13_000) as loop:
        await loop.resume()
    before, after = model.requests[-1].messages, again.requests[-1].messages
    assert "put aside to save room" in str(before)  # the first report
    assert before == after


async def test_remembering_works_once_the_user_approves_where_a_rule_asks(tmp_path):
    model = ScriptedProvider([call("remember", text="likes tea"), "kept"])
    rules = (Rule(do="ask", path="memory/**"),)
    async with agent(tmp_path, model, policy=rules) as loop:
        assert "May I" in await loop.process_direct("remember it", attended=True)
        assert await loop.process_direct("/approve", attended=True) == "kept"
    assert "likes tea" in (tmp_path / "work/memory/MEMORY.md").read_text()


async def test_status_shows_how_full_the_window_is(tmp_path):
    model = ScriptedProvider(["ok"])
    async with agent(tmp_path, model, window=20_000) as loop:
        assert "context: the model takes 20,000 tokens" in await loop.process_direct("/status")
        await loop.process_direct("hi")
        assert " of 20,000 tokens" in await loop.process_direct("/status")


def test_nothing_heavy_is_loaded_for_a_prompt_with_shipped_skills_only():
    code = (
        "import sys, tempfile; from everloop import ContextBuilder;"
        "ContextBuilder(tempfile.mkdtemp()).build_system_prompt();"
        "sys.exit('yaml' in sys.modules or 'PIL' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
