"""Which writes of a turn are flushed to the disk, as the kernel sees it and as the writer counts it."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus, tool
from everloop.config import Config
from everloop.errors import StoreError
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call

from ..support.places import ROOT


@tool(read_only=True)
async def look(where: str = "") -> str:
    """Look at something."""
    return "a harbour"


@tool(replay="safe")
async def note(text: str = "") -> str:
    """Keep a note under the call's id."""
    return "kept"


@tool
async def send(to: str = "") -> str:
    """Send something."""
    return "sent"


async def flushes(folder: Path, *rounds: Any, **options: Any) -> int:
    """Return how often a turn of these rounds is flushed."""
    provider = ScriptedProvider(["hello", *rounds, "done"])
    store = SQLiteStore(folder / "store.db", **options)
    async with AgentLoop(MessageBus(), provider, folder, store=store) as agent:
        for one in (look, note, send):
            agent.tools.register(one)
        await agent.process_direct("hi")
        before = store.writer.flushes
        assert await agent.process_direct("go") == "done"
        return store.writer.flushes - before


async def test_a_turn_that_only_reads_is_flushed_when_it_begins_and_when_it_ends(tmp_path):
    assert await flushes(tmp_path, call("look"), call("look"), [call("look"), call("list_dir")]) == 2


@pytest.mark.parametrize("name", ["send", "note"])
async def test_a_round_with_effects_is_flushed_before_its_calls_start(tmp_path, name):
    assert await flushes(tmp_path, call("look"), call(name), [call("look"), call(name)]) == 4


async def test_every_step_is_flushed_if_the_settings_say_so(tmp_path):
    assert await flushes(tmp_path, call("look"), call("look"), flush_always=True) == 6


@pytest.mark.parametrize(("flush", "expected"), [("needed", 2), ("always", 4)])
async def test_the_setting_reaches_the_store(tmp_path, flush, expected):
    config = Config(home=tmp_path / "home", flush=flush, restrict_to_workspace=False)
    async with AgentLoop(
        MessageBus(), ScriptedProvider(["hi", call("look"), "done"]), tmp_path, config=config
    ) as agent:
        agent.tools.register(look)
        await agent.process_direct("hi")
        assert isinstance(agent.store, SQLiteStore)
        before = agent.store.writer.flushes
        await agent.process_direct("go")
        assert agent.store.writer.flushes - before == expected


TURN = """
import asyncio, sys
from pathlib import Path
from everloop import AgentLoop, MessageBus, tool
from everloop.testing import ScriptedProvider, call

@tool(read_only=True)
async def look() -> str:
    "Look."
    return "a harbour"

async def main():
    folder = Path(sys.argv[1])
    provider = ScriptedProvider(["hello", call("look"), call("look"), "done"])
    async with AgentLoop(MessageBus(), provider, folder, store=folder / "store.db") as agent:
        agent.tools.register(look)
        await agent.process_direct("hi")
        (folder / "begin").write_text("")
        await agent.process_direct("go")
        (folder / "end").write_text("")

asyncio.run(main())
"""


@pytest.mark.platform("counts system calls with strace")
def test_the_kernel_sees_exactly_these_flushes(tmp_path):
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,openat", "-o", trace, sys.executable, "-c", TURN]
    subprocess.run([*command, tmp_path], cwd=ROOT, check=True, timeout=50)
    text = trace.read_text()
    turn = text[text.index(f"{tmp_path}/begin") : text.index(f"{tmp_path}/end")]
    assert len(re.findall(r"f(?:data)?sync\(\d+<[^>]*-wal>", turn)) == 2
    assert len(re.findall(r"f(?:data)?sync\(", turn)) == 2


async def test_writes_that_wait_for_a_locked_file_wait_together(tmp_path):
    store = SQLiteStore(tmp_path / "store.db", lock_seconds=0.3)
    await store.spend("me", [])
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = asyncio.get_running_loop().time()
        errors = await asyncio.gather(*(store.revoke_token(str(n)) for n in range(20)), return_exceptions=True)
        seconds = asyncio.get_running_loop().time() - began
        other.execute("ROLLBACK")
    assert {type(error) for error in errors} == {StoreError}
    assert seconds < 3  # one wait per batch, or two: not twenty
    assert await store.revoke_token("1") is False
    await store.close()


async def test_a_turn_of_three_rounds_writes_few_bytes(tmp_path):
    provider = ScriptedProvider([step for _ in range(40) for step in (call("look"), call("look"), "done")])
    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(MessageBus(), provider, tmp_path, store=store) as agent:
        agent.tools.register(look)
        for n in range(10):
            await agent.process_direct("hi", session_key=f"test:{n}")
        before = written()
        for n in range(30):
            await agent.process_direct("hi", session_key=f"test:{n}")
        assert (written() - before) / 30 < 32 * 1024


def written() -> int:
    """Bytes that the process has written to files, pipes and sockets."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])
