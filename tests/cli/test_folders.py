"""Working in arbitrary folders: which instructions are followed, and which sessions are found."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from everloop import AgentLoop, MessageBus
from everloop.store import location
from everloop.testing import ScriptedProvider
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import GREETING, everloop, terminal

CANARY = "OBEY-THE-CLONED-FOLDER-7319"
STEERING = {
    "AGENTS.md": CANARY,
    "SOUL.md": CANARY,
    "HEARTBEAT.md": CANARY,
    "memory/MEMORY.md": CANARY,
    "skills/evil/SKILL.md": f"---\nname: evil\ndescription: {CANARY}\n---\n{CANARY}\n",
    "agents/evil.md": f"---\nname: evil\ndescription: {CANARY}\n---\n{CANARY}\n",
}
QUESTION = "Trust this folder? [y/N]"


@pytest.fixture
def cloned(tmp_path: Path) -> Path:
    """A folder from `git clone` with files that instruct an agent."""
    source = tmp_path / "source"
    for name, text in STEERING.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(source)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    subprocess.run(["git", "clone", "-q", str(source), str(tmp_path / "cloned")], check=True)
    return tmp_path / "cloned"


def sent(server: FakeOpenAI) -> str:
    return "".join(json.dumps(seen.body) for seen in server.requests)


# ------------------------------------------------------------------------------------------------ trust


@pytest.mark.parametrize("how", ["flag", "variable", "chat"])
async def test_nothing_of_a_cloned_folder_reaches_the_model_unasked(server, cloned, how):
    server.reply("hello")
    match how:
        case "flag":
            done = await everloop("run", "use $evil", "--workspace", str(cloned), server=server)
        case "variable":
            done = await everloop("run", "use $evil", server=server, EVERLOOP_WORKSPACE=str(cloned))
        case _:
            done = await everloop(str(cloned), server=server, stdin=b"use $evil\n")
    assert (done.status, done.out) == (0, "hello\n")
    assert "AGENTS.md, SOUL.md, HEARTBEAT.md, skills/evil, agents/evil.md, memory/MEMORY.md left out" in done.err
    assert "--trust" in done.err
    assert len(server.requests) == 1
    assert CANARY not in sent(server)


async def test_the_trust_flag_applies_to_one_run(server, cloned):
    for flags in (["--trust"], []):
        server.reply("hello")
        await everloop("run", "hi", "--workspace", str(cloned), *flags, server=server)
    first, second = (json.dumps(seen.body) for seen in server.requests)
    assert CANARY in first
    assert CANARY not in second


@pytest.mark.parametrize(("key", "followed"), [("y\r", True), ("\r", False), ("n\r", False), ("\x04", False)])
async def test_the_user_is_asked_before_the_prompt_and_the_answer_is_kept(server, cloned, key, followed):
    for asked in (True, False):
        server.reply("hello there")
        async with terminal(str(cloned), server=server) as screen:
            if asked:
                place = await screen.sees(QUESTION)
                assert "AGENTS.md" in screen.text[:place]
                assert "skills/evil" in screen.text[:place]
                assert GREETING not in screen.text[:place]
                screen.type(key)
            await screen.ready()
            assert (QUESTION in screen.text) is asked
            screen.type("hi\r")
            await screen.sees("hello there")
            screen.type("\x04")
            assert await screen.ends() == 0
    assert [CANARY in json.dumps(seen.body) for seen in server.requests] == [followed, followed]


async def test_a_trusted_folder_is_confirmed_again_when_it_gains_a_new_instruction_file(server, cloned):
    async with terminal(str(cloned), server=server) as screen:
        await screen.sees(QUESTION)
        screen.type("y\r")
        await screen.ready()
        screen.type("\x04")
        await screen.ends()
    (cloned / "AGENTS.md").write_text("Be kind.")  # a changed file is not a new one
    server.reply("hello")
    assert "left out" not in (await everloop("run", "hi", "--workspace", str(cloned), server=server)).err
    assert "Be kind." in sent(server)
    (cloned / "skills/other").mkdir()
    (cloned / "skills/other/SKILL.md").write_text("---\nname: other\ndescription: x\n---\nx\n")
    server.reply("hello")
    assert "skills/other" in (await everloop("run", "hi", "--workspace", str(cloned), server=server)).err
    async with terminal(str(cloned), server=server) as screen:
        await screen.sees(QUESTION)


async def test_a_folder_without_such_files_needs_no_confirmation(server, tmp_path):
    (tmp_path / "plain").mkdir()
    server.reply("hello")
    done = await everloop("run", "hi", "--workspace", str(tmp_path / "plain"), server=server)
    assert (done.status, done.out, done.err) == (0, "hello\n", "")


@pytest.mark.parametrize("place", ["default", "config"])
async def test_the_home_workspace_is_trusted(server, home, tmp_path, place):
    folder = home / "workspace" if place == "default" else tmp_path / "garden"
    folder.mkdir(parents=True)
    home.mkdir(exist_ok=True)
    (folder / "AGENTS.md").write_text(CANARY)
    if place == "config":
        (home / "config.toml").write_text(f'workspace = "{folder}"\n')
    server.reply("hello")
    assert (await everloop("run", "hi", server=server)).err == ""
    assert CANARY in sent(server)


async def test_files_created_by_init_are_trusted_and_existing_ones_are_not(server, cloned, tmp_path):
    for folder, said in ((tmp_path / "made", ""), (cloned, "left out")):
        assert (await everloop("init", str(folder))).status == 0
        server.reply("hello")
        assert said in (await everloop("run", "hi", "--workspace", str(folder), server=server)).err
    first, second = (json.dumps(seen.body) for seen in server.requests)
    assert "AGENTS.md" in first
    assert CANARY not in second


async def test_a_workspace_passed_to_the_python_api_is_trusted(cloned):
    provider = ScriptedProvider(["hello"])
    async with AgentLoop(MessageBus(), provider, cloned) as agent:
        await agent.process_direct("hi")
    assert CANARY in provider.requests[0].messages[0]["content"]


# ------------------------------------------------------------------------------------------------ folders and sessions


async def test_a_folder_can_be_named_without_a_flag(server, tmp_path):
    (tmp_path / "log").mkdir()
    server.reply("hello")
    done = await everloop(f"{tmp_path}/log", server=server, stdin=b"hi\n")
    assert (done.status, done.out) == (0, "hello\n")
    assert f"Workspace: {tmp_path}/log" in sent(server).replace("\\n", "\n")
    missing = await everloop(f"{tmp_path}/nowhere", server=server)
    assert (missing.status, missing.out) == (2, "")
    assert missing.err.startswith(f"everloop: {tmp_path}/nowhere is not a folder")


@pytest.mark.parametrize("command", [[], ["chat"], ["--session", "cli:work", "chat"]], ids=["none", "chat", "flags"])
async def test_a_chat_does_not_create_a_missing_folder(tmp_path, command):
    done = await everloop(*command, str(tmp_path / "gardne"), stdin=b"hi\n")
    assert (done.status, done.out) == (2, "")
    assert done.err.endswith("gardne is not a folder: name one that exists, or make it with `everloop init`\n")
    assert not (tmp_path / "gardne").exists()


async def test_the_chat_says_which_folder_it_works_in(server, tmp_path):
    (tmp_path / "garden").mkdir()
    for folder, said in (
        ("", "Working in ~/.everloop/workspace, your home"),
        (f"{tmp_path}/garden", f"Working in {tmp_path}/garden"),
    ):
        async with terminal(*filter(None, [folder]), server=server) as screen:
            await screen.ready()
            assert said in screen.text.replace("\r\n", "")


async def run_in(folder: Path, server: FakeOpenAI, text: str = "hi", session: str = "my:work") -> str:
    """Run one turn in a folder; return what standard error says about it."""
    server.reply("hello")
    done = await everloop("run", text, "--session", session, "--workspace", str(folder), server=server)
    assert done.status == 0
    return done.err


async def test_each_folder_keeps_its_own_sessions(server, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        await run_in(tmp_path / name, server, f"I am {name}")
    assert [seen.messages for seen in server.requests] == [2, 2]
    assert "my:work" in (await everloop("sessions", "--workspace", str(tmp_path / "two"))).out
    assert "my:work" not in (await everloop("sessions")).out


async def test_sessions_are_found_after_their_folder_has_moved(server, tmp_path):
    (tmp_path / "old").mkdir()
    await run_in(tmp_path / "old", server)
    (tmp_path / "old").rename(tmp_path / "new")
    assert "my:work" in (await everloop("sessions", "--workspace", str(tmp_path / "new"))).out
    assert await run_in(tmp_path / "new", server) == ""
    assert [seen.messages for seen in server.requests] == [2, 4]
    (tmp_path / "old").mkdir()  # another folder at the old path has its own sessions
    await run_in(tmp_path / "old", server)
    assert server.requests[-1].messages == 2


async def test_the_python_api_finds_the_sessions_of_a_moved_folder(tmp_path):
    (tmp_path / "old").mkdir()
    async with AgentLoop(MessageBus(), ScriptedProvider(["hello"]), tmp_path / "old") as agent:
        await agent.process_direct("hi")
    (tmp_path / "old").rename(tmp_path / "new")
    provider = ScriptedProvider(["hello again"])
    async with AgentLoop(MessageBus(), provider, tmp_path / "new") as agent:
        await agent.process_direct("hi")
    assert len(provider.requests[0].messages) == 4


async def test_a_copy_of_a_folder_starts_without_sessions(server, tmp_path):
    (tmp_path / "old").mkdir()
    await run_in(tmp_path / "old", server)
    subprocess.run(["cp", "-a", str(tmp_path / "old"), str(tmp_path / "copy")], check=True)
    await run_in(tmp_path / "copy", server)
    await run_in(tmp_path / "old", server)
    assert [seen.messages for seen in server.requests] == [2, 2, 4]


def removed_and_restored(tmp_path: Path, how: str) -> tuple[Path, Path]:
    """Return a folder for sessions, and the path where `recreate` restores it as a different folder on disk."""
    old = tmp_path / "here" / "garden"
    old.mkdir(parents=True)
    return old, old if how == "made anew" else tmp_path / "there" / "garden"


def recreate(old: Path, new: Path) -> None:
    """Recreate the folder, as a restored backup or a move to another file system does."""
    kept = old.with_name("kept")
    shutil.copytree(old, kept)
    shutil.rmtree(old)
    shutil.copytree(kept, new)


HOW = pytest.mark.parametrize("how", ["moved to another disk", "made anew"])


@HOW
async def test_a_folder_that_only_resembles_a_lost_one_adopts_nothing_without_asking(server, tmp_path, how):
    old, new = removed_and_restored(tmp_path, how)
    await run_in(old, server)
    recreate(old, new)
    listed = await everloop("sessions", "--workspace", str(new))
    assert "my:work" not in listed.out
    said = await run_in(new, server)
    command = f"everloop sessions --adopt {old} --workspace {new}"
    for line in (listed.err.splitlines()[0] + "\n", said):
        assert line.startswith(f"everloop: {new} starts without sessions; those of ")
        assert line.endswith(f"are kept: `{command}` continues them here\n")
    assert server.requests[-1].messages == 2
    assert await run_in(new, server) == ""  # it has its own sessions now
    assert server.requests[-1].messages == 4


@HOW
async def test_the_notice_says_how_to_adopt_the_sessions_and_how_to_undo_it(server, tmp_path, how):
    old, new = removed_and_restored(tmp_path, how)
    await run_in(old, server, "before", "my:before")
    recreate(old, new)
    await run_in(new, server, "since", "my:since")  # without a user to ask: in its own store
    for session, other in (("my:before", "my:since"), ("my:since", "my:before")):
        done = await everloop("sessions", "--adopt", str(old), "--workspace", str(new))
        assert (done.status, done.err) == (0, "")
        assert session in done.out
        assert other not in done.out
        assert await run_in(new, server, "again", session) == ""
    assert [seen.messages for seen in server.requests] == [2, 2, 4, 4]


@pytest.mark.parametrize("command", [["run", "hi"], ["cron", "add", "hi", "--every", "1h"], ["token", "add", "ada"]])
async def test_a_command_that_writes_before_a_chat_adopts_nothing_and_says_so(server, tmp_path, command):
    old, new = removed_and_restored(tmp_path, "made anew")
    await run_in(old, server)
    recreate(old, new)
    server.reply("hello")
    done = await everloop(*command, "--workspace", str(new), server=server)
    assert done.status == 0
    assert f"everloop sessions --adopt {old} --workspace {new}" in done.err
    assert "my:work" not in (await everloop("sessions", "--workspace", str(new))).out


async def test_sessions_of_an_existing_folder_are_not_adopted(server, tmp_path):
    (tmp_path / "old").mkdir()
    await run_in(tmp_path / "old", server)
    subprocess.run(["cp", "-a", str(tmp_path / "old"), str(tmp_path / "copy")], check=True)
    for folder, said in (("old", "is still there"), ("nowhere", "there are no sessions of")):
        done = await everloop("sessions", "--adopt", f"{tmp_path}/{folder}", "--workspace", f"{tmp_path}/copy")
        assert (done.status, done.out) == (2, "")
        assert said in done.err
        assert done.err.count("\n") == 1
    await run_in(tmp_path / "old", server)
    assert server.requests[-1].messages == 4


@HOW
@pytest.mark.parametrize(("key", "messages"), [("y\r", 4), ("\r", 2)])
async def test_the_user_is_asked_whether_a_folder_is_the_missing_one(server, tmp_path, how, key, messages):
    old, new = removed_and_restored(tmp_path, how)
    await run_in(old, server)
    recreate(old, new)
    async with terminal(str(new), "--session", "my:work", server=server) as screen:
        await screen.sees("do they continue here? [y/N]")
        assert f"{old} had s" in screen.text.replace("\r\n", "")
        screen.type(key)
        await screen.ready()
        screen.type("\x04")
        await screen.ends()
    assert await run_in(new, server) == ""
    assert server.requests[-1].messages == messages


async def test_a_different_folder_at_a_trusted_path_is_not_trusted(server, cloned):
    async with terminal(str(cloned), server=server) as screen:
        await screen.sees(QUESTION)
        screen.type("y\r")
        await screen.ready()
        screen.type("\x04")
        await screen.ends()
    moved = cloned.with_name("moved")
    cloned.rename(moved)
    server.reply("hello")
    assert (await everloop("run", "hi", "--workspace", str(moved), server=server)).err == ""
    assert CANARY in sent(server)  # it is the same folder
    shutil.copytree(moved, cloned)
    server.requests.clear()
    server.reply("hello")
    done = await everloop("run", "hi", "--workspace", str(cloned), server=server)
    assert "AGENTS.md, SOUL.md" in done.err
    assert CANARY not in sent(server)
    async with terminal(str(cloned), server=server) as screen:
        await screen.sees(QUESTION)


async def test_the_python_api_adopts_nothing_of_another_folder_at_the_same_path(tmp_path, caplog):
    folder = tmp_path / "w"
    for replies in ("first", "second"):
        folder.mkdir()
        provider = ScriptedProvider([replies])
        async with AgentLoop(MessageBus(), provider, folder) as agent:
            await agent.process_direct("hi")
        assert len(provider.requests[0].messages) == 2
        shutil.rmtree(folder)
    assert f"everloop sessions --adopt {folder} --workspace {folder}" in caplog.text


async def test_a_store_from_before_folder_records_existed_is_still_found(tmp_path):
    folder = tmp_path / "w"
    folder.mkdir()
    async with AgentLoop(MessageBus(), ScriptedProvider(["hello"]), folder) as agent:
        await agent.process_direct("hi")
        path = agent.store.path  # type: ignore[attr-defined]
    for record in path.parent.glob("*.json"):
        record.unlink()
    assert (await asyncio.to_thread(location.find_own, folder, location.home())).path == path


async def test_a_server_in_another_folder_still_requires_tokens(server, tmp_path):
    (tmp_path / "w").mkdir()
    assert (await everloop("token", "add", "ada")).status == 0
    done = await everloop("serve", "--port", "0", "--workspace", str(tmp_path / "w"), server=server)
    assert (done.status, done.out) == (2, "")
    assert "everloop token add NAME --workspace" in done.err
