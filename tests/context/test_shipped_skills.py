"""The shipped skills: they are listed, and their instructions work."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from everloop.context.skills import SHIPPED, Skills
from everloop.sandbox.reach import Reach
from everloop.tools.shell.shell import ShellSettings
from tests.tools.shell.desks import Desk

CANARY = "canary-5f2c"


NAMES = ["code-review", "git", "schedule", "skill-writer", "summarise-page"]


def test_the_shipped_skills_are_listed_whole_within_the_budget(folder):
    skills = Skills(folder)
    (block,) = skills.blocks(Reach(folder))
    assert re.findall(r"^- ([a-z-]+): ", block, re.M) == NAMES
    assert "…" not in block
    assert len(block) < 3000
    assert skills.problems() == []
    for name, path in re.findall(r"^- ([a-z-]+): .* \((/.*)\)$", block, re.M):
        assert Path(path) == SHIPPED / name / "SKILL.md"
        assert 30 <= len(Path(path).read_text().splitlines()) <= 80
        assert str(SHIPPED / name) in (skills.load(name, Reach(folder)) or "")


def test_the_shipped_skills_are_read_without_the_yaml_reader(folder):
    code = (
        "import sys; from pathlib import Path; from everloop.context.skills import *; p = Path(sys.argv[1]);"
        "assert Skills(p).blocks(Reach(p)); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not {"yaml", "difflib"} & set(done.stdout.split())


def test_the_example_in_the_skill_writer_is_a_valid_skill(bench):
    (example,) = re.findall(r"^```markdown\n(.*?)^```$", (SHIPPED / "skill-writer/SKILL.md").read_text(), re.M | re.S)
    bench.add("water-report", example)
    assert "- water-report: Writes the weekly water report" in bench.prompt
    assert bench.skills.problems() == []


def test_the_calls_in_the_schedule_skill_match_the_tools_arguments():
    calls = re.findall(r"`(cron\(.*?\))`", (SHIPPED / "schedule/SKILL.md").read_text())
    assert len(calls) >= 5
    for text in calls:
        call = ast.parse(text.replace(", …)", ")"), mode="eval").body
        assert isinstance(call, ast.Call)
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        assert set(arguments) <= {"action", "message", "at", "every", "cron", "tz", "id"}
        assert arguments["action"] in ("add", "list", "remove")
        if arguments["action"] == "add":
            assert len({"at", "every", "cron"} & set(arguments)) == 1


@pytest.mark.parametrize(("wall", "place"), [("bubblewrap", "."), ("bubblewrap", "sub"), ("landlock", "sub")])
async def test_the_commands_of_the_git_skill_work_in_the_sandbox(folder, wall, place):
    (folder / place).mkdir(exist_ok=True)
    desk = Desk(folder, ShellSettings(mode=wall))
    first = 'git init -q . && git add README.md && git -c user.name=a -c user.email=a@b commit -q -m "First"'
    assert await desk(f"echo hello > README.md && {first}", working_dir=place) == "(no output)"
    (folder / place / "README.md").write_text("hello\nStart it with make.\n")
    blocks = re.findall(r"^```sh\n(.*?)^```$", (SHIPPED / "git/SKILL.md").read_text(), re.M | re.S)
    assert len(blocks) >= 3
    for block in blocks:
        said = await desk(f"set -euo pipefail\n{block}", working_dir=place)
        assert "exit status" not in said, said
        assert "error" not in said, said
    log = await desk("git log --topo-order --format='%an: %s'; git status --short", working_dir=place)
    assert [line.partition(": ")[2] for line in log.splitlines()] == [
        "Merge branch 'topic'", "Say more", "Say how the program is started", "First"
    ]  # fmt: skip
    await desk.close()


async def test_the_sandbox_refuses_what_the_git_skill_says_it_refuses(folder):
    desk = Desk(folder, ShellSettings(mode="bubblewrap"))
    named_by = "git -c user.name=a -c user.email=a@b"
    assert "identity unknown" in await desk("git init -q . && git commit --allow-empty -m x")
    assert "could not write config file .git/config" in await desk("git config user.name x")
    await desk(f"{named_by} commit -q --allow-empty -m x")
    assert "Deleted branch topic" in await desk("git branch topic && git branch -d topic")
    assert "exit status" in await desk("git remote add origin https://host.example/x")
    assert "Could not resolve host" in await desk("git fetch https://host.example/x")
    await desk.close()
    desk = Desk(folder, ShellSettings(mode="landlock"))
    assert "index.lock': Permission denied" in await desk(f"touch new; git add new; {named_by} commit -qm y")
    assert await desk("git log --format=%s") == "x"
    await desk.close()
