"""`everloop init`: what it creates, and that it never touches existing files."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import stat
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from everloop import ContextBuilder
from everloop.channels.base import SHIPPED, make_channel
from everloop.cli import channel_setup
from everloop.cli.init import FILES, command
from everloop.config import ChannelConfig, Config
from everloop.context.skills import Skills
from everloop.errors import EverloopError
from everloop.sandbox.reach import Reach
from tests.support.commands import COMMAND, terminal, until


def init(folder: Path | str | None = None, **options: str) -> int:
    return command(Namespace(folder=None if folder is None else str(folder), **options))


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return every file with its inode, modification time and content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def test_a_workspace_is_created_with_files_that_a_prompt_can_use(tmp_path, capsys):
    place = tmp_path / "new" / "garden"
    assert init(place) == 0
    assert set(state(place)) == set(FILES)
    said = capsys.readouterr().out
    for name in FILES:
        assert re.search(rf"^  {re.escape(name)} ", said, re.M)
    assert f"everloop --workspace {place}" in said
    prompt = ContextBuilder(place).build_system_prompt()
    for name in ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md"):
        assert (place / name).read_text().strip() in prompt
        assert 3 <= len((place / name).read_text().splitlines()) <= 15
    assert len(prompt) < 6000
    assert "- [ ]" not in re.sub(r"<!--.*?-->", "", (place / "HEARTBEAT.md").read_text(), flags=re.S)


async def test_at_a_terminal_it_asks_for_a_chat_network_and_shows_no_secret():
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir()
    (home / "config.toml").write_text('[agent]\ntitles = "words"\n')
    async with terminal("init") as screen:
        await screen.shows("Which one (Enter for none):")
        screen.type("telegramm\r")
        await until(lambda: screen.text.count("Which one (Enter for none):") == 2)
        screen.type("telegram\r")
        await screen.shows("Token, from @BotFather:")
        screen.type("1:never shown\r")
        await until(lambda: screen.text.count("Token, from @BotFather:") == 2)
        screen.type("1:never-shown\r")
        await until(lambda: "gets a code" in screen.text)
        assert await screen.ends() == 0
        assert "never" not in screen.text
    config = await asyncio.to_thread(lambda: Config.load(home=home))
    assert [(one.name, one.options, one.pairing) for one in config.channels] == [
        ("telegram", {"token": "1:never-shown"}, True)
    ]
    assert config.titles == "words"
    assert stat.S_IMODE((home / "config.toml").stat().st_mode) == 0o600
    async with terminal("init") as screen:  # with a channel configured, it asks nothing
        assert await screen.ends() == 0


SAMPLES = {
    "server": "https://chat.example.org",
    "url": "https://hook.example.org",
    "address": "agent@example.org",
    "jid": "agent@example.org",
}


def test_what_is_asked_for_is_all_that_each_network_needs():
    assert set(channel_setup.NETWORKS) == set(SHIPPED) - {"push"}  # which is turned on in the browser
    for network, questions in channel_setup.NETWORKS.items():
        given = {one.key: SAMPLES.get(one.key, f"{one.key}-1") for one in questions}
        given |= {"secret": 32 * "s"} if network == "webhook" else {}  # which is made
        channel, options = make_channel(ChannelConfig(name=network, options=given))
        assert channel.name == network
        secrets = {key for key, value in given.items() if options.redacted(value) != value}
        assert secrets - {"secret"} == {one.key for one in questions if one.secret}, network


def test_the_example_of_the_skills_page_works_as_written(tmp_path):
    init(tmp_path / "ws")
    (example,) = re.findall(r"^```markdown\n(.*?)^```$", (tmp_path / "ws/skills/README.md").read_text(), re.M | re.S)
    file = tmp_path / "ws/skills/water-report/SKILL.md"
    file.parent.mkdir()
    file.write_text(example)
    skills = Skills(tmp_path / "ws")
    assert "- water-report: " in skills.blocks(Reach(tmp_path / "ws"))[-1]
    assert skills.problems() == []


def test_a_second_run_changes_nothing(tmp_path, capsys):
    init(tmp_path / "ws")
    before = state(tmp_path / "ws")
    capsys.readouterr()
    assert init(tmp_path / "ws") == 0
    assert state(tmp_path / "ws") == before
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_existing_files_stay_and_missing_ones_are_created(tmp_path, capsys):
    place = tmp_path / "ws"
    (place / "memory").mkdir(parents=True)
    (place / "SOUL.md").write_text("my own")
    (place / "memory/MEMORY.md").write_text("")
    (place / "USER.md").mkdir()
    (place / "notes.txt").write_text("mine")
    before = state(place)
    assert init(place) == 0
    after = state(place)
    assert {name: after[name] for name in before} == before
    assert set(after) == {*FILES, "notes.txt"} - {"USER.md"}
    left = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Already there"))
    assert left.partition(": ")[2] == "SOUL.md, USER.md, memory/MEMORY.md"


@pytest.mark.parametrize("there", [True, False])
def test_init_writes_nothing_through_a_link(tmp_path, there):
    place, outside = tmp_path / "ws", tmp_path / "outside"
    place.mkdir()
    outside.mkdir()
    (outside / "memory").mkdir()
    if there:
        (outside / "canary").write_text("canary")
        (outside / "memory/MEMORY.md").write_text("canary")
    (place / "AGENTS.md").symlink_to(outside / "canary")
    (place / "SOUL.md").symlink_to("../outside/new")
    (place / "memory").symlink_to(outside / "memory")
    (place / "skills").symlink_to(outside / "missing")
    before = state(outside)
    assert init(place) == 0
    assert state(outside) == before
    assert set(os.listdir(outside)) == {"memory", *(["canary"] if there else [])}
    assert set(state(place)) == {"USER.md", "TOOLS.md", "HEARTBEAT.md"}


def test_without_a_folder_the_configured_workspace_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EVERLOOP_WORKSPACE", str(tmp_path / "set"))
    assert init() == 0
    assert (tmp_path / "set/AGENTS.md").exists()
    assert "`everloop` starts" in capsys.readouterr().out
    assert init(workspace=str(tmp_path / "flag")) == 0
    assert (tmp_path / "flag/AGENTS.md").exists()


def test_a_relative_folder_and_a_tilde_are_resolved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert init("here") == 0
    assert init("~/there") == 0
    assert (tmp_path / "here/AGENTS.md").exists()
    assert Path("~/there/AGENTS.md").expanduser().exists()
    assert f"--workspace {tmp_path}/here" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- what goes wrong


def run(folder: Path | str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process with a limit on the size of a file."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [*COMMAND, "init", str(folder)], capture_output=True, text=True, timeout=60, preexec_fn=limited
    )


def is_one_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"everloop: [^\n]+\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr


def test_a_file_in_the_way_is_reported_in_one_line_and_nothing_is_created(tmp_path):
    (tmp_path / "file").write_text("x")
    is_one_error(run(tmp_path / "file"), f"{tmp_path}/file")
    is_one_error(run(tmp_path / "file" / "deeper"), f"{tmp_path}/file")
    for name in ("memory", "skills"):
        place = tmp_path / f"with-{name}"
        place.mkdir()
        (place / name).write_text("x")
        is_one_error(run(place), f"{place}/{name}")
        assert list(state(place)) == [name]


def test_an_unwritable_folder_is_reported_in_one_line(tmp_path):
    is_one_error(run("/proc/garden"), "/proc/garden")
    is_one_error(run(""), '""')
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.geteuid() != 0:  # root may write there anyway
        is_one_error(run(locked), str(locked))


def test_a_partly_written_file_is_removed_and_written_by_the_next_run(tmp_path):
    place = tmp_path / "ws"
    is_one_error(run(place, limit=100), f"{place}/AGENTS.md")
    assert state(place) == {}
    done = run(place)
    assert done.returncode == 0, done.stderr
    assert set(state(place)) == set(FILES)


def test_a_settings_error_is_reported(monkeypatch):
    monkeypatch.setenv("EVERLOOP_WORKSPACE", "")
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir()
    (home / "config.toml").write_text("workspce = 5\n")
    with pytest.raises(EverloopError, match="workspce"):
        init()
