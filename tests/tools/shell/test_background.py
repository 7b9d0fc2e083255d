"""Commands in the background."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from everloop.tools.base import ToolError
from everloop.tools.shell import processes
from tests.support.commands import until

from .desks import beats, silent


async def test_a_background_command_is_polled_written_to_and_killed(desk):
    id = await desk.start("echo ready; while read line; do echo got $line; done; echo end; sleep 30")
    assert "ready" in await desk.until(id, "ready")
    await desk.process("write", id, text="one\ntwo\n")
    assert "got one" in await desk.until(id, "two")
    assert "got" not in await desk.process("poll", id)
    await desk.process("write", id)
    assert "end" in await desk.until(id, "end")
    with pytest.raises(ToolError):
        await desk.process("write", id, text="more")
    assert id in await desk.process("list")
    assert "SIGTERM" in await desk.process("kill", id)
    assert id not in await desk.process("list")
    with pytest.raises(ToolError):
        await desk.process("poll", id)


async def test_the_end_of_a_background_command_is_reported(desk):
    id = await desk.start("echo bye; exit 7")
    said = await desk.until(id, "exit status 7")
    assert "bye" in said
    assert "exit status 7" in await desk.process("list")


async def test_the_last_output_of_a_background_command_is_reported_with_its_end(desk, monkeypatch):
    monkeypatch.setattr(processes, "_PAUSE", 0.3)  # long enough that it ends before its last output is read
    monkeypatch.setattr(processes, "_DRAIN_SECONDS", 20)
    id = await desk.start("echo first; sleep 0.1; echo last; exit 7")
    said = ""
    async with asyncio.timeout(20):
        while "exit status 7" not in said:
            said += await desk.process("poll", id)
            await asyncio.sleep(0.01)
    assert "last" in said


async def test_polling_waits_for_output_only_as_long_as_requested(one, folder):
    """A wait that is too long lasts 20 or 30 seconds."""
    id = await one.start("while [ ! -e go ]; do sleep 0.05; done; echo news; sleep 60")
    began = time.monotonic()
    assert "running" in await one.process("poll", id)
    waiting = asyncio.create_task(one.process("poll", id, wait=20))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    (folder / "go").touch()
    assert "news" in await waiting
    assert "news" not in await one.process("poll", id, wait=0.1)
    assert time.monotonic() - began < 15


async def test_a_command_ended_while_its_sandbox_is_set_up_does_not_keep_running(desk, folder):
    for number in range(12):
        await desk.start(beats(f"survived{number}"))
        await asyncio.sleep(number / 1000)
        await desk.tools["exec"].end_turn("t")
    assert await silent(folder)


async def test_background_commands_end_with_their_turn_unless_they_are_kept(desk, folder):
    await desk.start(f"(trap '' TERM; {beats('one')}) & setsid sh -c '{beats('two')}' & {beats('three')}")
    kept = await desk.start("while [ ! -e go ]; do sleep 0.05; done; touch kept; sleep 60", keep=True)
    await until(lambda: all((folder / name).exists() for name in ("one", "two", "three")))
    await desk.tools["exec"].end_turn("another turn")
    assert len((await desk.process("list")).splitlines()) == 2
    await desk.tools["exec"].end_turn("t")
    assert (await desk.process("list")).startswith(kept)
    assert await silent(folder)
    (folder / "go").touch()
    await until((folder / "kept").exists)
    await desk.close()
    assert "No background" in await desk.process("list")


async def test_another_session_and_another_owner_see_nothing(one):
    id = await one.start("sleep 30")
    mine = one.context
    for other in (replace(mine, session="other"), replace(mine, owner="other")):
        one.context = other
        assert id not in await one.process("list")
        for action in ("poll", "write", "kill"):
            with pytest.raises(ToolError):
                await one.process(action, id, text="x")
    one.context = mine
    assert "running" in await one.process("poll", id)


async def test_the_number_of_background_commands_is_limited(desk_with):
    desk = desk_with(session_background=2, total_background=3)
    first = await desk.start("sleep 30")
    await desk.start("sleep 30")
    assert "kill one" in await desk.fails("sleep 30", background=True)
    await desk.process("kill", first)
    done = await desk.start("true")
    await desk.until(done, "exit status 0")
    await desk.start("sleep 30")  # in place of the one that has ended
    desk.context = replace(desk.context, session="other")
    await desk.start("sleep 30")
    assert "kill one" in await desk.fails("sleep 30", background=True)


async def test_only_the_end_of_a_long_background_output_is_kept(desk_with):
    desk = desk_with(output_limit=1000)
    id = await desk.start("seq 1 100000")
    async with asyncio.timeout(20):
        while "exit status 0" not in await desk.process("list"):  # which consumes none of its output
            await asyncio.sleep(0.02)
    said = await desk.process("poll", id)
    assert len(said) < 1200
    assert "omitted" in said
    assert "99999\n100000\n" in said


async def test_writing_to_a_command_with_network_counts_as_sending_data(desk_with):
    desk = desk_with()
    quiet = await desk.start("cat")
    loud = await desk.start("cat", network=True)
    assert not desk.plan("process", action="write", id=quiet, text="x").sends
    assert desk.plan("process", action="write", id=loud, text="secret").sends
    assert "secret" in desk.plan("process", action="write", id=loud, text="secret").shown
    assert not desk.plan("process", action="poll", id=loud).sends
    assert (await desk.output("process", action="poll", id=loud)).untrusted


RUNTIME = """
import asyncio, sys
from pathlib import Path
from everloop.tools.context import CallContext, current
from everloop.tools.shell.shell import ShellSettings, shell_tools

async def main():
    run, _ = shell_tools(ShellSettings(mode=sys.argv[1]))
    folder = Path(sys.argv[2])
    current.set(CallContext("me", "s", "t", "c", "cli", "d", folder, True, "k", lambda text: None))
    await run.execute(sys.argv[3], background=True, keep=True)
    await run.execute(sys.argv[4])

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["bubblewrap", "landlock", "off"])
async def test_nothing_survives_a_runtime_that_is_killed(folder, tmp_path, mode):
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    names = ["one", "two", "three", "four"]
    both = [f"(trap '' TERM; setsid sh -c '{beats(names[at])}') & {beats(names[at + 1])}" for at in (0, 2)]
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, mode, str(folder), *both], env=environment)
    try:
        await until(lambda: all((folder / name).exists() for name in names))
    finally:
        runtime.kill()
        runtime.wait()
    async with asyncio.timeout(20):
        while not await silent(folder):
            pass
    await until(lambda: not any((tmp_path / "tmp").iterdir()))  # removed by the last process to end
