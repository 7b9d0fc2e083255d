"""Every example of the documentation is run as written."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import environment, everloop
from tests.support.model_servers import server as server

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OLLAMA = "http://127.0.0.1:11434/v1"  # the pages' address of a model server
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
# A program, and its output if that follows right below.
PROGRAM = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S)
NAMED = re.compile(r"# (\w+\.py)\n")  # a program that is a file: the commands of its page run it
KILLED = re.compile(r"^.*Killed.*\n", re.M)  # printed by the shell, each in its own wording
LINK = re.compile(r"\]\(([^)#]+)")
# In expected output, an ellipsis matches anything, a turn's id the one first seen in its place, and clock times,
# dates and ids of runs any. The rest must be equal.
VARIES = re.compile(r"…|\b[0-9a-f]{19}\b|(?<=run:)[0-9a-f]{12}|\d{4}-\d\d-\d\d(?: \d\d:\d\d)?|\d\d:\d\d:\d\d")


def blocks(page: str, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall((DOCS / page).read_text()) if found == language]


def examples(page: str) -> list[tuple[str, str]]:
    """Return (command, expected output) of all console blocks."""
    parts = re.split(r"^\$ (.*)\n", "".join(blocks(page, "console")), flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


class Reader:
    """Compares output with a page, and learns which id stands for which turn."""

    def __init__(self) -> None:
        self.turns: dict[str, str] = {}

    def command(self, text: str) -> str:
        for written, real in self.turns.items():
            text = text.replace(written, real)
        return text

    def check(self, expected: str, output: str) -> None:
        new: dict[str, str] = {}

        def pattern(found: re.Match[str]) -> str:
            text = found[0]
            if re.fullmatch("[0-9a-f]{19}", text) is None:
                return ".*" if text == "…" else r"[0-9a-f: -]+"
            if text in self.turns:
                return self.turns[text]
            name = new.setdefault(text, f"turn{len(new)}")
            return f"(?P<{name}>[0-9a-f]{{19}})"

        pieces, end = [], 0
        for found in VARIES.finditer(expected):
            pieces += [re.escape(expected[end : found.start()]), pattern(found)]
            end = found.end()
        seen = re.fullmatch("".join([*pieces, re.escape(expected[end:])]), output)
        assert seen is not None, f"the page says\n{expected}\nand the command said\n{output}"
        self.turns |= {written: seen[name] for written, name in new.items()}


async def shell(script: str, server: FakeOpenAI, folder: Path) -> str:
    """Return the output of a page's command, on both outputs."""
    shim = folder / "bin" / "everloop"
    if not shim.exists():
        shim.parent.mkdir()
        for name, command_line in (("everloop", "-m everloop"), ("python", "")):
            (shim.parent / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command_line} "$@"\n')
            (shim.parent / name).chmod(0o755)
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    path = f"{shim.parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", script, cwd=workspace,
        env=environment(server, PATH=path, EVERLOOP_WORKSPACE=str(workspace)),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(40):
        out, _ = await process.communicate()
    return out.decode()


async def test_every_example_of_the_commands_page_does_what_it_says(server, tmp_path):
    server.calls(call("read_file", path="todo.txt"))
    for answer in ("Water the beans.", "You asked what needs doing in the garden.", "Hello.", "Hello."):
        server.reply(answer)
    found, reader = examples("commands.md"), Reader()
    assert len(found) >= 9
    for command, expected in found:
        reader.check(expected, await shell(reader.command(command), server, tmp_path))
    assert not server.replies


async def test_every_example_of_the_activity_page_does_what_it_says(server, tmp_path):
    for path in ("garden.txt", "todo.txt"):
        server.calls(call("read_file", path=path))
    server.reply("Water the beans.")
    found, reader = examples("activity.md"), Reader()
    assert len(found) >= 5
    for command, expected in found:
        reader.check(expected, await shell(reader.command(command), server, tmp_path))
    assert not server.replies


async def test_every_step_of_the_tutorial_does_what_it_says(server, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (program,) = blocks("tutorial.md", "python")
    found, reader = examples("tutorial.md"), Reader()
    assert len(found) >= 12
    server.calls(call("write_file", path="plan.md", content="- beans\n- peas\n"))
    server.reply("I wrote plan.md with beans and peas.")
    server.calls(call("edit_file", path="plan.md", old_text="- peas", new_text="- peas\n- carrots"))
    server.reply("Carrots are on the list.")
    server.calls(call("exec", command="rm plan.md"))
    server.reply("I may not delete plan.md without your approval.")
    server.calls(call("water", bed="north"))
    server.reply("The north bed is watered.")
    for command, expected in found:
        if "crash.py" in command:
            (workspace / "crash.py").write_text(program)
        said = await shell(reader.command(command), server, tmp_path)
        reader.check(KILLED.sub("", expected), KILLED.sub("", said))
    assert not server.replies


async def test_every_command_is_on_the_page():
    page = (DOCS / "commands.md").read_text()
    for name in re.findall(r"^    ([a-z]+) ", (await everloop("--help")).out, re.M):
        assert f"| `everloop {name}" in page


async def test_the_database_page_has_the_existing_tables_and_its_queries_run(server, tmp_path):
    server.calls(call("list_dir", path="."))
    server.reply("Water the beans.")
    await everloop("--session", "cli:direct", server=server, stdin=b"hi\n")
    server.fail(400)
    await everloop(server=server, stdin=b"again\n")
    page = (DOCS / "database.md").read_text()
    with closing(sqlite3.connect(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db")) as database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (table,) in tables.fetchall():
            columns = ", ".join(f"`{row[1]}`" for row in database.execute(f"PRAGMA table_xinfo({table})"))
            assert f"| `{table}` | {columns} |" in page, f"docs/database.md must have: | `{table}` | {columns} |"
    database = sqlite3.connect(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db", isolation_level=None)
    queries = blocks("database.md", "sql")
    assert len(queries) >= 6
    for query in queries:
        rows = database.execute(query.replace("'copy.db'", f"'{tmp_path}/copy.db'")).fetchall()
        assert rows or "VACUUM" in query, f"nothing comes of\n{query}"
    assert (tmp_path / "copy.db").exists()
    database.close()


# ---------------------------------------------------------------------------------------------- programs

PROGRAMS = [
    pytest.param(page, *found.groups(), id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
    for number, found in enumerate(PROGRAM.finditer(page.read_text()), start=1)
    if NAMED.match(found[1]) is None
]


@pytest.mark.parametrize(("page", "program", "expected"), PROGRAMS)
async def test_every_program_runs_as_written_and_prints_what_its_page_says(page, program, expected, server, tmp_path):
    if OLLAMA in program:
        server.reply("Hello.")
        program = program.replace(OLLAMA, server.base_url)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", program,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(40):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    if expected is None:
        assert f"`{out.decode().strip()}`" in page.read_text()
    else:
        Reader().check(expected, out.decode())
    assert not server.replies


async def test_a_program_uses_the_settings_of_the_command_line(server, tmp_path):
    (program,) = [one for one in blocks("library.md", "python") if NAMED.match(one)]
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "my_agent.py").write_text(program)
    server.reply("Hello.")
    server.fail(400, "no such model")
    assert await shell("python my_agent.py", server, tmp_path) == "Hello.\n"
    assert "no such model" in await shell("python my_agent.py", server, tmp_path)
    assert not server.replies


def test_every_page_that_needs_programs_has_some():
    pages = [found.values[0].name for found in PROGRAMS]  # type: ignore[union-attr]
    assert {page: pages.count(page) for page in pages} == {
        "README.md": 1, "activity.md": 1, "context.md": 2, "cron.md": 1, "durability.md": 1, "executor.md": 1,
        "library.md": 7, "memory.md": 1,
        "providers.md": 6,
        "skills.md": 1, "subagents.md": 1, "text-calls.md": 1,
        "tools.md": 5,
    }  # fmt: skip


async def test_the_crash_of_the_durability_page_happens_as_described(server, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    for program in blocks("durability.md", "python"):
        if named := NAMED.match(program):
            (workspace / named[1]).write_text(program)
    found, reader = examples("durability.md"), Reader()
    assert len(found) >= 7
    for command, expected in found:
        said = await shell(reader.command(command), server, tmp_path)
        reader.check(KILLED.sub("", expected), KILLED.sub("", said))


async def test_a_backup_is_made_and_restored_as_its_page_says(server, tmp_path):
    server.reply("Hello.")
    await shell('everloop run --session my:one "Say hello."', server, tmp_path)
    for command, expected in examples("backup.md"):
        Reader().check(expected, await shell(command, server, tmp_path))


# ---------------------------------------------------------------------------------------------- all pages


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_every_link_leads_somewhere_and_every_picture_is_well_formed(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
            if target.endswith(".svg"):
                ElementTree.parse(page.parent / target)


def test_the_guards_that_the_architecture_page_names_exist():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (DOCS / "architecture.md").read_text())
    assert len(named) >= 12
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_the_rooms_of_the_architecture_page_are_those_of_the_code():
    code = {path.stem for path in (ROOT / "src" / "everloop").iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms = code - {"__init__", "__main__", "__pycache__", "testing"}
    table = re.findall(r"^\| (`[^|]*) \|", (DOCS / "architecture.md").read_text(), re.M)
    named = {name.rstrip("/") for cell in table for name in re.findall(r"`([a-z_]+/?)`", cell)}
    assert named == rooms, "the table of rooms in docs/architecture.md must have a place for each module and folder"
