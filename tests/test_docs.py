"""The examples of docs/commands.md and docs/database.md are run as they are written."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI
from tests.commands import environment, everloop

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
# In expected output: an ellipsis is anything, a turn's id is the one that was first seen in its place, and clock times,
# dates and ids of runs are any. What is left must be the same.
VARIES = re.compile(r"…|\b[0-9a-f]{19}\b|(?<=run:)[0-9a-f]{12}|\d{4}-\d\d-\d\d(?: \d\d:\d\d)?|\d\d:\d\d:\d\d")


def blocks(page: str, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall((DOCS / page).read_text()) if found == language]


def examples(page: str) -> list[tuple[str, str]]:
    """(command, expected output) of all console blocks."""
    parts = re.split(r"^\$ (.*)\n", "".join(blocks(page, "console")), flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


class Reader:
    """Compares output with what a page says, and learns which id stands for which turn."""

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


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


async def shell(command: str, server: FakeOpenAI, folder: Path) -> str:
    """What a command of a page says, on both outputs."""
    shim = folder / "bin" / "everloop"
    if not shim.exists():
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m everloop "$@"\n')
        shim.chmod(0o755)
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    path = f"{shim.parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command,
        env=environment(server, PATH=path, EVERLOOP_WORKSPACE=str(workspace)),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(40):
        out, _ = await process.communicate()
    return out.decode()


async def test_every_example_of_the_commands_page_does_what_it_says(server, tmp_path):
    server.calls(call("read_file", path="todo.txt"))
    for answer in ("Water the beans.", "You asked what is to do in the garden.", "Hello.", "Hello."):
        server.reply(answer)
    found, reader = examples("commands.md"), Reader()
    assert len(found) >= 9
    for command, expected in found:
        reader.check(expected, await shell(reader.command(command), server, tmp_path))
    assert not server.replies


async def test_every_command_is_on_the_page():
    page = (DOCS / "commands.md").read_text()
    for name in re.findall(r"^    ([a-z]+) ", (await everloop("--help")).out, re.M):
        assert f"| `everloop {name}" in page


async def test_the_database_page_has_the_tables_there_are_and_its_queries_run(server, tmp_path):
    server.calls(call("list_dir", path="."))
    server.reply("Water the beans.")
    await everloop("--session", "cli:direct", server=server, stdin=b"hi\n")
    server.fail(400)
    await everloop(server=server, stdin=b"again\n")
    page = (DOCS / "database.md").read_text()
    with sqlite3.connect(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db") as database:
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
