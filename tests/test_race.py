"""`make race`: the drivers of Everloop and of the bare loop, and the table. Other runtimes are not needed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

RACE = Path(__file__).parents[1] / "benchmarks" / "race.py"
SMALL = ("--rounds", "1", "--turns", "1", "--sessions", "2", "--messages", "4")


async def race(*arguments: str) -> tuple[int, str]:
    pipe = asyncio.subprocess.PIPE
    made = await asyncio.create_subprocess_exec(sys.executable, str(RACE), *arguments, stdout=pipe, stderr=pipe)
    out, err = await made.communicate()
    return made.returncode or 0, (out if made.returncode == 0 else err).decode()


async def test_everloop_and_the_bare_loop_are_measured_and_written_to_a_page(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- race:begin -->\nold\n<!-- race:end -->\nafter\n")
    status, out = await race("--peers", "", "--write", str(page), *SMALL)
    assert status == 0, out
    rows = {cells[1].strip(): cells[2:-1] for line in out.splitlines() if len(cells := line.split("|")) > 5}
    assert rows["bare aiohttp loop"][-1].strip() == "keeps nothing"
    assert rows["**Everloop**"][-1].strip() == "message kept, 2 of 2 results, continues"
    assert not any(cell.strip() == "–" for name in ("bare aiohttp loop", "**Everloop**") for cell in rows[name])
    assert "everloop 0." in out
    assert page.read_text() == f"before\n<!-- race:begin -->\n{out}<!-- race:end -->\nafter\n"


async def test_a_runtime_without_a_driver_is_refused_in_one_line():
    status, error = await race("--peers", "unheard-of")
    assert status == 1
    assert error.startswith("there is no driver for unheard-of: choose from agno, ")
    assert error.count("\n") == 1
