"""Ordinary work with the default settings needs almost no approvals.

Twenty tasks, each a realistic conversation in a small project with a repository. Every call must succeed. All tasks
together ask at most five times; those that read, edit source, run tests or commit never ask.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus
from everloop.log import CallEnded, CallsAsked
from everloop.testing import ScriptedProvider, call
from tests.support.web_pdf import PDF
from tests.support.web_servers import answer, serving

from .scene import settings

TESTS = "python3 -m unittest -q"
PROJECT = {
    "README.md": "# Garden\n\nPlans beds.\n",
    "garden/__init__.py": "",
    "garden/beds.py": "def area(width, height):\n    return width + height\n",
    "garden/plan.py": "from .beds import area\n\n\ndef total(beds):\n    return sum(area(*bed) for bed in beds)\n",
    "tests/__init__.py": "",
    "tests/test_beds.py": "import unittest\n\nfrom garden.beds import area\n\n\nclass Beds(unittest.TestCase):\n"
    "    def test_area(self):\n        self.assertEqual(area(2, 2), 4)\n",
    "package.json": '{\n  "scripts": {\n    "test": "node test.js"\n  },\n  "dependencies": {}\n}\n',
    "Makefile": "test:\n\tpython3 -m unittest -q\n",
    "pyproject.toml": '[project]\nname = "garden"\nversion = "1"\ndependencies = []\n',
    ".github/workflows/ci.yml": "on: push\njobs:\n  test:\n    runs-on: ubuntu-latest\n",
    "notes/How to water the beans in a dry summer.md": "Water them at dawn.\n",
}


@dataclass
class Task:
    """A user's message and the calls with which the agent handles it; `asks` is how often it may ask for approval."""

    say: str
    calls: list[Any]
    asks: int = 0


def run(command: str, **more: Any) -> Any:
    return call("exec", command=command, **more)


def read(path: str) -> Any:
    return call("read_file", path=path)


def edit(path: str, old: str, new: str) -> Any:
    return call("edit_file", path=path, old_text=old, new_text=new)


FIX = edit("garden/beds.py", "width + height", "width * height")
COMMIT = "git add -A && git -c user.name=me -c user.email=me@garden.example commit -qm 'Multiply'"

# {} is the address of a web site whose page links to two articles; a search finds the first of them.
TASKS: dict[str, Task] = {
    "explain the code": Task("What does this do?", [call("list_dir"), read("README.md"), read("garden/plan.py")]),
    "find a function": Task("Where is area used?", [call("grep", pattern="area"), call("find_files", pattern="*.py")]),
    "fix a bug": Task("The test fails.", [run(TESTS + " || true"), read("garden/beds.py"), FIX, run(TESTS)]),
    "fix and commit": Task("Fix it and commit.", [read("garden/beds.py"), FIX, run(TESTS), run(COMMIT)]),
    "rename a function": Task(
        "Rename area to size.",
        [
            call("grep", pattern="area"),
            edit("garden/beds.py", "def area", "def size"),
            edit("garden/plan.py", "import area", "import size"),
            edit("garden/plan.py", "area(*bed)", "size(*bed)"),
            run("sed -i s/area/size/g tests/test_beds.py && git diff --stat"),
        ],
    ),
    "write a module and its test": Task(
        "Add a module for paths.",
        [
            read("garden/beds.py"),
            call("write_file", path="garden/paths.py", content="def length(steps):\n    return len(steps)\n"),
            call("write_file", path="tests/test_paths.py", content="import unittest\n"),
            run("python3 -m compileall -q garden tests"),
        ],
    ),
    "look at the history": Task("What changed?", [run("git log --oneline"), run("git status -s"), run("git diff")]),
    "work on a branch": Task(
        "Try it on a branch.",
        [run("git checkout -qb try"), read("garden/beds.py"), FIX, run(COMMIT), run("git checkout -q main")],
    ),
    "a script of one's own": Task(
        "Count the lines.",
        [
            call("write_file", path="count.py", content="print(sum(1 for _ in open('garden/beds.py')))\n"),
            run("python3 count.py"),
            read("count.py"),
        ],
    ),
    "a long command": Task(
        "Run the tests in the background.",
        [run(TESTS + "; true", background=True), call("process", action="poll", id="p1", wait=20)],
    ),
    "read a document": Task("Sum up the paper.", [read("paper.pdf"), call("write_file", path="sum.md", content="x\n")]),
    "notes with long names": Task(
        "What do my notes say?",
        [call("list_dir", path="notes"), read("notes/How to water the beans in a dry summer.md")],
    ),
    "a word in between": Task(
        "Check it.", [read("README.md"), call("message", content="Half done."), run(TESTS + ";:")]
    ),
    "a helper": Task("Look around.", [call("spawn", task="Sum up the README.", wait=True)]),
    "remember and remind": Task(
        "I like tea. Remind me at six.",
        [call("remember", text="Likes tea."), call("cron", action="add", message="Tea.", at="in 3 hours")],
    ),
    "research": Task(
        "Find out about beans; see also {}/page.",
        [call("web_search", query="beans"), call("web_fetch", url="{}/a"), call("web_fetch", url="{}/page")],
    ),
    "read on": Task(
        "Read {}/page and what it links to.", [call("web_fetch", url="{}/page"), call("web_fetch", url="{}/a")], asks=1
    ),
    # Files that other programs execute automatically need approval, once each, where they are known.
    "a script for npm": Task(
        "Add a lint script.",
        [read("package.json"), edit("package.json", '"test":', '"lint": "eslint",\n    "test":')],
        asks=1,
    ),
    "a target for make": Task(
        "Add a lint target.", [read("Makefile"), edit("Makefile", "test:", "lint:\n\truff check\n\ntest:")], asks=1
    ),
    "continuous integration": Task(
        "Run it on pull requests too.",
        [read(".github/workflows/ci.yml"), edit(".github/workflows/ci.yml", "on: push", "on: [push, pull_request]")],
        asks=1,
    ),
    "a dependency": Task(
        "We need requests.", [read("pyproject.toml"), edit("pyproject.toml", "[]", '["requests"]')], asks=1
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "garden"
    for name, text in PROJECT.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "paper.pdf").write_bytes(PDF)
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": os.environ["PATH"]}
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@garden.example")
    for command in (["init", "-qb", "main"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *command], cwd=folder, env=quiet, check=True, timeout=60)
    return folder


async def asked(folder: Path, task: Task) -> int:
    """Complete a task, approving every question; return how many there were."""
    page = "<p>See <a href='/a'>one</a>.</p>"
    async with serving({"/page": answer(page.encode(), "text/html"), "*": answer(b"Beans want water.")}) as site:
        address = f"http://127.0.0.1:{site.port}"
        found = {"results": [{"title": "Beans", "url": f"{address}/a", "content": "Beans."}]}
        async with serving({"*": answer(json.dumps(found).encode(), "application/json")}) as engine:
            config = settings(site, engine, searxng_url=f"http://127.0.0.1:{engine.port}", home=folder.parent / "home")
            steps: list[Any] = [
                call(one.name, **{key: _at(value, address) for key, value in one.arguments.items()})
                for one in task.calls
            ]
            if any(one.name == "spawn" for one in steps):
                steps += [read("README.md"), "It plans beds."]
            async with AgentLoop(
                MessageBus(),
                ScriptedProvider([*steps, "done"]),
                folder,
                config=config,
                store=folder.parent / "store.db",
                restrict_to_workspace=True,
            ) as agent:
                said = await agent.process_direct(_at(task.say, address), attended=True)
                for _ in range(10):
                    if said != "done":
                        said = await agent.process_direct("/approve", attended=True)
                assert said == "done"
                info = await agent.store.session("me", "cli:direct")
                assert info is not None
                log = [one.entry for one in await agent.store.read_log(info.id)]
    failed = [entry.content for entry in log if isinstance(entry, CallEnded) and entry.status != "ok"]
    # A direct call has no chat that a message could be sent to.
    assert [text for text in failed if "no chat here" not in text] == []
    return sum(isinstance(entry, CallsAsked) for entry in log)


def _at(value: Any, address: str) -> Any:
    return value.replace("{}", address) if isinstance(value, str) and "{}/" in value else value


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if not task.asks])
async def test_ordinary_work_needs_no_approval(project, name):
    assert await asked(project, TASKS[name]) == 0


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.asks])
async def test_auto_executed_files_and_links_on_pages_need_approval_once(project, name):
    assert await asked(project, TASKS[name]) == TASKS[name].asks


def test_all_tasks_together_ask_at_most_five_times():
    """The tests above check the number for each task."""
    assert len(TASKS) >= 20
    assert sum(task.asks for task in TASKS.values()) <= 5
    assert sum(task.asks for name, task in TASKS.items() if name != "read on") == 4
