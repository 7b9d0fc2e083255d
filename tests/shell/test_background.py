"""Commands in the background."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from everloop.tools.base import ToolError
from everloop.tools.shell.shell import ShellSettings

from .desks import Desk, gone


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


async def test_the_end_of_a_background_command_is_told(desk):
    id = await desk.start("echo bye; exit 7")
    said = await desk.until(id, "exit status 7")
    assert "bye" in said
    assert "exit status 7" in await desk.process("list")


async def test_polling_waits_for_news_only_as_long_as_asked(one):
    id = await one.start("sleep 0.5; echo news; sleep 30")
    began = time.monotonic()
    assert "running" in await one.process("poll", id)
    assert time.monotonic() - began < 0.4
    assert "news" in await one.process("poll", id, wait=20)
    assert time.monotonic() - began < 10
    assert "news" not in await one.process("poll", id, wait=0.1)


async def test_a_command_that_is_ended_while_its_sandbox_is_being_made_does_not_run_on(desk, folder):
    for number in range(12):
        await desk.start(f"sleep 0.6; touch survived{number}")
        await asyncio.sleep(number / 1000)
        await desk.tools["exec"].end_turn("t")
    await asyncio.sleep(0.7)
    assert list(folder.glob("survived*")) == []


async def test_background_commands_end_with_their_turn_unless_they_are_kept(desk, folder):
    mortal = (
        "(trap '' TERM; sleep 1; touch survived) & setsid sh -c 'sleep 1; touch survived' & sleep 1; touch survived"
    )
    await desk.start(mortal)
    kept = await desk.start("sleep 0.5; touch kept; sleep 30", keep=True)
    await desk.tools["exec"].end_turn("another turn")
    assert len((await desk.process("list")).splitlines()) == 2
    await desk.tools["exec"].end_turn("t")
    assert (await desk.process("list")).startswith(kept)
    assert await gone(folder / "survived", 1.2)
    assert (folder / "kept").exists()
    await desk.close()
    assert "Nothing" in await desk.process("list")


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


async def test_there_are_only_so_many_at_once(folder):
    desk = Desk(folder, ShellSettings(session_background=2, total_background=3))
    first = await desk.start("sleep 30")
    await desk.start("sleep 30")
    assert "kill one" in await desk.fails("sleep 30", background=True)
    await desk.process("kill", first)
    done = await desk.start("true")
    await desk.until(done, "exit status 0")
    await desk.start("sleep 30")  # in the place of the one that is over
    desk.context = replace(desk.context, session="other")
    await desk.start("sleep 30")
    assert "kill one" in await desk.fails("sleep 30", background=True)
    await desk.close()


async def test_a_background_command_that_says_too_much_is_remembered_by_its_end(folder):
    desk = Desk(folder, ShellSettings(output_limit=1000))
    id = await desk.start("seq 1 100000; touch done; sleep 30")
    async with asyncio.timeout(20):
        while not (folder / "done").exists():
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    said = await desk.process("poll", id)
    assert len(said) < 1200
    assert "left out" in said
    assert "99999\n100000\n" in said
    await desk.close()


async def test_writing_to_a_command_with_network_could_send_data_off(folder):
    desk = Desk(folder, ShellSettings())
    quiet = await desk.start("cat")
    loud = await desk.start("cat", network=True)
    assert not desk.plan("process", action="write", id=quiet, text="x").sends
    assert desk.plan("process", action="write", id=loud, text="secret").sends
    assert "secret" in desk.plan("process", action="write", id=loud, text="secret").shown
    assert not desk.plan("process", action="poll", id=loud).sends
    assert (await desk.output("process", action="poll", id=loud)).untrusted
    await desk.close()


RUNTIME = """
import asyncio, sys
from pathlib import Path
from everloop.tools.context import CallContext, current
from everloop.tools.shell.shell import ShellSettings, shell_tools

async def main():
    run, _ = shell_tools(ShellSettings(mode=sys.argv[1]))
    folder = Path(sys.argv[2])
    current.set(CallContext("me", "s", "t", "c", "cli", "d", folder, True, "k", lambda text: None))
    late = "touch started{0}; (trap '' TERM; setsid sh -c 'sleep 1; touch survived{0}') & sleep 1; touch survived{0}"
    await run.execute(late.format(1), background=True, keep=True)
    await run.execute(late.format(2))

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["bubblewrap", "landlock", "off"])
async def test_nothing_survives_a_runtime_that_is_killed(folder, tmp_path, mode):
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, mode, str(folder)], env=environment)
    try:
        async with asyncio.timeout(20):
            while not ((folder / "started1").exists() and (folder / "started2").exists()):
                await asyncio.sleep(0.02)
    finally:
        os.kill(runtime.pid, signal.SIGKILL)
        runtime.wait()
    await asyncio.sleep(1.2)
    async with asyncio.timeout(20):
        while any((tmp_path / "tmp").iterdir()):  # taken away by whoever ends last
            await asyncio.sleep(0.02)
    assert sorted(path.name for path in folder.iterdir()) == ["started1", "started2"]
